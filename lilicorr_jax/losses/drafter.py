"""The drafter's own loss: weighted cross-entropy over every supervised slot of a block (Eq. 6, or D-PACE).

It owns the slot weights and nothing of the vocabulary: log-probabilities come from `losses.vocabulary`.
"""

import jax
import jax.numpy as jnp

from lilicorr_jax.config import ObjectiveConfig
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


def survival_weights(
    gold_logprobs: Float[Array, "*b S"], is_supervised: Bool[Array, "*b S"], alpha: float
) -> Float[Array, "*b S"]:
    """D-PACE (arXiv 2605.18810): w_j = sum_{m >= j} C_m, C_m = prod_{i <= m} ((1 - alpha) q_i + alpha); no gradient.

    q_i is the drafter's probability of the gold token, C_m that of slot m being reached, and w_j what the logarithm of
    factor j adds to the sum of all C_m, a surrogate of the accepted length. It stands in place of the decay of Eq. 6.

    Args:
        gold_logprobs: the drafter's log-probability of each gold token.
        is_supervised: another slot is a factor 1, adds nothing to the sum and weighs 0.
        alpha: what a slot of probability 0 still passes on.
    """
    passed = (1 - alpha) * jnp.exp(jax.lax.stop_gradient(gold_logprobs)) + alpha
    reached = jnp.cumprod(jnp.where(is_supervised, passed, 1.0), axis=-1)
    weights = jax.lax.cumsum(jnp.where(is_supervised, reached, 0.0), axis=reached.ndim - 1, reverse=True)
    return jnp.where(is_supervised, weights, 0.0)


def drafter_weights(
    gold_logprobs: Float[Array, "*b S"], is_supervised: Bool[Array, "*b S"], config: ObjectiveConfig
) -> Float[Array, "*b S"]:
    """The weights that `config.drafter_weighting` names; they never carry a gradient."""
    if config.drafter_weighting == "dpace":
        return survival_weights(gold_logprobs, is_supervised, config.dpace_alpha)
    return supervised_weights(is_supervised, config.slot_decay)


def block_cross_entropy(gold_logprobs: Float[Array, "*b S"], weights: Float[Array, "*b S"]) -> Float[Array, "*b S"]:
    """-w_s log p_s(g_s), one entry per slot (Eq. 6).

    The paper sums over slots; like the public code, we divide the sum by that of the weights (`losses.terms`).

    Args:
        gold_logprobs: the drafter's log-probability of each gold token, float32.
        weights: `drafter_weights`; where it is 0, so are the loss and its gradient.
    """
    return jnp.where(weights > 0, -weights * gold_logprobs, 0.0)
