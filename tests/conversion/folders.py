"""Folders to break: copies of golden checkpoints and hand-made safetensors files."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def copied(source: Path, folder: Path) -> Path:
    """A writable copy of a checkpoint's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
        (folder / name).chmod(0o644)
    return folder


def edit_json(folder: Path, name: str, **changes) -> None:
    """Sets keys of a JSON file; `a__b` sets b inside a, and None as a Python value deletes."""
    path = folder / name
    values = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        place = values
        for part in outer:
            place = place[part]
        place.pop(last, None)
        if value is not None:
            place[last] = value
    path.write_text(json.dumps(values))


def edit_tensors(folder: Path, change) -> None:
    """Rewrites model.safetensors with `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in load_file(path).items()}
    save_file(change(tensors), path)


def split_in_shards(folder: Path) -> dict:
    """Turns model.safetensors into two shards and an index; returns the weight map."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: np.array(tensors[name]) for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    path.unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(path: Path, header: object, num_bytes: int, *, length: int | None = None) -> Path:
    """A safetensors file with any header, true or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + b"\x01" * num_bytes)
    return path
