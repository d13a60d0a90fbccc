"""One signature for three rules: what each takes, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.decoding.walk import walk
from pallas_kernels.match_walk import Scores

pytestmark = pytest.mark.usefixtures("strict_dtypes")

# Greedy takes rank 0 first and ends with 1.1; the path over rank 1 sums to 5.9.
SCORES = Scores(jnp.array([[1.0, 0.9]]), jnp.array([[[[0.0, 0.1], [5.0, 0.0]]]]))
DRAWS = dict(temperature=jnp.ones(1), uniforms=jnp.array([[0.999, 0.999]]))


def test_each_kind_follows_its_own_rule():
    """The sampled walk draws rank 1 (0.475 of the first row), and 0.999 lies past e^5 / (e^5 + 1) = 0.9933."""
    picks = {kind: walk(SCORES, kind).picks.tolist() for kind in ("greedy", "exact")}
    assert picks == {"greedy": [[0, 1]], "exact": [[1, 0]]}
    sampled = walk(SCORES, "sampled", **DRAWS)
    assert sampled.picks.tolist() == [[1, 1]]
    odds = 1 / (1 + np.exp(-np.array([0.1, 5.0])))
    np.testing.assert_allclose(sampled.q, np.stack([odds, 1 - odds], -1)[None], rtol=1e-5)


@pytest.mark.parametrize("kind", ["greedy", "exact"])
def test_a_walk_that_draws_nothing_has_no_q_and_refuses_noise(kind):
    assert walk(SCORES, kind).q is None
    for name, value in DRAWS.items():
        with pytest.raises(ValueError, match=kind):
            walk(SCORES, kind, **{name: value})


@pytest.mark.parametrize("given", [{}, *({name: value} for name, value in DRAWS.items())])
def test_a_sampled_walk_needs_both_temperature_and_noise(given):
    with pytest.raises(ValueError, match="sampled walk needs temperature and uniforms"):
        walk(SCORES, "sampled", **given)


def test_an_unknown_walk_is_named():
    with pytest.raises(ValueError, match="'viterbi'"):
        walk.__wrapped__(SCORES, "viterbi")
