"""The model that trains: its weights and their formats, packed experts, adapters, recompute and loss."""
