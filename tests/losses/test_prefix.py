"""Which slots count, against loops and the public code's masks."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.losses.prefix import gold_ranks, lattice_slots, leading_run
from tests.losses.arrays import golden_arrays

pytestmark = pytest.mark.usefixtures("strict_dtypes")

EVERY_PATTERN = jnp.asarray(list(itertools.product([False, True], repeat=6)))  # coverage and supervision of 3 slots
COVERED, SUPERVISED = EVERY_PATTERN[:, :3], EVERY_PATTERN[:, 3:]


def test_gold_is_found_at_its_rank_or_reported_missing():
    candidates = jnp.array([[[7, 3, 9], [1, 2, 3], [4, 5, 6]]])
    gold = gold_ranks(candidates, jnp.array([[9, 1, 7]]))
    assert gold.rank.tolist() == [[2, 0, 0]] and gold.rank.dtype == jnp.int32
    assert gold.is_covered.tolist() == [[True, True, False]]


def test_leading_run_ends_before_the_first_gap():
    flags = jnp.array([[True, True, False, True], [False, True, True, True], [True, True, True, True]])
    assert leading_run(flags).astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


def test_prefix_rule_takes_slots_until_one_is_uncovered_or_unsupervised():
    actual = lattice_slots(COVERED, SUPERVISED, "prefix")
    for covered, supervised, slots in zip(COVERED, SUPERVISED, actual, strict=True):
        expected = [all(covered[: s + 1]) and all(supervised[: s + 1]) for s in range(3)]
        assert slots.tolist() == expected


def test_whole_rule_drops_every_block_with_an_unsupervised_slot():
    actual = lattice_slots(COVERED, SUPERVISED, "whole")
    for covered, supervised, slots in zip(COVERED, SUPERVISED, actual, strict=True):
        expected = [all(covered[: s + 1]) and all(supervised) for s in range(3)]
        assert slots.tolist() == expected


def test_coverage_and_counted_slots_are_those_of_the_public_code(golden):
    arrays = golden_arrays(golden)
    gold = gold_ranks(jnp.asarray(arrays["candidate_token_ids"]), jnp.asarray(arrays["target_ids"][..., 1:]))
    np.testing.assert_array_equal(gold.is_covered, arrays["gt_in_pool"])
    np.testing.assert_array_equal(gold.rank, arrays["gt_index"])
    np.testing.assert_array_equal(leading_run(gold.is_covered), arrays["oracle_prefix_mask"])
    counts = lattice_slots(gold.is_covered, jnp.asarray(arrays["slot_mask"].astype(bool)), "whole")
    np.testing.assert_array_equal(counts, arrays["supervised"])


def test_another_rule_is_refused_by_name():
    with pytest.raises(ValueError, match="'suffix'"):
        lattice_slots(COVERED, SUPERVISED, "suffix")
