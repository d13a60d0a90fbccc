"""GGUF files made by hand, byte for byte as the format's description has them, to read and to break."""

import struct
from pathlib import Path

import numpy as np

UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(of: object) -> bytes:
    """A metadata value with its type; whole numbers are 32 bits wide, and lists hold one type."""
    if isinstance(of, bool):
        return struct.pack("<I?", BOOL, of)
    if isinstance(of, int):
        return struct.pack("<II", UINT32, of)
    if isinstance(of, float):
        return struct.pack("<If", FLOAT32, of)
    if isinstance(of, str):
        return struct.pack("<I", STRING) + text(of)
    assert isinstance(of, list)
    items = [value(item) for item in of]
    kind = items[0][:4] if items else struct.pack("<I", UINT32)
    return struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def tensor_line(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One line of the tensor table; `shape` is outermost axis first."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + axes + struct.pack("<IQ", kind, offset)


def file_bytes(
    metadata: bytes | dict = b"",
    lines: bytes = b"",
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; numbers of entries may be false."""
    if isinstance(metadata, dict):
        num_entries = len(metadata) if num_entries is None else num_entries
        metadata = b"".join(text(key) + value(item) for key, item in metadata.items())
    head = magic + struct.pack("<IQQ", version, num_tensors or 0, num_entries or 0) + metadata + lines
    return head + b"\0" * (-len(head) % alignment) + data


def write_f32(path: Path, metadata: dict, tensors: dict[str, np.ndarray]) -> Path:
    """A file of float32 tensors."""
    lines, data = b"", b""
    for name, tensor in tensors.items():
        lines += tensor_line(name, tensor.shape, F32, len(data))
        data += tensor.astype("<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    path.write_bytes(file_bytes(metadata, lines, data, num_tensors=len(tensors)))
    return path
