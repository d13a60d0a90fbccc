"""Speculated text is the target's own: against the target run anew for every token, without cache, block or engine."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.decoding.pair import Pair
from lilicorr_jax.decoding.prefill import empty_state, prefill
from lilicorr_jax.decoding.speculate import Finish, run_blocks
from serve.engine import Engine, EngineConfig, Request
from tests import stubs
from tests.pairs import VOCAB, baseline_models, plain_text, prompt, tiny_models

PROMPTS = tuple(prompt(length) for length in (3, 17, 40, 63))
METHODS = {
    "ar": ("ar", "greedy"),
    "dflash": ("dflash", "greedy"),
    "greedy": ("lilicorr", "greedy"),
    "exact": ("lilicorr", "exact"),
    "sampled": ("lilicorr", "sampled"),
    "domino": ("domino", "greedy"),
    "dspark": ("dspark", "greedy"),
    "sampled dspark": ("dspark", "sampled"),
}
GREEDY = ("ar", "dflash", "greedy", "exact", "domino", "dspark")
NUM_TOKENS = 40


@functools.cache
def engine(name: str) -> Engine:
    """One engine per method, compiled for one shape."""
    method, proposal = METHODS[name]
    config = EngineConfig(rows=4, context_limit=110, smallest_bucket=128, blocks_per_dispatch=3)
    models = baseline_models(method) if method in ("domino", "dspark") else tiny_models()
    return Engine(replace(models, method=method, proposal=proposal), config)


def requests(**fields):
    """The ragged batch, without stops."""
    fields = {"max_tokens": NUM_TOKENS, "stop_ids": ()} | fields
    return [Request(id=str(len(p)), prompt_ids=p, seed=7 + i, **fields) for i, p in enumerate(PROMPTS)]


@functools.cache
def batch(name: str, temperature: float = 0.0):
    return engine(name).run(requests(temperature=temperature))


def ask(name: str, prompt_ids, **fields):
    """The reply to one request, without stops unless told."""
    fields = {"max_tokens": NUM_TOKENS, "stop_ids": ()} | fields
    return engine(name).run([Request(id="x", prompt_ids=prompt_ids, **fields)])[0]


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_of_a_ragged_batch_is_the_targets_own(name):
    for prompt_ids, reply in zip(PROMPTS, batch(name), strict=True):
        assert reply.token_ids == plain_text(prompt_ids, NUM_TOKENS)
        assert reply.finish_reason == "length"


def test_the_random_drafters_are_sometimes_right_and_differ():
    accepted = {name: [block.accepted for reply in batch(name) for block in reply.blocks] for name in GREEDY}
    assert set(accepted["ar"]) == {0} and all(len(set(accepted[name])) >= 3 for name in GREEDY[1:])
    assert len({tuple(counts) for counts in accepted.values()}) == len(GREEDY)


@pytest.mark.parametrize("name", GREEDY[1:])
def test_a_reply_does_not_depend_on_its_neighbours(name):
    alone = [engine(name).run([request])[0] for request in requests()]
    assert alone == batch(name)


@pytest.mark.parametrize("name", GREEDY)
def test_text_ends_with_the_seventh_token_declared_a_stop_wherever_it_falls_in_a_block(name):
    for prompt_ids in PROMPTS:
        text = plain_text(prompt_ids, NUM_TOKENS)
        end = text.index(text[6]) + 1  # its first occurrence ends the text
        reply = engine(name).run([Request(id="x", prompt_ids=prompt_ids, stop_ids=(text[6],), max_tokens=NUM_TOKENS)])[
            0
        ]
        assert (reply.token_ids, reply.finish_reason) == (text[:end], "stop")
        assert 1 + sum(block.emitted for block in reply.blocks) == end


@pytest.mark.parametrize("name", ["ar", "dflash"])
def test_every_id_of_a_stop_list_ends_the_text_and_max_tokens_cuts_a_block(name):
    text = plain_text(PROMPTS[0], NUM_TOKENS)
    first_of = {token: text.index(token) + 1 for token in set(text)}
    late, later = sorted(first_of, key=first_of.get)[-2:]
    for stop_ids in ((late, later), (later, late), (later,)):
        reply = ask(name, PROMPTS[0], stop_ids=stop_ids)
        assert reply.token_ids == text[: min(first_of[token] for token in stop_ids)]
    replies = engine(name).run(
        [Request(id=str(n), prompt_ids=PROMPTS[0], stop_ids=(), max_tokens=n) for n in range(1, 9)]
    )
    assert [reply.token_ids for reply in replies] == [text[:n] for n in range(1, 9)]


@pytest.mark.parametrize("name", ["dflash", "domino"])
def test_deterministic_drafts_at_temperature_give_the_plain_text_of_the_same_seed(name):
    plain, drafted = batch("ar", 0.8), batch(name, 0.8)
    assert [reply.token_ids for reply in drafted] == [reply.token_ids for reply in plain]
    assert len({block.accepted for reply in drafted for block in reply.blocks}) >= 3
    assert all(reply.token_ids != greedy.token_ids for reply, greedy in zip(plain, batch("ar"), strict=True))


@pytest.mark.parametrize("name", ["dflash", "sampled", "sampled dspark"])
def test_the_same_seed_gives_the_same_text_alone_in_a_batch_and_in_another_order(name):
    together = batch(name, 0.8)
    for request, reply in zip(requests(temperature=0.8), together, strict=True):
        assert engine(name).run([request]) == [reply]
    backwards = engine(name).run(requests(temperature=0.8)[::-1])
    assert backwards[::-1] == together
    others = engine(name).run([replace(request, seed=request.seed + 100) for request in requests(temperature=0.8)])
    assert all(one.token_ids != other.token_ids for one, other in zip(others, together, strict=True))


def test_a_threshold_shortens_blocks_and_leaves_the_text():
    """Drafts of low confidence are not proposed: fewer verified rows count, and no token changes."""
    config = EngineConfig(rows=4, context_limit=110, smallest_bucket=128, blocks_per_dispatch=3)
    replies = Engine(replace(baseline_models("dspark"), threshold=0.6), config).run(requests())
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in batch("dspark")]
    proposed = {block.proposed for reply in replies for block in reply.blocks}
    assert len(proposed) >= 3 and min(proposed) < NUM_SLOTS


def test_rows_that_ask_for_different_sampling_share_a_batch():
    ways = [dict(), dict(temperature=0.8), dict(temperature=0.8, top_k=1), dict(temperature=0.8, top_p=0.7)]
    asked = [replace(request, **way) for request, way in zip(requests(), ways, strict=True)]
    replies = engine("ar").run(asked)
    assert [replies[0], replies[1]] == [batch("ar")[0], batch("ar", 0.8)[1]]
    assert replies[2].token_ids == plain_text(PROMPTS[2], NUM_TOKENS)  # one token kept: the greedy text
    assert [replies[3]] == engine("ar").run(asked[3:]) and replies[3].token_ids != batch("ar", 0.8)[3].token_ids


NUM_SLOTS = 5


def scripted_pair(num_right):
    """The tiny target with drafts of which `num_right[position of the anchor]` are the target's own."""
    text = jnp.array((*PROMPTS[1], *plain_text(PROMPTS[1], 100)), jnp.int32)

    def script(length, anchor_id, temperature, noise):
        slots = jnp.arange(NUM_SLOTS, dtype=jnp.int32)[None, :]
        right = text[length[:, None] + 1 + slots]
        is_right = slots < jnp.array(num_right, jnp.int32)[length][:, None]
        return stubs.drafts(jnp.where(is_right, right, (right + 1) % VOCAB))

    plain = replace(tiny_models(), method="ar").pair()
    return Pair(target=plain.target, drafter=stubs.scripted_drafter(NUM_SLOTS, script))


TURNS = np.arange(25) % (NUM_SLOTS + 1)  # right drafts of each block


@pytest.fixture(scope="module")
def in_turn():
    """A pair whose drafts are right 0, 1, 2, ..., S, 0, ... times in turn, and its compiled loop of 25 blocks."""
    num_right = np.zeros(200, int)
    num_right[len(PROMPTS[1]) + np.cumsum([0, *(TURNS[:-1] + 1)])] = TURNS
    pair = scripted_pair(num_right)
    return pair, jax.jit(partial(run_blocks, pair, mode="greedy", num_blocks=len(TURNS)))


def decode(in_turn, capacity, max_tokens):
    """State and record of the second prompt, prefilled with padding behind it, after all blocks."""
    pair, run = in_turn
    state = empty_state(pair, 1, capacity, 1).replace(max_tokens=jnp.array([max_tokens], jnp.int32))
    prompt_ids = jnp.pad(jnp.array([PROMPTS[1]], jnp.int32), ((0, 0), (0, 4)), constant_values=5)
    length = jnp.array([len(PROMPTS[1])], jnp.int32)
    state = jax.jit(partial(prefill, pair, mode="greedy"))(tiny_models().params, state, prompt_ids, length)
    return run(tiny_models().params, state)


def test_a_drafter_accepted_0_to_s_in_turn_leaves_the_targets_text(in_turn):
    _, record = decode(in_turn, capacity=128, max_tokens=200)
    np.testing.assert_array_equal(record.num_accepted[:, 0], TURNS)
    assert stubs.texts(record)[0] == list(plain_text(PROMPTS[1], 1 + TURNS.sum() + len(TURNS))[1:])


@pytest.mark.parametrize(("spare", "is_enough"), [(0, True), (-1, False)])
def test_p_rows_behind_the_longest_text_are_enough_and_fewer_are_not(in_turn, spare, is_enough):
    max_tokens = 60
    longest = len(PROMPTS[1]) + max_tokens - 1
    ample, _ = decode(in_turn, capacity=128, max_tokens=max_tokens)
    state, record = decode(in_turn, capacity=longest + NUM_SLOTS + 1 + spare, max_tokens=max_tokens)
    assert state.length[0] == longest and state.finish_reason[0] == Finish.LENGTH
    kept = [cache.keys[-1][:, :, :longest] for cache in (state.target_cache, ample.target_cache)]
    is_intact = np.allclose(*kept, atol=1e-5)
    assert is_intact == is_enough  # a clamped write lands on the text
    assert not is_enough or stubs.texts(record)[0] == list(plain_text(PROMPTS[1], max_tokens)[1:])
