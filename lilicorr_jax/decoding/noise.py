"""Random numbers as a function of (seed, absolute position, purpose), and draws made with them.

No key is carried from block to block. A row gives the same text alone and in any batch, and a position that is drawn
again after a rejection may meet the same number again: the discarded draw influenced nothing that was kept.
"""

import enum

import jax
import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Float, Int, Int32, UInt32

CHUNK = 128
"""Weights per chunk of an inverse CDF; divides Qwen3's vocabulary."""


class Purpose(enum.IntEnum):
    """What a number decides. One number never decides two things: acceptance and residual must not share."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3


def uniform(seed: UInt32[Array, "B"], position: Int32[Array, "B S"], purpose: Purpose) -> Float[Array, "B S"]:
    """Uniform numbers in [0, 1), never 1, one per absolute position of each row.

    One Threefry hash each: the seed is the key, position and purpose are the counter, 24 bits of the output are kept.
    """

    def at(seed, position):
        counter = position * len(Purpose) + purpose
        word = jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), counter))[0]
        return (word >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)

    return jax.vmap(jax.vmap(at, in_axes=(None, 0)))(seed, position)


def draw(weights: Float[Array, "*batch V"], uniforms: Float[Array, "*batch"]) -> Int32[Array, "*batch"]:
    """Draws an index in proportion to its weight: the inverse of the cumulative sum at `uniforms` times the total.

    Two levels, chunks and then one chunk's entries, so that the cumulative sums stay short: cheap, and accurate in
    float32 over a vocabulary. An entry of weight zero is never drawn.

    Args:
        weights: float32, not negative, not all zero; they need not sum to one.
        uniforms: in [0, 1).
    """
    *batch, size = weights.shape
    width = min(CHUNK, size)
    padding = [(0, 0)] * len(batch) + [(0, -size % width)]
    chunks = jnp.pad(weights, padding).reshape(*batch, -1, width)  # [*b, V/width, width]
    sums = chunks.sum(axis=-1)
    chunk, rest = _reach(sums, uniforms * sums.sum(axis=-1))
    inside, _ = _reach(jnp.take_along_axis(chunks, chunk[..., None, None], axis=-2)[..., 0, :], rest)
    return chunk * width + inside


def _reach(
    weights: Float[Array, "*batch M"], threshold: Float[Array, "*batch"]
) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """The last index with a weight whose predecessors sum to at most `threshold`, and what of it is left there."""
    before = jnp.cumsum(weights, axis=-1)[..., :-1]
    before = jnp.pad(before, [(0, 0)] * (before.ndim - 1) + [(1, 0)])
    order = jax.lax.broadcasted_iota(jnp.int32, weights.shape, weights.ndim - 1)
    is_reached = (weights > 0) & (before <= threshold[..., None])
    index = jnp.max(jnp.where(is_reached, order, 0), axis=-1)
    passed = jnp.take_along_axis(before, index[..., None], axis=-1)[..., 0]
    return index, jnp.maximum(threshold - passed, 0.0)
