"""The block formats of GGUF, unpacked into float32 with NumPy.

A format packs a row's numbers in blocks of fixed size, each with its own scales. Owns bits; where the bytes lie is
`gguf`'s affair. The layouts are ggml's (block_q4_1, block_q8_0, ...), little-endian throughout.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CHUNK_BLOCKS = 2**16  # unpacked at a time: whole tensors would take several times their float32 size on the way


class Format(NamedTuple):
    """One way to pack numbers.

    Attributes:
        block_size: numbers in a block.
        block_bytes: bytes of a block.
        unpack: bytes [blocks, block_bytes] -> float32 [blocks, block_size].
    """

    name: str
    block_size: int
    block_bytes: int
    unpack: Callable[[np.ndarray], np.ndarray]


def dequantise(form: Format, packed: np.ndarray) -> np.ndarray:
    """Bytes of whole blocks, in one row, to float32 numbers in one row."""
    blocks = packed.reshape(-1, form.block_bytes)
    numbers = np.empty((len(blocks), form.block_size), np.float32)
    for first in range(0, len(blocks), CHUNK_BLOCKS):
        chunk = np.s_[first : first + CHUNK_BLOCKS]
        numbers[chunk] = form.unpack(np.ascontiguousarray(blocks[chunk]))
    return numbers.reshape(-1)


def _f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4")


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """scale f16, 32 signed bytes."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """scale f16, minimum f16, 32 numbers of 4 bits: the low halves of 16 bytes, then the high ones."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """scale f16, the fifth bits of 32 numbers, their 4 low bits as in Q4_1; 16 is subtracted."""
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | fifth << 4).astype(np.float32) - 16)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers in 8 groups of 32: scale and minimum f16, each times 6 bits of the group, then 4 bits a number."""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])  # [blocks, 8]
    low_high = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32)  # a pair of groups shares 32 bytes
    scaled = (_half(blocks, 0) * scales)[..., None] * low_high.astype(np.float32)
    return (scaled - (_half(blocks, 2) * minima)[..., None]).reshape(-1, 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """256 numbers in 16 groups of 16: 4 low bits, 2 high bits, a signed byte per group, scale f16; 32 is subtracted.

    Each half of 128 numbers has 64 bytes of low bits (low halves first) and 32 bytes of high bits, two bits at a time.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    high_bytes = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high_bytes >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3  # [blocks, 2, 4, 32]
    numbers = ((low | high << 4).astype(np.float32) - 32).reshape(-1, 16, 16)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scales[..., None] * numbers).reshape(-1, 256)


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at `offset` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """4-bit numbers: the low halves of a row's bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8 scales and 8 minima of 6 bits in 12 bytes: the last four of each keep their high bits in the first eight."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


FORMATS = {
    0: Format("F32", 1, 4, _f32),
    3: Format("Q4_1", 32, 20, _q4_1),
    6: Format("Q5_0", 32, 22, _q5_0),
    8: Format("Q8_0", 32, 34, _q8_0),
    12: Format("Q4_K", 256, 144, _q4_k),
    14: Format("Q6_K", 256, 210, _q6_k),
}
"""By ggml's number of the format."""
