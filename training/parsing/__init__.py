"""Generated token ids as reasoning and answer, for harmony and for think tags."""
