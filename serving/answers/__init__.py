"""One request and its answer: text to token ids and back, the language that is held, and what it cost."""
