"""GGUF files (version 3): metadata and tensors, read without trusting a byte of them.

Files come from others: counts, lengths and offsets are checked against the file before anything is allocated, and the
tensors must tile the rest of the file. Owns where bytes lie; `quantised` turns them into numbers, `gguf_target` knows
what they mean.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lilicorr_jax.conversion.quantised import FORMATS, Format, dequantise

MAGIC = b"GGUF"
VERSION = 3
MAX_HEAD_BYTES = 64 * 2**20  # metadata and tensor table; ten times that of a vocabulary of 150,000 tokens
MAX_NAME_BYTES = 64
MAX_KEY_BYTES = 2**16 - 1
MAX_AXES = 4
DEFAULT_ALIGNMENT = 32
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where a tensor lies, and how its numbers are packed.

    Attributes:
        shape: outermost axis first, so a matrix is [out, in]; the file has it the other way round.
        offset: in bytes from the start of the file.
    """

    path: Path
    format: Format
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.format.block_size * self.format.block_bytes

    def read(self) -> np.ndarray:
        """The numbers as float32, a copy."""
        packed = np.memmap(self.path, np.uint8, "r", self.offset, (self.num_bytes,))
        return dequantise(self.format, packed).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class File:
    """What a GGUF file says of itself. Arrays in the metadata are tuples of strings or NumPy arrays."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_file(path: Path) -> File:
    """Metadata and tensor table of a file, all checked; no tensor is read.

    Raises ValueError, naming file, entry and value, for whatever the module's docstring rules out.
    """
    with path.open("rb") as opened:
        cursor = _Cursor(path, opened.read(MAX_HEAD_BYTES), path.stat().st_size)
    if (magic := cursor.take(4)) != MAGIC:
        cursor.refuse(f"begins with {magic!r}; GGUF files of version {VERSION} are read")
    if (version := cursor.scalar("<u4")) != VERSION:
        cursor.refuse(f"begins with version {version}; GGUF files of version {VERSION} are read")
    num_tensors, num_entries = (
        cursor.count(what, least) for what, least in (("tensors", 24), ("metadata entries", 13))
    )
    metadata = cursor.table(num_entries, MAX_KEY_BYTES, _value)
    lines = cursor.table(num_tensors, MAX_NAME_BYTES, _tensor_line)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        cursor.refuse(f"has general.alignment {alignment!r}; a positive multiple of 8 is wanted")
    start = cursor.position + -cursor.position % alignment
    tensors = {
        name: Tensor(path=path, format=form, shape=shape, offset=start + offset)
        for name, (form, shape, offset) in lines.items()
    }
    _check_tiling(cursor, tensors, start, alignment)
    return File(path=path, metadata=metadata, tensors=tensors)


class _Cursor:
    """Reads a file's head from front to back, and no further than it goes."""

    def __init__(self, path: Path, head: bytes, size: int):
        self.path, self.head, self.size, self.position = path, head, size, 0

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.path} {problem}.")

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.head) - self.position:
            self.refuse(
                f"claims {num_bytes} bytes at byte {self.position}; its head has {len(self.head)} bytes, at most "
                f"{MAX_HEAD_BYTES}, so the file is cut off or no GGUF"
            )
        self.position += num_bytes
        return self.head[self.position - num_bytes : self.position]

    def scalar(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self.take(kind.itemsize), kind)[0].item()

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things that take at least `least_bytes` each."""
        number = self.scalar("<u8")
        if number * least_bytes > len(self.head) - self.position:
            self.refuse(f"claims {number} {what} at byte {self.position}, more than its head has room for")
        return number

    def text(self, most_bytes: int = MAX_HEAD_BYTES) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        if length > most_bytes:
            self.refuse(f"has a string of {length} bytes at byte {self.position}; at most {most_bytes} are read there")
        raw = self.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.refuse(f"has a string at byte {self.position - length} that is not UTF-8 ({error})")

    def table(self, number: int, most_bytes: int, read: Callable[["_Cursor", str], Any]) -> dict[str, Any]:
        """`number` named entries; no name may stand twice."""
        entries: dict[str, Any] = {}
        for _ in range(number):
            name = self.text(most_bytes)
            if name in entries:
                self.refuse(f"has {name!r} twice")
            entries[name] = read(self, name)
        return entries


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.scalar("<u4")
    if kind == STRING:
        return cursor.text()
    if kind == ARRAY:
        return _array(cursor, key)
    values = _numbers(cursor, key, kind, 1)
    return values[0].item()


def _array(cursor: _Cursor, key: str) -> tuple[str, ...] | np.ndarray:
    kind = cursor.scalar("<u4")
    if kind == STRING:
        return tuple(cursor.text() for _ in range(cursor.count(f"strings of {key!r}", 8)))
    return _numbers(cursor, key, kind, cursor.count(f"numbers of {key!r}", 1))


def _numbers(cursor: _Cursor, key: str, kind: int, number: int) -> np.ndarray:
    if kind not in SCALARS:
        cursor.refuse(f"has {key!r} of value type {kind}; numbers, strings, and arrays of these are read")
    dtype = np.dtype(SCALARS[kind])
    raw = cursor.take(number * dtype.itemsize)
    if kind == BOOL and raw.strip(b"\0\1"):
        cursor.refuse(f"has {key!r} with a truth value other than 0 and 1")
    return np.frombuffer(raw, dtype)


def _tensor_line(cursor: _Cursor, name: str) -> tuple[Format, tuple[int, ...], int]:
    """Format, shape and offset into the tensor data of one line of the table."""
    num_axes = cursor.scalar("<u4")
    if not 1 <= num_axes <= MAX_AXES:
        cursor.refuse(f"has {name!r} with {num_axes} axes; 1 to {MAX_AXES} are read")
    shape = tuple(cursor.scalar("<u8") for _ in range(num_axes))[::-1]
    kind, offset = cursor.scalar("<u4"), cursor.scalar("<u8")
    if kind not in FORMATS:
        known = ", ".join(f"{form.name} ({number})" for number, form in FORMATS.items())
        cursor.refuse(f"has {name!r} in format {kind}; {known} are read")
    form = FORMATS[kind]
    if min(shape) < 1 or shape[-1] % form.block_size:
        cursor.refuse(f"has {name!r} of shape {shape}; {form.name} packs rows of multiples of {form.block_size}")
    return form, shape, offset


def _check_tiling(cursor: _Cursor, tensors: dict[str, Tensor], start: int, alignment: int) -> None:
    """Each tensor begins where the one before it ends, but for padding, and the last ends with the file."""
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        begin = end + -end % alignment
        if tensor.offset != begin:
            cursor.refuse(f"has {name!r} at byte {tensor.offset}; the tensors before it, padded, end at {begin}")
        end = tensor.offset + tensor.num_bytes
        if end > cursor.size:
            cursor.refuse(f"has {name!r} up to byte {end}, but {cursor.size} bytes in all; it is cut off")
    if tensors and cursor.size - end >= alignment:
        cursor.refuse(f"has {cursor.size - end} bytes behind its last tensor, which ends at byte {end}")
