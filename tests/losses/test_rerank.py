"""The reranker's losses against loops, the public code's numbers, and the derivations of Appendix D."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.losses.rerank import cross_entropy, distractor_cost, gold_gaps, gold_path_scores, margin_hinge
from tests.losses.arrays import golden_arrays, golden_scores, golden_target_logits, random_scores
from tests.tolerance import assert_close, assert_gradients_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

SLOTS, CANDIDATES = 5, 4


def softmax(z):
    e = np.exp(np.asarray(z, np.float64) - np.max(z))
    return e / e.sum()


@pytest.fixture
def rank(rng):
    return jnp.asarray(rng.integers(0, CANDIDATES, size=(2, 3, SLOTS)), jnp.int32)


@pytest.fixture
def scores(rng):
    """Gold-path scores of some blocks."""
    return jnp.asarray(3 * rng.normal(size=(2, 3, SLOTS, CANDIDATES)), jnp.float32)


@pytest.fixture
def target_logits(rng, rank):
    """The target's logits of the candidates, and of the gold one among them."""
    candidates = jnp.asarray(2 * rng.normal(size=(*rank.shape, CANDIDATES)), jnp.float32)
    return jnp.take_along_axis(candidates, rank[..., None], axis=-1)[..., 0], candidates


def test_gold_path_follows_the_gold_predecessor(rng, rank):
    lattice = random_scores(rng, 2, 3)
    start, pair, actual = map(np.asarray, (*lattice, gold_path_scores(lattice, rank)))
    for b, a, s in np.ndindex(2, 3, SLOTS):
        expected = start[b, a] if s == 0 else pair[b, a, s - 1, rank[b, a, s - 1]]
        np.testing.assert_array_equal(actual[b, a, s], expected)


def test_cross_entropy_is_the_negative_log_probability_of_the_gold_candidate(scores, rank):
    z, g = np.asarray(scores), np.asarray(rank)
    expected = [-np.log(softmax(z[i])[g[i]]) for i in np.ndindex(g.shape)]
    assert_close(cross_entropy(scores, rank), np.reshape(expected, rank.shape))


def test_distractor_cost_is_the_expected_gap(scores, target_logits):
    z, gold, candidates = map(np.asarray, (scores, *target_logits))
    expected = [softmax(z[i]) @ np.maximum(gold[i] - candidates[i], 0.0) for i in np.ndindex(gold.shape)]
    assert_close(distractor_cost(scores, gold_gaps(*target_logits)), np.reshape(expected, gold.shape))


def test_hinge_is_zero_beyond_the_margin_and_linear_within_it():
    scores = jnp.array([[5.0, 2.9, 1.0], [1.0, 4.0, 2.5], [0.0, 1.0, 3.0]])
    rank = jnp.array([0, 1, 0])
    assert_close(margin_hinge(scores, rank, 2.0), np.array([0.0, 0.5, 5.0]))


def test_a_single_candidate_has_no_rival_and_no_hinge():
    value, gradient = jax.value_and_grad(lambda z: jnp.sum(margin_hinge(z, jnp.zeros(3, jnp.int32), 2.0)))(
        jnp.ones((3, 1))
    )
    assert value == 0 and not np.any(gradient)


def test_terms_of_every_slot_are_those_of_the_public_code(golden):
    arrays = golden_arrays(golden)
    rank = jnp.asarray(arrays["gt_index"])
    z = gold_path_scores(golden_scores(arrays), rank)
    assert_close(z, arrays["teacher_forced_node_scores"])
    assert_close(cross_entropy(z, rank), arrays["ce_per_slot"])
    gaps = gold_gaps(*map(jnp.asarray, golden_target_logits(arrays)))
    counts = arrays["supervised"].astype(bool)
    assert_close(gaps[counts], arrays["rejection_weight"][counts])
    assert_close(distractor_cost(z, gaps)[counts], arrays["omega_per_slot"][counts])
    # The hinge at a width far above every gap is the width minus the gap.
    assert_close(1000.0 - margin_hinge(z, rank, 1000.0), arrays["gap_per_slot"], "golden")


def gradient_of_cost(scores, gaps):
    return jax.grad(lambda z: jnp.sum(distractor_cost(z, gaps)))(scores)


def test_where_the_target_prefers_gold_the_cost_is_cross_entropy_against_it_minus_a_constant(
    scores, target_logits, rank
):
    """Eq. 9: Omega = H(P, q) - c_g, with the same gradient."""
    _, candidates = target_logits
    rank = jnp.argmax(candidates, axis=-1)
    log_q = jax.nn.log_softmax(candidates, axis=-1)
    gold = jnp.take_along_axis(log_q, rank[..., None], axis=-1)[..., 0]

    def against_target(z):
        return -jnp.sum(jax.nn.softmax(z, axis=-1) * log_q, axis=-1)

    gaps = gold_gaps(gold, log_q)
    assert_close(distractor_cost(scores, gaps), against_target(scores) + gold)
    assert_gradients_close(gradient_of_cost(scores, gaps), jax.grad(lambda z: jnp.sum(against_target(z)))(scores))


def test_candidates_that_the_target_prefers_to_gold_cost_nothing(scores, target_logits, rank):
    """Without the rectifier their costs would be negative, and would draw the reranker away from gold."""
    gold, candidates = target_logits
    preferred = np.asarray(candidates) >= np.asarray(gold)[..., None]
    gaps = gold_gaps(gold, candidates)
    assert preferred.sum() > rank.size  # gold itself, and some others
    assert not np.asarray(gaps)[preferred].any() and (np.asarray(gaps)[~preferred] > 0).all()


def test_gradients_on_the_gold_logit_complement_each_other(scores, target_logits, rank):
    """Eq. 10: P(g) - 1. Eq. 11: -P(g) E_P[w]."""
    gaps = gold_gaps(*target_logits)
    of_cross_entropy = np.asarray(jax.grad(lambda z: jnp.sum(cross_entropy(z, rank)))(scores))
    of_cost = np.asarray(gradient_of_cost(scores, gaps))
    z, gaps, g = map(np.asarray, (scores, gaps, rank))
    for i in np.ndindex(g.shape):
        p = softmax(z[i])
        assert_close(of_cross_entropy[i][g[i]], p[g[i]] - 1)
        assert_close(of_cost[i][g[i]], -p[g[i]] * (p @ gaps[i]))


def test_renormalising_the_target_over_the_pool_changes_nothing(scores, target_logits):
    gold, candidates = target_logits
    log_partition = jax.nn.logsumexp(candidates, axis=-1)
    over_pool = gold_gaps(gold - log_partition, candidates - log_partition[..., None])
    assert_close(distractor_cost(scores, over_pool), distractor_cost(scores, gold_gaps(gold, candidates)))


def test_cost_is_linear_in_the_reranker_distribution(scores, target_logits):
    """So its least value lies at a vertex: it commits, where a divergence would match."""
    gaps = gold_gaps(*target_logits)
    one, other = jax.nn.softmax(scores, axis=-1), jax.nn.softmax(scores[::-1], axis=-1)
    mixed = distractor_cost(jnp.log(0.3 * one + 0.7 * other), gaps)
    assert_close(mixed, 0.3 * distractor_cost(scores, gaps) + 0.7 * distractor_cost(scores[::-1], gaps))


def test_the_target_receives_no_gradient(scores, target_logits):
    gradients = jax.grad(lambda gold, others: jnp.sum(distractor_cost(scores, gold_gaps(gold, others))), (0, 1))(
        *target_logits
    )
    assert not any(np.any(gradient) for gradient in gradients)
