"""Presets that people write, and the small model and rows that `tiny.yaml` uses."""
