"""Rows appended at each row's own length, against NumPy; and what happens where the room for them is missing."""

import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.cache import append, append_rows, init_cache
from lilicorr_jax.presets import tiny

pytestmark = pytest.mark.usefixtures("strict_dtypes")

CAPACITY, ROWS = 11, 4  # ROWS plays P


def draw(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("spare", [0, 1, ROWS - 1, ROWS, ROWS + 1, CAPACITY])
def test_rows_are_written_at_the_length_or_where_room_is_missing_over_the_text(rng, spare):
    """capacity - length in 0, 1, P-1: the write is clamped and lands on valid rows. So P rows must be left, always."""
    old, new = draw(rng, 2, 3, CAPACITY, 5), draw(rng, 2, 3, ROWS, 5)
    lengths = np.array([CAPACITY - spare, 2])
    actual = np.asarray(append_rows(jnp.array(old), jnp.array(new), jnp.array(lengths, jnp.int32)))
    for row, length in enumerate(lengths):
        is_room = CAPACITY - length >= ROWS
        start = length if is_room else CAPACITY - ROWS
        np.testing.assert_array_equal(actual[row, :, start : start + ROWS], new[row])
        np.testing.assert_array_equal(actual[row, :, :start], old[row, :, :start])
        np.testing.assert_array_equal(actual[row, :, start + ROWS :], old[row, :, start + ROWS :])
        assert np.array_equal(actual[row, :, :length], old[row, :, :length]) == is_room


def test_every_layer_gets_its_own_rows_and_keeps_its_dtype(rng):
    config = tiny().target
    cache = init_cache(config, 2, CAPACITY)
    assert cache.capacity == CAPACITY and len(cache.keys) == len(cache.values) == config.num_layers
    shape = (2, config.num_kv_heads, ROWS, config.head_width)
    keys, values = (tuple(jnp.array(draw(rng, *shape)) for _ in cache.keys) for _ in range(2))
    lengths = jnp.array([3, 0], jnp.int32)
    written = append(cache, cache.replace(keys=keys, values=values), lengths)
    for kept, new in ((written.keys, keys), (written.values, values)):
        for layer, rows in zip(kept, new, strict=True):
            assert layer.shape == (2, config.num_kv_heads, CAPACITY, config.head_width) and layer.dtype == config.dtype
            np.testing.assert_array_equal(layer[0, :, 3 : 3 + ROWS], rows[0])
            np.testing.assert_array_equal(layer[1, :, :ROWS], rows[1])
