"""Checkpoints on disk: reading and rewriting them tensor by tensor, and the parts of a merge's proof."""
