"""The acceptance rules, against golden cases of a public implementation, exact laws, and brute force over tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lilicorr_jax.decoding import verify as rules
from lilicorr_jax.decoding.noise import draw
from lilicorr_jax.decoding.proposal import Proposal, SparseQ
from lilicorr_jax.decoding.verify import Noise
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

DRAWS = 100_000

reject, next_weights = jax.jit(rules.reject), jax.jit(rules.next_weights)
verify = jax.jit(rules.verify, static_argnames="mode")
target_distribution = jax.jit(rules.target_distribution, static_argnames="mode")


@pytest.fixture(scope="module")
def cases(request):
    with np.load(request.getfixturevalue("golden") / "dspark" / "verify.npz") as data:
        return dict(data)


def int32(values):
    return jnp.array(values, jnp.int32)


def filters(batch, temperature=1.0, top_k=0, top_p=1.0):
    return dict(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
    )


def fresh_noise(batch, slots, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    accept, residual = (jax.random.uniform(key, (batch, slots)) for key in keys[:2])
    return Noise(accept, residual, jax.random.uniform(keys[2], (batch, slots + 1)))


def sparse(q, rng):
    """The same distribution as a list of candidates in a shuffled order."""
    order = rng.permuted(np.broadcast_to(np.arange(q.shape[-1]), q.shape), axis=-1)
    return SparseQ(ids=int32(order), probs=jnp.array(np.take_along_axis(q, order, -1)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("contract", ["sampled", "deterministic"])
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_rejection_equals_the_golden_cases(cases, rng, temperature, contract, form):
    prefix = f"T{temperature}/{contract}/"
    case = {name.removeprefix(prefix): array for name, array in cases.items() if name.startswith(prefix)}
    q = sparse(case["q"], rng) if form == "sparse" else jnp.array(case["q"])
    proposal = Proposal(draft_ids=int32(case["draft_tokens"]), num_proposed=jnp.full(48, 5, jnp.int32), q=q)
    probs = target_distribution(jnp.array(cases["target_logits"]), **filters(48, temperature), mode="temperature")
    assert_close(probs, cases[f"T{temperature}/target_probs"])
    noise = fresh_noise(48, 5)._replace(accept=jnp.array(cases["uniforms"]))
    verdict = reject(proposal, probs, noise)
    np.testing.assert_array_equal(verdict.num_accepted, case["accepted"])
    weights = np.asarray(next_weights(proposal, probs, verdict.num_accepted))
    assert_close(weights / weights.sum(-1, keepdims=True), case["next_token_distribution"])
    assert np.all(np.take_along_axis(weights, np.asarray(verdict.next_id)[:, None], 1) > 0)


def test_deterministic_drafts_are_kept_while_they_equal_the_targets_draws(rng):
    logits = rng.normal(size=(200, 4, 3)).astype(np.float32)
    noise = fresh_noise(200, 3)
    drafts, num_proposed = rng.integers(0, 3, (200, 3)), rng.integers(0, 4, 200)
    verdict = verify(
        jnp.array(logits), Proposal(int32(drafts), int32(num_proposed)), **filters(200), noise=noise, mode="temperature"
    )
    for row in range(200):
        cumulative = np.cumsum(np.exp(logits[row]) / np.exp(logits[row]).sum(-1, keepdims=True), -1)
        choices = [int(np.searchsorted(c, u, side="right")) for c, u in zip(cumulative, noise.target[row], strict=True)]
        kept = 0
        while kept < num_proposed[row] and drafts[row, kept] == choices[kept]:
            kept += 1
        assert (int(verdict.num_accepted[row]), int(verdict.next_id[row])) == (kept, choices[kept])
    assert set(np.asarray(verdict.num_accepted)) == {0, 1, 2, 3}


def test_greedy_keeps_the_run_of_argmaxes_and_ties_go_to_the_lowest_id():
    logits = jnp.zeros((3, 3, 4)).at[:, 0, 2].set(1.0).at[:, 1, 3].set(2.0).at[:, 2, 1:3].set(5.0)
    drafts = int32([[2, 3], [2, 0], [0, 3]])
    everything = Proposal(drafts, int32([2, 2, 2]))
    sampled = Proposal(drafts, int32([2, 2, 2]), q=jnp.full((3, 2, 4), 0.25))
    for proposal in (everything, sampled):
        verdict = verify(logits, proposal, **filters(3, 0.0), noise=fresh_noise(3, 2), mode="greedy")
        np.testing.assert_array_equal(verdict.num_accepted, [2, 1, 0])
        np.testing.assert_array_equal(verdict.next_id, [1, 3, 2])
        np.testing.assert_array_equal(verdict.target_choices, [[2, 3, 1]] * 3)
    mixed = verify(logits, sampled, **filters(3, 0.0), noise=fresh_noise(3, 2), mode="temperature")
    np.testing.assert_array_equal(mixed.num_accepted, [2, 1, 0])
    np.testing.assert_array_equal(mixed.next_id, [1, 3, 2])


@pytest.mark.parametrize("mode", ["greedy", "temperature"])
def test_slots_past_num_proposed_are_never_accepted(mode):
    logits = jnp.full((4, 4, 3), -30.0).at[:, :, 1].set(30.0)
    drafts = jnp.ones((4, 3), jnp.int32)
    for q in (None, jnp.full((4, 3, 3), 1 / 3)):
        proposal = Proposal(drafts, int32([0, 1, 2, 3]), q=q)
        verdict = verify(logits, proposal, **filters(4), noise=fresh_noise(4, 3), mode=mode)
        np.testing.assert_array_equal(verdict.num_accepted, [0, 1, 2, 3])
        np.testing.assert_array_equal(verdict.next_id, [1, 1, 1, 1])


def brute_force(logits, temperature, top_k, top_p):
    """Token by token: a token stays if fewer than k are larger and what is larger holds less than top_p."""
    scaled = logits.astype(np.float64) / temperature
    kept = [i for i, x in enumerate(scaled) if top_k == 0 or (scaled > x).sum() < top_k]
    mass = sum(np.exp(scaled[i]) for i in kept)
    kept = [
        i for i in kept if top_p == 1 or sum(np.exp(scaled[j]) for j in kept if scaled[j] > scaled[i]) / mass < top_p
    ]
    probs = np.zeros(len(logits))
    probs[kept] = np.exp(scaled[kept])
    return probs / probs.sum()


def test_temperature_then_top_k_then_top_p_equals_brute_force(rng):
    settings = [(0.7, 3, 1.0), (1.0, 0, 0.6), (1.3, 4, 0.8), (1.0, 0, 1.0), (0.5, 1, 0.9), (2.0, 99, 0.99)]
    logits = rng.normal(size=(len(settings), 4, 11)).astype(np.float32) * 2
    temperature, top_k, top_p = (np.array(column) for column in zip(*settings, strict=True))
    probs = target_distribution(
        jnp.array(logits), jnp.array(temperature, jnp.float32), int32(top_k), jnp.array(top_p, jnp.float32), "filtered"
    )
    for row, setting in enumerate(settings):
        for position in range(4):
            np.testing.assert_allclose(
                probs[row, position], brute_force(logits[row, position], *setting), rtol=2e-5, atol=2e-6
            )


def test_ties_with_the_last_kept_token_are_kept():
    logits = jnp.array([[[2.0, 1.0, 1.0, 0.0]]])
    probs = target_distribution(logits, **filters(1, top_k=2), mode="filtered")
    np.testing.assert_allclose(probs[0, 0], brute_force(np.array([2.0, 1.0, 1.0, 0.0]), 1.0, 2, 1.0), rtol=1e-5)
    assert probs[0, 0, 2] > 0 and probs[0, 0, 3] == 0


def test_top_p_one_keeps_a_tail_too_small_for_the_cumulative_sum():
    logits = jnp.array([[[40.0, 0.0, -1.0]]])
    assert np.all(np.asarray(target_distribution(logits, **filters(1), mode="filtered")) > 0)


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
@pytest.mark.parametrize("mode", ["greedy", "temperature", "filtered"])
def test_a_vanishing_temperature_is_a_point_mass(mode, temperature):
    logits = jnp.array([[[1.0, 90.0, 89.0, -3.0]]])
    probs = target_distribution(logits, **filters(1, temperature), mode=mode)
    np.testing.assert_array_equal(probs, [[[0.0, 1.0, 0.0, 0.0]]])


@partial(jax.jit, static_argnames="mode")
def one_slot(target_logits, q, drafts, noise, settings, mode):
    """DRAWS blocks of one slot over the same two-row target; the first token each emits and how many it accepted."""
    if q is not None:
        q = jnp.broadcast_to(q, (DRAWS, 1, q.size))
    proposal = Proposal(drafts, jnp.ones(DRAWS, jnp.int32), q=q)
    logits = jnp.broadcast_to(target_logits, (DRAWS, 2, target_logits.size))
    verdict = verify(logits, proposal, **settings, noise=noise, mode=mode)
    return jnp.where(verdict.num_accepted > 0, drafts[:, 0], verdict.next_id), verdict.num_accepted.mean()


def first_tokens(p_logits, q=None, draft=0, mode="temperature", **settings):
    logits = jnp.array(p_logits, jnp.float32)[None, None]
    drafts = jnp.full((DRAWS, 1), draft, jnp.int32)
    if q is not None:
        q = jnp.array(q, jnp.float32)[None, None]
        weights = jnp.broadcast_to(q[0, 0], (DRAWS, q.size))
        drafts = draw(weights, jax.random.uniform(jax.random.key(5), (DRAWS,)))[:, None]
    tokens, rate = one_slot(logits, q, drafts, fresh_noise(DRAWS, 1), filters(DRAWS, **settings), mode)
    return np.bincount(tokens, minlength=len(p_logits)) / DRAWS, float(rate)


def test_the_denominator_of_acceptance_is_q_of_the_draft():
    always_zero = Proposal(
        jnp.zeros((DRAWS, 1), jnp.int32),
        jnp.ones(DRAWS, jnp.int32),
        q=jnp.broadcast_to(jnp.array([0.9, 0.1]), (DRAWS, 1, 2)),
    )
    verdict = reject(always_zero, jnp.full((DRAWS, 2, 2), 0.5), fresh_noise(DRAWS, 1))
    assert abs(float(verdict.num_accepted.mean()) - 0.5 / 0.9) < 0.005
    marginal, _ = first_tokens(np.log([0.5, 0.5]), q=[0.9, 0.1])
    np.testing.assert_allclose(marginal, [0.5, 0.5], atol=0.005)


def test_a_deterministic_draft_is_accepted_with_p_and_a_sampled_one_with_the_overlap():
    marginal, accepted = first_tokens(np.log([0.7, 0.3]), draft=0)
    np.testing.assert_allclose([accepted, *marginal], [0.7, 0.7, 0.3], atol=0.005)
    marginal, accepted = first_tokens(np.log([0.7, 0.3]), q=[0.3, 0.7])
    np.testing.assert_allclose([accepted, *marginal], [0.6, 0.7, 0.3], atol=0.005)


@pytest.mark.parametrize("q", [None, [0.5, 0.5]])
@pytest.mark.parametrize("settings", [dict(temperature=0.1), dict(temperature=1.0), dict(temperature=1.0, top_p=0.6)])
def test_sampling_parameters_hold_on_both_sides_of_the_test(q, settings):
    marginal, _ = first_tokens([2.0, 0.0], q=q, mode="filtered", **settings)
    expected = brute_force(np.array([2.0, 0.0]), settings["temperature"], 0, settings.get("top_p", 1.0))
    np.testing.assert_allclose(marginal, expected, atol=0.005)


def test_filtered_sampling_has_the_filtered_law_and_never_leaves_its_support(rng):
    logits = rng.normal(size=8)
    q = np.exp(rng.normal(size=8))
    marginal, _ = first_tokens(logits, q=q / q.sum(), mode="filtered", temperature=0.7, top_k=3)
    expected = brute_force(logits, 0.7, 3, 1.0)
    assert np.all(marginal[expected == 0] == 0)
    support = expected > 0
    assert stats.chisquare(marginal[support] * DRAWS, expected[support] * DRAWS).pvalue > 1e-3


def test_a_zero_probability_draft_is_rejected_even_at_u_zero():
    proposal = Proposal(int32([[0]]), int32([1]), q=jnp.array([[[1.0, 0.0]]]))
    noise = Noise(accept=jnp.zeros((1, 1)), residual=jnp.zeros((1, 1)), target=jnp.zeros((1, 2)))
    verdict = reject(proposal, jnp.array([[[0.0, 1.0], [1.0, 0.0]]]), noise)
    assert (int(verdict.num_accepted[0]), int(verdict.next_id[0])) == (0, 1)


def test_an_empty_residual_falls_back_to_p():
    p = jnp.array([[[0.25, 0.75], [0.5, 0.5]]])
    proposal = Proposal(int32([[0]]), int32([1]), q=p[:, :1])
    weights = next_weights(proposal, p, int32([0]))
    np.testing.assert_array_equal(weights, p[:, 0])
