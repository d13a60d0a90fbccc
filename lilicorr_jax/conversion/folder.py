"""A folder that came from someone else: its names stay inside it, and its JSON is read within limits."""

import json
import os
from collections import Counter
from pathlib import Path

MAX_JSON_BYTES = 16 * 2**20


def contained(folder: Path, name: str) -> Path:
    """Path of the regular file `name` in `folder`, links followed.

    A link may leave the folder in one case: the hub's local cache keeps the files of `snapshots/REVISION` in `blobs`
    beside `snapshots`. Raises ValueError naming the entry when the name is not a plain file name, when the file lies
    elsewhere, or when there is none.
    """
    if not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{folder} names the file {name!r}; only plain file names of the folder itself are read.")
    home, path = folder.resolve(), (folder / name).resolve()
    cached = home.parent.name == "snapshots" and path.parent == home.parent.parent / "blobs"
    if path.parent != home and not cached:
        raise ValueError(f"{name!r} in {folder} links to {path}, outside the folder; copy the file there instead.")
    if not path.is_file():
        raise ValueError(f"{folder} has no file {name!r}; give a folder that holds a whole checkpoint.")
    return path


def exists(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of that name, be it a dangling link."""
    return os.path.lexists(folder / name)


def read_json(folder: Path, name: str) -> dict:
    """The JSON object in a file of the folder."""
    path = contained(folder, name)
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {size} bytes; a JSON file of a checkpoint has at most {MAX_JSON_BYTES}.")
    return parse_json(path.read_bytes(), str(path))


def parse_json(raw: bytes, where: str) -> dict:
    """A JSON object whose keys are unique and whose numbers are finite."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not the JSON that is wanted: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold a JSON object; got {type(value).__name__}.")
    return value


def write_json(folder: Path, name: str, value: dict) -> None:
    """Writes an indented JSON object; readers see the old file or the new one, never half of it."""
    partial = folder / f"{name}.partial"
    partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(partial, folder / name)


def _unique(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the keys {twice} stand twice")
    return value


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")
