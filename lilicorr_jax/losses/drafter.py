"""The drafter's own loss: decayed cross-entropy over every supervised slot of a block (Eq. 6).

It owns the slot weights and nothing of the vocabulary: log-probabilities come from `losses.vocabulary`.
"""

import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Bool, Float


def slot_weights(num_slots: int, slot_decay: float) -> Float[Array, "S"]:
    """w_s = exp(-(s - 1) / beta) for slots s = 1..S (Eq. 6); the first weighs 1.

    >>> slot_weights(3, 7.0)
    Array([1.        , 0.8668779 , 0.75147724], dtype=float32)
    """
    return jnp.exp(-jnp.arange(num_slots, dtype=jnp.float32) / slot_decay)


def supervised_weights(is_supervised: Bool[Array, "*b S"], slot_decay: float) -> Float[Array, "*b S"]:
    """The weights of Eq. 6 where a slot is supervised, 0 elsewhere; their sum is the loss's denominator.

    An unsupervised slot leaves the weights of later ones alone: they go with the distance from the anchor.
    """
    weights = slot_weights(is_supervised.shape[-1], slot_decay)
    return jnp.where(is_supervised, jnp.broadcast_to(weights, is_supervised.shape), 0.0)  # [*b, S]


def block_cross_entropy(gold_logprobs: Float[Array, "*b S"], weights: Float[Array, "*b S"]) -> Float[Array, "*b S"]:
    """-w_s log p_s(g_s), one entry per slot (Eq. 6).

    The paper sums over slots; like the public code, we divide the sum by that of the weights (`losses.terms`).

    Args:
        gold_logprobs: the drafter's log-probability of each gold token, float32.
        weights: `supervised_weights`; where it is 0, so are the loss and its gradient.
    """
    return jnp.where(weights > 0, -weights * gold_logprobs, 0.0)
