"""The engine's book-keeping: limits, refusals, rows that come and go, what is compiled; texts by the oracle."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from lilicorr_jax.decoding.speculate import Trace
from serve.engine import Engine, EngineConfig, Models, Request, load_models
from tests.pairs import VOCAB, plain_text, prompt, tiny_models

LIMIT, ROWS = 64, 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Three rows of a drafting engine that traces, with a context of 64 tokens; idle between tests."""
    config = EngineConfig(rows=ROWS, context_limit=LIMIT, smallest_bucket=128, blocks_per_dispatch=2, trace=True)
    return Engine(tiny_models(), config)


@pytest.fixture(scope="module")
def plain() -> Engine:
    """An engine without drafting whose buckets start small."""
    config = EngineConfig(rows=ROWS, context_limit=LIMIT, smallest_bucket=16, blocks_per_dispatch=2)
    return Engine(replace(tiny_models(), method="ar"), config)


@pytest.fixture(autouse=True)
def is_idle(request):
    yield
    if "engine" in request.fixturenames:
        idle = request.getfixturevalue("engine")
        assert idle.num_free == ROWS and idle.num_pending == 0


def ask(id="x", length=5, **fields):
    return Request(**({"id": id, "prompt_ids": prompt(length), "stop_ids": ()} | fields))


@pytest.mark.parametrize(("length", "expected"), [(47, 17), (48, 16), (62, 2), (63, 1)])
def test_a_reply_without_max_tokens_fills_the_context(engine, length, expected):
    (reply,) = engine.run([ask(length=length)])
    assert (len(reply.token_ids), reply.finish_reason) == (expected, "length")
    assert reply.token_ids == plain_text(prompt(length), expected)


def test_neighbours_at_the_limit_harm_nobody(engine):
    lengths = (63, 10, 62, 47, 3)
    replies = engine.run([ask(str(length), length) for length in lengths])
    assert [reply.token_ids for reply in replies] == [plain_text(prompt(n), LIMIT - n) for n in lengths]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(length=64), r"context limit of 64 tokens; got 64"),
        (dict(length=65), r"context limit of 64 tokens; got 65"),
        (dict(prompt_ids=()), r"at least one token; got none"),
        (dict(prompt_ids=(1, VOCAB)), rf"prompt_ids must lie in the vocabulary \[0, {VOCAB}\); got \[{VOCAB}\]"),
        (dict(prompt_ids=(-1,)), r"got \[-1\]"),
        (dict(prompt_ids=(2**40,)), r"got \[1099511627776\]"),
        (dict(stop_ids=(-7,)), r"stop_ids must lie in the vocabulary .* got \[-7\]"),
        (dict(stop_ids=tuple(range(9)) * 2), r"stop_ids may hold at most 8 ids; got 18"),
        (dict(max_tokens=0), r"max_tokens must be a whole number of at least 1; got 0"),
        (dict(max_tokens=-1), r"got -1"),
        (dict(max_tokens=60), r"max_tokens must be at most 59, .* got 60"),
        (dict(max_tokens=10**12), r"got 1000000000000"),
        (dict(temperature=float("nan")), r"temperature must be finite and not negative; got nan"),
        (dict(temperature=-0.1), r"got -0.1"),
        (dict(temperature=float("inf")), r"got inf"),
        (dict(top_p=0.0), r"top_p must lie in \(0, 1\]; got 0.0"),
        (dict(top_p=1.01), r"got 1.01"),
        (dict(top_p=float("nan")), r"top_p .* got nan"),
        (dict(top_k=-1), r"top_k must be a whole number of at least 0; got -1"),
        (dict(seed=2**32), r"seed must be at most 4294967295; got 4294967296"),
        (dict(seed=-1), r"seed must be a whole number of at least 0; got -1"),
    ],
)
def test_a_bad_request_is_refused_by_the_value_and_the_next_one_served(engine, fields, message):
    with pytest.raises(ValueError, match=message):
        engine.run([ask(max_tokens=3), ask("bad", **fields)])
    assert engine.run([ask(max_tokens=3)])[0].token_ids == plain_text(prompt(5), 3)


def test_ids_must_be_unique_and_rows_must_suffice(engine):
    with pytest.raises(ValueError, match="'a' is not"):
        engine.run([ask("a"), ask("a")])
    with pytest.raises(ValueError, match="4 requests are to be admitted, but 3 rows are free"):
        engine.admit([ask(str(number)) for number in range(4)])


def test_default_stops_are_the_targets_end_of_text_ids(engine):
    eos_ids = tiny_models().target.eos_ids
    for length in (5, 9, 17, 20):
        (reply,) = engine.run([ask(length=length, stop_ids=None)])
        text = plain_text(prompt(length), LIMIT - length)
        end = next((i + 1 for i, token in enumerate(text) if token in eos_ids), len(text))
        assert reply.token_ids == text[:end]


def test_more_requests_than_rows_come_and_go_and_each_gets_its_own_text(engine):
    lengths = [3 + 2 * number for number in range(12)]
    asked = [ask(str(n), n, max_tokens=1 + n % 7) for n in lengths]
    replies = engine.run(asked)
    assert [reply.id for reply in replies] == [request.id for request in asked]
    for request, reply in zip(asked, replies, strict=True):
        assert reply.token_ids == plain_text(request.prompt_ids, request.max_tokens)
        assert [reply] == engine.run([request])  # alone, and out of another row's old caches


def test_admit_returns_the_first_token_which_may_end_the_request(engine):
    first = plain_text(prompt(5), 1)
    stop, length, goes_on = engine.admit(
        [ask("stop", stop_ids=first), ask("length", max_tokens=1), ask("goes on", max_tokens=2)]
    )
    assert stop.token_ids == length.token_ids == goes_on.token_ids == first
    assert (stop.reply.finish_reason, stop.reply.blocks) == ("stop", ())
    assert (length.reply.finish_reason, length.reply.blocks) == ("length", ())
    assert goes_on.reply is None and engine.num_free == ROWS - 1
    assert engine.dispatch() and not engine.dispatch()  # one block is sure to end it, a second dispatch would be idle
    (event,) = engine.retire()
    assert event.reply.token_ids == plain_text(prompt(5), 2)


def test_events_and_blocks_account_for_every_token(engine):
    events = engine.admit([ask(max_tokens=30)])
    while not events[-1].reply:
        while engine.num_pending < 2 and engine.dispatch():
            pass
        events += engine.retire()
    while engine.num_pending:
        assert engine.retire() == []
    reply = events[-1].reply
    assert sum((event.token_ids for event in events), ()) == reply.token_ids == plain_text(prompt(5), 30)
    assert 1 + sum(block.emitted for block in reply.blocks) == 30
    assert all(1 <= block.emitted <= block.accepted + 1 <= block.proposed + 1 == 6 for block in reply.blocks)
    assert reply.times.sent_s < reply.times.first_s < reply.times.last_s


def test_a_trace_shows_the_drafts_that_were_kept_and_the_targets_choice_behind_them(engine):
    (reply,) = engine.run([ask(max_tokens=30)])
    position = 1
    for block in reply.blocks:
        assert isinstance(block.trace, Trace)
        kept = reply.token_ids[position : position + block.emitted]
        assert tuple(block.trace.draft_ids[: block.emitted - 1]) == kept[:-1]
        assert tuple(block.trace.target_choices[: block.emitted]) == kept
        position += block.emitted


def test_a_cancelled_request_is_silent_and_its_row_serves_another(engine):
    engine.admit([ask("gone", 20, max_tokens=40), ask("stays", 9, max_tokens=12)])
    engine.dispatch()
    engine.cancel("gone")
    engine.cancel("never was")
    events = engine.admit([ask("new", 6, max_tokens=9)])
    while engine.num_free < ROWS or engine.num_pending:
        engine.dispatch()
        events += engine.retire()
    replies = {event.id: event.reply.token_ids for event in events if event.reply}
    assert replies == {"stays": plain_text(prompt(9), 12), "new": plain_text(prompt(6), 9)}
    assert {event.id for event in events} == {"stays", "new"}


def test_warm_up_compiles_every_program_that_its_requests_need(plain):
    asked = [ask("a", 7, max_tokens=40), ask("b", 20, max_tokens=20), ask("c", 50, max_tokens=9)]
    plain.warm_up(asked)
    sizes = plain._run._cache_size(), plain._prefill._cache_size()
    replies = plain.run(asked)
    assert (plain._run._cache_size(), plain._prefill._cache_size()) == sizes == (3, 3)
    for request, reply in zip(asked, replies, strict=True):
        assert reply.token_ids == plain_text(request.prompt_ids, request.max_tokens)


def test_warm_up_is_refused_while_the_engine_works(engine):
    engine.admit([ask(max_tokens=2)])
    with pytest.raises(ValueError, match="The engine is at work"):
        engine.warm_up([ask("other")])
    engine.dispatch()
    engine.retire()


def test_attention_reads_the_power_of_two_that_covers_what_a_dispatch_can_reach(plain, monkeypatch):
    buckets, run = [], plain._run

    def spy(*args, bucket, **options):
        buckets.append(bucket)
        return run(*args, bucket=bucket, **options)

    monkeypatch.setattr(plain, "_run", spy)
    (reply,) = plain.run([ask(length=5, max_tokens=56)])
    assert reply.token_ids == plain_text(prompt(5), 56)
    assert buckets == sorted(buckets) and set(buckets) == {16, 32, 64}
    plain.run([ask(length=63 - 2, max_tokens=3)])
    assert buckets[-1] == 64 and plain.capacity == 65


def test_limits_that_the_models_cannot_hold_are_refused():
    models = tiny_models()
    with pytest.raises(ValueError, match="context limit of 300 tokens, but its models have 256 positions"):
        Engine(models, EngineConfig(context_limit=300))
    short = replace(models, drafter=replace(models.drafter, max_positions=64))
    with pytest.raises(ValueError, match="context limit of 100 tokens, but its models have 64 positions"):
        Engine(short, EngineConfig(context_limit=100))
    assert short.context_limit == 64 and replace(short, method="ar").context_limit == 256
    with pytest.raises(ValueError, match="ends its texts with 2 ids, but EngineConfig.max_stop_ids is 1"):
        Engine(models, EngineConfig(max_stop_ids=1))
    with pytest.raises(ValueError, match="rows must be at least 1; got 0"):
        EngineConfig(rows=0)
    with pytest.raises(ValueError, match="context_limit must hold a prompt and a reply, 2 tokens; got 1"):
        EngineConfig(context_limit=1)


def test_a_method_needs_its_parts():
    models = tiny_models()
    with pytest.raises(ValueError, match="Method 'dflash' needs a drafter"):
        Models(target=models.target, params=models.params, method="dflash")
    with pytest.raises(ValueError, match="Method 'lilicorr' needs a reranker, and this drafter's checkpoint has none"):
        replace(models, corrector=None, method="lilicorr")
    with pytest.raises(ValueError, match="drafter expects 4"):
        replace(models, drafter=replace(models.drafter, num_target_layers=4))


def test_models_load_from_folders_in_the_dtype_asked_for(golden):
    folder = golden / "dflash" / "tied"
    models = load_models(folder / "target", folder / "drafter", method="dflash", dtype="bfloat16")
    assert models.target.dtype == models.drafter.dtype == "bfloat16"
    assert {leaf.dtype for leaf in jax.tree.leaves(models.params)} == {np.dtype("bfloat16")}
    with pytest.raises(ValueError, match="needs a reranker"):
        load_models(folder / "target", folder / "drafter", method="lilicorr")
    assert load_models(folder / "target").pair().drafter is None
