"""How many drafts are verified: against loops, and against the counterexample to looking further than allowed."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.decoding.schedule import confident_prefix, load_aware_prefix

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def test_a_threshold_cuts_at_the_first_slot_below_it():
    confidence = jnp.array([[0.9, 0.5, 0.2, 0.8], [0.1, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]])
    for threshold, wanted in ((0.0, [4, 4, 4]), (0.5, [2, 0, 4]), (0.15, [4, 0, 4]), (0.95, [0, 0, 0])):
        np.testing.assert_array_equal(confident_prefix(confidence, threshold), wanted)


def by_loop(confidence, rates, stop: bool = True) -> np.ndarray:
    """One draft after the other; without the stop, the best prefix of the whole order."""
    requests, slots = confidence.shape
    survival = np.cumprod(confidence, axis=1)
    order = sorted(itertools.product(range(slots), range(requests)), key=lambda at: -survival[at[1], at[0]])
    lengths = np.zeros(requests, int)
    best, best_lengths, expected = requests * rates[requests - 1], lengths.copy(), float(requests)
    for count, (slot, request) in enumerate(order, start=1):
        expected += survival[request, slot]
        lengths[request] += 1
        value = expected * rates[requests + count - 1]
        if value > best:
            best, best_lengths = value, lengths.copy()
        elif stop:
            break
    return best_lengths


@pytest.mark.parametrize("seed", range(8))
def test_drafts_join_in_order_of_survival_until_one_does_not_pay(seed):
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.2, 1, size=(4, 5)).astype(np.float32)
    rates = 1 / (1 + rng.uniform(0.02, 0.2) * np.arange(24)) * rng.uniform(0.97, 1.03, 24)
    found = load_aware_prefix(jnp.asarray(confidence), jnp.asarray(rates, jnp.float32))
    np.testing.assert_array_equal(found, by_loop(confidence.astype(np.float64), rates))


def test_a_certain_draft_does_not_overtake_the_one_before_it():
    """Equal survival throughout: every request gets its slots in order."""
    rates = jnp.array([1.0, 0.9, 0.9, 0.8, 0.8, 0.01], jnp.float32)
    np.testing.assert_array_equal(load_aware_prefix(jnp.ones((2, 2)), rates), [2, 1])


P, Q = (0.7, 0.3), (0.5, 0.5)
RATES = np.array([1.0, 0.5, 0.45])
CONTINUATION = (0.9, 0.0)  # the second slot's confidence behind either first draft


def law_of_the_first_token(prefix) -> float:
    """Probability of token 0 by rejection, where `prefix(confidence)` says how many of two drafts are verified."""
    total = 0.0
    for token in range(2):
        if prefix(np.array([[0.8, CONTINUATION[token]]])) == 0:
            total += Q[token] * P[0]  # nothing verified: the target draws
        else:
            kept = min(1.0, P[token] / Q[token])
            residual = np.maximum(np.subtract(P, Q), 0)
            total += Q[token] * (kept * (token == 0) + (1 - kept) * residual[0] / residual.sum())
    return total


def test_stopping_early_keeps_the_law_that_searching_on_would_change():
    """The published counterexample: admitting slot 1 for what its own draft promises gives 0.85 in the place of 0.7."""

    def ours(confidence):
        return int(load_aware_prefix(jnp.asarray(confidence, jnp.float32), jnp.asarray(RATES, jnp.float32))[0])

    def searching_on(confidence):
        return int(by_loop(confidence, RATES, stop=False)[0])

    assert law_of_the_first_token(ours) == pytest.approx(0.7)
    assert law_of_the_first_token(searching_on) == pytest.approx(0.85)


def test_too_few_measured_rates_are_refused():
    with pytest.raises(ValueError, match="up to 8 tokens; got 7"):
        load_aware_prefix(jnp.ones((2, 3)), jnp.ones(7))
