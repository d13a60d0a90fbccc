"""What an arm drafts behind every token of the held-out replies, all anchors of a few texts in one program.

The training pass of the drafter gives the states that a served block would have (one context row for each token, every
block its own anchor), and the very proposer that serving uses turns them into drafts. Beside them: the drafter's own
K likeliest tokens, and other walks through LiLiCorr's lattice than those that are served.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.study.chain import Text
from demo.greedy import replies
from lilicorr_jax.config import RerankerConfig
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.decoding.candidates import candidate_pool
from lilicorr_jax.decoding.propose import slot_states
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.fold import folded_vectors
from lilicorr_jax.models.target import Target
from lilicorr_jax.shapes import Array, Float, Int
from pallas_kernels.match_walk import Scores, exact_walk, match_scores
from serve.engine import Engine, EngineConfig, Models, Request, load_models
from serve.workload import choose, load_tokenizer, read_prompts, templated

NUM_CANDIDATES = 8
TEXTS_AT_ONCE = 8
ANCHOR_STEP = 32  # anchors of a program are a multiple of it
LONGEST_REPLY = 160
ROWS = 32  # replies drawn side by side


class Drafted(NamedTuple):
    """One text's drafts at each of its anchors; NumPy.

    Attributes:
        best_ids: the target's likeliest token behind every anchor, [A].
        pool_ids, logprobs: the drafter's own K likeliest tokens of every slot, [A, S, K].
        drafts: of every way of drafting, [A, S].
    """

    best_ids: np.ndarray
    pool_ids: np.ndarray
    logprobs: np.ndarray
    drafts: Mapping[str, np.ndarray]


def greedy_texts(target_folder: str | Path, prompts: str | Path, count: int | None = None) -> list[Text]:
    """Held-out prompts with the target's greedy replies, in the order in which `serve.bench` would draw them."""
    config, params = load_target(target_folder)
    tokenizer = load_tokenizer(target_folder)
    chosen = choose(read_prompts(prompts), count, 0)
    ids = [templated(tokenizer, prompt.text) for prompt in chosen]
    answers = replies(Target(config), params, ids, max_new=LONGEST_REPLY)
    if endless := [p.id for p, answer in zip(chosen, answers, strict=True) if answer[-1] not in config.eos_ids]:
        raise ValueError(f"{endless[0]} has no end of turn within {LONGEST_REPLY} tokens; the chain needs one.")
    return [
        Text(id=prompt.id, category=prompt.category, prompt_ids=tuple(prompt_ids), reply_ids=tuple(answer))
        for prompt, prompt_ids, answer in zip(chosen, ids, answers, strict=True)
    ]


def sampled_texts(target_folder: str | Path, greedy: Sequence[Text], seeds: Sequence[int]) -> list[Text]:
    """The same prompts with the replies that plain decoding draws at temperature 1, for each seed."""
    engine = Engine(load_models(target_folder), EngineConfig(rows=ROWS, smallest_bucket=256))
    texts = [replace(text, temperature=1.0, seed=seed) for seed in seeds for text in greedy]
    asked = [
        Request(
            id=f"{text.id}/{text.seed}",
            prompt_ids=text.prompt_ids,
            max_tokens=LONGEST_REPLY,
            temperature=text.temperature,
            seed=text.seed,
        )
        for text in texts
    ]
    return [replace(text, reply_ids=reply.token_ids) for text, reply in zip(texts, engine.run(asked), strict=True)]


def draft_everywhere(models: Models, ways: Mapping[str, Models], texts: Sequence[Text]) -> list[Drafted]:
    """Drafts of every text, in order; texts of like length go through one program together.

    Args:
        models: target and drafter, with LiLiCorr's reranker if it has one.
        ways: the same weights with the ways of drafting that are asked for, by name.
    """
    longest_prompt = max(len(text.prompt_ids) for text in texts)
    run = jax.jit(partial(_draft, models, ways))
    order, found = sorted(range(len(texts)), key=lambda place: texts[place].num_anchors), {}
    for group in itertools.batched(order, TEXTS_AT_ONCE):
        num_anchors = -(-max(texts[place].num_anchors for place in group) // ANCHOR_STEP) * ANCHOR_STEP
        token_ids = np.zeros((TEXTS_AT_ONCE, longest_prompt + num_anchors + 1), np.int32)
        anchors = np.ones((TEXTS_AT_ONCE, num_anchors), np.int32)  # behind the first token, where there are too few
        for row, place in enumerate(group):
            text = texts[place]
            ids, first = (*text.prompt_ids, *text.reply_ids), len(text.prompt_ids)
            token_ids[row, : len(ids)] = ids
            anchors[row, : text.num_anchors] = first + np.arange(text.num_anchors)
        drafted = jax.device_get(run(models.params, token_ids, anchors))
        for row, place in enumerate(group):
            found[place] = jax.tree.map(lambda x, row=row, n=texts[place].num_anchors: x[row, :n].copy(), drafted)
    return [found[place] for place in range(len(texts))]


def _draft(
    models: Models, ways: Mapping[str, Models], params, token_ids: Int[Array, "B T"], anchors: Int[Array, "B A"]
):
    """Blocks at all anchors of a few texts, as `Drafted` of arrays with a leading axis of texts."""
    config, corrector = models.drafter, models.corrector
    if config is None:
        raise ValueError("There is a target alone, which drafts nothing; load it with a drafter.")
    target = Target(models.target).bind({"params": params["target"]})
    judged = target(token_ids, capture=config.target_layer_ids)
    best_ids = jnp.argmax(target.unembed(judged.hidden), axis=-1).astype(jnp.int32)  # [B, T]
    drafter = Drafter(config).bind({"params": params["drafter"]})
    context = drafter.fuse(judged.features)
    anchor_ids = jnp.take_along_axis(token_ids, anchors, axis=1)  # [B, A]
    masks = jnp.full((*anchors.shape, config.input_rows - 1), config.mask_id, jnp.int32)
    block_ids = jnp.concatenate([anchor_ids[..., None], masks], axis=-1)  # [B, A, Q]
    rows = drafter(context, target.embed(block_ids), anchors)
    rows = rows.reshape(-1, *rows.shape[2:])  # [B*A, Q, D]
    before = jnp.take_along_axis(context, anchors[..., None] - 1, axis=1).reshape(rows.shape[0], -1)
    states = slot_states(config, rows)
    pool = candidate_pool(target.unembed(states), NUM_CANDIDATES, "reference")
    drafts = {name: _propose(way, params, rows, anchor_ids.reshape(-1), before) for name, way in ways.items()}
    if isinstance(corrector, RerankerConfig):
        drafts["exact, rows normalised"] = _normalised_exact(corrector, params, states, pool, before)
    best_ids = jnp.take_along_axis(best_ids, anchors, axis=1).reshape(-1)
    whole = Drafted(best_ids, pool.ids, pool.logprobs, drafts)
    return jax.tree.map(lambda array: array.reshape(*anchors.shape, *array.shape[1:]), whole)


def _propose(models: Models, params, rows, anchor_ids, before) -> Int[Array, "N S"]:
    """What serving would draft at temperature 0."""
    drafter = models.pair().drafter
    if drafter is None:
        raise ValueError(f"Method {models.method!r} drafts nothing; choose one that has a drafter.")
    zeros = jnp.zeros((rows.shape[0], drafter.num_slots))
    return drafter.propose(params, rows, anchor_ids, before, zeros[:, 0], zeros).draft_ids


def _normalised_exact(config: RerankerConfig, params, states: Float[Array, "N S D"], pool, before) -> Int[Array, "N S"]:
    """The path of highest probability, Eq. 2 at every slot: exact search on scores normalised over each row."""
    vectors = folded_vectors(
        config, params["reranker"], pool.ids, states, pool.logprobs, before, jnp.ones(states.shape[0], bool)
    )
    scores = match_scores(vectors.anchor_out, vectors.out, vectors.in_, config.cosine_scale)
    picks = exact_walk(Scores(*(jax.nn.log_softmax(part, axis=-1) for part in scores)))
    return jnp.take_along_axis(pool.ids, picks[..., None], axis=-1)[..., 0]
