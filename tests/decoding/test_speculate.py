"""What one block commits, when a row ends, and that ended rows stay as they are: against a loop over Python lists."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.decoding.pair import Pair
from lilicorr_jax.decoding.speculate import Finish, run_blocks, speculative_block
from tests import stubs

pytestmark = pytest.mark.usefixtures("strict_dtypes")

VOCAB, SLOTS, BATCH, BLOCKS = 11, 4, 6, 12
TABLE = np.random.default_rng(3).normal(size=(97, VOCAB, VOCAB)).astype(np.float32)


def greedy_text(first: int, num_tokens: int) -> list[int]:
    """The target's own text behind the anchor `first` at position 0."""
    text = [first]
    for position in range(num_tokens):
        text.append(int(np.argmax(TABLE[position, text[-1]])))
    return text[1:]


ANCHORS = np.arange(BATCH)
TEXTS = np.array([greedy_text(anchor, 96) for anchor in ANCHORS])  # token i sits at position i + 1
TURNS = np.arange(97)  # where the scripted drafts go wrong: the block at position i has TURNS[i] right ones
for turn, position in enumerate(np.cumsum([0, *(np.arange(30) % (SLOTS + 1) + 1)])):
    TURNS[position : position + 1] = turn % (SLOTS + 1)


def in_turn(length, anchor_id, temperature, noise):
    """Drafts of which 0, 1, 2, ..., S, 0, ... are the target's own, block after block."""
    slots = jnp.arange(SLOTS, dtype=jnp.int32)[None, :]
    rows = jnp.arange(length.shape[0])[:, None]
    right = jnp.array(TEXTS, jnp.int32)[rows, length[:, None] + slots]
    is_right = slots < jnp.array(TURNS, jnp.int32)[length][:, None]
    return stubs.drafts(jnp.where(is_right, right, (right + 1) % VOCAB))


PAIR = Pair(target=stubs.table_target(TABLE), drafter=stubs.scripted_drafter(SLOTS, in_turn))
PLAIN = Pair(target=stubs.table_target(TABLE))
RUN = {
    name: jax.jit(partial(run_blocks, pair, {}, mode="greedy", trace=True), static_argnames="num_blocks")
    for name, pair in (("pair", PAIR), ("plain", PLAIN))
}
BLOCK = jax.jit(partial(speculative_block, PAIR, {}, mode="greedy"))


def start(pair=PAIR, **fields):
    return stubs.running_state(pair, BATCH, anchor_id=jnp.array(ANCHORS, jnp.int32), **fields)


def test_drafts_accepted_in_turn_give_the_plain_text():
    state, record = RUN["pair"](start(), num_blocks=BLOCKS)
    _, plain = RUN["plain"](start(PLAIN), num_blocks=24)
    expected = np.arange(BLOCKS) % (SLOTS + 1)
    np.testing.assert_array_equal(record.num_accepted, np.tile(expected[:, None], (1, BATCH)))
    np.testing.assert_array_equal(record.num_committed, record.num_accepted + 1)
    np.testing.assert_array_equal(record.num_proposed, np.full((BLOCKS, BATCH), SLOTS))
    for text, plain_text, greedy in zip(stubs.texts(record), stubs.texts(plain), TEXTS, strict=True):
        assert text == list(greedy[: len(text)])
        assert plain_text == list(greedy[:24])
    np.testing.assert_array_equal(state.length, [expected.sum() + BLOCKS] * BATCH)
    np.testing.assert_array_equal(state.anchor_id, TEXTS[:, expected.sum() + BLOCKS - 1])
    np.testing.assert_array_equal(state.num_emitted, 1 + state.length)


def test_n_blocks_in_one_loop_equal_n_single_blocks():
    looped, records = RUN["pair"](start(), num_blocks=3)
    state = start()
    for number in range(3):
        state, record = BLOCK(state)
        jax.tree.map(
            np.testing.assert_array_equal, record, jax.tree.map(lambda x, n=number: x[n], records.replace(trace=None))
        )
    jax.tree.map(np.testing.assert_array_equal, state, looped)


def test_skipping_idle_blocks_changes_nothing():
    state = start(max_tokens=jnp.full(BATCH, 5, jnp.int32))
    skipping = jax.jit(partial(run_blocks, PAIR, {}, mode="greedy", trace=True, skip_idle=True, num_blocks=6))
    (expected, blocks), (got, skipped) = RUN["pair"](state, num_blocks=6), skipping(state)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    jax.tree.map(np.testing.assert_array_equal, skipped.replace(trace=None), blocks.replace(trace=None))
    assert np.all(np.asarray(blocks.num_committed).sum(1)[3:] == 0) and np.any(blocks.num_committed)


def reference_end(text, lengths, stop_ids, max_tokens):
    """Kept tokens, reason and blocks used of a text that comes in blocks of `lengths`."""
    kept = next((i + 1 for i, token in enumerate(text) if token in stop_ids), len(text))
    reason = Finish.STOP if kept <= min(max_tokens, len(text)) and text[kept - 1] in stop_ids else Finish.LENGTH
    kept = min(kept, max_tokens)
    return list(text[:kept]), reason, int(np.searchsorted(np.cumsum(lengths), kept)) + 1


@pytest.mark.parametrize("max_tokens", [1, 4, 5, 6, 7, 17])
@pytest.mark.parametrize("num_stops", [0, 1, 2])
def test_a_row_ends_at_its_first_stop_id_or_at_max_tokens_wherever_in_a_block(max_tokens, num_stops):
    lengths = np.arange(BLOCKS) % (SLOTS + 1) + 1
    stops = np.full((BATCH, 2), -1)
    for row in range(BATCH):
        stops[row, :num_stops] = TEXTS[row, [4 + row, 12 - row]][:num_stops]
    state = start(stop_ids=jnp.array(stops, jnp.int32), max_tokens=jnp.full(BATCH, 1 + max_tokens, jnp.int32))
    state, record = RUN["pair"](state, num_blocks=BLOCKS)
    for row, text in enumerate(stubs.texts(record)):
        kept, reason, blocks = reference_end(TEXTS[row], lengths, set(stops[row]) - {-1}, max_tokens)
        assert text == kept
        assert state.finish_reason[row] == reason
        np.testing.assert_array_equal(np.asarray(record.num_committed[:, row]) > 0, np.arange(BLOCKS) < blocks)
        np.testing.assert_array_equal(
            np.asarray(record.num_proposed[:, row]), np.where(np.arange(BLOCKS) < blocks, SLOTS, 0)
        )
        np.testing.assert_array_equal(record.num_accepted[:blocks, row], lengths[:blocks] - 1)  # before any cut
        np.testing.assert_array_equal(record.finish_reason[blocks - 1 :, row], [reason] * (BLOCKS - blocks + 1))


def test_a_block_of_five_accepted_drafts_with_a_stop_as_third_token_counts_three():
    pair = Pair(
        target=PAIR.target,
        drafter=stubs.scripted_drafter(5, lambda *_: stubs.drafts(jnp.array(TEXTS[:1, :5], jnp.int32))),
    )
    assert TEXTS[0, 2] not in TEXTS[0, :2]
    state = stubs.running_state(pair, 1, stop_ids=jnp.array(TEXTS[:1, 2:3], jnp.int32))
    _, record = speculative_block(pair, {}, state, mode="greedy")
    assert (int(record.num_committed[0]), int(record.num_accepted[0]) + 1, int(record.num_proposed[0])) == (3, 6, 5)
    assert list(record.token_ids[0]) == [*TEXTS[0, :3], -1, -1, -1]


def test_rows_that_do_not_run_keep_their_state_bit_for_bit_and_report_nothing():
    reasons = jnp.array(
        [Finish.RUNNING, Finish.STOP, Finish.LENGTH, Finish.VACANT, Finish.RUNNING, Finish.STOP], jnp.int32
    )
    before = start(finish_reason=reasons, length=jnp.arange(BATCH, dtype=jnp.int32))
    after, record = BLOCK(before)
    frozen = np.asarray(reasons) != Finish.RUNNING
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a)[frozen], np.asarray(b)[frozen]), after, before
    )
    assert np.all(np.asarray(after.length)[~frozen] > np.asarray(before.length)[~frozen])
    for counts in (record.num_committed, record.num_accepted, record.num_proposed):
        np.testing.assert_array_equal(np.asarray(counts)[frozen], 0)
    np.testing.assert_array_equal(np.asarray(record.token_ids)[frozen], -1)


def test_the_trace_holds_the_drafts_and_the_targets_choices():
    _, record = RUN["pair"](start(), num_blocks=2)
    trace = record.trace
    np.testing.assert_array_equal(trace.target_choices[0, :, 0], TEXTS[:, 0])
    np.testing.assert_array_equal(trace.draft_ids[1, :, 0], TEXTS[:, 1])  # the second block has one right draft
    np.testing.assert_array_equal(trace.target_choices[1, :, :2], TEXTS[:, 1:3])
    np.testing.assert_array_equal(trace.target_best, trace.target_choices)  # greedy
    assert trace.candidate_ids is None and trace.picks is None
    assert BLOCK(start())[1].trace is None


def test_greedy_blocks_sort_nothing_and_draw_nothing():
    text = jax.jit(partial(speculative_block, PAIR, {}, mode="greedy")).lower(start()).as_text()
    assert "stablehlo.sort" not in text and "stablehlo.exponential" not in text
    sampled = jax.jit(partial(speculative_block, PAIR, {}, mode="temperature")).lower(start()).as_text()
    assert "stablehlo.sort" not in sampled and "stablehlo.exponential" in sampled
    assert "stablehlo.sort" in jax.jit(partial(speculative_block, PAIR, {}, mode="filtered")).lower(start()).as_text()
