"""Domino's and DSpark's whole objectives, drafter and correction together, against the public codes' gradients.

The golden targets are tables of features and states, which stand in for their pass; all else is the trainer's.
"""

import json
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.objective as trained
from lilicorr_jax.config import ObjectiveConfig
from lilicorr_jax.conversion.checkpoint import DrafterCheckpoint, checkpoint_rules
from lilicorr_jax.conversion.rules import flat
from lilicorr_jax.sharding import make_mesh
from tests.baselines import KINDS, golden_drafter, golden_target
from tests.losses.arrays import target_of
from tests.tolerance import assert_close, assert_gradients_close
from train.data import Batch

UNSHIFTED = "domino, unshifted labels"


class Lesson(NamedTuple):
    """What we make of a golden batch, and what the public code made of it."""

    loss: jax.Array
    gradients: dict  # by the public names of the parameters
    expected_loss: float
    expected_gradients: dict  # of the correction
    expected_norms: dict  # of every gradient


@pytest.fixture(scope="module", params=["domino", UNSHIFTED, *KINDS])
def lesson(golden, request, tmp_path_factory) -> Lesson:
    name = "domino" if request.param == UNSHIFTED else request.param
    drafted = golden_drafter(name, tmp_path_factory.mktemp(name))
    checkpoint = whole_block(drafted.checkpoint, is_shifted=request.param != UNSHIFTED)
    loss, gradients = run(checkpoint, drafted.train, *golden_target(name))
    found = flat(gradients)
    rules = checkpoint_rules(checkpoint.drafter, checkpoint.corrector)
    named = {rule.name: rule.layout.write(np.asarray(found[rule.path])) for rule in rules}
    scalars = json.loads((golden / ("domino" if name == "domino" else "dspark") / "losses.json").read_text())
    if name == "domino":
        case = "shift0_pure0" if request.param == UNSHIFTED else "shift1_pure1"
        expected, prefix = scalars[f"{case}/lambda0.35"], f"{case}/lambda0.35/grad/"
    else:
        expected, prefix = scalars["terms"][name], f"{name}/grad/"
    whole = {key.removeprefix(prefix): value for key, value in drafted.train.items() if key.startswith(prefix)}
    return Lesson(loss, named, expected["loss"], whole, expected["grad_l2"])


def whole_block(checkpoint: DrafterCheckpoint, is_shifted: bool) -> DrafterCheckpoint:
    """The golden block has six rows, which all speak for slots unless the labels are unshifted."""
    slots = 6 if is_shifted else 5
    convention = "next" if is_shifted else "same"
    drafter = replace(checkpoint.drafter, input_rows=6, num_slots=slots, slot_convention=convention)
    fields = dict(num_slots=slots) if is_shifted else dict(num_slots=slots, plain_slots=0)
    return replace(checkpoint, drafter=drafter, corrector=replace(checkpoint.corrector, **fields))


def run(checkpoint: DrafterCheckpoint, arrays: dict, embedding: np.ndarray, head: np.ndarray):
    """Loss and gradients of a step in which Domino's weight of the uncorrected cross-entropy is 0.35."""
    is_domino = "domino" in checkpoint.params
    objective = trained.Objective(
        target=target_of(checkpoint.drafter),
        drafter=checkpoint.drafter,
        corrector=checkpoint.corrector,
        weights=ObjectiveConfig(slot_decay=7.0 if is_domino else 4.0),
        mesh=make_mesh(),
        anchors=3,
        num_candidates=4,
        num_steps=100,
        seed=0,
        vocabulary_chunk=8,
        anchor_chunk=2,
    )
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    batch = Batch(
        token_ids=arrays["input_ids"].astype(jnp.int32), loss_mask=arrays["loss_mask"] > 0, length=jnp.full(2, 30),
        example_id=jnp.arange(2),
    )  # fmt: skip
    features = arrays["target_hidden" if is_domino else "target_hidden_states"]
    opinions = features[..., : head.shape[-1]] if is_domino else arrays["target_last_hidden_states"]
    anchors = trained.Anchors(arrays["anchor_positions"].astype(jnp.int32), arrays["block_keep_mask"])
    target = {"embed": {"embedding": jnp.asarray(embedding)}, "unembed": {"embedding": jnp.asarray(head)}}

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return objective.loss(objective(params, target, batch, jnp.int32(65)), 65)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "read_target", lambda *_: trained.Lesson(features=features, hidden=opinions))
        patch.setattr(trained, "choose_anchors", lambda *_: anchors)
        return loss(checkpoint.params)


def test_loss_is_that_of_the_public_code(lesson):
    assert_close(lesson.loss, lesson.expected_loss, "loss")


def test_gradients_of_the_correction_are_those_of_the_public_code(lesson):
    expected = lesson.expected_gradients
    assert_gradients_close({name: lesson.gradients[name] for name in expected}, expected)


def test_every_gradients_norm_is_that_of_the_public_code(lesson):
    assert len(lesson.expected_norms) >= 29 and lesson.expected_norms.keys() == lesson.gradients.keys()
    norms = {name: np.linalg.norm(gradient) for name, gradient in lesson.gradients.items()}
    assert_close(norms, lesson.expected_norms)
