"""Attention of every node of a lattice to every node, in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def check(qkv: Float[Array, "*batch M three_W"], bias: Float[Array, "N M M"]) -> None:
    """Raises ValueError where the columns can't be shared out to queries, keys and values of all heads."""
    if qkv.shape[-1] % (3 * bias.shape[0]):
        raise ValueError(
            f"lattice_attention shares its columns out to queries, keys and values of {bias.shape[0]} heads; got "
            f"{qkv.shape[-1]} of them, which 3 x {bias.shape[0]} does not divide."
        )


def lattice_attention(qkv: Float[Array, "*batch M three_W"], bias: Float[Array, "N M M"]) -> Float[Array, "*batch M W"]:
    """softmax(q k^T / sqrt(H) + bias) v in each head; scores and softmax in float32, products take the inputs' dtype.

    No mask, no rotary embedding. The columns of `qkv` are queries, keys and values, each of them head by head.
    """
    shape = (*qkv.shape[:-1], bias.shape[0], qkv.shape[-1] // (3 * bias.shape[0]))  # [*batch, M, N, H]
    queries, keys, values = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("...inh,...jnh->...nij", queries, keys, preferred_element_type=jnp.float32)
    scores = scores * shape[-1] ** -0.5 + jnp.broadcast_to(bias.astype(jnp.float32), scores.shape)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("...nij,...jnh->...inh", weights, values)
    return mixed.reshape(*qkv.shape[:-1], -1)  # [*batch, M, N, H] -> [*batch, M, W]
