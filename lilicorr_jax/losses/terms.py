"""Every method's loss as sums and counts, so that it is divided once, over everything that was added up (Eq. 7).

Terms of micro-batches, devices and hosts simply add: how a batch was split never shows in the loss. The terms of blocks
are means over slot weights and the lattice terms are means over lattice slots; the two denominators are known only
after the forward pass, so whoever accumulates gradients keeps one tree for each numerator of `loss_sums`.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from lilicorr_jax.config import ObjectiveConfig
from lilicorr_jax.losses.drafter import block_cross_entropy, drafter_weights
from lilicorr_jax.losses.prefix import GoldRanks, lattice_slots, leading_run
from lilicorr_jax.losses.rerank import cross_entropy, distractor_cost, gold_path_scores, margin_hinge
from lilicorr_jax.shapes import Array, Bool, Float
from pallas_kernels.match_walk import Scores

Scalar = Float[Array, ""]


@flax.struct.dataclass
class Terms:
    """Sums and counts of the objective and its metrics; float32 scalars.

    A prefix is a leading run of supervised slots in which the pool holds the gold token (oracle), ranks it first
    (top1), or the method picks it, by the reranker's greedy walk or by the corrected logits (selected); `num_blocks`
    are those whose first slot is supervised.
    """

    drafter_sum: Scalar  # sum of -w_s log p_s(g_s), Eq. 6
    corrected_sum: Scalar  # the same of a corrector's logits (Domino, DSpark)
    distance_sum: Scalar  # sum of w_s |q_s - p_s|, the corrected distribution's L1 distance from the target's (DSpark)
    confidence_sum: Scalar  # sum of w_s times the confidence's cross-entropy (DSpark)
    slot_weight_sum: Scalar  # sum of w_s over supervised slots
    rerank_sum: Scalar  # Eq. 3 before its division
    distractor_sum: Scalar  # Eq. 4-5
    margin_sum: Scalar  # Eq. 13
    num_lattice_slots: Scalar  # the size of the oracle prefix
    num_supervised: Scalar
    num_covered: Scalar  # supervised slots whose gold token is in the pool
    num_correct: Scalar  # supervised slots whose gold token is the drafter's first choice
    num_blocks: Scalar
    oracle_prefix_sum: Scalar
    top1_prefix_sum: Scalar
    selected_prefix_sum: Scalar
    spread_sum: Scalar  # over supervised slots, how far the candidates' vectors lie apart (LiLiCorr)

    def __add__(self, other: "Terms") -> "Terms":
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def zero(cls) -> "Terms":
        """What an empty batch adds up to."""
        return cls(**{name: jnp.zeros((), jnp.float32) for name in cls.__dataclass_fields__})


def drafter_terms(
    gold_logprobs: Float[Array, "*b S"],
    gold: GoldRanks,
    is_supervised: Bool[Array, "*b S"],
    config: ObjectiveConfig,
) -> Terms:
    """The drafter's share of the terms: Eq. 6 and what its candidates cover. The reranker's share is zero."""
    weights = drafter_weights(gold_logprobs, is_supervised, config)
    is_covered = gold.is_covered & is_supervised
    is_correct = is_covered & (gold.rank == 0)
    return Terms.zero().replace(
        drafter_sum=jnp.sum(block_cross_entropy(gold_logprobs, weights)),
        slot_weight_sum=jnp.sum(weights),
        num_supervised=_count(is_supervised),
        num_covered=_count(is_covered),
        num_correct=_count(is_correct),
        num_blocks=_count(is_supervised[..., 0]),
        oracle_prefix_sum=_count(leading_run(is_covered)),
        top1_prefix_sum=_count(leading_run(is_correct)),
    )


def lattice_terms(
    scores: Scores,
    gold: GoldRanks,
    gaps: Float[Array, "*b S K"],
    is_supervised: Bool[Array, "*b S"],
    config: ObjectiveConfig,
) -> Terms:
    """The reranker's share of the terms: Eq. 3, 4 and 13 over the oracle prefix. The drafter's share is zero.

    Args:
        scores: the lattice's matching scores (sigma times cosine), float32.
        gold: where the gold tokens stand among the candidates.
        gaps: `rerank.gold_gaps` of the target's logits.
        is_supervised: slots whose label exists and counts.
        config: names the rule of `prefix.lattice_slots` and the margin.
    """
    logits = gold_path_scores(scores, gold.rank)
    counts = lattice_slots(gold.is_covered, is_supervised, config.lattice_blocks)
    # While every earlier pick is gold, the gold path is the walked one: the walk's prefix needs no walk.
    is_picked = gold.is_covered & is_supervised & (jnp.argmax(logits, axis=-1) == gold.rank)
    return Terms.zero().replace(
        rerank_sum=_sum(cross_entropy(logits, gold.rank), counts),
        distractor_sum=_sum(distractor_cost(logits, gaps), counts),
        margin_sum=_sum(margin_hinge(logits, gold.rank, config.margin), counts),
        num_lattice_slots=_count(counts),
        selected_prefix_sum=_count(leading_run(is_picked)),
    )


class Mixture(NamedTuple):
    """What each block term weighs in a method's loss; the drafter's cross-entropy alone is DFlash's and LiLiCorr's."""

    drafter: float | Scalar = 1.0
    corrected: float | Scalar = 0.0
    distance: float | Scalar = 0.0
    confidence: float | Scalar = 0.0


DRAFTER_ALONE = Mixture()


def spread_terms(
    out: Float[Array, "*b S K E"], in_: Float[Array, "*b S K E"], is_supervised: Bool[Array, "*b S"]
) -> Terms:
    """How far apart a slot's unit vectors lie: 1 - |mean over candidates|^2, the mean of out and in vectors.

    1 where they cancel, 1 - 1/K where they are orthogonal, 0 where all candidates have one vector, and the reranker has
    collapsed: it can tell none of them from another. No loss reads it.
    """
    apart = [1 - jnp.sum(jnp.square(jnp.mean(x.astype(jnp.float32), axis=-2)), axis=-1) for x in (out, in_)]
    return Terms.zero().replace(spread_sum=_sum((apart[0] + apart[1]) / 2, is_supervised))


class LossParts(NamedTuple):
    """One scalar for the block terms of the loss and one for the lattice terms of Eq. 7."""

    block: Scalar
    lattice: Scalar


def loss_sums(terms: Terms, config: ObjectiveConfig, mixture: Mixture = DRAFTER_ALONE) -> LossParts:
    """The loss's numerators; every weight stands here.

    The mixture of the block terms, and Eq. 7's gamma ((1 - mu) CE + lambda Omega + mu hinge), 0 without a reranker.
    """
    sums = (terms.drafter_sum, terms.corrected_sum, terms.distance_sum, terms.confidence_sum)
    hinge_share = config.margin_weight
    rerank = (1 - hinge_share) * terms.rerank_sum + hinge_share * terms.margin_sum
    lattice = config.rerank_weight * (rerank + config.distractor_weight * terms.distractor_sum)
    return LossParts(block=sum(map(jnp.multiply, mixture, sums)), lattice=lattice)


def loss_counts(terms: Terms) -> LossParts:
    """The loss's denominators: slot weights and lattice slots, 1 where there are none."""
    return LossParts(block=_or_one(terms.slot_weight_sum), lattice=_or_one(terms.num_lattice_slots))


def joint_loss(terms: Terms, config: ObjectiveConfig, mixture: Mixture = DRAFTER_ALONE) -> Scalar:
    """L = L_DFlash + gamma ((1 - mu) L_CE + lambda L_dist + mu L_margin) (Eq. 7; with mu > 0, Eq. 13).

    L_DFlash, or what `mixture` has in its place, is a mean weighted by Eq. 6, the others are means over all lattice
    slots. A set with nothing in it gives 0 and a zero gradient.
    """
    sums, counts = loss_sums(terms, config, mixture), loss_counts(terms)
    return sums.block / counts.block + sums.lattice / counts.lattice


def metrics(terms: Terms) -> dict[str, Scalar]:
    """Unweighted means of every term, and of what the terms count; 0 where nothing was counted."""
    counts = loss_counts(terms)
    slots, blocks = _or_one(terms.num_supervised), _or_one(terms.num_blocks)
    return {
        "drafter_loss": terms.drafter_sum / counts.block,
        "corrected_loss": terms.corrected_sum / counts.block,
        "distance": terms.distance_sum / counts.block,
        "confidence_loss": terms.confidence_sum / counts.block,
        "rerank_loss": terms.rerank_sum / counts.lattice,
        "distractor_loss": terms.distractor_sum / counts.lattice,
        "margin_loss": terms.margin_sum / counts.lattice,
        "coverage": terms.num_covered / slots,
        "accuracy": terms.num_correct / slots,
        "oracle_prefix": terms.oracle_prefix_sum / blocks,
        "top1_prefix": terms.top1_prefix_sum / blocks,
        "selected_prefix": terms.selected_prefix_sum / blocks,
        "factor_spread": terms.spread_sum / slots,
    }


def _sum(per_slot: Float[Array, "*b S"], counts: Bool[Array, "*b S"]) -> Scalar:
    return jnp.sum(jnp.where(counts, per_slot, 0.0))


def _count(flags: Bool[Array, "*b"]) -> Scalar:
    return jnp.sum(flags.astype(jnp.float32))


def _or_one(count: Scalar) -> Scalar:
    return jnp.where(count > 0, count, 1.0)
