"""Attention of training blocks over their context and themselves, in plain JAX, with its own gradient.

Never builds an (A*Q) x (T+A*Q) mask: the context part and the block part share one maximum and one denominator, a chunk
of anchors at a time. The forward pass keeps its output and log-sum-exp; the backward pass recomputes the scores.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


class Context(NamedTuple):
    """Keys and values of a sequence, which all its blocks share."""

    keys: Float[Array, "B G T H"]
    values: Float[Array, "B G T H"]


class Blocks(NamedTuple):
    """What belongs to C of a sequence's blocks; the M = Q N / G query rows of a block share a key/value head."""

    queries: Float[Array, "B G C M H"]
    keys: Float[Array, "B G C Q H"]
    values: Float[Array, "B G C Q H"]
    start: Int[Array, "B C"]
    anchors: Int[Array, "B C"]


def block_attention(
    queries: Float[Array, "B A N Q H"],
    context_keys: Float[Array, "B G T H"],
    context_values: Float[Array, "B G T H"],
    block_keys: Float[Array, "B A G Q H"],
    block_values: Float[Array, "B A G Q H"],
    anchors: Int[Array, "B A"],
    *,
    start: Int[Array, "B A"] | None = None,
    anchor_chunk: int = 32,
) -> Float[Array, "B A N Q H"]:
    """softmax(q k^T / sqrt(H)) v, where a block sees the context rows in [start, anchor) and all of its own rows.

    Consecutive query heads share a key/value head. Scores, softmax and sums are float32, products take the inputs'
    dtype. A context row outside a block's range has no influence on it whatever, nor a gradient from it; a block whose
    range is empty (a padded one, of anchor 0) attends to itself alone.

    Args:
        anchors: position of each block's anchor, 0..T.
        start: first context row of each block; None means 0.
        anchor_chunk: anchors per step, which bounds the scores in memory to B N anchor_chunk Q (T+Q) numbers; need not
            divide A.

    Raises:
        ValueError: where the query heads can't be shared out evenly, or a step has no anchor.
    """
    batch, num_blocks, heads, _, width = queries.shape
    kv_heads = context_keys.shape[1]
    if heads % kv_heads:
        raise ValueError(f"block_attention needs query heads in equal groups; got {heads} for {kv_heads} kv heads.")
    if anchor_chunk < 1:
        raise ValueError(f"block_attention takes at least 1 anchor per step; got anchor_chunk={anchor_chunk}.")
    steps = -(-num_blocks // anchor_chunk)
    blocks = Blocks(
        queries=_split(queries.reshape(batch, num_blocks, kv_heads, -1, width), steps),
        keys=_split(block_keys, steps),
        values=_split(block_values, steps),
        start=_split(jnp.zeros_like(anchors) if start is None else start, steps),
        anchors=_split(anchors, steps),
    )
    mixed = _attention(Context(context_keys, context_values), blocks)
    return _join(mixed, num_blocks).reshape(queries.shape)


def _split(x: Array, steps: int) -> Array:
    """[B, A, G, ...] or [B, A] -> [steps, B, G, C, ...], the anchors padded with zeros to steps * C."""
    chunk = -(-x.shape[1] // steps)
    padded = jnp.pad(x, [(0, 0), (0, steps * chunk - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    stacked = jnp.moveaxis(padded.reshape(x.shape[0], steps, chunk, *x.shape[2:]), 1, 0)  # [steps, B, C, ...]
    return stacked if x.ndim == 2 else jnp.moveaxis(stacked, 2, 3)


def _join(x: Float[Array, "steps B G C M H"], num_blocks: int) -> Float[Array, "B A G M H"]:
    stacked = jnp.moveaxis(x, (1, 0, 3), (0, 1, 2))  # [B, steps, C, G, M, H]
    return stacked.reshape(x.shape[1], -1, *stacked.shape[3:])[:, :num_blocks]


@jax.custom_vjp
def _attention(context: Context, blocks: Blocks) -> Float[Array, "steps B G C M H"]:
    return _forward(context, blocks)[0]


def _forward(context: Context, blocks: Blocks):
    mixed, log_sum = jax.lax.map(partial(_attend, context), blocks)
    return mixed, (context, blocks, mixed, log_sum)


def _backward(residuals, cotangent):
    context, blocks, mixed, log_sum = residuals

    def step(total, chunk):
        context_part, block_part = _attend_backward(context, *chunk)
        return jax.tree.map(jnp.add, total, context_part), block_part

    zero = jax.tree.map(lambda x: jnp.zeros_like(x.mT, jnp.float32), context)
    total, block_gradients = jax.lax.scan(step, zero, (blocks, mixed, log_sum, cotangent))
    return jax.tree.map(lambda total, x: total.mT.astype(x.dtype), total, context), block_gradients


_attention.defvjp(_forward, _backward)


def _flat(x: Float[Array, "B G C M X"]) -> Float[Array, "B G CM X"]:
    """All query rows of a chunk in one axis, since the context is the same for all of them."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _visible(context: Context, blocks: Blocks) -> Bool[Array, "B C T"]:
    position = jnp.arange(context.keys.shape[2])[None, None, :]
    return (position >= blocks.start[:, :, None]) & (position < blocks.anchors[:, :, None])


def _scores(context: Context, blocks: Blocks) -> tuple[Float[Array, "B G C M T"], Float[Array, "B G C M Q"]]:
    """Scaled scores of the context rows, -inf where out of range, and of the own rows; float32."""
    scale = blocks.queries.shape[-1] ** -0.5
    context_scores = _product("bgnh,bgth->bgnt", _flat(blocks.queries), context.keys) * scale
    context_scores = context_scores.reshape(*blocks.queries.shape[:4], -1)  # [B, G, C, M, T]
    own_scores = _product("bgcmh,bgckh->bgcmk", blocks.queries, blocks.keys) * scale
    return jnp.where(_visible(context, blocks)[:, None, :, None, :], context_scores, -jnp.inf), own_scores


def _mix(context_weights, own_weights, context_rows, own_rows) -> Float[Array, "B G C M H"]:
    """Weighted sum of context rows and own rows, float32."""
    context_weights, own_weights = context_weights.astype(own_rows.dtype), own_weights.astype(own_rows.dtype)
    own = _product("bgcmk,bgckh->bgcmh", own_weights, own_rows)
    return own + _product("bgnt,bgth->bgnh", _flat(context_weights), context_rows).reshape(own.shape)


def _attend(context: Context, blocks: Blocks) -> tuple[Float[Array, "B G C M H"], Float[Array, "B G C M"]]:
    """Attention output and log-sum-exp of the scores of one chunk of blocks."""
    context_scores, own_scores = _scores(context, blocks)
    highest = jnp.maximum(jnp.max(context_scores, axis=-1, initial=-jnp.inf), jnp.max(own_scores, axis=-1))
    context_weights = jnp.exp(context_scores - highest[..., None])
    own_weights = jnp.exp(own_scores - highest[..., None])
    total = jnp.sum(context_weights, axis=-1) + jnp.sum(own_weights, axis=-1)
    mixed = _mix(context_weights, own_weights, context.values, blocks.values) / total[..., None]
    return mixed.astype(blocks.queries.dtype), highest + jnp.log(total)


def _attend_backward(context: Context, blocks: Blocks, mixed, log_sum, cotangent) -> tuple[Context, Blocks]:
    """Gradients of one chunk, from its recomputed scores; the context's are float32, [B, G, H, T]."""
    dtype, scale = blocks.queries.dtype, blocks.queries.shape[-1] ** -0.5
    context_weights, own_weights = (jnp.exp(scores - log_sum[..., None]) for scores in _scores(context, blocks))
    mean = jnp.sum(cotangent.astype(jnp.float32) * mixed.astype(jnp.float32), axis=-1, keepdims=True)
    through_context = _product("bgnh,bgth->bgnt", _flat(cotangent), context.values).reshape(context_weights.shape)
    through_own = _product("bgcmh,bgckh->bgcmk", cotangent, blocks.values)
    d_context = (context_weights * (through_context - mean) * scale).astype(dtype)
    d_own = (own_weights * (through_own - mean) * scale).astype(dtype)
    context_part = Context(
        keys=_product("bgnh,bgnt->bght", _flat(blocks.queries), _flat(d_context)),
        values=_product("bgnh,bgnt->bght", _flat(cotangent), _flat(context_weights.astype(dtype))),
    )
    block_part = Blocks(
        queries=_mix(d_context, d_own, context.keys, blocks.keys).astype(dtype),
        keys=_product("bgcmk,bgcmh->bgckh", d_own, blocks.queries).astype(dtype),
        values=_product("bgcmk,bgcmh->bgckh", own_weights.astype(dtype), cotangent).astype(dtype),
        start=None,
        anchors=None,
    )
    return context_part, block_part
