"""The drafter's loss against its formula and the public code's per-slot numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.losses.drafter import block_cross_entropy, slot_weights, supervised_weights
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
