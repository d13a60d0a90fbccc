"""Checkpoints of others and our own: `checkpoint` for Hugging Face folders, `export` for Orbax. Only this opens files."""
