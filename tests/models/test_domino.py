"""Domino's correction against the public code's numbers, and what must hold for any weights."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.cache import append, init_cache
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.domino import Domino, domino_shapes
from lilicorr_jax.presets import tiny
from lilicorr_jax.sharding import init_parameters
from tests import baselines
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> baselines.Golden:
    return baselines.golden_drafter("domino", tmp_path_factory.mktemp("domino"))


@pytest.fixture(scope="module")
def embedding() -> np.ndarray:
    return baselines.golden_target("domino")[0]


@partial(jax.jit, static_argnums=0, static_argnames="method")
def run(config, params, *arguments, method=None):
    return Domino(config).apply({"params": params}, *arguments, method=method)


def corrected(golden, embedding, prev_ids, hidden, base, **fields):
    config = replace(golden.checkpoint.corrector, **fields)
    return base + run(config, golden.checkpoint.params["domino"], embedding[prev_ids], hidden)


def test_a_drafting_rounds_logits_and_states_equal_the_public_codes(golden, embedding):
    """All six rows of the golden block, which its code drafts from; a served block uses the first five."""
    arrays = golden.inference
    prev_ids = baselines.before(arrays["anchor_token_ids"], arrays["greedy_tokens"])
    states = run(golden.checkpoint.corrector, golden.checkpoint.params["domino"], embedding[prev_ids], method="states")
    assert_close(states, arrays["gru_states"])
    logits = corrected(golden, embedding, prev_ids, arrays["draft_hidden"], arrays["base_logits"])
    assert_close(logits, arrays["corrected_logits"])
    assert (np.argmax(arrays["base_logits"], -1) != np.argmax(logits, -1)).sum() == 8  # the correction decides


CASES = {"shift1_pure1": ("next", 1), "shift1_pure0": ("next", 0), "shift0_pure0": ("same", 0)}


@pytest.mark.parametrize("case", CASES)
def test_teacher_forced_logits_equal_the_public_codes_under_both_conventions(golden, embedding, case):
    """The tokens of a slot are those before it, whichever row of the block speaks for it."""
    convention, plain_slots = CASES[case]
    arrays, first = golden.train, 0 if convention == "next" else 1
    kept = arrays["block_keep_mask"]
    positions = np.minimum(arrays["anchor_positions"][kept][:, None] + np.arange(6 - first), 29)  # the last of the text
    prev_ids = arrays["input_ids"][np.nonzero(kept)[0][:, None], positions]
    hidden, base = (arrays[f"shift1_pure1/{name}"][kept][:, first:] for name in ("hidden", "base_logits"))
    logits = corrected(golden, embedding, prev_ids, hidden, base, plain_slots=plain_slots)
    assert_close(logits, arrays[f"{case}/final_logits"][kept][:, first:])


def test_a_loaded_drafter_gives_the_public_codes_states(golden, embedding):
    """Backbone and embedding of a block behind eleven context rows, as a server drafts."""
    arrays, config = golden.inference, golden.checkpoint.drafter
    tree = {"params": golden.checkpoint.params["drafter"]}

    @jax.jit
    def draft(features, block_ids):
        context = Drafter(config).apply(tree, features, method="fuse")
        rows = Drafter(config).apply(tree, context, jnp.broadcast_to(jnp.arange(11), (2, 11)), method="context_rows")
        cache = append(init_cache(config, 2, 16), rows, jnp.zeros(2, jnp.int32))
        block = jnp.asarray(embedding)[block_ids]
        return Drafter(config).apply(tree, block, cache=cache, length=jnp.full(2, 11), method="draft")

    assert_close(draft(arrays["target_hidden"], arrays["block_input_ids"]), arrays["draft_hidden"])


TINY = tiny().domino


@pytest.fixture(scope="module")
def random_case():
    rng = np.random.default_rng(0)
    row = jnp.zeros((1, 1, TINY.drafter_width))
    params = init_parameters(Domino(TINY), jax.random.key(0), row, row)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype), params)
    return params, *(rng.normal(size=(2, 5, TINY.drafter_width)).astype(np.float32) for _ in range(2))


@pytest.mark.parametrize("plain_slots", [0, 1, 3])
def test_plain_slots_are_exactly_uncorrected_and_the_others_are_not(random_case, plain_slots):
    change = run(replace(TINY, plain_slots=plain_slots), *random_case)
    assert np.all(np.asarray(change[:, :plain_slots]) == 0)
    assert np.all(np.abs(np.asarray(change[:, plain_slots:])).max(axis=-1) > 1e-3)


def test_a_slot_depends_on_every_token_before_it_and_on_none_behind(random_case):
    params, embeddings, states = random_case
    config = replace(TINY, plain_slots=0)
    right = np.asarray(run(config, params, embeddings, states))
    for slot in range(5):
        other = embeddings.copy()
        other[:, slot] += 1
        differs = np.abs(np.asarray(run(config, params, other, states)) - right).max(axis=(0, 2)) > 1e-6
        np.testing.assert_array_equal(differs, np.arange(5) >= slot)


def test_the_gru_equals_a_loop_in_float64(random_case):
    """PyTorch's form: the reset gate multiplies the projected state."""
    params, embeddings, _ = random_case

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    of_input, of_state = (np.asarray(params[name]["kernel"], np.float64) for name in ("gru_input", "gru_state"))
    state, width, wanted = np.zeros((2, TINY.state_width)), TINY.state_width, []
    for slot in range(5):
        a, b = embeddings[:, slot] @ of_input, state @ of_state
        reset, update = (sigmoid((a + b)[:, i * width : (i + 1) * width]) for i in range(2))
        candidate = np.tanh(a[:, 2 * width :] + reset * b[:, 2 * width :])
        state = (1 - update) * candidate + update * state
        wanted.append(state)
    assert_close(run(TINY, params, embeddings, method="states"), np.stack(wanted, axis=1).astype(np.float32))


def test_initial_weights_are_the_public_codes():
    row = jnp.zeros((1, 1, 40))
    params = init_parameters(Domino(TINY), jax.random.key(0), row, row)
    bound = TINY.state_width**-0.5
    for name in ("gru_input", "gru_state"):
        kernel = np.asarray(params[name]["kernel"])
        assert 0.95 * bound < np.abs(kernel).max() <= bound
    for name in ("joint", "out"):
        assert np.std(params[name]["kernel"]) == pytest.approx(0.02, rel=0.15)
    assert [shape.shape for shape in domino_shapes(TINY)] == [(1, 1, 40)] * 2
