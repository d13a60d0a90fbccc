"""Batched greedy replies against one text at a time without a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from demo import greedy
from lilicorr_jax import presets
from lilicorr_jax.models.target import Target
from lilicorr_jax.sharding import init_parameters

PROMPTS = [[5, 9, 30], [7, 7, 21, 44, 60, 2], [11]]
MAX_NEW = 7


@pytest.fixture(scope="module")
def tiny():
    target = Target(dataclasses.replace(presets.tiny().target, num_layers=2, eos_ids=()))
    return target, init_parameters(target, jax.random.key(3), jnp.zeros((1, 4), jnp.int32))


@pytest.fixture(scope="module")
def expected(tiny):
    """Every reply by running the whole text anew for each token."""
    target, params = tiny
    width = max(map(len, PROMPTS)) + MAX_NEW
    logits = jax.jit(
        lambda ids: target.apply({"params": params}, target.apply({"params": params}, ids).hidden, method="unembed")
    )
    texts = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(MAX_NEW):
            padded = jnp.array([text + [0] * (width - len(text))])
            text.append(int(jnp.argmax(logits(padded)[0, len(text) - 1])))
        texts.append(text[len(prompt) :])
    return texts


def test_a_ragged_batch_gives_what_each_prompt_gives_alone(tiny, expected):
    assert greedy.replies(*tiny, PROMPTS, max_new=MAX_NEW, batch=4) == expected


def test_a_reply_ends_with_its_first_stop_and_others_go_on(tiny, expected):
    target, params = tiny
    stop = next(token for token in expected[0] if token != expected[0][0])
    stopping = Target(dataclasses.replace(target.config, eos_ids=(stop,)))
    cut = [reply[: reply.index(stop) + 1] if stop in reply else reply for reply in expected]
    assert 1 < len(cut[0]) < MAX_NEW
    assert greedy.replies(stopping, params, PROMPTS, max_new=MAX_NEW, batch=4) == cut


def test_batches_of_another_size_change_nothing(tiny, expected):
    assert greedy.replies(*tiny, PROMPTS, max_new=MAX_NEW, batch=2) == expected
