"""Training rows: read from anywhere, checked for duplicates, added to, packed into sequences and dealt to workers."""
