"""The tiny gpt-oss of the quickstart and the tests: its corpus, its layout, its pre-training."""
