"""Top-K and log-partition against NumPy in float64, and what ties and NaN give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.topk_logprobs import topk_logprobs
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def literal(logits, num_candidates: int):
    """Stable sort of the negated logits: descending, ties to the lower id."""
    logits = np.asarray(logits, np.float64)
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :num_candidates]
    highest = logits.max(-1, keepdims=True)
    log_partition = np.log(np.exp(logits - highest).sum(-1)) + highest[:, 0]
    return ids, np.take_along_axis(logits, ids, -1) - log_partition[:, None], log_partition


@pytest.mark.parametrize("rows, vocab, num_candidates", [(15, 512, 8), (15, 50_000, 8), (3, 7, 7), (2, 5, 1)])
def test_the_most_probable_tokens_in_descending_order(rng, rows, vocab, num_candidates):
    logits = (5 * rng.normal(size=(rows, vocab))).astype(np.float32)
    ids, logprobs, log_partition = literal(logits, num_candidates)
    actual = topk_logprobs(jnp.asarray(logits), num_candidates)
    np.testing.assert_array_equal(actual.ids, ids)
    assert_close((actual.logprobs, actual.log_partition), (logprobs, log_partition))
    assert actual.ids.dtype == jnp.int32 and actual.logprobs.dtype == jnp.float32


@pytest.mark.parametrize("vocab", [16, 5_000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equal_logits_rank_by_id(rng, vocab, dtype):
    logits = jnp.asarray(rng.integers(0, 3, size=(6, vocab)), dtype)
    actual = topk_logprobs(logits, 8)
    np.testing.assert_array_equal(actual.ids, literal(logits, 8)[0])
    np.testing.assert_array_equal(topk_logprobs(jnp.zeros((1, vocab), dtype), 8).ids, np.arange(8)[None])


def test_no_use_of_the_result_turns_the_choice_into_a_sort_of_the_row():
    """XLA's CPU compiler recognises top-K only where nothing is sliced off it; a sort is hundreds of times slower."""

    def best(logits):
        top = topk_logprobs(logits, 8)
        return top.ids[:, 0], top.logprobs[:, :2]

    program = jax.jit(best).lower(jnp.zeros((15, 4096))).compile().as_text()
    assert "TopK" in program and "sort(" not in program


def test_bfloat16_logits_are_reduced_in_float32(rng):
    """4,096 equal logits: a bfloat16 sum would stop growing at 256."""
    actual = topk_logprobs(jnp.full((1, 4096), 3.0, jnp.bfloat16), 4)
    assert_close(actual.log_partition, np.array([3 + np.log(4096)]))
    assert actual.logprobs.dtype == jnp.float32


def test_large_logits_do_not_overflow():
    actual = topk_logprobs(jnp.array([[1e4, 1e4, -1e4]]), 3)
    assert_close(actual.logprobs, np.array([[-np.log(2), -np.log(2), -2e4 - np.log(2)]]))


def test_masked_entries_come_last_with_log_probability_minus_infinity():
    actual = topk_logprobs(jnp.array([[-jnp.inf, 1.0, -jnp.inf, 1.0]]), 3)
    assert actual.ids.tolist() == [[1, 3, 0]]
    np.testing.assert_allclose(actual.logprobs, [[-np.log(2), -np.log(2), -np.inf]], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 3, 199])
def test_a_row_with_nan_or_infinity_says_so_in_its_best_log_probability_and_spares_the_others(rng, bad, at):
    logits = rng.normal(size=(3, 200)).astype(np.float32)
    clean = topk_logprobs(jnp.asarray(logits), 4)
    logits[1, at] = bad
    actual = topk_logprobs(jnp.asarray(logits), 4)
    assert np.isnan(actual.logprobs[1, 0])
    if np.isnan(bad):
        assert np.isnan(actual.log_partition[1]) and np.isnan(actual.logprobs[1]).all()
    for field, expected in zip(actual, clean, strict=True):
        np.testing.assert_array_equal(np.delete(field, 1, 0), np.delete(expected, 1, 0))


def test_gradient_is_that_of_the_chosen_log_probabilities(rng):
    logits = jnp.asarray(rng.normal(size=(2, 9)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(weights * topk_logprobs(x, 3).logprobs))(logits)
    ids = literal(logits, 3)[0]
    expected = -np.asarray(jax.nn.softmax(logits)) * np.asarray(weights).sum(-1, keepdims=True)
    for row in range(2):
        np.add.at(expected[row], ids[row], weights[row])
    assert_close(gradient, expected)


@pytest.mark.parametrize("num_candidates", [0, 6])
def test_more_candidates_than_logits_or_none_are_refused(num_candidates):
    with pytest.raises(ValueError, match=rf"\[1, 5\].*got {num_candidates}"):
        topk_logprobs(jnp.zeros((1, 5)), num_candidates)
