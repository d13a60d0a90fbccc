"""Packed blocks against loops over bytes and bits, written after ggml's scalar definition of each format."""

import struct

import numpy as np
import pytest

from lilicorr_jax.conversion import quantised
from lilicorr_jax.conversion.quantised import FORMATS, dequantise

BY_NAME = {form.name: form for form in FORMATS.values()}


def half(block: bytes, offset: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, offset)[0])


def q8_0(block):
    return [half(block, 0) * np.float32(struct.unpack_from("<b", block, 2 + i)[0]) for i in range(32)]


def q4_1(block):
    scale, least = half(block, 0), half(block, 2)
    bits = [block[4 + i] & 15 for i in range(16)] + [block[4 + i] >> 4 for i in range(16)]
    return [np.float32(b) * scale + least for b in bits]


def q5_0(block):
    scale, (fifth,) = half(block, 0), struct.unpack_from("<I", block, 2)
    numbers = [0] * 32
    for i in range(16):
        numbers[i] = (block[6 + i] & 15 | (fifth >> i & 1) << 4) - 16
        numbers[i + 16] = (block[6 + i] >> 4 | (fifth >> (i + 16) & 1) << 4) - 16
    return [scale * np.float32(n) for n in numbers]


def q4_k(block):
    scale, least, packed, bits = half(block, 0), half(block, 2), block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            s, m = packed[group] & 63, packed[group + 4] & 63
        else:
            s = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            m = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for i in range(32):
            byte = bits[group // 2 * 32 + i]
            number = byte & 15 if group % 2 == 0 else byte >> 4
            values.append(scale * np.float32(s) * np.float32(number) - least * np.float32(m))
    return values


def q6_k(block):
    low, high, scales, scale = block[:128], block[128:192], block[192:208], half(block, 208)
    values = [np.float32(0)] * 256
    for part in range(2):
        for i in range(32):
            near, far, pairs = low[part * 64 + i], low[part * 64 + 32 + i], high[part * 32 + i]
            numbers = [
                near & 15 | (pairs & 3) << 4,
                far & 15 | (pairs >> 2 & 3) << 4,
                near >> 4 | (pairs >> 4 & 3) << 4,
                far >> 4 | (pairs >> 6 & 3) << 4,
            ]
            for quarter, number in enumerate(numbers):
                place = part * 128 + quarter * 32 + i
                signed = struct.unpack_from("<b", scales, place // 16)[0]
                values[place] = scale * np.float32(signed) * np.float32(number - 32)
    return values


HALVES = {"Q8_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # where float16 numbers stand
LOOPS = {"Q8_0": q8_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q4_K": q4_k, "Q6_K": q6_k}


def random_blocks(rng, name: str, count: int) -> np.ndarray:
    """Random bytes, but for scales that are finite."""
    blocks = rng.integers(0, 256, (count, BY_NAME[name].block_bytes), dtype=np.uint8)
    for offset in HALVES[name]:
        blocks[:, offset : offset + 2] = rng.normal(size=(count, 1)).astype("<f2").view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", LOOPS)
def test_blocks_are_unpacked_as_by_loops_over_their_bits(rng, name):
    blocks = random_blocks(rng, name, 5)
    expected = np.array([LOOPS[name](block.tobytes()) for block in blocks]).reshape(-1)
    np.testing.assert_array_equal(dequantise(BY_NAME[name], blocks.reshape(-1)), expected)


def test_a_tensor_is_unpacked_the_same_in_chunks(rng, monkeypatch):
    packed = random_blocks(rng, "Q4_K", 7).reshape(-1)
    whole = dequantise(BY_NAME["Q4_K"], packed)
    monkeypatch.setattr(quantised, "CHUNK_BLOCKS", 3)
    np.testing.assert_array_equal(dequantise(BY_NAME["Q4_K"], packed), whole)


def test_float32_is_kept_bit_for_bit(rng):
    numbers = rng.normal(size=9).astype("<f4")
    np.testing.assert_array_equal(dequantise(BY_NAME["F32"], numbers.view(np.uint8)), numbers)
