"""What a block serves, against what training computes at the same anchor, and against the target's own text.

The oracles have no cache, no block loop, no folded weights and no kernel: one training pass of the drafter over the
finished text, the reranker as it is trained, and walks that enumerate paths.
"""

import functools
import itertools
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lilicorr_jax.config import DrafterConfig, corrector_name
from lilicorr_jax.decoding.prefill import empty_state, prefill
from lilicorr_jax.decoding.speculate import BlockRecord, DecodeState, Finish, run_blocks
from lilicorr_jax.models.corrector import make_corrector
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.lilicorr import Reranker
from lilicorr_jax.models.target import Target
from serve.engine import Models, assemble
from tests import pairs, stubs
from tests.pairs import TARGET, plain_text, prompt

# One layer each, compiled without optimisation: these tests compile many programs and run each once.
DRAFTER, RERANKER = replace(pairs.DRAFTER, num_layers=1), replace(pairs.RERANKER, num_layers=1)
RECORDS = {  # method: drafter and corrector
    "dflash": (DRAFTER, RERANKER),
    "lilicorr": (DRAFTER, RERANKER),
    **{method: (replace(drafter, num_layers=1), corrector) for method, (drafter, corrector) in pairs.BASELINES.items()},
}
quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

PROMPTS = tuple(prompt(length) for length in (3, 17, 9, 14))
BLOCKS = 16
ROOM = 128  # rows of the caches, and of the texts that the oracle reads
S, K = RERANKER.num_slots, RERANKER.num_candidates


@functools.cache
def parameters() -> dict:
    """Those of `tests.pairs`, without the layers that are not there."""
    trees = pairs.tiny_parameters()
    short = {name: {k: v for k, v in trees[name].items() if k != "layers_1"} for name in ("drafter", "reranker")}
    return trees | short | {method: pairs.baseline_parameters(method)[method] for method in pairs.BASELINES}


@functools.cache
def models(method: str = "lilicorr") -> Models:
    """A method as a server holds it."""
    drafter, corrector = RECORDS[method]
    kept = {name: parameters()[name] for name in ("target", "drafter", corrector_name(corrector))}
    return assemble(TARGET, kept, drafter=drafter, corrector=corrector, method=method)


class Served(NamedTuple):
    """A ragged batch that was prefilled with padding and decoded for BLOCKS blocks.

    Attributes:
        state: before the first block.
        record: traced, with a leading axis of blocks.
        texts: prompt and reply of each row.
        anchors: the position of every block's anchor, [B, BLOCKS].
    """

    state: DecodeState
    record: BlockRecord
    texts: list[list[int]]
    anchors: np.ndarray


def prefilled(held: Models) -> DecodeState:
    """All prompts behind one prefill of as many rows as the longest has, and one more; greedy, endless."""
    lengths = [len(ids) for ids in PROMPTS]
    padded = np.full((len(PROMPTS), max(lengths) + 1), 5, np.int32)
    for row, ids in enumerate(PROMPTS):
        padded[row, : len(ids)] = ids
    pair = held.pair()
    state = empty_state(pair, len(PROMPTS), ROOM, 1).replace(max_tokens=jnp.full(len(PROMPTS), 1000, jnp.int32))
    run = quick(partial(prefill, pair, mode="greedy"))
    return run(held.params, state, jnp.array(padded), jnp.array(lengths, jnp.int32))


def serve(method: str = "lilicorr", state: DecodeState | None = None) -> Served:
    """Greedy decoding, behind a prefill or from a state; traced anew, so that what a test has planted takes part."""
    pair = models(method).pair()
    state = state or prefilled(models(method))
    assert np.all(np.asarray(state.finish_reason) == Finish.RUNNING)
    run = quick(partial(run_blocks, pair, mode="greedy", num_blocks=BLOCKS, trace=True))
    record = run(models(method).params, state)[1]
    replies = stubs.texts(record)
    texts = [[*ids, int(first), *reply] for ids, first, reply in zip(PROMPTS, state.anchor_id, replies, strict=True)]
    committed = np.asarray(record.num_committed).T  # [B, BLOCKS]
    lengths = np.array([[len(ids)] for ids in PROMPTS])
    return Served(state, record, texts, lengths + np.cumsum(committed, axis=1) - committed)


class Trained(NamedTuple):
    """What training computes at each anchor: best candidates first, and matching scores on them."""

    logits: np.ndarray  # [A, S, V]
    candidate_ids: np.ndarray  # [A, S, K]
    start: np.ndarray  # [A, K]
    pair: np.ndarray  # [A, S-1, K, K]


def trained(text: list[int], anchors: np.ndarray) -> Trained:
    """One pass over a finished text with a block at every anchor."""
    logits, states, context, embedding = jax.tree.map(
        np.asarray, _train(parameters(), *_blocks(DRAFTER, text, anchors), anchors[None])
    )
    candidate_ids = np.argsort(-logits, axis=-1, kind="stable")[..., :K]
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    logprobs = np.take_along_axis(logprobs, candidate_ids, -1).astype(np.float32)
    before = context[0, anchors - 1][None]
    vectors = _rerank(
        parameters()["reranker"], embedding[candidate_ids], states, logprobs, before, np.ones(before.shape[:2], bool)
    )
    anchor_out, out, in_ = (np.asarray(x, np.float64)[0] for x in vectors)
    start = RERANKER.cosine_scale * np.einsum("ae,ake->ak", anchor_out, in_[:, 0])
    pair = RERANKER.cosine_scale * np.einsum("asje,aske->asjk", out[:, :-1], in_[:, 1:])
    return Trained(logits[0], candidate_ids[0], start, pair)


def _blocks(drafter: DrafterConfig, text: list[int], anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A padded text, and a block of an anchor and masks for every anchor."""
    token_ids = np.zeros((1, ROOM), np.int32)
    token_ids[0, : len(text)] = text
    block_ids = np.full((1, len(anchors), drafter.input_rows), drafter.mask_id, np.int32)
    block_ids[0, :, 0] = token_ids[0, anchors]
    return token_ids, block_ids


@quick
def _train(params, token_ids, block_ids, anchors):
    target, drafter = Target(TARGET).bind({"params": params["target"]}), Drafter(DRAFTER)
    features = target(token_ids, capture=DRAFTER.target_layer_ids).features
    context = drafter.apply({"params": params["drafter"]}, features, method="fuse")
    rows = drafter.apply({"params": params["drafter"]}, context, target.embed(block_ids), anchors)
    states = rows[:, :, 1:]  # a mask's row speaks for its own position
    return target.unembed(states), states, context, target.embed(jnp.arange(TARGET.vocab_size))


@quick
def _rerank(params, *arguments):
    return Reranker(RERANKER).apply({"params": params}, *arguments)


def greedy_path(start, pair) -> list[int]:
    """Eq. 8, slot by slot."""
    picks = [int(np.argmax(start))]
    for slot in range(S - 1):
        picks.append(int(np.argmax(pair[slot, picks[-1]])))
    return picks


def best_path(start, pair) -> list[int]:
    """The path of highest sum, out of all K^S."""

    def total(picks):
        return start[picks[0]] + sum(pair[s, j, k] for s, (j, k) in enumerate(itertools.pairwise(picks)))

    return list(max(itertools.product(range(K), repeat=S), key=total))


def assert_blocks_are_the_trained_ones(served: Served, path=greedy_path) -> None:
    """Every block's candidates, picks and drafts are those that training computes at its anchor."""
    trace = served.record.trace
    for row, text in enumerate(served.texts):
        expected = trained(text, served.anchors[row])
        np.testing.assert_array_equal(trace.candidate_ids[:, row], expected.candidate_ids)
        picks = np.array([path(*scores) for scores in zip(expected.start, expected.pair, strict=True)])
        np.testing.assert_array_equal(trace.picks[:, row], picks)
        drafts = np.take_along_axis(expected.candidate_ids, picks[..., None], axis=-1)[..., 0]
        np.testing.assert_array_equal(trace.draft_ids[:, row], drafts)


def assert_rollouts_are_the_trained_ones(served: Served, method: str) -> None:
    """Every draft is the likeliest by what training computes at its anchor, given the tokens before it."""
    drafter, corrector = RECORDS[method]

    @quick
    def train(params, token_ids, block_ids, anchors, prev_ids):
        target, trunk = Target(TARGET).bind({"params": params["target"]}), Drafter(drafter)
        features = target(token_ids, capture=drafter.target_layer_ids).features
        rows = trunk.apply(
            {"params": params["drafter"]}, features, target.embed(block_ids), anchors, method="from_features"
        )
        states = rows[:, :, : drafter.num_slots]  # the anchor's row speaks for the first slot
        before = target.embed(prev_ids) if method == "domino" else prev_ids
        change = make_corrector(corrector).apply({"params": params[method]}, before, states)
        return target.unembed(states), change if method == "domino" else change[0]

    changed = 0
    for row, text in enumerate(served.texts):
        drafts, anchors = np.asarray(served.record.trace.draft_ids)[:, row], served.anchors[row]
        prev_ids = np.concatenate([np.array(text)[anchors][:, None], drafts[:, :-1]], axis=1)
        blocks = _blocks(drafter, text, anchors)
        logits, change = train(parameters(), *blocks, anchors[None], prev_ids[None])
        expected = np.argmax(np.asarray(logits + change)[0], axis=-1)
        np.testing.assert_array_equal(drafts, expected)
        changed += np.sum(expected != np.argmax(np.asarray(logits)[0], axis=-1))
    assert changed > 0, "the correction never decided"


def assert_drafts_are_the_likeliest(served: Served) -> None:
    """DFlash's blocks: the argmax of every slot."""
    for row, text in enumerate(served.texts):
        expected = np.argmax(trained(text, served.anchors[row]).logits, axis=-1)
        np.testing.assert_array_equal(served.record.trace.draft_ids[:, row], expected)


def assert_texts_are_the_targets_own(served: Served) -> None:
    """Greedy text, by the target run anew for every token; of a long reply the beginning."""
    for ids, text in zip(PROMPTS, served.texts, strict=True):
        expected = plain_text(ids, 2 * BLOCKS)
        reply = tuple(text[len(ids) :])[: len(expected)]
        assert reply == expected[: len(reply)]
