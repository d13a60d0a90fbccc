"""Checkpoints, others' and ours: `checkpoint` for Hugging Face folders, `export` for Orbax. They alone open files."""
