"""Attention of training blocks over their context and themselves, in plain JAX.

Never builds an (A*Q) x (T+A*Q) mask: the context part and the block part share one maximum and one denominator.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    del anchor_chunk
    batch, blocks, heads, rows, width = queries.shape
    grouped = queries.reshape(batch, blocks, context_keys.shape[1], -1, rows, width)
    position = jnp.arange(context_keys.shape[2])[None, None, :]
    visible = position < anchors[:, :, None]  # [B, A, T]
    if start is not None:
        visible &= position >= start[:, :, None]
    context = jnp.einsum("bagrqh,bgth->bagrqt", grouped, context_keys, preferred_element_type=jnp.float32)
    context = jnp.where(visible[:, :, None, None, None], context * width**-0.5, jnp.finfo(jnp.float32).min)
    own = jnp.einsum("bagrqh,bagth->bagrqt", grouped, block_keys, preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.concatenate([context, own], axis=-1), axis=-1).astype(queries.dtype)
    context, own = jnp.split(weights, [context_keys.shape[2]], axis=-1)
    mixed = jnp.einsum("bagrqt,bgth->bagrqh", context, context_values)
    mixed += jnp.einsum("bagrqt,bagth->bagrqh", own, block_values)
    return mixed.reshape(queries.shape)
