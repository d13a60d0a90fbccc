"""A target that is a table and drafters that follow a script, for tests that know every probability or every draft.

The target's logits are a lookup by the position and the id of the last token, so the law of any text can be enumerated.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from lilicorr_jax.decoding.pair import DrafterCalls, Pair, TargetCalls
from lilicorr_jax.decoding.prefill import empty_state
from lilicorr_jax.decoding.proposal import Proposal
from lilicorr_jax.decoding.speculate import BlockRecord, DecodeState, Finish
from lilicorr_jax.models.target import TargetPass


def table_target(table: np.ndarray) -> TargetCalls:
    """`table[position, token]` [V] are the logits behind `token` at `position`; the position wraps around."""
    table = jnp.array(table, jnp.float32)

    def run(params, token_ids, cache, length, bucket):
        positions = length[:, None] + jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        logits = table[positions % table.shape[0], token_ids]  # [B, Q, V]
        return TargetPass(hidden=logits, features=logits[..., :1], cache=cache)

    return TargetCalls(run=run, unembed=lambda params, hidden: hidden, init_cache=lambda batch, capacity: None)


def scripted_drafter(num_slots: int, script: Callable[..., Proposal]) -> DrafterCalls:
    """`script(length [B], anchor_id [B], temperature [B], noise [B, S])` is the proposal of every block."""

    def draft(params, anchor_id, cache, length, bucket):
        return length

    def propose(params, block_states, anchor_id, anchor_state, temperature, noise):
        return script(block_states, anchor_id, temperature, noise)

    return DrafterCalls(
        num_slots=num_slots,
        draft=draft,
        absorb=lambda params, features, cache, length: (features, cache),
        propose=propose,
        init_cache=lambda batch, capacity: None,
        init_feature=lambda batch: jnp.zeros((batch, 1)),
    )


def drafts(draft_ids, num_proposed=None, q=None) -> Proposal:
    """A proposal of all slots, or of the first `num_proposed`."""
    if num_proposed is None:
        num_proposed = jnp.full(draft_ids.shape[:1], draft_ids.shape[1], jnp.int32)
    return Proposal(draft_ids=draft_ids, num_proposed=num_proposed, q=q)


def running_state(pair: Pair, batch: int, capacity: int = 0, num_stop_ids: int = 2, **fields) -> DecodeState:
    """Rows that decode from anchor 0 at position 0 with seeds 0, 1, ...; `fields` replace what a test cares about."""
    state = empty_state(pair, batch, capacity, num_stop_ids).replace(
        seed=jnp.arange(batch, dtype=jnp.uint32),
        num_emitted=jnp.ones(batch, jnp.int32),
        max_tokens=jnp.full(batch, 1000, jnp.int32),
        finish_reason=jnp.full(batch, Finish.RUNNING, jnp.int32),
    )
    return state.replace(**fields)


def texts(record: BlockRecord) -> list[list[int]]:
    """The committed tokens of each row, from a record with a leading axis of blocks."""
    rows = np.moveaxis(np.asarray(record.token_ids), 0, 1).reshape(record.token_ids.shape[1], -1)
    return [[int(token) for token in row if token >= 0] for row in rows]
