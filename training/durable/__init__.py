"""What outlives a process or a machine: checkpoints, an orderly stop, and the run directory's copy at a storage URL."""
