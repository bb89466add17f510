"""The generator as a Serve deployment: its replicas, its settings and figures, and when it gives its GPUs to training."""
