"""The shipped pair: its text on held-out prompts is the target's own, and its blocks bring more than random ones."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.conversion.export import load_any
from lilicorr_jax.models.target import Target
from serve.engine import Engine, EngineConfig, Models, Reply, Request, assemble
from serve.workload import choose, load_tokenizer, read_prompts, templated
from tests.tolerance import TEXT_GAP

DEMO = Path(__file__).parents[2] / "demo"
WIDTH = 256  # tokens of a prompt and its reply
METHODS = {"argmax": ("dflash", "greedy"), "greedy": ("lilicorr", "greedy"), "exact": ("lilicorr", "exact")}
FEW, ALL = 8, 160  # prompts, evenly over the categories


@functools.cache
def models(drafter: str) -> Models:
    """The shipped drafter, or one of the same shapes that knows nothing."""
    target, params = load_target(DEMO / "target")
    checkpoint = load_any(DEMO / "export")
    trees = checkpoint.params
    if drafter == "random":
        rng = np.random.default_rng(0)
        trees = jax.tree.map(lambda x: x if x.ndim == 1 else rng.normal(0, x.shape[0] ** -0.5, x.shape), trees)
    trees = jax.tree.map(lambda x: jnp.asarray(x, target.dtype), trees)
    records = dict(drafter=checkpoint.drafter, corrector=checkpoint.corrector)
    return assemble(target, {"target": params, **trees}, method="lilicorr", **records)


@functools.cache
def prompts(count: int) -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(DEMO / "target")
    chosen = choose(read_prompts(DEMO / "heldout.jsonl"), count, seed=0)
    return [templated(tokenizer, prompt.text) for prompt in chosen]


@functools.cache
def replies(drafter: str, method: str, count: int) -> list[Reply]:
    """Greedy, four rows at a time that come and go: a ragged batch."""
    name, proposal = METHODS[method]
    config = EngineConfig(rows=4, context_limit=WIDTH, smallest_bucket=WIDTH)
    engine = Engine(replace(models(drafter), method=name, proposal=proposal), config)
    return engine.run([Request(id=str(i), prompt_ids=ids) for i, ids in enumerate(prompts(count))])


@jax.jit
def logits_of(params, token_ids):
    target, tree = Target(models("trained").target), {"params": params}
    return target.apply(tree, target.apply(tree, token_ids).hidden, method="unembed")


def assert_greedy(prompt_ids, reply: Reply) -> None:
    """No token of the reply is less likely than another, by one pass over all of it; rounding may decide a tie."""
    ids = np.array([*prompt_ids, *reply.token_ids])
    logits = np.asarray(logits_of(models("trained").params["target"], np.pad(ids, (0, WIDTH - len(ids)))[None])[0])
    chosen = logits[len(prompt_ids) - 1 : len(ids) - 1]
    lost = chosen.max(axis=-1) - np.take_along_axis(chosen, np.array(reply.token_ids)[:, None], axis=-1)[:, 0]
    assert lost.max() < TEXT_GAP
    ends = models("trained").target.eos_ids
    assert not set(reply.token_ids[:-1]) & set(ends)
    assert (reply.finish_reason == "stop") == (reply.token_ids[-1] in ends)
    assert reply.finish_reason == "stop" or len(ids) == WIDTH


QUICK = [("trained", "greedy", FEW), ("random", "greedy", FEW)]
SLOW = [(drafter, method, ALL) for drafter in ("trained", "random") for method in METHODS]


@pytest.mark.parametrize(
    ("drafter", "method", "count"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_text_on_heldout_prompts_is_the_targets_own(drafter, method, count):
    for prompt_ids, reply in zip(prompts(count), replies(drafter, method, count), strict=True):
        assert_greedy(prompt_ids, reply)


def tau(drafter: str) -> float:
    blocks = [block.emitted for reply in replies(drafter, "greedy", FEW) for block in reply.blocks]
    return sum(blocks) / len(blocks)


def test_a_block_of_the_trained_pair_brings_more_than_one_of_a_random_pair():
    assert tau("trained") >= 1.2 * tau("random")
