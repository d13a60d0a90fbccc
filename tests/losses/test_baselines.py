"""Domino's and DSpark's objectives on logits: the public code's numbers, NumPy in float64, and what they keep."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.config import ObjectiveConfig
from lilicorr_jax.losses import baselines
from lilicorr_jax.losses import terms as sums
from lilicorr_jax.losses.baselines import (
    SlotReadings,
    SlotRows,
    base_weight,
    confidence_cross_entropy,
    domino_mixture,
    dspark_mixture,
    read_logits,
    read_slots,
)
from lilicorr_jax.losses.drafter import supervised_weights
from lilicorr_jax.losses.prefix import leading_run
from lilicorr_jax.losses.terms import Terms, joint_loss
from tests.program import shapes_made
from tests.tolerance import assert_close, assert_gradients_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

SLOTS, WIDTH, RANK, VOCAB, CANDIDATES = 13, 16, 6, 96, 4
DECAY_4 = ObjectiveConfig(slot_decay=4.0)

# One program each, instead of one for each of their operations.
domino_terms = jax.jit(baselines.domino_terms, static_argnums=3)
dspark_terms = jax.jit(baselines.dspark_terms, static_argnums=4)
metrics = jax.jit(sums.metrics)


@jax.jit
def read_blocks(base, corrected, gold_ids, target=None) -> SlotReadings:
    """`read_logits` of whole blocks [*b, S, V]."""
    flat = [None if x is None else jnp.asarray(x).reshape(-1, x.shape[-1]) for x in (base, corrected, target)]
    readings = read_logits(flat[0], flat[1], jnp.asarray(gold_ids).ravel(), CANDIDATES, flat[2])
    return jax.tree.map(lambda x: x.reshape(*gold_ids.shape, *x.shape[1:]), readings)


@pytest.fixture(scope="module")
def domino(golden):
    folder = golden / "domino"
    return dict(np.load(folder / "train.npz")), json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def dspark(golden):
    folder = golden / "dspark"
    return dict(np.load(folder / "train.npz")), json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize("case", ["shift1_pure1", "shift0_pure0", "shift1_pure0"])
def test_dominos_losses_are_those_of_the_public_code(domino, case):
    arrays, scalars = domino
    first = 1 if case.startswith("shift0") else 0  # unshifted, the anchor's own row speaks for no slot
    slots = lambda name: arrays[f"{case}/{name}"][:, :, first:]
    base = arrays["shift1_pure1/base_logits"][:, :, first:]
    kept = arrays["block_keep_mask"][..., None]
    is_supervised = jnp.asarray((slots("eval_weight_mask") > 0) & kept)
    assert_close(supervised_weights(is_supervised, 7.0), slots("weight_mask") * kept)
    assert not np.array_equal(is_supervised, leading_run(is_supervised)), "no block has a hole"
    config = ObjectiveConfig()
    terms = domino_terms(
        read_blocks(base, slots("final_logits"), slots("target_ids")), jnp.asarray(slots("target_ids")), is_supervised,
        config,
    )  # fmt: skip
    for step, weight in ((100, "0.0"), (65, "0.35"), (0, "1.0")):
        expected = scalars[f"{case}/lambda{weight}"]
        assert_close(joint_loss(terms, config, domino_mixture(config, step, 100)), expected["loss"], "loss")
    means = metrics(terms)
    names = {"corrected_loss": "final_loss", "drafter_loss": "base_loss", "accuracy": "base_accuracy"}
    assert_close({name: means[name] for name in names}, {ours: expected[name] for ours, name in names.items()}, "loss")
    assert float(terms.num_supervised) == expected["accuracy_denom"]
    # The public code counts the anchor with the accepted tokens.
    assert_close(1 + means["selected_prefix"], expected["accept_len"])
    assert_close(1 + means["top1_prefix"], expected["base_accept_len"])


def test_dominos_schedule_is_that_of_the_public_code(golden):
    rows = json.loads((golden / "domino" / "lambda_schedule.json").read_text())
    assert {row["ratio"] for row in rows} == {0.5, 1.0} and {row["start"] for row in rows} == {0.8, 1.0}
    for row in rows:
        config = ObjectiveConfig(base_weight_start=row["start"], base_decay_share=row["ratio"])
        weight = base_weight(config, jnp.int32(row["step"]), row["total"])
        np.testing.assert_allclose(weight, row["lambda_base"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dsparks_losses_are_those_of_the_public_code(dspark, kind):
    arrays, scalars = dspark
    labels = arrays["loss_mask"][:, None] > 0
    place = arrays["anchor_positions"][:, :, None] + np.arange(1, 7)
    inside = np.take_along_axis(np.pad(labels[:, 0], ((0, 0), (0, 9))), place.reshape(2, -1), 1).reshape(place.shape)
    is_supervised = jnp.asarray(inside & arrays["block_keep_mask"][..., None])
    np.testing.assert_array_equal(leading_run(is_supervised), arrays["eval_mask"])
    slots = read_blocks(
        arrays[f"{kind}/draft_logits"], arrays[f"{kind}/draft_logits"], arrays["target_ids"],
        arrays["aligned_target_logits"],
    )  # fmt: skip
    confidence = jnp.asarray(arrays[f"{kind}/confidence_pred"])
    terms = dspark_terms(slots, confidence, jnp.asarray(arrays["target_ids"]), is_supervised, DECAY_4)
    expected = scalars["terms"][kind]
    assert_close(terms.slot_weight_sum, expected["weight_sum"], "loss")
    assert_close(joint_loss(terms, DECAY_4, dspark_mixture(DECAY_4)), expected["loss"], "loss")
    names = {"corrected_loss": "ce_loss", "distance": "l1_loss", "confidence_loss": "confidence_loss"}
    means = metrics(terms)
    assert_close({name: means[name] for name in names}, {ours: expected[name] for ours, name in names.items()}, "loss")
    kept = arrays["eval_mask"]
    assert_close((1 - 0.5 * slots.distance)[kept], arrays[f"{kind}/accept_rate"][kept])


def test_an_unsupervised_slot_ends_dsparks_block_and_not_dominos():
    ones, ids = jnp.ones((1, 4)), jnp.zeros((1, 4), jnp.int32)
    slots = SlotReadings(-ones, ids[..., None], -2 * ones, ids == 0, 0.5 * ones)
    holed = jnp.array([[True, False, True, True]])
    decayed = np.exp(-np.arange(4) / 4)
    of_domino = domino_terms(slots, ids, holed, DECAY_4)
    assert_close(of_domino.slot_weight_sum, decayed[[0, 2, 3]].sum(), "loss")
    assert_close(of_domino.corrected_sum, 2 * decayed[[0, 2, 3]].sum(), "loss")
    of_dspark = dspark_terms(slots, 0 * ones, ids, holed, DECAY_4)
    assert (of_dspark.slot_weight_sum, of_dspark.num_supervised) == (1, 1)
    assert (of_dspark.corrected_sum, of_dspark.distance_sum) == (2, 0.5)
    assert_close(of_dspark.confidence_sum, np.log(2), "loss")
    assert of_domino.selected_prefix_sum == of_dspark.selected_prefix_sum == 1


def test_a_confidence_is_drawn_to_the_chance_of_survival_and_does_not_push_back():
    logits, distance = jnp.array([[0.3, -2.0, 50.0, -50.0]]), jnp.array([[0.5, 1.2, 0.0, 2.0]])
    loss, pull = jax.vjp(confidence_cross_entropy, logits, distance)
    of_logits, of_distance = pull(jnp.ones_like(loss))
    wide, survival = np.asarray(logits, np.float64), np.array([[0.75, 0.4, 1.0, 0.0]])
    log_chance, log_end = -np.logaddexp(0, -wide), -np.logaddexp(0, wide)
    assert_close(loss, -(survival * log_chance + (1 - survival) * log_end))
    assert_close(of_logits, np.exp(log_chance) - survival)
    assert not of_distance.any()


@pytest.fixture
def case(rng) -> tuple[SlotRows, jax.Array, jax.Array]:
    """Rows of some slots, an unembedding and the last matrix of a correction."""
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    gold = jnp.asarray(rng.integers(0, VOCAB, SLOTS), jnp.int32)
    return (
        SlotRows(draw(SLOTS, WIDTH), draw(SLOTS, RANK), gold, draw(SLOTS, WIDTH)),
        draw(VOCAB, WIDTH),
        draw(RANK, VOCAB),
    )


def curved(readings: SlotReadings):
    """A loss that weighs everything differently."""
    return jnp.sum(jnp.square(readings.gold_logprobs) + 3 * readings.base_logprobs + jnp.sin(5 * readings.distance))


def read_plainly(rows: SlotRows, unembedding, correction) -> SlotReadings:
    base = rows.states @ unembedding.T
    target = rows.target_states @ unembedding.T
    return read_logits(base, base + rows.features @ correction, rows.gold_ids, CANDIDATES, target)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_change_neither_readings_nor_gradients(case, chunk):
    rows, unembedding, correction = case

    def value(read, learned):
        readings = read(rows._replace(states=learned[0], features=learned[1]), unembedding, learned[2])
        return curved(readings), readings

    learned = (rows.states, rows.features, correction)
    chunked = partial(read_slots, num_candidates=CANDIDATES, chunk=chunk)
    gradient, readings = jax.jit(jax.grad(partial(value, chunked), has_aux=True))(learned)
    expected_gradient, expected = jax.jit(jax.grad(partial(value, read_plainly), has_aux=True))(learned)
    np.testing.assert_array_equal(readings.candidate_ids, expected.candidate_ids)
    np.testing.assert_array_equal(readings.is_chosen, expected.is_chosen)
    assert_close(readings, expected)
    assert_gradients_close(gradient, expected_gradient)


def test_readings_are_those_of_whole_rows_in_float64(case):
    rows, unembedding, correction = case
    wide = lambda x: np.asarray(x, np.float64)
    base = wide(rows.states) @ wide(unembedding).T
    corrected = base + wide(rows.features) @ wide(correction)
    softmax = lambda logits: np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    own, changed, target = (softmax(x) for x in (base, corrected, wide(rows.target_states) @ wide(unembedding).T))
    gold = np.arange(SLOTS), np.asarray(rows.gold_ids)
    read = jax.jit(read_slots, static_argnums=(3, 4))
    readings = read(rows, unembedding, correction, CANDIDATES, 5)
    assert_close(readings.base_logprobs, np.log(own[gold]))
    assert_close(readings.gold_logprobs, np.log(changed[gold]))
    assert_close(readings.distance, np.abs(changed - target).sum(-1))
    np.testing.assert_array_equal(readings.candidate_ids, np.argsort(-base)[:, :CANDIDATES])
    np.testing.assert_array_equal(readings.is_chosen, corrected.argmax(-1) == gold[1])
    best = jnp.asarray(corrected.argmax(-1), jnp.int32)
    assert read(rows._replace(gold_ids=best), unembedding, correction, CANDIDATES, 5).is_chosen.all()


def test_no_row_of_the_vocabularys_width_outlives_its_chunk(case):
    rows, unembedding, correction = case

    def loss(learned):
        changed = rows._replace(states=learned[0], features=learned[1])
        return curved(read_slots(changed, unembedding, learned[2], CANDIDATES, 5))

    wide = {shape for shape in shapes_made(jax.grad(loss), (rows.states, rows.features, correction)) if VOCAB in shape}
    assert {(5, VOCAB), (RANK, VOCAB)} <= wide
    tables = {(RANK, VOCAB), (VOCAB, RANK), (VOCAB, WIDTH)}
    assert all(shape[0] <= 5 for shape in wide - tables - {(VOCAB,)}), wide


def test_the_frozen_unembedding_receives_nothing(case):
    rows, unembedding, correction = case
    read = lambda table: curved(read_slots(rows, table, correction, CANDIDATES, 5))
    assert not np.any(jax.jit(jax.grad(read))(unembedding))


def test_dspark_refuses_slots_that_were_read_without_the_target():
    ids, supervised = jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool)
    slots = SlotReadings(-jnp.ones((2, 3)), ids[..., None], -jnp.ones((2, 3)), ids == 0)
    with pytest.raises(ValueError, match="distance from the target; got None"):
        dspark_terms(slots, None, ids, supervised, DECAY_4)


def test_a_batch_with_nothing_to_learn_gives_zero(case):
    ids = jnp.zeros((2, 3), jnp.int32)
    slots = SlotReadings(-jnp.ones((2, 3)), ids[..., None], -jnp.ones((2, 3)), ids == 0, jnp.ones((2, 3)))
    nothing = jnp.zeros((2, 3), bool)
    for terms in (
        domino_terms(slots, ids, nothing, DECAY_4),
        dspark_terms(slots, jnp.ones((2, 3)), ids, nothing, DECAY_4),
    ):
        assert not any(map(float, jax.tree.leaves(terms)))
        assert joint_loss(terms, DECAY_4, dspark_mixture(DECAY_4)) == 0
    assert isinstance(terms, Terms)
