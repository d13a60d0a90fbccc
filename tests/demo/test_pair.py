"""The shipped pair on the held-out prompts: drafting never changes the text, and training is worth its tokens."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lilicorr_jax.conversion.checkpoint import abstract_drafter, load_drafter, load_target
from serve.engine import Engine, EngineConfig, Models, Reply, Request, assemble
from serve.workload import load_tokenizer, read_prompts, templated
from tests.tolerance import assert_same_text

DEMO = Path(__file__).parents[2] / "demo"
FEW, ALL = 10, 200
METHODS = {
    "argmax": {"method": "dflash"},
    "greedy": {"method": "lilicorr", "walk": "greedy"},
    "exact": {"method": "lilicorr", "walk": "exact"},
    "sampled": {"method": "lilicorr", "walk": "sampled"},
}
TRAINED = [("trained", method) for method in METHODS]
RANDOM = [("random", method) for method in METHODS]


@functools.cache
def requests(count: int) -> tuple[Request, ...]:
    """Evenly over the categories, whose prompts and replies differ in length: ragged batches."""
    tokenizer, prompts = load_tokenizer(DEMO / "target"), read_prompts(DEMO / "heldout.jsonl")
    chosen = prompts[:: len(prompts) // count]
    return tuple(Request(id=p.id, prompt_ids=templated(tokenizer, p.text), max_tokens=120) for p in chosen)


@functools.cache
def models(kind: str) -> Models:
    target, params = load_target(DEMO / "target")
    checkpoint = load_drafter(DEMO / "export")
    drafting = checkpoint.params
    if kind == "random":
        rng = np.random.default_rng(0)
        shapes = abstract_drafter(checkpoint.drafter, checkpoint.reranker)
        drafting = jax.tree.map(lambda leaf: rng.normal(0, 0.08, leaf.shape).astype(leaf.dtype), shapes)
    trees = {"target": params, **drafting}
    return assemble(target, trees, drafter=checkpoint.drafter, reranker=checkpoint.reranker)


@functools.cache
def replies(kind: str, method: str, count: int) -> tuple[Reply, ...]:
    chosen = replace(models(kind), **METHODS.get(method, {"method": "ar"}))
    return tuple(Engine(chosen, EngineConfig(rows=5)).run(requests(count)))


def tau(served: tuple[Reply, ...]) -> float:
    blocks = [block.emitted for reply in served for block in reply.blocks]
    return sum(blocks) / len(blocks)


def assert_all_plain(kind: str, method: str, count: int) -> None:
    plain, drafted = replies("trained", "ar", count), replies(kind, method, count)
    assert len(plain) == len(drafted) == count
    for one, other in zip(drafted, plain, strict=True):
        assert_same_text(one.token_ids, other.token_ids)
        assert one.finish_reason == other.finish_reason


@pytest.mark.parametrize("kind, method", [("trained", "greedy"), ("random", "greedy")])
def test_held_out_texts_are_those_of_plain_decoding(kind, method):
    assert_all_plain(kind, method, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind, method", TRAINED + RANDOM)
def test_every_held_out_text_is_that_of_plain_decoding(kind, method):
    assert_all_plain(kind, method, ALL)


def test_the_trained_pair_brings_at_least_a_fifth_more_tokens_a_block_than_a_random_one():
    assert tau(replies("trained", "greedy", FEW)) >= 1.2 * tau(replies("random", "greedy", FEW))
