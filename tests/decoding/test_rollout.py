"""Rollouts over folded parameters against the public code's drafts, and against the modules at those drafts."""

import functools
import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.config import corrector_name
from lilicorr_jax.decoding.rollout import domino_rollout, dspark_rollout
from lilicorr_jax.decoding.schedule import confident_prefix
from lilicorr_jax.models.corrector import corrector_shapes, make_corrector
from lilicorr_jax.models.fold import fold_for_serving
from lilicorr_jax.presets import tiny
from lilicorr_jax.sharding import abstract_parameters
from tests import baselines
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

TINY = tiny()
BATCH, SLOTS, VOCAB, WIDTH = 3, TINY.drafter.num_slots, TINY.target.vocab_size, TINY.drafter.width
quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
fold = quick(fold_for_serving, static_argnums=0)
roll_domino = quick(domino_rollout, static_argnums=0)
roll_dspark = quick(dspark_rollout, static_argnums=0, static_argnames="kind")


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """name -> record, folded parameters and a drafting round's arrays; anchors as the engine holds them."""

    @functools.cache
    def load(name):
        checkpoint, arrays, _ = baselines.golden_drafter(name, tmp_path_factory.mktemp(name))
        tree = checkpoint.params[corrector_name(checkpoint.corrector)]
        config = replace(checkpoint.corrector, num_slots=6)  # the reference drafts from all six rows
        arrays["anchor_token_ids"] = arrays["anchor_token_ids"].astype(np.int32)
        return config, fold(config, tree, baselines.golden_target(name)[0]), arrays

    return load


def block(arrays):
    return arrays["base_logits"], arrays["draft_hidden"], arrays["anchor_token_ids"]


def test_dominos_drafts_are_the_public_codes(golden):
    config, folded, arrays = golden("domino")
    drafts = roll_domino(config, folded, *block(arrays))
    np.testing.assert_array_equal(drafts, arrays["greedy_tokens"])
    np.testing.assert_array_equal(drafts[:, :5], arrays["greedy_tokens_reference_first_Bminus1"])


@pytest.mark.parametrize("name", baselines.KINDS)
def test_dsparks_greedy_drafts_and_confidences_are_the_public_codes(golden, name):
    config, folded, arrays = golden(name)
    rolled = roll_dspark(config, folded, *block(arrays))
    np.testing.assert_array_equal(rolled.draft_ids, arrays[f"{name}/greedy_tokens"])
    assert_close(rolled.confidence, arrays[f"{name}/confidence_logits"])
    assert rolled.q is None


@pytest.mark.parametrize("name", baselines.KINDS)
def test_sampled_drafts_have_the_public_codes_q_along_its_path(golden, name):
    """Numbers in the middle of the greedy tokens' share of the golden q, so that these tokens are drawn."""
    config, folded, arrays = golden(name)
    q, path = arrays[f"{name}/q_T1"].astype(np.float64), arrays[f"{name}/greedy_tokens"]
    share = np.take_along_axis(q, path[..., None], -1)[..., 0]
    ends = np.take_along_axis(np.cumsum(q, axis=-1), path[..., None], -1)[..., 0]
    rolled = roll_dspark(
        config, folded, *block(arrays), kind="sampled", temperature=jnp.ones(2),
        uniforms=jnp.asarray(ends - share / 2, jnp.float32),
    )  # fmt: skip
    np.testing.assert_array_equal(rolled.draft_ids, path)
    assert_close(rolled.q, arrays[f"{name}/q_T1"])


@pytest.mark.parametrize("name", baselines.KINDS)
def test_confident_prefixes_are_the_public_codes(golden, name):
    arrays = golden(name)[-1]
    losses = json.loads((baselines.GOLDEN / "dspark/losses.json").read_text())
    confidence = jax.nn.sigmoid(arrays[f"{name}/confidence_logits"])
    lengths = losses["confident_prefix_length"][name]
    assert {0, 6} <= {length for both in lengths.values() for length in both}
    for threshold, wanted in lengths.items():
        np.testing.assert_array_equal(confident_prefix(confidence, float(threshold)), wanted)


CASES = {
    "domino": TINY.domino,
    "domino without plain slots": replace(TINY.domino, plain_slots=0),
    "rnn": replace(TINY.dspark, kind="rnn"),
    "vanilla without confidence": replace(TINY.dspark, has_confidence=False),
    "gated with a confidence of states": replace(TINY.dspark, kind="gated", confidence_reads_token=False),
}


def random_block(config, seed: int = 0, logits_scale: float = 1.0):
    rng = np.random.default_rng(seed)
    shapes = abstract_parameters(make_corrector(config), *corrector_shapes(config))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), shapes)
    embedding = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    logits = (logits_scale * rng.normal(size=(BATCH, SLOTS, VOCAB))).astype(np.float32)
    states = rng.normal(size=(BATCH, SLOTS, WIDTH)).astype(np.float32)
    return params, embedding, (logits, states, rng.integers(0, VOCAB, BATCH).astype(np.int32))


def unfolded(config, params, embedding, prev_ids, states):
    """The correction of every slot by the module at given tokens, and the confidence."""
    module = make_corrector(config)
    if config in (CASES["domino"], CASES["domino without plain slots"]):
        return quick(module.apply)({"params": params}, embedding[prev_ids], states), None
    return quick(module.apply)({"params": params}, prev_ids, states)


@pytest.mark.parametrize("name", CASES)
def test_every_draft_is_the_argmax_of_the_unfolded_module_at_the_drafts_before_it(name):
    config = CASES[name]
    params, embedding, arguments = random_block(config)
    folded = fold(config, params, embedding)
    if name.startswith("domino"):
        drafts, confidence = roll_domino(config, folded, *arguments), None
    else:
        drafts, _, confidence = roll_dspark(config, folded, *arguments)
    logits, states, anchor_id = arguments
    correction, wanted = unfolded(config, params, embedding, baselines.before(anchor_id, np.asarray(drafts)), states)
    np.testing.assert_array_equal(drafts, np.argmax(logits + np.asarray(correction), axis=-1))
    assert np.mean(np.argmax(logits, -1) != np.asarray(drafts)) > 0.3, "the correction decides too little"
    assert (confidence is None) == (wanted is None)
    if wanted is not None:
        assert_close(confidence, wanted, "folded")


def test_sampled_drafts_are_drawn_from_the_q_that_is_handed_on():
    """Row 0 at temperature 0 drafts greedily with certainty; the others draw by the cumulative sums of their q."""
    config = CASES["rnn"]
    params, embedding, arguments = random_block(config)
    folded = fold(config, params, embedding)
    temperature = np.array([0.0, 0.7, 1.3], np.float32)
    uniforms = np.random.default_rng(3).random((BATCH, SLOTS)).astype(np.float32)
    rolled = roll_dspark(config, folded, *arguments, kind="sampled", temperature=temperature, uniforms=uniforms)
    logits, states, anchor_id = arguments
    drafts = np.asarray(rolled.draft_ids)
    correction, _ = unfolded(config, params, embedding, baselines.before(anchor_id, drafts), states)
    scaled = (logits + np.asarray(correction)).astype(np.float64)[1:] / temperature[1:, None, None]
    wanted = np.exp(scaled - scaled.max(-1, keepdims=True))
    assert rolled.q.dtype == jnp.float32
    assert_close(rolled.q[1:], (wanted / wanted.sum(-1, keepdims=True)).astype(np.float32))
    greedy = np.asarray(roll_dspark(config, folded, *arguments).draft_ids)
    np.testing.assert_array_equal(drafts[0], greedy[0])
    np.testing.assert_array_equal(rolled.q[0], np.eye(VOCAB)[greedy[0]])
    assert np.any(drafts[1:] != greedy[1:])
    reached = np.cumsum(np.asarray(rolled.q, np.float64), axis=-1)
    drawn = [[np.searchsorted(reached[b, s], uniforms[b, s], "right") for s in range(SLOTS)] for b in range(BATCH)]
    np.testing.assert_array_equal(drafts, drawn)


def test_in_bfloat16_the_q_handed_on_is_the_float32_array_that_was_drawn_from():
    """Logits that bfloat16 rounds together; the numbers lie beside the edges of q, where another q draws otherwise."""
    config = replace(TINY.dspark, dtype="bfloat16")
    params, embedding, (logits, states, anchor_id) = random_block(config, logits_scale=0.01)
    logits, states = jnp.asarray(logits + 10, jnp.bfloat16), jnp.asarray(states, jnp.bfloat16)
    folded = fold(config, params, jnp.asarray(embedding, jnp.bfloat16))

    def roll(noise):
        return roll_dspark(
            config, folded, logits, states, anchor_id, kind="sampled", temperature=jnp.ones(BATCH), uniforms=noise
        )

    first = roll(jnp.full((BATCH, SLOTS), 0.5))
    assert first.q.dtype == jnp.float32
    edges = np.cumsum(np.asarray(first.q)[:, 0], axis=-1)[:, VOCAB // 2]
    for side, token in ((-1e-5, VOCAB // 2), (1e-5, VOCAB // 2 + 1)):
        noise = np.full((BATCH, SLOTS), 0.5, np.float32)
        noise[:, 0] = edges + side
        again = roll(noise)
        np.testing.assert_array_equal(again.q[:, 0], first.q[:, 0])
        np.testing.assert_array_equal(again.draft_ids[:, 0], token)


@pytest.mark.parametrize("name", ["domino", "rnn"])
def test_what_was_multiplied_out_is_not_kept_twice(name):
    config = CASES[name]
    params, embedding, _ = random_block(config)
    folded = fold(config, params, embedding)
    if name == "domino":
        assert_close(folded.input_table, embedding @ np.asarray(params["gru_input"]["kernel"]), "folded")
        assert folded.state_kernel.shape == (config.state_width, 3 * config.state_width + config.bottleneck_width)
    sizes = sum(leaf.size for leaf in jax.tree.leaves(folded))
    kept = sum(leaf.size for leaf in jax.tree.leaves(params))
    table = VOCAB * 3 * config.state_width - params["gru_input"]["kernel"].size if name == "domino" else 0
    assert sizes <= kept + table


def test_a_rollout_draws_only_with_what_it_needs():
    config = TINY.dspark
    params, embedding, arguments = random_block(config)
    with pytest.raises(ValueError, match="'sampled'"):
        roll_dspark(config, fold(config, params, embedding), *arguments, kind="sampled")
