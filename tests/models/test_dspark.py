"""DSpark's Markov heads and its confidence against the public code's numbers, and what must hold for any weights."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.dspark import DSpark, dspark_shapes
from lilicorr_jax.presets import tiny
from lilicorr_jax.sharding import abstract_parameters
from tests import baselines
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

TINY = tiny().dspark
VOCAB, WIDTH, SLOTS = TINY.vocab_size, TINY.drafter_width, TINY.num_slots


@pytest.fixture(scope="module", params=baselines.KINDS)
def golden(request, tmp_path_factory) -> baselines.Golden:
    return baselines.golden_drafter(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def golden_states(tmp_path_factory) -> np.ndarray:
    """Those of the training step, by our drafter at the golden anchors; the three kinds share it."""
    checkpoint, _, arrays = baselines.golden_drafter("vanilla", tmp_path_factory.mktemp("backbone"))
    config, anchors = checkpoint.drafter, arrays["anchor_positions"]
    block_ids = np.full((*anchors.shape, config.input_rows), config.mask_id)
    block_ids[..., 0] = np.take_along_axis(arrays["input_ids"], anchors, axis=1)
    run = jax.jit(partial(Drafter(config).apply, method="from_features"))
    blocks = baselines.golden_target("vanilla")[0][block_ids]
    tree = {"params": checkpoint.params["drafter"]}
    return np.asarray(run(tree, arrays["target_hidden_states"], blocks, jnp.asarray(anchors)))


@partial(jax.jit, static_argnums=0)
def run(config, params, prev_ids, states):
    return DSpark(config).apply({"params": params}, prev_ids, states)


def test_a_drafting_rounds_logits_and_confidences_equal_the_public_codes(golden):
    arrays, ours = golden.inference, golden.checkpoint.corrector
    prev_ids = baselines.before(arrays["anchor_token_ids"], arrays[f"{ours.kind}/greedy_tokens"])
    bias, confidence = run(ours, golden.checkpoint.params["dspark"], prev_ids, arrays["draft_hidden"])
    assert_close(arrays["base_logits"] + bias, arrays[f"{ours.kind}/corrected_logits"])
    assert_close(confidence, arrays[f"{ours.kind}/confidence_logits"])


def test_teacher_forced_logits_and_confidences_equal_the_public_codes(golden, golden_states):
    arrays, ours = golden.train, golden.checkpoint.corrector
    kept = arrays["block_keep_mask"]
    prev_ids = arrays["prev_token_ids"][kept]
    anchors = arrays["input_ids"][np.nonzero(kept)[0], arrays["anchor_positions"][kept]]
    np.testing.assert_array_equal(prev_ids, baselines.before(anchors, arrays["target_ids"][kept]))
    states = golden_states[kept]
    bias, confidence = run(ours, golden.checkpoint.params["dspark"], prev_ids, states)
    base = states @ baselines.golden_target("vanilla")[1].T
    assert_close(base + bias, arrays[f"{ours.kind}/draft_logits"][kept])
    assert_close(confidence, arrays[f"{ours.kind}/confidence_pred"][kept])


def random_case(**fields):
    rng = np.random.default_rng(1)
    config = replace(TINY, **fields)
    shapes = abstract_parameters(DSpark(config), *dspark_shapes(config))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), shapes)
    prev_ids = rng.integers(0, VOCAB, (2, SLOTS)).astype(np.int32)
    return config, params, prev_ids, rng.normal(size=(2, SLOTS, WIDTH)).astype(np.float32)


def moved_slots(config, params, prev_ids, states, slot: int, what: int) -> np.ndarray:
    """Which slots' bias (0) or confidence (1) changes with the token before `slot`."""
    other = prev_ids.copy()
    other[:, slot] = (other[:, slot] + 1) % VOCAB
    right, moved = (np.asarray(run(config, params, ids, states)[what]) for ids in (prev_ids, other))
    return np.abs(moved - right).reshape(2, SLOTS, -1).max(axis=(0, 2)) > 1e-6


@pytest.mark.parametrize("kind", baselines.KINDS)
def test_a_token_moves_its_own_slot_and_through_a_recurrence_all_behind(kind):
    case = random_case(kind=kind)
    for slot in range(SLOTS):
        slots = np.arange(SLOTS)
        wanted = slots >= slot if kind == "rnn" else slots == slot
        np.testing.assert_array_equal(moved_slots(*case, slot, 0), wanted)
        np.testing.assert_array_equal(moved_slots(*case, slot, 1), slots == slot)


def test_a_confidence_that_reads_no_token_reads_none():
    case = random_case(confidence_reads_token=False)
    assert case[1]["confidence_proj"]["kernel"].shape == (WIDTH, 1)
    assert not any(moved_slots(*case, slot, 1).any() for slot in range(SLOTS))


def test_without_a_confidence_there_is_none_to_ask_for():
    config, params, prev_ids, states = random_case(has_confidence=False)
    assert "confidence_proj" not in params and run(config, params, prev_ids, states)[1] is None
    with pytest.raises(ValueError, match="has_confidence is False"):
        DSpark(config).apply({"params": params}, jnp.asarray(prev_ids), jnp.asarray(states), method="confidence")
