"""The pass over the vocabulary against NumPy in float64 and plain differentiation, and what it keeps in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.losses.vocabulary import over_chunks, token_logits, vocabulary_pass
from tests.losses.arrays import golden_arrays
from tests.program import equations, shapes_made
from tests.tolerance import assert_close, assert_gradients_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

SLOTS, WIDTH, VOCAB, CANDIDATES = 13, 16, 96, 4


@pytest.fixture
def case(rng):
    """States, unembedding and gold tokens."""
    return (
        jnp.asarray(rng.normal(size=(SLOTS, WIDTH)), jnp.float32),
        jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32),
        jnp.asarray(rng.integers(0, VOCAB, size=SLOTS), jnp.int32),
    )


def read_by_pass(states, unembedding, gold, chunk):
    """All that the objective reads: the log-probabilities of the gold token and of the candidates."""
    summary = vocabulary_pass(states, unembedding, CANDIDATES, chunk)
    wanted = jnp.concatenate([gold[:, None], summary.candidate_ids], axis=1)
    return token_logits(states, unembedding, wanted) - summary.log_partition[:, None]


def read_plainly(states, unembedding, gold):
    """The same by a softmax over everything."""
    logprobs = jax.nn.log_softmax(states @ unembedding.T, axis=-1)
    ids = jax.lax.stop_gradient(jax.lax.top_k(logprobs, CANDIDATES)[1])
    return jnp.take_along_axis(logprobs, jnp.concatenate([gold[:, None], ids], axis=1), axis=1)


def curved(logprobs):
    """A loss that weighs every entry differently."""
    return jnp.sum(jnp.square(logprobs[:, 1:])) - 3 * jnp.sum(logprobs[:, 0])


def test_log_partition_and_candidates_are_those_of_the_whole_row(case):
    states, unembedding, _ = case
    logits = np.asarray(states, np.float64) @ np.asarray(unembedding, np.float64).T
    summary = vocabulary_pass(states, unembedding, CANDIDATES, 5)
    assert_close(summary.log_partition, np.log(np.exp(logits).sum(-1)))
    np.testing.assert_array_equal(summary.candidate_ids, np.argsort(-logits, axis=-1)[:, :CANDIDATES])


def test_token_logits_are_the_chosen_entries_of_the_row(case):
    states, unembedding, gold = case
    logits = np.asarray(states, np.float64) @ np.asarray(unembedding, np.float64).T
    wanted = jnp.stack([gold, gold[::-1]], axis=1)
    assert_close(token_logits(states, unembedding, wanted), np.take_along_axis(logits, np.asarray(wanted), -1))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_gradient_is_that_of_a_plain_softmax_for_any_chunk(case, chunk):
    states, unembedding, gold = case
    expected, expected_gradient = jax.value_and_grad(lambda h: curved(read_plainly(h, unembedding, gold)))(states)
    actual, gradient = jax.value_and_grad(lambda h: curved(read_by_pass(h, unembedding, gold, chunk)))(states)
    assert_close(actual, expected, "loss")
    assert_gradients_close(gradient, expected_gradient)


def test_gradient_counts_tied_tokens_once_and_candidates_are_the_lowest_ids(case):
    states, unembedding, gold = case
    unembedding = jnp.tile(unembedding[: VOCAB // 8], (8, 1))  # every logit eightfold, so a tie straddles rank K
    summary, pull = jax.vjp(lambda h: vocabulary_pass(h, unembedding, CANDIDATES, 5).log_partition, states)
    probabilities = jax.nn.softmax(states @ unembedding.T, axis=-1)
    assert_gradients_close(pull(jnp.ones(SLOTS))[0], probabilities @ unembedding)
    best = np.argmax(states @ unembedding[: VOCAB // 8].T, axis=-1)
    ids = vocabulary_pass(states, unembedding, CANDIDATES, 5).candidate_ids
    np.testing.assert_array_equal(ids, best[:, None] + np.arange(CANDIDATES)[None] * (VOCAB // 8))


def test_the_frozen_unembedding_receives_nothing(case):
    states, unembedding, gold = case
    assert not np.any(jax.grad(lambda w: curved(read_by_pass(states, w, gold, 5)))(unembedding))


def test_a_training_step_multiplies_twice_by_the_vocabulary_and_keeps_no_row_of_that_width(case):
    """Neither logits of more slots than a chunk's, nor a gradient of the unembedding, are ever made."""
    states, unembedding, gold = case
    gradient = jax.grad(lambda h: curved(read_by_pass(h, unembedding, gold, 5)))
    products = [e for e in equations(gradient, states) if e.primitive.name == "dot_general"]
    assert sum(VOCAB in e.invars[1].aval.shape for e in products) == 2
    wide = {shape for shape in shapes_made(gradient, states) if VOCAB in shape}
    assert wide == {(VOCAB,), (1, 1, VOCAB), (5, VOCAB), (5, CANDIDATES, VOCAB)}, wide


def test_candidates_and_log_probabilities_are_those_of_the_public_code(golden):
    arrays = golden_arrays(golden)
    states = jnp.asarray(arrays["draft_hidden"][:, :, 1:])
    unembedding = jnp.asarray(arrays["lm_head"])
    ids = arrays["candidate_token_ids"]
    summary = vocabulary_pass(states.reshape(-1, states.shape[-1]), unembedding, ids.shape[-1], 7)
    np.testing.assert_array_equal(summary.candidate_ids.reshape(ids.shape), ids)
    logprobs = token_logits(states, unembedding, jnp.asarray(ids)) - summary.log_partition.reshape(*ids.shape[:-1], 1)
    assert_close(logprobs, arrays["candidate_log_probs"], "golden")


def test_bfloat16_keeps_the_gradient_where_the_drafter_is_nearly_right(rng):
    """p(gold) is 0.99, so all but a hundredth of the two gradients cancels; half-precision sums would lose it."""
    vocab, width = 32_000, 64
    unembedding = jnp.asarray(rng.normal(size=(vocab, width)), jnp.bfloat16)
    wide = np.asarray(unembedding, np.float64)
    gold = rng.integers(0, vocab, size=6)
    states = wide[gold] * (17.5 / np.square(wide[gold]).sum(-1, keepdims=True)) + 0.01 * rng.normal(size=(6, width))
    states = jnp.asarray(states, jnp.bfloat16)
    logits = np.asarray(states, np.float64) @ wide.T
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    assert (probabilities[np.arange(6), gold] > 0.9).all()
    expected = probabilities @ wide - wide[gold]

    def loss(states):
        summary = vocabulary_pass(states, unembedding, CANDIDATES, 4)
        gold_logits = token_logits(states, unembedding, jnp.asarray(gold)[:, None])[:, 0]
        return jnp.sum(summary.log_partition - gold_logits)

    gradient = jax.grad(loss)(states.astype(jnp.float32))
    assert_gradients_close(list(gradient), list(expected), "cancelling_gradient")  # slot by slot


def test_chunks_of_any_size_give_each_row_its_own_result(rng):
    rows = {"a": jnp.asarray(rng.normal(size=(7, 3)), jnp.float32), "b": jnp.arange(1.0, 8.0)}

    def reciprocal(rows):  # a padded row divides by zero, which must reach neither results nor gradients
        return 1 / rows["b"], jnp.sum(rows["a"], axis=1) / rows["b"]

    for chunk in (3, 100):
        inverse, ratio = over_chunks(reciprocal, rows, chunk)
        assert_close(inverse, 1 / np.arange(1.0, 8.0))
        assert_close(ratio, np.asarray(rows["a"], np.float64).sum(1) / np.arange(1, 8))
        gradient = jax.grad(lambda a, chunk=chunk: jnp.sum(over_chunks(reciprocal, rows | {"a": a}, chunk)[1]))(
            rows["a"]
        )
        assert_close(gradient, np.repeat(1 / np.arange(1.0, 8.0)[:, None], 3, axis=1))


def test_differentiating_a_function_of_chunks_keeps_nothing_of_its_inside():
    """The backward pass recomputes a chunk's [chunk, V] arrays instead of stacking them."""
    unembedding = jnp.ones((VOCAB, WIDTH))

    def entropy(states):
        logprobs = jax.nn.log_softmax(states @ unembedding.T, axis=-1)
        return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    gradient = jax.grad(lambda h: jnp.sum(over_chunks(entropy, h, 5)))
    wide = {shape for shape in shapes_made(gradient, jnp.ones((SLOTS, WIDTH))) if VOCAB in shape}
    assert wide <= {(5, VOCAB), (WIDTH, VOCAB), (VOCAB, WIDTH)}, wide


def test_a_chunk_of_nothing_is_refused(case):
    with pytest.raises(ValueError, match="chunk=0"):
        vocabulary_pass(case[0], case[1], CANDIDATES, 0)
