"""Block attention against dense attention under a mask written with loops, forward and backward."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention import block_attention
from tests.program import shapes_made
from tests.tolerance import assert_close, assert_gradients_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

BATCH, CONTEXT, KV_HEADS, HEADS, WIDTH = 2, 20, 2, 6, 8


def dense_mask(start, anchors, rows: int) -> np.ndarray:
    """[B, A*Q, T+A*Q]: which of the context and of all blocks' rows each block row may see."""
    batch, blocks = anchors.shape
    mask = np.zeros((batch, blocks * rows, CONTEXT + blocks * rows), bool)
    for b in range(batch):
        for a in range(blocks):
            for q in range(rows):
                for t in range(start[b, a], anchors[b, a]):
                    mask[b, a * rows + q, t] = True
                for k in range(rows):
                    mask[b, a * rows + q, CONTEXT + a * rows + k] = True
    return mask


def dense_attention(arrays, mask):
    """All blocks' rows behind the context, every query head with its own copy of keys and values."""
    queries, context_keys, context_values, block_keys, block_values = arrays
    batch, blocks, heads, rows, width = queries.shape

    def behind(context, own):
        own = jnp.moveaxis(own, 1, 2).reshape(batch, KV_HEADS, blocks * rows, width)
        return jnp.repeat(jnp.concatenate([context, own], axis=2), heads // KV_HEADS, axis=1)

    flat = jnp.moveaxis(queries, 1, 2).reshape(batch, heads, blocks * rows, width)
    scores = jnp.einsum("bnqh,bnkh->bnqk", flat, behind(context_keys, block_keys)) / width**0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bnqk,bnkh->bnqh", weights, behind(context_values, block_values))
    return jnp.moveaxis(mixed.reshape(batch, heads, blocks, rows, width), 2, 1)


def draw(rng, blocks: int, rows: int):
    """Queries, context keys and values, block keys and values."""
    shapes = [(BATCH, blocks, HEADS, rows, WIDTH), *2 * [(BATCH, KV_HEADS, CONTEXT, WIDTH)]]
    shapes += 2 * [(BATCH, blocks, KV_HEADS, rows, WIDTH)]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


CASES = {
    "chunks that do not divide the blocks": dict(anchors=[[1, 7, 19], [2, 3, 11]], rows=16, anchor_chunk=2),
    "the last of nine blocks sees the whole context": dict(anchors=[[*range(8), 20], [*range(9, 17), 20]], rows=7),
    "one block per step": dict(anchors=[[5, 9, 20], [4, 4, 5]], rows=4, anchor_chunk=1),
    "empty contexts and padded blocks": dict(anchors=[[0, 8, 0], [12, 0, 0]], rows=4),
    "context rows from a start": dict(anchors=[[6, 9, 9], [20, 8, 3]], start=[[2, 0, 9], [13, 7, 3]], rows=4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_those_of_dense_attention(rng, case):
    anchors = np.array(case["anchors"], np.int32)
    start = np.array(case["start"], np.int32) if "start" in case else np.zeros_like(anchors)
    arrays = draw(rng, anchors.shape[1], case["rows"])
    probe = jnp.asarray(rng.normal(size=arrays[0].shape), jnp.float32)
    mask = jnp.asarray(dense_mask(start, anchors, case["rows"]))
    options = dict(start=jnp.asarray(start) if "start" in case else None, anchor_chunk=case.get("anchor_chunk", 4))

    def probed(attention, *rest, **options):
        def loss(arrays):
            mixed = attention(arrays, *rest, **options)
            return jnp.sum(mixed * probe), mixed

        (_, mixed), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
        return mixed, gradients

    expected, expected_gradients = probed(dense_attention, mask)
    actual, gradients = probed(lambda arrays, **o: block_attention(*arrays, jnp.asarray(anchors), **o), **options)
    assert_close(actual, expected)
    assert_gradients_close(gradients, expected_gradients)
    for b in range(BATCH):
        seen = [any(s <= t < a for s, a in zip(start[b], anchors[b], strict=True)) for t in range(CONTEXT)]
        for of_context in gradients[1:3]:
            assert np.any(of_context[b] != 0, axis=(0, 2)).tolist() == seen  # exactly zero where no block looks


def test_rows_outside_a_block_range_change_nothing_bitwise(rng):
    """Neither values nor keys, at the anchor, behind it, or before the start, nor any other block's rows."""
    anchors, start = jnp.array([[6, 13], [6, 13]]), jnp.array([[2, 2], [2, 2]])
    queries, *context, block_keys, block_values = draw(rng, 2, 4)
    attend = jax.jit(lambda *arrays: block_attention(*arrays, anchors, start=start))
    before = attend(queries, *context, block_keys, block_values)
    for first, last in ((0, 2), (6, CONTEXT)):
        changed = [x.at[:, :, first:last].add(1000.0) for x in context]
        after = attend(queries, *changed, block_keys.at[:, 1].add(1000.0), block_values.at[:, 1].add(1000.0))
        np.testing.assert_array_equal(after[:, 0], before[:, 0])
    nearer = attend(queries, context[0], context[1].at[:, :, 5].add(1000.0), block_keys, block_values)
    assert np.all(nearer[:, 0] != before[:, 0])


def test_a_row_sees_its_whole_block_in_both_directions(rng):
    anchors = jnp.array([[6], [6]])
    arrays = draw(rng, 1, 4)
    gradient = jax.grad(lambda values: jnp.sum(block_attention(*arrays[:4], values, anchors)[:, :, :, 0]))(arrays[4])
    assert np.all(gradient != 0)


def test_huge_scores_neither_overflow_nor_lose_the_smaller_part(rng):
    """One maximum serves both parts: scores of thousands in the context leave the block's own rows a weight of zero."""
    anchors = jnp.array([[6, 0], [6, 0]])
    queries, keys, *rest = draw(rng, 2, 4)
    arrays = (300 * jnp.ones_like(queries), 300 * jnp.ones_like(keys), *rest)
    mixed, pull = jax.vjp(lambda *arrays: block_attention(*arrays, anchors), *arrays)
    assert_close(mixed[:, 0, 0, 0], jnp.mean(rest[0][:, 0, :6], axis=1))
    assert all(np.all(np.isfinite(gradient)) for gradient in pull(jnp.ones_like(mixed)))


def test_bfloat16_stays_near_float32(rng):
    anchors = jnp.array([[6, 0, 20], [11, 3, 0]])
    arrays = tuple(x.astype(jnp.bfloat16) for x in draw(rng, 3, 4))
    wide = tuple(x.astype(jnp.float32) for x in arrays)

    def loss(*arrays):
        return jnp.sum(jnp.square(block_attention(*arrays, anchors, anchor_chunk=2).astype(jnp.float32)))

    every = tuple(range(5))
    value, gradients = jax.jit(jax.value_and_grad(loss, every))(*arrays)
    expected, expected_gradients = jax.jit(jax.value_and_grad(loss, every))(*wide)
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)
    assert_close(value, expected, "bfloat16")
    assert_gradients_close(gradients, expected_gradients, "bfloat16")


def test_scores_of_no_more_than_a_chunk_exist_at_a_time():
    """The mask of every row against every row, and the scores of all blocks, are never made."""
    blocks, rows, chunk = 12, 4, 3
    anchors = jnp.zeros((BATCH, blocks), jnp.int32)
    arrays = draw(np.random.default_rng(0), blocks, rows)
    gradient = jax.grad(lambda *arrays: jnp.sum(block_attention(*arrays, anchors, anchor_chunk=chunk)), tuple(range(5)))
    scores = BATCH * HEADS * chunk * rows * CONTEXT
    sizes = {math.prod(shape) for shape in shapes_made(gradient, *arrays) if shape[-1:] == (CONTEXT,)}
    assert max(sizes) == scores
    assert max(math.prod(shape) for shape in shapes_made(gradient, *arrays)) <= max(scores, arrays[0].size)


@pytest.mark.parametrize("heads, chunk, match", [(5, 4, "got 5"), (6, 0, "anchor_chunk=0")])
def test_what_cannot_be_computed_is_refused(rng, heads, chunk, match):
    queries, *rest = draw(rng, 2, 4)
    with pytest.raises(ValueError, match=match):
        block_attention(queries[:, :, :heads], *rest, jnp.zeros((BATCH, 2), jnp.int32), anchor_chunk=chunk)
