"""The objective's pieces against serving, NumPy loops and relations; its sum and gradients stand against golden data
in tests/losses/test_golden_joint.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.objective as trainer
from lilicorr_jax.cache import append, init_cache
from lilicorr_jax.decoding import propose
from lilicorr_jax.decoding.candidates import candidate_pool
from lilicorr_jax.models.corrector import make_corrector
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.fold import fold_for_serving
from lilicorr_jax.models.target import Target, unembedding
from tests.tolerance import assert_close
from tests.train.texts import few_layers_parameters, make_objective, random_batch
from train.data import Batch
from train.objective import (
    Anchors,
    Labels,
    Lesson,
    Objective,
    choose_anchors,
    draft_states,
    draw_pool,
    label_slots,
    read_target,
    target_gaps,
)

pytestmark = pytest.mark.usefixtures("strict_dtypes")

OBJECTIVE = make_objective()
S = OBJECTIVE.drafter.num_slots


@pytest.fixture(scope="module")
def parameters():
    return jax.tree.map(jnp.asarray, few_layers_parameters())


@pytest.fixture(scope="module")
def batch() -> Batch:
    return jax.tree.map(jnp.asarray, random_batch(rows=2))


@pytest.fixture(scope="module")
def anchors() -> Anchors:
    """One at the very beginning, two whose blocks overlap, and one whose block runs past the end of the text."""
    position = jnp.array([[0, 7, 9, 22], [1, 2, 12, 23]], jnp.int32)
    return Anchors(position=position, is_kept=jnp.ones_like(position, bool))


@pytest.fixture(scope="module")
def lesson(parameters, batch) -> Lesson:
    return jax.jit(partial(read_target, OBJECTIVE))(parameters[1], batch)


@pytest.fixture(scope="module")
def draft(parameters):
    """(batch, lesson, anchors) -> the trainer's context rows and slot states, as one compiled function."""
    trained, target = parameters
    return jax.jit(lambda *inputs: draft_states(OBJECTIVE, trained["drafter"], target, *inputs))


def serve_rows(objective: Objective, parameters, text, anchor):
    """A drafted block as serving computes it: prefill, context rows in a cache, one block at its length.

    Args:
        text: one row, zero from the anchor on but for the anchor itself.
        anchor: its position, the length of the prompt.
    """
    trained, target = parameters
    verifier = Target(objective.target).bind({"params": target})
    drafter = Drafter(objective.drafter).bind({"params": trained["drafter"]})
    features = verifier(text[None], capture=objective.drafter.target_layer_ids).features
    rows = drafter.context_rows(drafter.fuse(features), jnp.arange(text.shape[0])[None])
    cache = append(init_cache(objective.drafter, 1, 32), rows, jnp.zeros(1, jnp.int32))
    ids = jnp.full((1, objective.drafter.input_rows), objective.drafter.mask_id).at[:, 0].set(text[anchor])
    return drafter.draft(verifier.embed(ids), cache=cache, length=anchor[None])


@jax.jit
def serve(parameters, text, anchor):
    """The states and logits of its slots."""
    states = serve_rows(OBJECTIVE, parameters, text, anchor)[0, 1 : S + 1]
    return states, Target(OBJECTIVE.target).bind({"params": parameters[1]}).unembed(states)


def test_training_computes_the_states_and_candidates_that_serving_computes(parameters, batch, lesson, anchors, draft):
    _, states = draft(batch, lesson, anchors)
    labels = label_slots(batch, anchors, S)
    pool = jax.jit(lambda states: draw_pool(OBJECTIVE, states, unembedding(parameters[1], OBJECTIVE.target), labels))(
        states
    )
    for row, block in [(0, 1), (0, 3), (1, 0), (1, 2)]:
        anchor = int(anchors.position[row, block])
        text = jnp.where(jnp.arange(24) <= anchor, batch.token_ids[row], 0)
        served, logits = serve(parameters, text, jnp.int32(anchor))
        assert_close(states[row, block], served)
        candidates = candidate_pool(logits, OBJECTIVE.num_candidates)
        np.testing.assert_array_equal(pool.ids[row, block], candidates.ids)
        assert_close(pool.logprobs[row, block], candidates.logprobs)
        gold = jnp.take_along_axis(jax.nn.log_softmax(logits), labels.gold_ids[row, block][:, None], axis=-1)[:, 0]
        assert_close(pool.gold_logprobs[row, block], gold)


def test_tokens_behind_the_anchor_never_reach_a_block(parameters, batch, lesson, anchors, draft):
    _, states = draft(batch, lesson, anchors)
    read = jax.jit(partial(read_target, OBJECTIVE))
    for row, block in [(0, 0), (0, 1), (1, 2)]:
        anchor = int(anchors.position[row, block])
        later = batch.replace(token_ids=batch.token_ids.at[row, anchor + 1 :].add(1))
        _, changed = draft(later, read(parameters[1], later), anchors)
        np.testing.assert_array_equal(changed[row, block], states[row, block])
        itself = batch.replace(token_ids=batch.token_ids.at[row, anchor].add(1))
        _, changed = draft(itself, lesson, anchors)
        assert np.abs(changed[row, block] - states[row, block]).max() > 1e-3


def test_target_features_reach_a_block_only_from_before_its_anchor(batch, lesson, anchors, draft):
    _, states = draft(batch, lesson, anchors)
    for row, block in [(0, 0), (0, 1), (1, 2)]:
        anchor = int(anchors.position[row, block])
        hidden = lesson._replace(features=lesson.features.at[row, anchor:].add(3.0))
        np.testing.assert_array_equal(draft(batch, hidden, anchors)[1][row, block], states[row, block])
        if anchor:
            seen = lesson._replace(features=lesson.features.at[row, anchor - 1].add(3.0))
            assert np.abs(draft(batch, seen, anchors)[1][row, block] - states[row, block]).max() > 1e-3


def test_blocks_of_one_row_do_not_see_each_other(batch, lesson, anchors, draft):
    _, states = draft(batch, lesson, anchors)
    moved = anchors._replace(position=anchors.position.at[0, 2].set(4))
    _, changed = draft(batch, lesson, moved)
    np.testing.assert_array_equal(changed[0, [0, 1, 3]], states[0, [0, 1, 3]])


def test_labels_are_the_tokens_behind_the_anchor_where_they_exist_and_count(batch, anchors):
    dropped = anchors._replace(is_kept=anchors.is_kept.at[1, 1].set(False))
    labels = label_slots(batch, dropped, S)
    length = batch.token_ids.shape[1]
    for row, block, slot in np.ndindex(2, 4, S):
        place = int(anchors.position[row, block]) + slot + 1
        counts = bool(dropped.is_kept[row, block]) and place < length and bool(batch.loss_mask[row, place])
        assert bool(labels.is_supervised[row, block, slot]) == counts
        if counts:
            assert labels.gold_ids[row, block, slot] == batch.token_ids[row, place]
    assert labels.is_supervised.any() and not labels.is_supervised.all()


draw_anchors = jax.jit(choose_anchors, static_argnums=(1, 2))


def valid_places(batch: Batch, row: int) -> list[int]:
    mask = np.asarray(batch.loss_mask[row])
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


def test_anchors_are_distinct_supervised_pairs_in_rising_order():
    batch = jax.tree.map(jnp.asarray, random_batch(rows=6))
    for num_anchors in (3, 20):
        anchors = draw_anchors(batch, num_anchors, 0, jnp.int32(5))
        for row in range(6):
            valid = valid_places(batch, row)
            kept = anchors.position[row][anchors.is_kept[row]].tolist()
            assert len(kept) == min(num_anchors, len(valid)) and set(kept) <= set(valid)
            assert kept == sorted(set(kept))
            assert not anchors.position[row][~anchors.is_kept[row]].any()
    assert (~anchors.is_kept).any(), "no row was short of anchors"


def test_anchors_depend_on_seed_step_and_example_and_not_on_the_place_in_the_batch():
    batch = jax.tree.map(jnp.asarray, random_batch(rows=6))
    order = jnp.array([3, 0, 5, 1, 4, 2])
    shuffled = jax.tree.map(lambda x: x[order], batch)
    draw = lambda batch, seed, step: np.asarray(draw_anchors(batch, 3, seed, jnp.int32(step)).position)
    np.testing.assert_array_equal(draw(shuffled, 0, 5), draw(batch, 0, 5)[order])
    renamed = batch.replace(example_id=batch.example_id + 1)
    for other in (draw(batch, 0, 6), draw(batch, 1, 5), draw(renamed, 0, 5)):
        assert (other != draw(batch, 0, 5)).any()


def test_anchors_of_a_row_do_not_depend_on_its_padding():
    batch = jax.tree.map(jnp.asarray, random_batch(rows=6))
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 9))) if x.ndim == 2 else x
    longer = jax.tree.map(pad, batch)
    for num_anchors in (3, 30):  # 30 are more than the shorter row has places
        short, long = (draw_anchors(rows, num_anchors, 0, jnp.int32(5)) for rows in (batch, longer))
        for row in range(6):
            kept = [anchors.position[row][anchors.is_kept[row]].tolist() for anchors in (short, long)]
            assert kept[0] == kept[1]


def test_every_valid_place_is_drawn_equally_often():
    batch = jax.tree.map(jnp.asarray, random_batch(rows=1))
    valid, draws = valid_places(batch, 0), 4000
    position = jax.jit(jax.vmap(lambda step: choose_anchors(batch, 2, 0, step).position[0]))(jnp.arange(draws))
    counts = np.bincount(np.asarray(position).ravel(), minlength=24)
    expected = 2 * draws / len(valid)
    assert counts[valid].sum() == 2 * draws
    assert np.abs(counts[valid] - expected).max() < 5 * np.sqrt(expected)


def test_target_gaps_compare_logits_of_the_row_that_predicts_the_slot(parameters, batch, lesson, anchors):
    rng = np.random.default_rng(0)
    candidates = rng.integers(0, 96, (2, 4, S, 3))
    labels: Labels = label_slots(batch, anchors, S)
    head = unembedding(parameters[1], OBJECTIVE.target)
    gaps = target_gaps(lesson.hidden, head, anchors, labels, jnp.asarray(candidates))
    logits = np.asarray(lesson.hidden, np.float64) @ np.asarray(head, np.float64).T
    for row, block, slot, rank in np.ndindex(2, 4, S, 3):
        if labels.is_supervised[row, block, slot]:
            place = int(anchors.position[row, block]) + slot  # one before the slot's token
            gold = logits[row, place, batch.token_ids[row, place + 1]]
            wanted = max(gold - logits[row, place, candidates[row, block, slot, rank]], 0.0)
            np.testing.assert_allclose(gaps[row, block, slot, rank], wanted, atol=1e-5)


def test_terms_of_the_drafter_are_sums_over_the_slots_of_its_blocks(parameters, draft):
    """And a drafter alone has no others. Oracle: loops over blocks and slots, whole log-softmax rows in float64."""
    batch = jax.tree.map(jnp.asarray, random_batch(rows=2))
    trained, target = parameters
    step = jnp.int32(7)
    alone = make_objective(method="dflash")
    terms = vars(jax.jit(alone)({"drafter": trained["drafter"]}, target, batch, step))
    lesson = jax.jit(partial(read_target, OBJECTIVE))(target, batch)
    anchors = draw_anchors(batch, OBJECTIVE.anchors, OBJECTIVE.seed, step)
    states = draft(batch, lesson, anchors)[1]
    logits = np.asarray(states, np.float64) @ np.asarray(unembedding(target, OBJECTIVE.target), np.float64).T
    logprobs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    wanted = dict.fromkeys(terms, 0.0)
    for row, block in np.ndindex(anchors.position.shape):
        oracle_runs = top1_runs = True
        for slot in range(S):
            place = int(anchors.position[row, block]) + slot + 1
            supervised = bool(anchors.is_kept[row, block]) and place < 24 and bool(batch.loss_mask[row, place])
            rank = int(
                np.sum(logprobs[row, block, slot] > logprobs[row, block, slot, batch.token_ids[row, place % 24]])
            )
            oracle_runs &= supervised and rank < OBJECTIVE.num_candidates
            top1_runs &= supervised and rank == 0
            wanted["oracle_prefix_sum"] += oracle_runs
            wanted["top1_prefix_sum"] += top1_runs
            wanted["num_blocks"] += supervised and slot == 0
            if supervised:
                weight = np.exp(-slot / OBJECTIVE.weights.slot_decay)
                wanted["slot_weight_sum"] += weight
                wanted["drafter_sum"] -= weight * logprobs[row, block, slot, batch.token_ids[row, place]]
                wanted["num_supervised"] += 1
                wanted["num_covered"] += rank < OBJECTIVE.num_candidates
                wanted["num_correct"] += rank == 0
    assert_close(terms, wanted)
    assert wanted["num_covered"] > 0


@pytest.mark.parametrize("method", ["domino", "dspark"])
def test_terms_of_a_corrector_are_sums_over_slots_that_read_the_gold_tokens_before_them(method):
    """Oracle: loops over blocks and slots, the correction as one whole array, distributions in float64."""
    objective = make_objective(method=method)
    batch, step = jax.tree.map(jnp.asarray, random_batch(rows=2)), jnp.int32(7)
    trained, target = jax.tree.map(jnp.asarray, few_layers_parameters(method))
    head = unembedding(target, objective.target)

    @jax.jit
    def run(trained, target):
        lesson = read_target(objective, target, batch)
        anchors = choose_anchors(batch, objective.anchors, objective.seed, step)
        states = draft_states(objective, trained["drafter"], target, batch, lesson, anchors)[1]
        place = anchors.position[..., None] + jnp.arange(S)[None, None, :]
        previous = jax.vmap(lambda row, at: row[at])(batch.token_ids, jnp.minimum(place, 23))
        inputs = target["embed"]["embedding"][previous] if method == "domino" else previous
        result = make_corrector(objective.corrector).apply({"params": trained[method]}, inputs, states)
        change, confidence = (result, None) if method == "domino" else result
        terms = objective(trained, target, batch, step)
        return terms, anchors, states @ head.T, change, confidence, lesson.hidden @ head.T

    terms, anchors, base, change, confidence, opinions = run(trained, target)
    softmax = lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)
    own, corrected, opinions = (softmax(np.asarray(x, np.float64)) for x in (base, base + change, opinions))
    assert np.abs(corrected - own).max() > 1e-3
    wanted = dict.fromkeys(("drafter", "corrected", "distance", "confidence", "slot_weight", "selected_prefix"), 0.0)
    for row, block in np.ndindex(anchors.position.shape):
        runs = unbroken = True
        for slot in range(S):
            place = int(anchors.position[row, block]) + slot + 1
            counted = bool(anchors.is_kept[row, block]) and place < 24 and bool(batch.loss_mask[row, place])
            unbroken &= counted
            if not (unbroken if method == "dspark" else counted):
                runs = False
                continue
            weight, gold = np.exp(-slot / 7), int(batch.token_ids[row, place])
            here = corrected[row, block, slot]
            runs &= int(here.argmax()) == gold
            wanted["selected_prefix"] += runs
            wanted["slot_weight"] += weight
            wanted["drafter"] -= weight * np.log(own[row, block, slot, gold])
            wanted["corrected"] -= weight * np.log(here[gold])
            if method == "dspark":
                distance = np.abs(here - opinions[row, place - 1]).sum()
                logit = float(confidence[row, block, slot])
                wanted["distance"] += weight * distance
                wanted["confidence"] += weight * (np.logaddexp(0, logit) - (1 - distance / 2) * logit)
    assert_close({name: getattr(terms, f"{name}_sum") for name in wanted}, wanted)


@pytest.mark.parametrize("method", ["domino", "dspark"])
def test_training_picks_what_serving_drafts_as_long_as_the_text_agrees(method, monkeypatch):
    """A text that goes on with a rollout is picked whole; where one token is another, the picked prefix ends there."""
    objective, anchor = make_objective(method=method), 9
    parameters = jax.tree.map(jnp.asarray, few_layers_parameters(method))
    head = unembedding(parameters[1], objective.target)
    proposer = getattr(propose, method)(objective.drafter, objective.corrector, lambda _, states: states @ head.T)
    text = jnp.where(jnp.arange(24) <= anchor, random_batch(rows=1).token_ids[0], 0)

    @jax.jit
    def rollout(parameters):
        folded = fold_for_serving(objective.corrector, parameters[0][method], parameters[1]["embed"]["embedding"])
        rows = serve_rows(objective, parameters, text, jnp.int32(anchor))
        nothing = jnp.zeros((1, objective.drafter.width))
        return proposer({method: folded}, rows, text[anchor][None], nothing, jnp.zeros(1), jnp.zeros((1, S))).draft_ids[
            0
        ]

    here = Anchors(position=jnp.array([[anchor]]), is_kept=jnp.array([[True]]))
    monkeypatch.setattr(trainer, "choose_anchors", lambda *_: here)
    terms_of = jax.jit(objective)
    drafts = np.asarray(rollout(parameters))
    assert len(set(drafts.tolist())) > 1
    for wrong in (None, *range(S)):
        gold = drafts.copy()
        if wrong is not None:
            gold[wrong] = (gold[wrong] + 1) % 90
        ids = text.at[anchor + 1 : anchor + 1 + S].set(gold)
        row = Batch(
            token_ids=ids[None], loss_mask=jnp.ones((1, 24), bool), length=jnp.array([24]), example_id=jnp.array([0])
        )
        assert terms_of(*parameters, row, jnp.int32(0)).selected_prefix_sum == (S if wrong is None else wrong)
