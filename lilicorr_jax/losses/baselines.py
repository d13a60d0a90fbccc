"""The objectives of Domino (arXiv 2605.29707) and DSpark (arXiv 2607.05147).

Both add to a slot's logits a correction of low rank that depends on the gold tokens before it, and read whole
distributions of it. It owns what they read of them, in chunks, and how that enters the terms; the correction's network
is in `models.domino` and `models.dspark`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lilicorr_jax.config import ObjectiveConfig
from lilicorr_jax.losses.drafter import block_cross_entropy, supervised_weights
from lilicorr_jax.losses.prefix import gold_ranks, leading_run
from lilicorr_jax.losses.terms import Mixture, Terms, drafter_terms
from lilicorr_jax.losses.vocabulary import over_chunks, row_logits
from lilicorr_jax.shapes import Array, Bool, Float, Int, Int32
from pallas_kernels.topk_logprobs import topk_logprobs


class SlotRows(NamedTuple):
    """What the distributions of a slot are made of, one row each.

    Attributes:
        states: the drafter's; times the unembedding they are its own logits.
        features: what the correction's last matrix multiplies; zero leaves the drafter's logits alone.
        gold_ids: the slot's gold token.
        target_states: the target's opinion of the same token; None where the method does not ask for it.
    """

    states: Float[Array, "*b D"]
    features: Float[Array, "*b E"]
    gold_ids: Int[Array, "*b"]
    target_states: Float[Array, "*b D"] | None = None


class SlotReadings(NamedTuple):
    """What the terms read of a slot's distributions; float32.

    Attributes:
        base_logprobs: log-probability of the gold token under the drafter's own logits.
        candidate_ids: the K tokens of largest logit by the drafter alone, best first.
        gold_logprobs: log-probability of the gold token under the corrected logits.
        is_chosen: whether the gold token has the largest corrected logit.
        distance: `distribution_distance` of the corrected logits from the target's; None without target states.
    """

    base_logprobs: Float[Array, "*b"]
    candidate_ids: Int32[Array, "*b K"]
    gold_logprobs: Float[Array, "*b"]
    is_chosen: Bool[Array, "*b"]
    distance: Float[Array, "*b"] | None = None


def read_slots(
    rows: SlotRows, unembedding: Float[Array, "V D"], correction: Float[Array, "E V"], num_candidates: int, chunk: int
) -> SlotReadings:
    """Reads every slot's own and corrected distribution, `chunk` slots at a time.

    Args:
        rows: one for each slot.
        unembedding: the target's, frozen.
        correction: the last matrix of the correction, trained; rounded to the features' dtype.
        num_candidates: K.
        chunk: slots per step; need not divide M.
    """

    def read(rows: SlotRows) -> SlotReadings:
        base = row_logits(rows.states, unembedding)
        matrix = correction.astype(rows.features.dtype)  # inside, so that chunks' gradients add up in its own dtype
        change = jnp.einsum("ce,ev->cv", rows.features, matrix, preferred_element_type=jnp.float32)
        target = None if rows.target_states is None else row_logits(rows.target_states, unembedding)
        return read_logits(base, base + change, rows.gold_ids, num_candidates, target)

    return over_chunks(read, rows, chunk)


def read_logits(
    base: Float[Array, "C V"],
    corrected: Float[Array, "C V"],
    gold_ids: Int[Array, "C"],
    num_candidates: int,
    target: Float[Array, "C V"] | None = None,
) -> SlotReadings:
    """The readings of one chunk, from its whole rows of logits."""
    return SlotReadings(
        base_logprobs=_gold_logprobs(base, gold_ids),
        candidate_ids=topk_logprobs(jax.lax.stop_gradient(base), num_candidates).ids,
        gold_logprobs=_gold_logprobs(corrected, gold_ids),
        is_chosen=jnp.argmax(corrected, axis=-1) == gold_ids,
        distance=None if target is None else distribution_distance(corrected, target),
    )


def _gold_logprobs(logits: Float[Array, "C V"], gold_ids: Int[Array, "C"]) -> Float[Array, "C"]:
    gold = jnp.take_along_axis(logits, gold_ids[:, None], axis=-1)[:, 0]
    return gold - jax.nn.logsumexp(logits, axis=-1)


def distribution_distance(logits: Float[Array, "*b V"], target_logits: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """sum_v |q_v - p_v|, q and p the softmaxes of the draft's and the target's logits at temperature 1.

    It is twice the total variation, so a draft drawn from q survives verification with probability 1 - distance / 2.
    """
    difference = jax.nn.softmax(logits, axis=-1) - jax.nn.softmax(jax.lax.stop_gradient(target_logits), axis=-1)
    return jnp.sum(jnp.abs(difference), axis=-1)


def confidence_cross_entropy(
    confidence_logits: Float[Array, "*b S"], distance: Float[Array, "*b S"]
) -> Float[Array, "*b S"]:
    """Cross-entropy of sigmoid(c_s) with 1 - distance / 2, a slot's chance of surviving if all before it did.

    The distance gets no gradient from it.
    """
    survival = jnp.clip(1 - 0.5 * jax.lax.stop_gradient(distance), 0.0, 1.0)
    return jax.nn.softplus(confidence_logits) - survival * confidence_logits


def domino_terms(
    slots: SlotReadings, gold_ids: Int[Array, "*b S"], is_supervised: Bool[Array, "*b S"], config: ObjectiveConfig
) -> Terms:
    """Cross-entropies before and after the correction, weighted by Eq. 6; a hole in a block spares what follows."""
    weights = supervised_weights(is_supervised, config.slot_decay)
    gold = gold_ranks(slots.candidate_ids, gold_ids)
    return drafter_terms(slots.base_logprobs, gold, is_supervised, config).replace(
        corrected_sum=jnp.sum(block_cross_entropy(slots.gold_logprobs, weights)),
        selected_prefix_sum=jnp.sum(leading_run(slots.is_chosen & is_supervised).astype(jnp.float32)),
    )


def dspark_terms(
    slots: SlotReadings,
    confidence_logits: Float[Array, "*b S"] | None,
    gold_ids: Int[Array, "*b S"],
    is_supervised: Bool[Array, "*b S"],
    config: ObjectiveConfig,
) -> Terms:
    """As `domino_terms`, and the distance from the target and the confidence's cross-entropy.

    The first unsupervised slot ends its block. Without a confidence its term is 0.

    Raises:
        ValueError: the slots were read without the target's states.
    """
    if slots.distance is None:
        raise ValueError(
            "DSpark's terms need each slot's distance from the target; got None: read the slots with target_states."
        )
    is_supervised = leading_run(is_supervised)
    weights = supervised_weights(is_supervised, config.slot_decay)
    terms = domino_terms(slots, gold_ids, is_supervised, config)
    terms = terms.replace(distance_sum=jnp.sum(weights * slots.distance))
    if confidence_logits is None:
        return terms
    per_slot = confidence_cross_entropy(confidence_logits, slots.distance)
    return terms.replace(confidence_sum=jnp.sum(weights * per_slot))


def base_weight(config: ObjectiveConfig, step: Int[Array, ""] | int, num_steps: int) -> Float[Array, ""]:
    """Domino's lambda: falls linearly from `base_weight_start` to 0 over the first `base_decay_share` of the steps.

    At its default start of 1 the correction has no gradient in the very first step.
    """
    decay_steps = max(1, math.floor(config.base_decay_share * num_steps))
    passed = jnp.minimum(jnp.asarray(step, jnp.float32) / decay_steps, 1.0)
    return config.base_weight_start * (1 - passed)


def domino_mixture(config: ObjectiveConfig, step: Int[Array, ""] | int, num_steps: int) -> Mixture:
    """L = (1 - lambda) CE(corrected) + lambda CE(drafter)."""
    weight = base_weight(config, step, num_steps)
    return Mixture(drafter=weight, corrected=1 - weight)


def dspark_mixture(config: ObjectiveConfig) -> Mixture:
    """L = 0.1 CE(corrected) + 0.9 distance + 1.0 confidence, by default; the drafter's own logits have no loss."""
    return Mixture(0.0, config.cross_entropy_weight, config.distance_weight, config.confidence_weight)
