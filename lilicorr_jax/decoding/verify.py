"""Exact verification: how many drafts the target keeps, and which token follows them. Pure, batched, knows no model.

Row j of a verify pass speaks for the token behind row j, so it judges slot j + 1 (column j of the drafts). Noise comes
in as arrays, one number per position and purpose (`lilicorr_jax.decoding.noise`).
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from lilicorr_jax.decoding.noise import draw
from lilicorr_jax.decoding.proposal import Proposal, SparseQ
from lilicorr_jax.shapes import Array, Bool, Float, Int, Int32

Mode = Literal["greedy", "temperature", "filtered"]
"""What is compiled: argmax alone; softmax at a temperature; that, and top-k and top-p, which sort the vocabulary."""


class Noise(NamedTuple):
    """Uniform numbers in [0, 1) for the positions that a verify pass decides.

    Attributes:
        accept: whether a sampled draft is kept.
        residual: which token replaces a sampled draft that is not.
        target: the target's own draw behind each row.
    """

    accept: Float[Array, "B S"]
    residual: Float[Array, "B S"]
    target: Float[Array, "B P"]


class Verdict(NamedTuple):
    """The outcome for each row of the batch.

    Attributes:
        num_accepted: leading drafts kept, 0..num_proposed.
        next_id: the token behind them, a correction or, when every draft was kept, a bonus.
        target_choices: the target's own token behind each row: its draw, or its likeliest where drafts were sampled.
    """

    num_accepted: Int32[Array, "B"]
    next_id: Int32[Array, "B"]
    target_choices: Int32[Array, "B P"]


def target_distribution(
    logits: Float[Array, "B P V"],
    temperature: Float[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    mode: Mode,
) -> Float[Array, "B P V"]:
    """The distribution that sampled text has: temperature, then top-k, then top-p, then normalised; float32.

    A row of temperature 0 is a point mass at the lowest id among the largest logits. top_k 0 and top_p 1 keep all.
    Tokens that tie with the last kept one are kept, so that no order among equals matters.
    """
    logits = logits.astype(jnp.float32)
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    point = jax.lax.broadcasted_iota(best.dtype, logits.shape, 2) == best
    if mode == "greedy":
        return point.astype(jnp.float32)
    shifted = logits - jnp.take_along_axis(logits, best, axis=-1)  # largest first: no temperature can overflow
    scaled = shifted / jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    if mode == "filtered":
        scaled = _filter(scaled, top_k[:, None, None], top_p[:, None, None])
    weights = jnp.exp(scaled)
    probs = weights / weights.sum(axis=-1, keepdims=True)
    return jnp.where((temperature > 0)[:, None, None], probs, point.astype(jnp.float32))


def _filter(
    scaled: Float[Array, "B P V"], top_k: Int[Array, "B 1 1"], top_p: Float[Array, "B 1 1"]
) -> Float[Array, "B P V"]:
    """Minus infinity at every token outside the k largest and outside the smallest set that holds mass top_p."""
    batch, rows, vocab = scaled.shape
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1
    last = jnp.broadcast_to(last, (batch, rows, 1))
    is_kept = ordered >= jnp.take_along_axis(ordered, last, axis=-1)
    weights = jnp.where(is_kept, jnp.exp(ordered), 0.0)
    mass = jnp.cumsum(weights, axis=-1)
    before = jnp.pad(mass[..., :-1], ((0, 0), (0, 0), (1, 0)))
    is_kept &= (before < top_p * mass[..., -1:]) | (top_p >= 1.0)  # at 1 rounding must not cut the tail
    floor = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def verify(
    logits: Float[Array, "B P V"],
    proposal: Proposal,
    *,
    temperature: Float[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    noise: Noise,
    mode: Mode,
) -> Verdict:
    """Keeps the longest run of drafts that leaves the text's law the target's own (arXiv 2211.17192).

    Deterministic drafts are compared with the target's draw at each position, which has the law of rejection against a
    point mass and makes the text that of decoding without drafts under the same noise. Sampled drafts are kept with
    probability min(1, p / q); a rejected one is replaced by a draw from max(p - q, 0). In greedy mode p is a point mass
    and both rules are comparison.
    """
    if mode == "greedy":
        return match(proposal, jnp.argmax(logits, axis=-1).astype(jnp.int32))
    probs = target_distribution(logits, temperature, top_k, top_p, mode)
    if proposal.q is None:
        return match(proposal, draw(probs, noise.target))
    return reject(proposal, probs, noise)


def match(proposal: Proposal, choices: Int32[Array, "B P"]) -> Verdict:
    """Keeps drafts while they equal the target's choices; the first choice that differs follows."""
    num_accepted = count_accepted(proposal.draft_ids == choices[:, :-1], proposal.num_proposed)
    return Verdict(num_accepted, _at(choices, num_accepted), choices)


def reject(proposal: Proposal, probs: Float[Array, "B P V"], noise: Noise) -> Verdict:
    """Keeps a draft d while u q(d) < p(d), strictly: u may be 0, and a token of p(d) = 0 is never kept."""
    p = jnp.take_along_axis(probs[:, :-1], proposal.draft_ids[..., None], axis=-1)[..., 0]  # [B, S]
    is_kept = noise.accept * _probability(proposal.q, proposal.draft_ids) < p
    num_accepted = count_accepted(is_kept, proposal.num_proposed)
    is_rejected = num_accepted < proposal.num_proposed
    slot = jnp.minimum(num_accepted, proposal.draft_ids.shape[1] - 1)
    number = jnp.where(is_rejected, _at(noise.residual, slot), _at(noise.target, num_accepted))
    next_id = draw(next_weights(proposal, probs, num_accepted), number)
    return Verdict(num_accepted, next_id, jnp.argmax(probs, axis=-1).astype(jnp.int32))


def count_accepted(is_kept: Bool[Array, "B S"], num_proposed: Int32[Array, "B"]) -> Int32[Array, "B"]:
    """Length of the leading run of kept drafts among the proposed ones."""
    slots = jax.lax.broadcasted_iota(jnp.int32, is_kept.shape, 1)
    run = jnp.cumprod((is_kept & (slots < num_proposed[:, None])).astype(jnp.int32), axis=1)
    return run.sum(axis=1, dtype=jnp.int32)


def next_weights(
    proposal: Proposal, probs: Float[Array, "B P V"], num_accepted: Int32[Array, "B"]
) -> Float[Array, "B V"]:
    """What the token behind the kept drafts is drawn from, not normalised.

    max(p - q, 0) of the slot where a draft was rejected; p where none was, or where rounding left nothing.
    """
    p = jnp.take_along_axis(probs, num_accepted[:, None, None], axis=1)[:, 0]  # [B, V]
    slot = jnp.minimum(num_accepted, proposal.draft_ids.shape[1] - 1)[:, None, None]
    if isinstance(proposal.q, SparseQ):
        ids, q = (jnp.take_along_axis(part, slot, axis=1)[:, 0] for part in (proposal.q.ids, proposal.q.probs))
        residual = p.at[jnp.arange(p.shape[0])[:, None], ids].add(-q)
    else:
        residual = p - jnp.take_along_axis(proposal.q, slot, axis=1)[:, 0]
    residual = jnp.maximum(residual, 0.0)
    is_residual = (num_accepted < proposal.num_proposed) & (residual.sum(axis=-1) > 0)
    return jnp.where(is_residual[:, None], residual, p)


def _probability(q: SparseQ | Float[Array, "B S V"], draft_ids: Int32[Array, "B S"]) -> Float[Array, "B S"]:
    """q of each draft."""
    if isinstance(q, SparseQ):
        return jnp.where(q.ids == draft_ids[..., None], q.probs, 0.0).sum(axis=-1)
    return jnp.take_along_axis(q, draft_ids[..., None], axis=-1)[..., 0]


def _at(values: Array, index: Int32[Array, "B"]) -> Array:
    """values[b, index[b]] of each row."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
