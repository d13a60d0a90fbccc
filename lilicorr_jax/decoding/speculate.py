"""One speculative block as one pure function, the loop of blocks on the device, and the records that they pass on.

`(params, state) -> (state, BlockRecord)`: draft, propose, verify, commit, advance. Plain autoregressive decoding is the
same block without a drafter (S = 0): whatever the drafts, the text must equal it.

Each part runs under a named scope (`STAGES`), by which profiles and preflight tell them apart.

A text's tokens are counted by where they sit: `length` tokens are cached, the anchor sits at position `length`, slot s
at `length + s`, and row j of a verify pass speaks for position `length + 1 + j`.
"""

import enum

import jax
import jax.numpy as jnp
from flax import struct

from lilicorr_jax.cache import KVCache
from lilicorr_jax.decoding.noise import Purpose, uniform
from lilicorr_jax.decoding.pair import Pair
from lilicorr_jax.decoding.proposal import Proposal
from lilicorr_jax.decoding.verify import Mode, Noise, Verdict, verify
from lilicorr_jax.models.target import TargetPass
from lilicorr_jax.shapes import Array, Float, Int32, UInt32

STAGES = ("draft", "propose", "target", "verify", "commit", "advance")
"""The named scopes of a block, in order."""

NO_TOKEN = -1
"""Fills the unused ends of token and stop lists."""


class Finish(enum.IntEnum):
    """Why a row no longer decodes. Only RUNNING rows take part in a block."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    VACANT = 3


@struct.dataclass
class DecodeState:
    """Everything that decoding carries from block to block, one row per text.

    Attributes:
        anchor_id: the last committed token; it is not cached yet.
        length: tokens cached, which is the anchor's position; it holds for both caches, whose rows behind it are dead.
        target_cache, draft_cache: capacity must leave P rows behind every length that can occur; None without drafter.
        anchor_feature: fused context row of position length - 1; None without drafter.
        seed: of all noise of the row.
        temperature, top_p, top_k: how the row is sampled; temperature 0 is greedy.
        stop_ids: committing one of them ends the text; padded with -1.
        num_emitted: tokens so far, the prefill's included.
        max_tokens: the row ends when num_emitted reaches it.
        finish_reason: a `Finish`.
    """

    anchor_id: Int32[Array, "B"]
    length: Int32[Array, "B"]
    target_cache: KVCache
    draft_cache: KVCache | None
    anchor_feature: Float[Array, "B D"] | None
    seed: UInt32[Array, "B"]
    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int32[Array, "B"]
    stop_ids: Int32[Array, "B M"]
    num_emitted: Int32[Array, "B"]
    max_tokens: Int32[Array, "B"]
    finish_reason: Int32[Array, "B"]


@struct.dataclass
class Trace:
    """What a block considered, for attribution; candidates and picks are None where a method has none.

    `target_choices` are the target's own tokens, drawn at a temperature; `target_best` its likeliest.
    """

    draft_ids: Int32[Array, "B S"]
    candidate_ids: Int32[Array, "B S K"] | None
    picks: Int32[Array, "B S"] | None
    target_choices: Int32[Array, "B P"]
    target_best: Int32[Array, "B P"]


@struct.dataclass
class BlockRecord:
    """What one block did; rows that were not running report zeros.

    Attributes:
        token_ids: the committed tokens, then -1.
        num_committed: 1..P, cut behind the first stop id and at max_tokens.
        num_accepted: drafts that the target kept, 0..num_proposed, before any cut.
        num_proposed: drafts that were judged.
        finish_reason: a `Finish`, after this block.
        trace: only where asked for.
    """

    token_ids: Int32[Array, "B P"]
    num_committed: Int32[Array, "B"]
    num_accepted: Int32[Array, "B"]
    num_proposed: Int32[Array, "B"]
    finish_reason: Int32[Array, "B"]
    trace: Trace | None = None


def speculative_block(
    pair: Pair, params: dict, state: DecodeState, *, mode: Mode, bucket: int | None = None, trace: bool = False
) -> tuple[DecodeState, BlockRecord]:
    """One block of every running row; finished rows keep their state, but for dead rows of the caches.

    Args:
        pair: target and drafter as callables.
        mode: how rows are sampled, the richest that any of them asks for (static).
        bucket: attention reads this many leading cache rows; must cover length + P of every running row. None: all.
        trace: also record what was considered (static).
    """
    proposal = _propose(pair, params, state, bucket)
    token_ids = jnp.concatenate([state.anchor_id[:, None], proposal.draft_ids], axis=1)  # [B, P]
    with jax.named_scope("target"):
        judged = pair.target.run(params, token_ids, state.target_cache, state.length, bucket)
        logits = pair.target.unembed(params, judged.hidden)
    with jax.named_scope("verify"):
        verdict = verify(
            logits,
            proposal,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
            noise=_verify_noise(state, pair.num_slots),
            mode=mode,
        )
    with jax.named_scope("commit"):
        record = _commit(state, proposal, verdict)
    if trace:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        considered = Trace(proposal.draft_ids, proposal.candidate_ids, proposal.picks, verdict.target_choices, best)
        record = record.replace(trace=considered)
    with jax.named_scope("advance"):
        return _advance(pair, params, state, judged, record), record


def run_blocks(
    pair: Pair,
    params: dict,
    state: DecodeState,
    *,
    num_blocks: int,
    mode: Mode,
    bucket: int | None = None,
    trace: bool = False,
    skip_idle: bool = False,
) -> tuple[DecodeState, BlockRecord]:
    """A fixed number of blocks in one device loop; the record's arrays have a leading axis of blocks.

    Args:
        bucket: must cover the longest running row and num_blocks * P more.
        skip_idle: leave out the work of blocks in which no row runs (static). The branch is free on a CPU; on a GPU it
            would make the host wait for its condition in every block.
    """

    def block(state):
        return speculative_block(pair, params, state, mode=mode, bucket=bucket, trace=trace)

    def idle(state):
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(block, state)[1])
        token_ids = jnp.full_like(nothing.token_ids, NO_TOKEN)
        return state, nothing.replace(token_ids=token_ids, finish_reason=state.finish_reason)

    def step(state, _):
        if not skip_idle:
            return block(state)
        return jax.lax.cond((state.finish_reason == Finish.RUNNING).any(), block, idle, state)

    return jax.lax.scan(step, state, length=num_blocks)


def token_noise(state: DecodeState, num_tokens: int, purpose: Purpose) -> Float[Array, "B num_tokens"]:
    """Uniform numbers of the `num_tokens` positions behind each row's anchor."""
    positions = state.length[:, None] + 1 + jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
    return uniform(state.seed, positions, purpose)


def _verify_noise(state: DecodeState, num_slots: int) -> Noise:
    return Noise(
        accept=token_noise(state, num_slots, Purpose.ACCEPT),
        residual=token_noise(state, num_slots, Purpose.RESIDUAL),
        target=token_noise(state, num_slots + 1, Purpose.TARGET),
    )


def _propose(pair: Pair, params: dict, state: DecodeState, bucket: int | None) -> Proposal:
    """The drafts of a block; S = 0 of them without a drafter."""
    if pair.drafter is None:
        nothing = jnp.zeros_like(state.anchor_id)
        return Proposal(draft_ids=nothing[:, None][:, :0], num_proposed=nothing)
    with jax.named_scope("draft"):
        block_states = pair.drafter.draft(params, state.anchor_id, state.draft_cache, state.length, bucket)
    with jax.named_scope("propose"):
        noise = token_noise(state, pair.num_slots, Purpose.DRAFT)
        return pair.drafter.propose(
            params, block_states, state.anchor_id, state.anchor_feature, state.temperature, noise
        )


def finish_reason(
    num_tokens: Int32[Array, "B"], num_to_stop: Int32[Array, "B"], room: Int32[Array, "B"]
) -> tuple[Int32[Array, "B"], Int32[Array, "B"]]:
    """How many of `num_tokens` new tokens a row keeps, and its `Finish` afterwards.

    Args:
        num_to_stop: tokens up to and including the first stop id; more than `num_tokens` if there is none.
        room: tokens left until max_tokens. Where both end a text at the same token, it was the stop.
    """
    kept = jnp.minimum(num_tokens, room)
    ended = jnp.where(num_tokens >= room, Finish.LENGTH, Finish.RUNNING)
    reason = jnp.where(num_to_stop <= kept, Finish.STOP, ended)
    return jnp.minimum(kept, num_to_stop), reason.astype(jnp.int32)


def tokens_to_stop(token_ids: Int32[Array, "B P"], stop_ids: Int32[Array, "B M"]) -> Int32[Array, "B"]:
    """Number of tokens up to and including the first that is a stop id of its row; P + 1 if none is."""
    rows = token_ids.shape[1]
    is_stop = (token_ids[:, :, None] == stop_ids[:, None, :]).any(axis=-1) & (token_ids != NO_TOKEN)
    order = jax.lax.broadcasted_iota(jnp.int32, token_ids.shape, 1)
    return jnp.min(jnp.where(is_stop, order + 1, rows + 1), axis=1)


def _commit(state: DecodeState, proposal: Proposal, verdict: Verdict) -> BlockRecord:
    """Accepted drafts and the token behind them, cut at the first stop id and at max_tokens."""
    drafts = jnp.pad(proposal.draft_ids, ((0, 0), (0, 1)))
    order = jax.lax.broadcasted_iota(jnp.int32, drafts.shape, 1)
    accepted = verdict.num_accepted[:, None]
    token_ids = jnp.where(order == accepted, verdict.next_id[:, None], drafts)
    token_ids = jnp.where(order <= accepted, token_ids, NO_TOKEN)
    kept, reason = finish_reason(
        verdict.num_accepted + 1,
        tokens_to_stop(token_ids, state.stop_ids),
        state.max_tokens - state.num_emitted,
    )
    is_running = state.finish_reason == Finish.RUNNING
    num_committed = jnp.where(is_running, kept, 0)
    return BlockRecord(
        token_ids=jnp.where(order < num_committed[:, None], token_ids, NO_TOKEN),
        num_committed=num_committed,
        num_accepted=jnp.where(is_running, verdict.num_accepted, 0),
        num_proposed=jnp.where(is_running, proposal.num_proposed, 0),
        finish_reason=jnp.where(is_running, reason, state.finish_reason),
    )


def _advance(pair: Pair, params: dict, state: DecodeState, judged: TargetPass, record: BlockRecord) -> DecodeState:
    """Moves every row behind what it committed: the last of it becomes the anchor, the rest is cached."""
    last = jnp.maximum(record.num_committed - 1, 0)[:, None]
    is_moved = record.num_committed > 0
    anchor_id = jnp.take_along_axis(record.token_ids, last, axis=1)[:, 0]
    draft_cache, anchor_feature = state.draft_cache, state.anchor_feature
    if pair.drafter is not None:
        context, draft_cache = pair.drafter.absorb(params, judged.features, state.draft_cache, state.length)
        moved = jnp.take_along_axis(context, last[:, :, None], axis=1)[:, 0]  # row of position length' - 1
        anchor_feature = jnp.where(is_moved[:, None], moved, state.anchor_feature)
    return state.replace(
        anchor_id=jnp.where(is_moved, anchor_id, state.anchor_id),
        length=state.length + record.num_committed,
        target_cache=judged.cache,
        draft_cache=draft_cache,
        anchor_feature=anchor_feature,
        num_emitted=state.num_emitted + record.num_committed,
        finish_reason=record.finish_reason,
    )
