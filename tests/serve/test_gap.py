"""The gap of a choice against a target whose logits are known by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.decoding.noise import Purpose, uniform
from lilicorr_jax.models.target import Target
from lilicorr_jax.presets import PRESETS
from lilicorr_jax.sharding import init_parameters
from serve import gap


def test_a_number_misses_a_token_by_its_distance_to_the_token_s_stretch():
    probs = np.array([0.2, 0.5, 0.0, 0.3])
    missed = [gap.missed_by(probs, token, 0.65) for token in range(4)]
    assert missed == pytest.approx([0.45, 0.0, 0.05, 0.05])


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(PRESETS["tiny"]().target, num_layers=2)
    return config, init_parameters(Target(config), jax.random.key(0), jnp.zeros((1, 2), jnp.int32))


@pytest.mark.parametrize("length", [5, 129])
def test_padding_does_not_reach_the_last_logits(model, length):
    config, params = model
    text = tuple(np.random.default_rng(length).integers(config.vocab_size, size=length).tolist())

    @jax.jit
    def unpadded(params, token_ids):
        hidden = Target(config).apply({"params": params}, token_ids).hidden
        return Target(config).apply({"params": params}, hidden, method="unembed")

    expected = unpadded(params, jnp.asarray([text]))[0, -1]
    np.testing.assert_allclose(gap.next_logits(config, params, text), expected, rtol=2e-5, atol=2e-5)


def test_greedy_gaps_are_between_the_two_best_logits(model, monkeypatch):
    monkeypatch.setattr(gap, "next_logits", lambda *_: np.array([1.0, -4.0, 3.5, 3.25]))
    assert gap.choice_gap(*model, (1, 2), (2, 3), temperature=0.0) == 0.25


def test_sampled_gaps_are_in_cumulative_probability_at_the_token_s_own_position(model, monkeypatch):
    """Two tokens of 0.3 and 0.7 at temperature 2; the third token is filtered away by top_k."""
    monkeypatch.setattr(gap, "next_logits", lambda *_: np.array([2 * np.log(0.3), 2 * np.log(0.7), -50.0]))
    for seed in range(4):
        number = float(uniform(jnp.array([seed], jnp.uint32), jnp.array([[3]], jnp.int32), Purpose.TARGET)[0, 0])
        found = gap.choice_gap(*model, (4, 4, 4), (0, 1), temperature=2.0, top_k=2, seed=seed)
        assert found == pytest.approx(abs(number - 0.3), abs=1e-6)


def test_bfloat16_excuses_one_step_at_the_largest_logit(model, monkeypatch):
    """Logits in [4, 8) have steps of 2^-5: 8 bits of significand from 4 on."""
    config, params = model
    monkeypatch.setattr(gap, "next_logits", lambda *_: np.array([1.0, -7.0, 3.5]))
    half = dataclasses.replace(config, dtype="bfloat16")
    assert float(jnp.bfloat16(4 + 2**-5)) == 4 + 2**-5 and float(jnp.bfloat16(4 + 2**-7)) == 4
    assert gap.tolerance(half, params, (1,), 0.0) == 2**-5
    assert gap.tolerance(half, params, (1,), 0.5) == 2**-4
    assert gap.tolerance(config, params, (1,), 0.0) == 1e-4
