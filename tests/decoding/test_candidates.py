"""The candidate pool against the public code's numbers, and the five scalars written out."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from lilicorr_jax.decoding.candidates import candidate_pool, confidence_features
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.fixture(scope="module")
def reference(golden):
    return load_file(golden / "lilicorr" / "forward.safetensors")


def test_golden_pool_and_log_probabilities(reference):
    logits = jnp.asarray(reference["draft_logits"][:, :, 1:])
    pool = candidate_pool(logits, 4)
    np.testing.assert_array_equal(pool.ids, reference["candidate_token_ids"])
    assert_close(pool.logprobs, reference["candidate_log_probs"])


def test_golden_features(reference):
    assert_close(confidence_features(jnp.asarray(reference["candidate_log_probs"])), reference["features"])


def test_features_of_one_slot_written_out():
    logprobs = np.log(np.array([0.5, 0.25, 0.125], np.float32))
    expected = [
        [np.log(0.5), 0.5, 0.0, 0.0, 1.0],
        [np.log(0.25), 0.25, -np.log(2), 0.5, 0.0],
        [np.log(0.125), 0.125, -np.log(4), 1.0, 0.0],
    ]
    assert_close(confidence_features(jnp.asarray(logprobs)), np.array(expected))


def test_a_pool_of_one_has_rank_fraction_zero():
    assert_close(confidence_features(jnp.array([[-0.5]])), np.array([[[-0.5, np.exp(-0.5), 0.0, 0.0, 1.0]]]))


def test_each_slot_has_its_own_pool(rng):
    logits = jnp.asarray(rng.normal(size=(2, 3, 4, 20)), jnp.float32)
    pool = candidate_pool(logits, 5)
    for block in np.ndindex(2, 3, 4):
        np.testing.assert_array_equal(pool.ids[block], np.argsort(-np.asarray(logits[block]), kind="stable")[:5])
