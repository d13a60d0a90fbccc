"""Digests of what lies in a target's folder: by them a run knows its target again, and prepared data its tokenizer."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lilicorr_jax.conversion.safetensors import read_folder
from train.chat import RULE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
TARGET_FILES = ("config.json", "generation_config.json")
TARGET_TENSORS = ("model.norm.weight", "model.embed_tokens.weight")
FIRST_ROWS = 64


def digest_files(folder: Path | str, names: Iterable[str]) -> str:
    """SHA-256 over those of the named files that a folder has, with their names."""
    found = hashlib.sha256()
    for path in (Path(folder) / name for name in names):
        if path.is_file():
            found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def target_revision(folder: Path | str) -> str:
    """A digest of a target's configuration, its last norm and a few embedding rows: another target has another one."""
    found = hashlib.sha256(digest_files(folder, TARGET_FILES).encode())
    entries = read_folder(Path(folder))
    for name in TARGET_TENSORS:
        if name in entries:
            found.update(np.ascontiguousarray(entries[name].open()[:FIRST_ROWS]).tobytes())
    return found.hexdigest()


def of_target(folder: Path | str) -> dict[str, str | int]:
    """The fields of `train.records.MadeWith` that a target's folder and the code decide."""
    return {
        "mask_rule": RULE,
        "tokenizer": digest_files(folder, TOKENIZER_FILES),
        "template": digest_files(folder, TEMPLATE_FILES),
        "target": target_revision(folder),
    }
