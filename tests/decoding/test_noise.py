"""Position-keyed noise and the inverse CDF, against uniformity and NumPy's cumulative sums."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lilicorr_jax.decoding.noise import CHUNK, Purpose, draw, uniform

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def seeds(*values):
    return jnp.array(values, jnp.uint32)


def test_a_number_depends_on_seed_position_and_purpose_alone():
    positions = jnp.array([[4, 5, 6], [6, 9, 4]], jnp.int32)
    batch = uniform(seeds(11, 12), positions, Purpose.ACCEPT)
    alone = uniform(seeds(12), jnp.array([[4]], jnp.int32), Purpose.ACCEPT)
    assert batch[1, 2] == alone[0, 0]
    assert batch[0, 0] != batch[1, 2]  # another seed
    assert len(np.unique(batch)) == 6  # another position
    assert not np.any(batch == uniform(seeds(11, 12), positions, Purpose.RESIDUAL))


def test_numbers_are_uniform_and_independent_between_purposes_and_positions():
    many = jnp.arange(20_000, dtype=jnp.uint32)
    positions = jnp.broadcast_to(jnp.array([[7, 8]], jnp.int32), (20_000, 2))
    columns = [np.asarray(uniform(many, positions, purpose)) for purpose in Purpose]
    numbers = np.concatenate(columns, axis=1)  # [seeds, purposes * positions]
    assert numbers.min() >= 0 and numbers.max() < 1
    for column in numbers.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    correlations = np.corrcoef(numbers.T) - np.eye(numbers.shape[1])
    assert np.abs(correlations).max() < 5 / np.sqrt(20_000)


@pytest.mark.parametrize("size", [3, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 17])
def test_draw_inverts_the_cumulative_sum(rng, size):
    weights = rng.random((4, 60, size)).astype(np.float32) * (rng.random((4, 60, size)) < 0.4)
    weights[..., rng.integers(size)] += 0.5
    numbers = rng.random((4, 60)).astype(np.float32)
    drawn = np.asarray(draw(jnp.array(weights), jnp.array(numbers)))
    cumulative = np.cumsum(weights.astype(np.float64), axis=-1)
    expected = (cumulative <= (numbers * cumulative[..., -1])[..., None]).sum(-1)
    near_edge = np.abs(cumulative - (numbers * cumulative[..., -1])[..., None]).min(-1) < 1e-6 * size
    assert np.all((drawn == expected) | near_edge)
    assert near_edge.mean() < 0.2


def test_draw_never_returns_a_token_of_weight_zero():
    highest = np.nextafter(np.float32(1), np.float32(0))
    for size in (4, 3 * CHUNK):
        for support in ([1], [size - 2], [1, size - 2]):
            weights = np.zeros((size,), np.float32)
            weights[support] = 1e-8
            first, last = draw(jnp.array([weights, weights]), jnp.array([0.0, highest], jnp.float32))
            assert (first, last) == (support[0], support[-1])
