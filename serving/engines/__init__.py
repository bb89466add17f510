"""Engines, from token ids to token ids: the built-in one with continuous batching, and vLLM."""
