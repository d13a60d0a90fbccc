"""Checkpoints of others and our own: `checkpoint` for Hugging Face folders, `export` for Orbax; only this opens files."""
