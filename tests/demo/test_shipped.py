"""The files that are shipped: the target, its replies, the held-out prompts."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from demo import corpus, rows
from lilicorr_jax import presets
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.models.target import Target
from serve.report import is_degenerate
from serve.workload import load_tokenizer, read_prompts, templated
from train.tokens import read_token_file

DEMO = Path(__file__).parents[2] / "demo"
MIB = 2**20


@pytest.fixture(scope="module")
def shipped():
    model, params = load_target(DEMO / "target")
    return Target(model), params


@pytest.fixture(scope="module")
def examples() -> list[tuple[list[int], list[int]]]:
    file = read_token_file(DEMO / "replies.npz", vocab_size=512)
    bounds = zip(file.offsets[:-1], file.prompt_lengths, file.offsets[1:], strict=True)
    return [(file.tokens[a : a + p].tolist(), file.tokens[a + p : b].tolist()) for a, p, b in bounds]


def test_the_shipped_target_is_the_demo_preset_and_small(shipped):
    assert dataclasses.replace(shipped[0].config, init_std=0.02) == presets.demo().target
    assert sum(path.stat().st_size for path in (DEMO / "target").iterdir()) <= 8 * MIB
    assert (DEMO / "replies.npz").stat().st_size <= MIB


def test_the_shipped_prompts_are_those_of_the_seed(examples):
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    first = corpus.distinct("replies", seed=0, per_category=dict.fromkeys(corpus.CATEGORIES, 3))
    shipped_prompts = {tuple(prompt) for prompt, _ in examples}
    assert all(tuple(rows.turn(tokenizer, record.prompt, "")[0]) in shipped_prompts for record in first)
    assert len(shipped_prompts) == len(examples)


def test_the_shipped_replies_are_the_targets_own_greedy_choice(shipped, examples):
    target, params = shipped
    chosen = examples[:: len(examples) // 24][:24]
    width = max(len(prompt) + len(reply) for prompt, reply in chosen)
    token_ids = jnp.array([prompt + reply + [0] * (width - len(prompt) - len(reply)) for prompt, reply in chosen])

    @jax.jit
    def logits_of(token_ids):
        return target.apply({"params": params}, target.apply({"params": params}, token_ids).hidden, method="unembed")

    logits = np.asarray(logits_of(token_ids))
    for row, (prompt, reply) in enumerate(chosen):
        before = slice(len(prompt) - 1, len(prompt) + len(reply) - 1)
        lost = (
            logits[row, before].max(axis=-1)
            - np.take_along_axis(logits[row, before], np.array(reply)[:, None], 1)[:, 0]
        )
        assert lost.max() < 1e-4, "a near tie may fall otherwise in a batch of another shape"


def test_shipped_replies_end_and_do_not_loop(examples):
    ends = presets.demo().target.eos_ids
    assert all(reply[-1] in ends and not set(reply[:-1]) & set(ends) for _, reply in examples)
    assert sum(is_degenerate(reply) for _, reply in examples) < 0.01 * len(examples)
    lengths = [len(reply) for _, reply in examples]
    assert 28 <= np.mean(lengths) <= 76 and max(lengths) < 160


def test_shipped_heldout_prompts_are_no_training_prompts(examples):
    prompts = read_prompts(DEMO / "heldout.jsonl")
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(corpus.CATEGORIES, 40)
    assert {corpus.split_of(prompt.text) for prompt in prompts} == {"heldout"}
    tokenizer = load_tokenizer(DEMO / "target")
    assert not {templated(tokenizer, prompt.text) for prompt in prompts} & {tuple(prompt) for prompt, _ in examples}


def test_the_shipped_folder_is_one_that_hugging_face_readers_expect():
    names = {path.name for path in (DEMO / "target").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert json.loads((DEMO / "target" / "config.json").read_text())["model_type"] == "qwen3"
    assert json.loads((DEMO / "target" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
