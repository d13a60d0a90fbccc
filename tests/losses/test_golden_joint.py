"""The whole objective, drafter, reranker and losses together, against the gradients of the public code.

The golden target is a table of features and logits, so these stand in for its pass; everything else is the trainer's.
"""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import train.objective as trained
from lilicorr_jax.config import ObjectiveConfig
from lilicorr_jax.conversion.checkpoint import checkpoint_rules, load_drafter
from lilicorr_jax.conversion.rules import flat
from lilicorr_jax.losses.rerank import gold_gaps
from lilicorr_jax.losses.terms import Terms, joint_loss, loss_counts, loss_sums
from lilicorr_jax.sharding import make_mesh
from tests.losses.arrays import golden_arrays, golden_target_logits, target_of
from tests.tolerance import assert_close, assert_gradients_close
from train.data import Batch

RULE = ObjectiveConfig(lattice_blocks="whole")
VARIANTS = {"base": RULE, "margin": ObjectiveConfig(lattice_blocks="whole", margin_weight=0.5)}


class Lesson(NamedTuple):
    """Terms of the golden batch, and the gradients of any function of them."""

    terms: Terms
    pull: object  # cotangent of the terms -> gradients by the public names, and that of the drafter's states
    scalars: dict
    gradients: dict


@pytest.fixture(scope="module")
def lesson(golden):
    arrays = {name: jnp.asarray(value) for name, value in golden_arrays(golden).items()}
    checkpoint = load_drafter(golden / "lilicorr")
    rules = checkpoint_rules(checkpoint.drafter, checkpoint.corrector)
    objective = make_objective(checkpoint)
    batch = Batch(
        token_ids=arrays["input_ids"],
        loss_mask=arrays["loss_mask"] > 0,
        length=jnp.full(2, arrays["input_ids"].shape[1]),
        example_id=jnp.arange(2),
    )
    target = {"embed": {"embedding": arrays["embed_tokens"]}, "unembed": {"embedding": arrays["lm_head"]}}

    def terms_of(params, nudge):
        with pytest.MonkeyPatch.context() as patch:
            put_golden_target(patch, golden_arrays(golden), nudge)
            return objective(params, target, batch, jnp.int32(0))

    @jax.jit
    def run(params, nudge, cotangent):
        terms, pull = jax.vjp(terms_of, params, nudge)
        return terms, pull(cotangent)

    nudge = jnp.zeros_like(arrays["draft_hidden"][:, :, 1:])

    def pull(cotangent):
        params, of_states = run(checkpoint.params, nudge, jax.tree.map(np.float32, cotangent))[1]
        found = flat(params)
        named = {rule.name: rule.layout.write(np.asarray(found[rule.path])) for rule in rules}
        return named | {"@draft_hidden": np.pad(of_states, ((0, 0), (0, 0), (1, 0), (0, 0)))}

    folder = golden / "lilicorr"
    return Lesson(
        terms=run(checkpoint.params, nudge, jax.tree.map(np.float32, Terms.zero()))[0],
        pull=pull,
        scalars=json.loads((folder / "scalars.json").read_text()),
        gradients=load_file(folder / "grads.safetensors"),
    )


def make_objective(checkpoint) -> trained.Objective:
    return trained.Objective(
        target=target_of(checkpoint.drafter),
        drafter=checkpoint.drafter,
        corrector=checkpoint.corrector,
        weights=RULE,
        mesh=make_mesh(),
        anchors=3,
        num_candidates=checkpoint.corrector.num_candidates,
        num_steps=1,
        seed=0,
        vocabulary_chunk=8,
        anchor_chunk=2,
    )


def put_golden_target(patch, arrays, nudge) -> None:
    """The golden features, anchors and logits in place of a target's; `nudge` is added to the drafter's states."""
    anchors = trained.Anchors(
        position=jnp.asarray(arrays["anchor_positions"]), is_kept=jnp.asarray(arrays["block_keep_mask"] > 0)
    )
    features = jnp.asarray(arrays["target_hidden"])
    gaps = gold_gaps(*map(jnp.asarray, golden_target_logits(arrays)))
    draft_states = trained.draft_states

    def nudged(*args):
        context, states = draft_states(*args)
        return context, states + nudge

    patch.setattr(trained, "read_target", lambda *_: trained.Lesson(features=features, hidden=features[..., :1]))
    patch.setattr(trained, "choose_anchors", lambda *_: anchors)
    patch.setattr(trained, "target_gaps", lambda *_: gaps)
    patch.setattr(trained, "draft_states", nudged)


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_those_of_the_public_code(lesson, variant):
    config = VARIANTS[variant]
    lattice = loss_sums(lesson.terms, config).lattice / loss_counts(lesson.terms).lattice
    assert_close(lattice, lesson.scalars[f"{variant}.lilicorr_loss"], "loss")
    assert_close(joint_loss(lesson.terms, config), lesson.scalars[f"{variant}.total_loss"], "loss")
    assert float(lesson.terms.num_lattice_slots) == lesson.scalars["supervised_count"]


@pytest.mark.parametrize("scope", ["total", "lattice_only"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_public_code(lesson, variant, scope):
    config, kind = VARIANTS[variant], f"{variant}_{scope}"

    def loss(terms):
        lattice = loss_sums(terms, config).lattice / loss_counts(terms).lattice
        return joint_loss(terms, config) if scope == "total" else lattice

    gradients = lesson.pull(jax.grad(loss)(lesson.terms))
    expected = {
        name.removeprefix(f"{kind}."): value for name, value in lesson.gradients.items() if name.startswith(f"{kind}.")
    }
    assert len(expected) >= 13
    assert_gradients_close({name: gradients[name] for name in expected}, expected)
    norm = np.sqrt(sum(np.sum(np.square(g)) for name, g in gradients.items() if name != "@draft_hidden"))
    assert_close(norm, lesson.scalars[f"{kind}.global_grad_norm"])
