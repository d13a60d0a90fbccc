"""Parameters on huge pages: the same numbers, at addresses that JAX takes as they are."""

import gc
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serve.pages import ALIGNMENT, on_huge_pages


def tree() -> dict:
    draw = np.random.default_rng(0).normal(size=(300, 700)).astype(np.float32)
    return {"a": jnp.asarray(draw), "b": {"c": jnp.arange(3, dtype=jnp.bfloat16), "d": jnp.zeros((0, 4))}}


def test_every_leaf_is_copied_with_its_shape_and_dtype_and_outlives_the_original():
    wanted = jax.tree.map(np.array, tree())
    moved = on_huge_pages(tree())
    gc.collect()
    jax.tree.map(np.testing.assert_array_equal, moved, wanted)
    assert jax.tree.map(lambda leaf: leaf.dtype, moved) == jax.tree.map(lambda leaf: leaf.dtype, wanted)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux takes advice on pages")
def test_leaves_lie_in_one_piece_of_memory_in_order_and_aligned():
    a, c, _ = jax.tree.leaves(on_huge_pages(tree()))
    start = a.unsafe_buffer_pointer()
    assert start % mmap.PAGESIZE == 0
    assert c.unsafe_buffer_pointer() - start == -(-a.nbytes // ALIGNMENT) * ALIGNMENT


def test_arrays_of_numpy_are_moved_with_the_others():
    mixed = {"host": np.arange(5.0, dtype=np.float32), "device": jnp.ones(2)}
    moved = on_huge_pages(mixed)
    jax.tree.map(np.testing.assert_array_equal, moved, mixed)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(moved))


def test_a_tree_on_another_device_stays_where_it_is():
    there = jax.device_put(tree(), jax.devices()[-1])
    if jax.device_count() == 1:
        pytest.skip("there is one device")
    assert on_huge_pages(there) is there
