"""Tensors of local safetensors folders, read one at a time, and written.

Files come from others: before a tensor is touched, names must stay inside the folder and every header must describe
its file exactly. Nothing larger than the file is ever allocated. Owns bytes; what the tensors mean is in `rules`.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from lilicorr_jax.conversion.folder import contained, exists, parse_json, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 16 * 2**20  # a hundred times the header of an 8B model; parsed JSON takes several times its bytes

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
SHARD_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies. Its numbers are read by `open`, and only as far as the view is used."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # in bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def open(self) -> np.ndarray:
        """A read-only view of the file; copy what is to outlive it."""
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def read_folder(folder: Path) -> dict[str, Entry]:
    """Every tensor of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises ValueError, naming file and tensor, for whatever the module's docstring rules out; no tensor is read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a local folder that holds {SINGLE_FILE}.")
    single, index = exists(folder, SINGLE_FILE), exists(folder, INDEX_FILE)
    if single and index:
        raise ValueError(f"{folder} has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is stale.")
    if index:
        return _read_shards(folder)
    if single:
        return read_header(contained(folder, SINGLE_FILE))
    raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; pickled weights (.bin) are not read.")


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, which must tile the rest of it: no overlap, no gap, nothing past the end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} claims a header of {length} bytes; the file has {size} bytes and a header may have "
                f"{MAX_HEADER_BYTES}. It is no safetensors file, or it is cut off."
            )
        header = parse_json(file.read(length), f"The header of {path}")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    _check_tiling(path, entries, 8 + length, size)
    return entries


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one file of contiguous arrays; readers see the old file or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.touch()
    mode = partial.stat().st_mode  # what a new file has here; the library's files are their owner's alone
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    partial.chmod(mode)
    os.replace(partial, path)


def _read_shards(folder: Path) -> dict[str, Entry]:
    weight_map = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX_FILE} must map tensors to files in weight_map; got {weight_map!r}.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard):
            raise ValueError(
                f"{folder / INDEX_FILE} puts {name!r} into {shard!r}; only plain names ending in .safetensors are read."
            )
    paths = {shard: contained(folder, shard) for shard in sorted(set(weight_map.values()))}
    entries: dict[str, Entry] = {}
    for shard, path in paths.items():
        for name, entry in read_header(path).items():
            if name in entries:
                raise ValueError(f"{name!r} stands in two shards of {folder}: {entries[name].path.name} and {shard}.")
            if weight_map.get(name) != shard:
                raise ValueError(f"{name!r} stands in {path}, but the index has it in {weight_map.get(name)!r}.")
            entries[name] = entry
    if absent := sorted(set(weight_map) - set(entries)):
        raise ValueError(f"{len(absent)} tensors of {folder / INDEX_FILE} are in no shard: {absent[:8]}.")
    return entries


def _entry(path: Path, name: str, fields: object, start: int) -> Entry:
    """One checked line of a header; `start` is where the file's data begin."""
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} in {path} must have dtype, shape and data_offsets; got {fields!r:.200}.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name!r} in {path} has dtype {dtype!r}; {', '.join(DTYPES)} are read.")
    if not _are_counts(shape) or len(shape) > 8:
        raise ValueError(f"{name!r} in {path} has shape {shape!r:.200}; up to 8 whole numbers from 0 are read.")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name!r} in {path} has data_offsets {offsets!r:.200}; two in ascending order are wanted.")
    entry = Entry(path=path, dtype=DTYPES[dtype], shape=tuple(shape), offset=start + offsets[0])
    if entry.num_bytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"{name!r} in {path} is {dtype} of shape {shape}, {entry.num_bytes} bytes, but its data_offsets {offsets} "
            f"span {offsets[1] - offsets[0]}."
        )
    return entry


def _check_tiling(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset < end:
            raise ValueError(f"{name!r} in {path} begins at byte {entry.offset}, inside another that ends at {end}.")
        if entry.offset > end:
            raise ValueError(f"{path} has bytes {end} to {entry.offset} that belong to no tensor, before {name!r}.")
        end += entry.num_bytes
        if end > size:
            raise ValueError(f"{name!r} in {path} ends at byte {end}; the file has {size}. It is cut off.")
    if end != size:
        raise ValueError(f"{path} has {size - end} bytes behind its last tensor, which ends at byte {end}.")


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
