"""The joint loss as sums and counts: worked by hand, against the public code's totals, and however it is split."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.config import ObjectiveConfig
from lilicorr_jax.losses.prefix import GoldRanks, gold_ranks
from lilicorr_jax.losses.rerank import gold_gaps
from lilicorr_jax.losses.terms import (
    LossParts,
    Terms,
    drafter_terms,
    joint_loss,
    lattice_terms,
    loss_counts,
    loss_sums,
    metrics,
)
from lilicorr_jax.losses.vocabulary import token_logits, vocabulary_pass
from pallas_kernels.match_walk import Scores, greedy_walk
from tests.losses.arrays import golden_arrays, golden_scores, golden_target_logits, random_scores
from tests.tolerance import assert_close, assert_gradients_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

BLOCKS, SLOTS, CANDIDATES = 12, 5, 4
MARGIN = ObjectiveConfig(margin_weight=0.5)


@pytest.fixture(scope="module")
def golden_scalars(golden):
    return json.loads((golden / "lilicorr" / "scalars.json").read_text())


@partial(jax.jit, static_argnums=1)
def all_terms(case, config: ObjectiveConfig) -> Terms:
    logprobs, scores, gold, gaps, is_supervised = case
    return drafter_terms(logprobs, gold, is_supervised, config) + lattice_terms(
        scores, gold, gaps, is_supervised, config
    )


@partial(jax.jit, static_argnums=1)
def loss_and_gradients(case, config: ObjectiveConfig):
    """Of the gold log-probabilities and of the scores."""
    return jax.value_and_grad(lambda learned: joint_loss(all_terms((*learned, *case[2:]), config), config))(case[:2])


@partial(jax.jit, static_argnums=1)
def numerator_gradients(case, config: ObjectiveConfig):
    """As `loss_and_gradients`, before anything is divided."""

    def sums(learned):
        return loss_sums(all_terms((*learned, *case[2:]), config), config)

    return LossParts(
        *(jax.grad(lambda learned, part=part: getattr(sums(learned), part))(case[:2]) for part in LossParts._fields)
    )


@pytest.fixture
def case(rng):
    """Log-probabilities of gold tokens, scores, gold ranks, gaps and supervision of some blocks."""
    return (
        jnp.asarray(-rng.exponential(size=(BLOCKS, SLOTS)), jnp.float32),
        random_scores(rng, BLOCKS, slots=SLOTS, candidates=CANDIDATES),
        GoldRanks(
            rank=jnp.asarray(rng.integers(0, CANDIDATES, size=(BLOCKS, SLOTS)), jnp.int32),
            is_covered=jnp.asarray(rng.uniform(size=(BLOCKS, SLOTS)) < 0.9),
        ),
        jnp.asarray(np.maximum(rng.normal(size=(BLOCKS, SLOTS, CANDIDATES)), 0), jnp.float32),
        jnp.asarray(rng.uniform(size=(BLOCKS, SLOTS)) < 0.9),
    )


def test_two_slots_and_two_candidates_by_hand():
    """Gold ranks 1 then 0; the softmax of (0, ln 3) is (1/4, 3/4), that of (ln 4, 0) is (4/5, 1/5)."""
    scores = Scores(
        start=jnp.log(jnp.array([[1.0, 3.0]])), pair=jnp.log(jnp.array([[[[9.0, 9.0], [4.0, 1.0]]]]))
    )  # row 0 leads out of the wrong predecessor
    gold = GoldRanks(rank=jnp.array([[1, 0]]), is_covered=jnp.array([[True, True]]))
    gaps = jnp.array([[[2.0, 0.0], [0.0, 5.0]]])
    case = jnp.log(jnp.array([[0.5, 0.25]])), scores, gold, gaps, jnp.ones((1, 2), bool)
    terms = all_terms(case, ObjectiveConfig(slot_decay=1.0))
    assert_close(terms.drafter_sum, np.log(2) + np.exp(-1) * np.log(4), "loss")
    assert_close(terms.slot_weight_sum, 1 + np.exp(-1), "loss")
    assert_close(terms.rerank_sum, np.log(4 / 3) + np.log(5 / 4), "loss")
    assert_close(terms.distractor_sum, np.array(2 / 4 + 5 / 5), "loss")
    assert_close(terms.margin_sum, (2 - np.log(3)) + (2 - np.log(4)), "loss")
    assert terms.num_lattice_slots == terms.selected_prefix_sum == terms.oracle_prefix_sum == 2
    assert terms.num_correct == 1 and terms.top1_prefix_sum == 0  # slot 1's gold is no first choice


@pytest.mark.parametrize("gamma, lambda_, mu", [(0.25, 1.0, 0.0), (0.25, 1.0, 0.5), (2.0, 0.0, 1.0)])
def test_weights_enter_as_in_the_paper(gamma, lambda_, mu):
    sums = dict(drafter_sum=6, slot_weight_sum=2, rerank_sum=20, distractor_sum=12, margin_sum=28, num_lattice_slots=4)
    terms = Terms.zero().replace(**{name: jnp.float32(value) for name, value in sums.items()})
    config = ObjectiveConfig(rerank_weight=gamma, distractor_weight=lambda_, margin_weight=mu)
    assert_close(joint_loss(terms, config), np.array(3 + gamma * ((1 - mu) * 5 + lambda_ * 3 + mu * 7)), "loss")


@pytest.mark.parametrize("name, margin_weight", [("base", 0.0), ("margin", 0.5)])
def test_totals_are_those_of_the_public_code(golden, golden_scalars, name, margin_weight):
    arrays = golden_arrays(golden)
    config = ObjectiveConfig(lattice_blocks="whole", margin_weight=margin_weight)
    states, gold_ids = jnp.asarray(arrays["draft_hidden"][:, :, 1:]), jnp.asarray(arrays["target_ids"][..., 1:])
    unembedding = jnp.asarray(arrays["lm_head"])
    summary = vocabulary_pass(states.reshape(-1, states.shape[-1]), unembedding, 4, 8)
    gold = gold_ranks(summary.candidate_ids.reshape(*gold_ids.shape, 4), gold_ids)
    logprobs = token_logits(states, unembedding, gold_ids[..., None])[..., 0]
    logprobs -= summary.log_partition.reshape(gold_ids.shape)
    gaps = gold_gaps(*map(jnp.asarray, golden_target_logits(arrays)))
    is_supervised = jnp.asarray(arrays["slot_mask"].astype(bool))
    terms = all_terms((logprobs, golden_scores(arrays), gold, gaps, is_supervised), config)
    assert float(terms.num_lattice_slots) == golden_scalars["supervised_count"]
    means = metrics(terms)
    expected = {
        "drafter_loss": golden_scalars["dflash_loss"],
        "rerank_loss": golden_scalars["lilicorr_ce"],
        "distractor_loss": golden_scalars["lilicorr_penalty"],
        "margin_loss": golden_scalars["lilicorr_margin"],
        "accuracy": golden_scalars["dflash_accuracy"],
    }
    assert_close({key: means[key] for key in expected}, expected, "loss")
    assert_close(joint_loss(terms, config), golden_scalars[f"{name}.total_loss"], "loss")


def test_a_first_slot_miss_leaves_the_reranker_exactly_nothing(case):
    logprobs, scores, gold, gaps, is_supervised = case
    missed = gold._replace(is_covered=gold.is_covered.at[:, 0].set(False))

    missed_case = logprobs, scores, missed, gaps, is_supervised
    terms = all_terms(missed_case, MARGIN)
    assert terms.rerank_sum == terms.distractor_sum == terms.margin_sum == terms.num_lattice_slots == 0
    assert terms.drafter_sum > 0
    of_logprobs, of_scores = loss_and_gradients(missed_case, MARGIN)[1]
    assert np.any(of_logprobs) and not any(np.any(leaf) for leaf in of_scores)


@pytest.mark.parametrize("rule", ["prefix", "whole"])
def test_a_batch_with_nothing_to_learn_gives_zero_and_no_gradient(case, rule):
    *values, is_supervised = case
    config = ObjectiveConfig(margin_weight=0.5, lattice_blocks=rule)
    value, gradients = loss_and_gradients((*values, jnp.zeros_like(is_supervised)), config)
    assert value == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    assert joint_loss(Terms.zero(), config) == 0 and not any(metrics(Terms.zero()).values())


def test_unsupervised_blocks_count_as_if_they_were_left_out(case):
    """Masked equals filtered, whatever stands in the masked blocks."""
    kept = np.arange(BLOCKS) % 3 > 0
    *values, is_supervised = case
    masked = (*values, is_supervised & jnp.asarray(kept)[:, None])
    filtered = jax.tree.map(lambda x: x[kept], (*values, is_supervised))
    assert_close(all_terms(masked, MARGIN), all_terms(filtered, MARGIN))


def test_unsupervised_slots_at_the_end_count_as_a_shorter_block(case):
    logprobs, scores, gold, gaps, _ = case
    ends = jnp.asarray(np.tile(np.arange(SLOTS) < 3, (BLOCKS, 1)))
    short = (
        logprobs[:, :3],
        Scores(start=scores.start, pair=scores.pair[:, :2]),
        GoldRanks(*(x[:, :3] for x in gold)),
        gaps[:, :3],
        jnp.ones((BLOCKS, 3), bool),
    )
    assert_close(all_terms((logprobs, scores, gold, gaps, ends), MARGIN), all_terms(short, MARGIN))


def test_however_a_batch_is_split_its_terms_loss_and_gradient_are_the_same(case):
    """Parts of unequal content; each numerator's gradients are added up, then divided once."""
    parts = [jax.tree.map(lambda x, start=start: x[start : start + 4], case) for start in range(0, BLOCKS, 4)]
    total = sum((all_terms(part, MARGIN) for part in parts), Terms.zero())
    assert_close(total, all_terms(case, MARGIN))
    loss, gradients = loss_and_gradients(case, MARGIN)
    assert_close(joint_loss(total, MARGIN), loss, "loss")
    counts = loss_counts(total)
    joined = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), *(numerator_gradients(part, MARGIN) for part in parts)
    )
    divided = [jax.tree.map(lambda x, n=n: x / n, tree) for tree, n in zip(joined, counts, strict=True)]
    assert_gradients_close(jax.tree.map(jnp.add, *divided), gradients)


def test_prefixes_end_where_pool_first_choice_or_greedy_walk_leave_the_gold_path(case):
    """The selected prefix needs no walk: as long as it holds, the walk stands on the gold path."""
    logprobs, scores, gold, gaps, is_supervised = case
    walked = greedy_walk(scores)
    likely = gold._replace(rank=jnp.where(jnp.arange(BLOCKS)[:, None] % 4 > 0, walked, gold.rank).at[:, 3].set(0))
    terms = all_terms((logprobs, scores, likely, gaps, is_supervised), MARGIN)
    rank, covered, supervised = map(np.asarray, (likely.rank, likely.is_covered, is_supervised))

    def total(is_right):
        return float(sum(next((s for s in range(SLOTS) if not row[s]), SLOTS) for row in is_right))

    assert terms.oracle_prefix_sum == total(covered & supervised)
    assert terms.top1_prefix_sum == total(covered & supervised & (rank == 0))
    assert terms.selected_prefix_sum == total(covered & supervised & (rank == np.asarray(walked)))
    assert 0 < terms.top1_prefix_sum < terms.selected_prefix_sum < terms.oracle_prefix_sum
    assert int(terms.num_blocks) == supervised[:, 0].sum() and int(terms.num_supervised) == supervised.sum()
    assert int(terms.num_covered) == (covered & supervised).sum()
    means = metrics(terms)
    assert_close(means["coverage"], (covered & supervised).sum() / supervised.sum(), "loss")
    assert_close(means["oracle_prefix"], total(covered & supervised) / supervised[:, 0].sum(), "loss")
