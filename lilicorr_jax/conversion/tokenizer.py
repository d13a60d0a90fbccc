"""The tokenizer of a local model folder."""

import os
from pathlib import Path


def load_tokenizer(folder: str | Path):
    """The tokenizer of a local model folder.

    Raises:
        ValueError: the folder has no tokenizer that transformers can read.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no models of transformers are used here
    from transformers import AutoTokenizer  # a second of import, which few programs need

    if not Path(folder).is_dir():
        raise ValueError(f"The tokenizer is read from a model folder; got {str(folder)!r}, which is no folder.")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no readable tokenizer; put tokenizer.json and tokenizer_config.json there. ({error})"
        ) from error
