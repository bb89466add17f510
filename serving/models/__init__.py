"""Models by name: which directory a name means, loading it, and the models in memory."""
