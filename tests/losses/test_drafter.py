"""The drafter's loss against its formula and the public code's per-slot numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.config import ObjectiveConfig
from lilicorr_jax.losses.drafter import (
    block_cross_entropy,
    drafter_weights,
    slot_weights,
    supervised_weights,
    survival_weights,
)
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def test_weights_decay_from_one_at_the_first_slot():
    assert_close(slot_weights(4, 7.0), np.exp([0.0, -1 / 7, -2 / 7, -3 / 7]))


def test_an_unsupervised_slot_weighs_nothing_and_moves_no_other_weight():
    weights = supervised_weights(jnp.array([[True, False, True]]), 4.0)
    assert_close(weights, np.array([[1.0, 0.0, np.exp(-0.5)]]))


def test_an_unweighted_slot_neither_counts_nor_learns_even_if_its_gold_token_is_impossible():
    weights = supervised_weights(jnp.array([True, False]), 4.0)
    loss, gradient = jax.value_and_grad(lambda logprobs: jnp.sum(block_cross_entropy(logprobs, weights)))(
        jnp.array([-0.5, -jnp.inf])
    )
    assert loss == 0.5 and gradient.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("name, decay", [("decay7", 7.0), ("nodecay", 1e30)])
def test_sum_and_denominator_are_those_of_the_public_code(golden, model, name, decay):
    arrays = np.load(golden / "dflash" / model / "training.npz")
    weights = supervised_weights(jnp.asarray(arrays["weight_mask"][..., 1:] > 0), decay)
    loss = block_cross_entropy(jnp.asarray(-arrays["nll"][..., 1:]), weights)
    assert_close(jnp.sum(loss), arrays[f"{name}_loss_num"], "loss")
    assert_close(jnp.sum(weights), arrays[f"{name}_loss_den"], "loss")
    assert_close(jnp.sum(loss) / jnp.sum(weights), arrays[f"{name}_loss"], "loss")


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_survival_weights_are_those_of_the_public_code(golden, alpha):
    arrays = np.load(golden / "dspark" / "extras_dpace.npz")
    is_supervised = arrays["mask"] > 0
    weights = survival_weights(jnp.log(arrays["confidence"]), jnp.asarray(is_supervised), alpha)
    assert_close(weights, np.where(is_supervised, arrays[f"alpha{alpha}/dpace"], 0.0))


def test_survival_weights_are_the_slope_of_the_expected_length_and_have_none_themselves(rng):
    """w_j is d/d log q~_j of the sum of C_m. Oracle: differences of a loop; slot 1 counts for nothing."""
    logprobs, counted = -rng.exponential(size=5), np.array([True, False, True, True, True])
    factors = np.where(counted, 0.7 * np.exp(logprobs) + 0.3, 1.0)

    def length(log_factors):
        return sum(np.exp(log_factors[: m + 1]).prod() for m in range(5) if counted[m])

    step = 1e-5
    slopes = [
        (length(np.log(factors) + step * one) - length(np.log(factors) - step * one)) / (2 * step) for one in np.eye(5)
    ]
    weigh = lambda logprobs: survival_weights(logprobs, jnp.asarray(counted), 0.3)
    assert_close(weigh(jnp.asarray(logprobs, jnp.float32)), np.where(counted, slopes, 0.0))
    assert not jax.jacobian(weigh)(jnp.asarray(logprobs, jnp.float32)).any()


def test_the_objective_names_the_weights():
    logprobs, counted = jnp.log(jnp.array([0.5, 0.25])), jnp.array([True, True])
    assert_close(drafter_weights(logprobs, counted, ObjectiveConfig(slot_decay=4.0)), np.exp([0.0, -0.25]))
    paced = ObjectiveConfig(drafter_weighting="dpace", dpace_alpha=0.2)  # factors 0.6 and 0.4
    assert_close(drafter_weights(logprobs, counted, paced), np.array([0.6 + 0.24, 0.24]))
