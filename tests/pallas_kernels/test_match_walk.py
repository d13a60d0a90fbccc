"""Matching scores and the three walks against loops in NumPy and against every path there is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.match_walk import Scores, exact_walk, greedy_walk, match_scores, sampled_walk
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

SLOTS, RANKS = 5, 3


def random_scores(rng, *batch: int, slots: int = SLOTS, ranks: int = RANKS, levels: int | None = None) -> Scores:
    """Scores like those of a trained head; with `levels`, small integers, which tie often and add exactly."""

    def draw(*shape):
        drawn = rng.integers(0, levels, shape) if levels else 4 * rng.normal(size=shape)
        return jnp.asarray(drawn, jnp.float32)

    return Scores(start=draw(*batch, ranks), pair=draw(*batch, slots - 1, ranks, ranks))


def path_score(start, pair, path) -> float:
    """Eq. 12, literally."""
    steps = [pair[s, path[s], path[s + 1]] for s in range(len(pair))]
    return float(start[path[0]]) + float(np.sum(steps, dtype=np.float64))


def greedy_loop(start, pair) -> list[int]:
    """Eq. 8, literally: the first of the largest."""
    path = [int(np.argmax(start))]
    for transition in pair:
        path.append(int(np.argmax(transition[path[-1]])))
    return path


def best_path(start, pair) -> tuple[int, ...]:
    """Of all K^S paths, in lexicographic order, the first with the highest score."""
    paths = itertools.product(range(len(start)), repeat=len(pair) + 1)
    return max(paths, key=lambda path: path_score(start, pair, path))


def sampled_loop(start, pair, temperature, uniforms):
    row, picks, rows = start, [], []
    for slot, uniform in enumerate(uniforms):
        weights = np.exp((row - row.max()) / np.float32(max(temperature, 1e-5)))
        q = (weights / weights.sum()).astype(np.float32)
        picks.append(min(int(np.sum(np.cumsum(q, dtype=np.float32) <= uniform)), len(q) - 1))
        rows.append(q)
        if slot < len(pair):
            row = pair[slot, picks[-1]]
    return picks, np.stack(rows)


@pytest.fixture(scope="module")
def reference(golden):
    return load_file(golden / "lilicorr" / "forward.safetensors")


@pytest.fixture(scope="module")
def reference_scores(reference):
    return Scores(jnp.asarray(reference["log_start"]), jnp.asarray(reference["log_pair"]))


def test_scores_are_cosines_from_each_slot_to_the_next(rng):
    shapes = ((2, 8), (2, SLOTS, RANKS, 8), (2, SLOTS, RANKS, 8))
    drawn = [rng.normal(size=shape) for shape in shapes]
    anchor, out, in_ = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in drawn)
    scores = match_scores(*(jnp.asarray(x, jnp.float32) for x in (anchor, out, in_)), 8.0)
    for b, s, j, k in itertools.product(range(2), range(SLOTS - 1), range(RANKS), range(RANKS)):
        assert_close(scores.pair[b, s, j, k], 8 * np.dot(out[b, s, j], in_[b, s + 1, k]))
    for b, k in itertools.product(range(2), range(RANKS)):
        assert_close(scores.start[b, k], 8 * np.dot(anchor[b], in_[b, 0, k]))


def test_bfloat16_vectors_give_float32_scores(rng):
    vectors = [jnp.asarray(rng.normal(size=(2, *shape)), jnp.bfloat16) for shape in ((64,), (2, 3, 64), (2, 3, 64))]
    expected = match_scores(*(x.astype(jnp.float32) for x in vectors), 8.0)
    scores = match_scores(*vectors, 8.0)
    assert scores.start.dtype == scores.pair.dtype == jnp.float32
    assert_close(tuple(scores), tuple(expected))


def test_golden_greedy_path(reference, reference_scores):
    np.testing.assert_array_equal(greedy_walk(reference_scores), reference["greedy_path_index"])


def test_golden_path_of_highest_sum(reference, reference_scores):
    picks = exact_walk(reference_scores)
    np.testing.assert_array_equal(picks, reference["maxsum_path_index"])
    assert (picks != greedy_walk(reference_scores)).any()
    for block in np.ndindex(picks.shape[:-1]):
        score = path_score(reference_scores.start[block], reference_scores.pair[block], np.asarray(picks[block]))
        assert_close(score, reference["maxsum_path_score"][block])


def test_golden_sampled_path_and_its_distributions(reference, reference_scores):
    """A row that its request asks to be greedy has temperature 0 here."""
    flat = jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), reference_scores)
    is_greedy = reference["sample_greedy_mask"].astype(bool)
    temperature = np.where(is_greedy, np.float32(0), reference["sample_temperatures"])
    picks, q = sampled_walk(flat, jnp.asarray(temperature), jnp.asarray(reference["sample_uniforms"]))
    np.testing.assert_array_equal(picks, reference["sample_path_index"])
    assert_close(q, reference["sample_q_rows"])
    assert is_greedy.any() and not is_greedy.all()


@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "tied"])
def test_greedy_walk_takes_the_best_next_candidate_the_lower_rank_of_equals(rng, levels):
    scores = random_scores(rng, 4, 8, levels=levels)
    picks = jax.jit(greedy_walk)(scores)
    assert picks.shape == (4, 8, SLOTS) and picks.dtype == jnp.int32
    for block in np.ndindex(4, 8):
        assert picks[block].tolist() == greedy_loop(np.asarray(scores.start[block]), np.asarray(scores.pair[block]))


@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "tied"])
def test_exact_walk_is_the_best_of_all_paths_the_first_of_equals(rng, levels):
    scores = random_scores(rng, 4, 4, levels=levels)
    picks = jax.jit(exact_walk)(scores)
    assert picks.shape == (4, 4, SLOTS) and picks.dtype == jnp.int32
    for block in np.ndindex(4, 4):
        assert tuple(picks[block].tolist()) == best_path(
            np.asarray(scores.start[block]), np.asarray(scores.pair[block])
        )


def test_exact_walk_gives_up_a_little_now_for_more_later():
    start = jnp.array([1.0, 0.9])
    pair = jnp.array([[[0.0, 0.1], [0.0, 5.0]]])
    scores = Scores(start, pair)
    assert greedy_walk(scores).tolist() == [0, 1] and exact_walk(scores).tolist() == [1, 1]


def test_sampled_walk_equals_a_loop_that_follows_what_was_drawn(rng):
    scores = random_scores(rng, 64)
    temperature = rng.uniform(0.3, 2.0, size=64).astype(np.float32)
    uniforms = rng.uniform(size=(64, SLOTS)).astype(np.float32)
    picks, q = jax.jit(sampled_walk)(scores, jnp.asarray(temperature), jnp.asarray(uniforms))
    assert picks.dtype == jnp.int32 and q.dtype == jnp.float32
    for row in range(64):
        expected = sampled_loop(
            np.asarray(scores.start[row]), np.asarray(scores.pair[row]), temperature[row], uniforms[row]
        )
        assert picks[row].tolist() == expected[0]
        assert_close(q[row], expected[1])
    assert (picks != greedy_walk(scores)).any()


def test_sampled_walk_draws_in_proportion_to_q(rng):
    draws = 20_000
    scores = random_scores(rng, slots=2)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (draws, *x.shape)), scores)
    uniforms = jnp.asarray(rng.uniform(size=(draws, 2)), jnp.float32)
    picks, q = jax.jit(sampled_walk)(many, jnp.full(draws, 3.0), uniforms)
    first = jax.nn.softmax(scores.start / 3)
    joint = np.asarray(first[:, None] * jax.nn.softmax(scores.pair[0] / 3, axis=-1))
    seen = np.zeros_like(joint)
    np.add.at(seen, (picks[:, 0], picks[:, 1]), 1 / draws)
    assert np.abs(seen - joint).max() < 5 * np.sqrt(0.25 / draws)
    assert_close(q[0, 0], first)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_a_pick_stays_in_the_pool_at_the_ends_of_the_unit_interval(uniform):
    """Cumulative sums in float32 may end below one."""
    scores = Scores(jnp.full((1, 7), 0.1), jnp.full((1, 4, 7, 7), 0.1))
    picks, q = sampled_walk(scores, jnp.ones(1), jnp.full((1, 5), uniform))
    assert picks.tolist() == [[0 if uniform == 0 else 6] * 5]
    assert_close(q, np.full((1, 5, 7), 1 / 7))


def test_a_uniform_number_on_a_boundary_belongs_to_the_next_candidate():
    """Interval k is [sum before, sum after), so that 0 never draws a candidate of probability zero."""
    scores = Scores(jnp.zeros((3, 2)), jnp.zeros((3, 0, 2, 2)))
    picks, _ = sampled_walk(scores, jnp.ones(3), jnp.array([[0.5 - 2**-25], [0.5], [0.75]]))
    assert picks.tolist() == [[0], [1], [1]]


def test_temperature_zero_is_the_greedy_walk_with_certainty_ties_included(rng):
    scores = random_scores(rng, 16, levels=2)
    uniforms = jnp.asarray(rng.uniform(size=(16, SLOTS)), jnp.float32)
    picks, q = sampled_walk(scores, jnp.zeros(16), uniforms)
    np.testing.assert_array_equal(picks, greedy_walk(scores))
    np.testing.assert_array_equal(q, np.eye(RANKS)[np.asarray(picks)])


def test_a_tiny_temperature_is_clamped_so_that_equal_scores_still_share():
    scores = Scores(jnp.array([[2.0, 2.0, 1.0]]), jnp.zeros((1, 0, 3, 3)))
    picks, q = sampled_walk(scores, jnp.full(1, 1e-30), jnp.full((1, 1), 0.75))
    assert picks.tolist() == [[1]]
    assert_close(q, np.array([[[0.5, 0.5, 0.0]]]))


def test_one_slot_needs_no_transition():
    scores = Scores(jnp.array([[0.0, 2.0, 1.0]]), jnp.zeros((1, 0, 3, 3)))
    assert greedy_walk(scores).tolist() == exact_walk(scores).tolist() == [[1]]


@pytest.mark.parametrize("rule", [greedy_walk, exact_walk])
def test_a_walk_compiles_to_one_program_without_a_loop(rule):
    program = jax.jit(rule).lower(Scores(jnp.zeros((2, 3)), jnp.zeros((2, 4, 3, 3)))).compile().as_text()
    assert "while(" not in program
