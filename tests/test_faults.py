"""The suite can fail: each fault planted here is seen by a check that other tests rely on.

Others are planted where their checks stand: a wrong q, a wrong residual and shared uniforms in
tests/decoding/test_law.py, a cache without head-room in tests/decoding/test_lossless.py, wrong imports in
tests/test_architecture.py.
"""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import pytest

import serve.models
from lilicorr_jax.decoding import propose
from lilicorr_jax.decoding.speculate import DecodeState
from lilicorr_jax.models import dflash, target
from lilicorr_jax.models.layers import Part
from tests import served

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.fixture(scope="module")
def state() -> DecodeState:
    """Behind a faultless prefill, whatever is planted later."""
    return served.prefilled(served.models())


def around(patch: pytest.MonkeyPatch, module, name: str, fault: Callable) -> None:
    """Replaces a function by `fault(right, *arguments)`."""
    right = getattr(module, name)
    patch.setattr(module, name, lambda *arguments, **options: fault(right, *arguments, **options))


def everything_visible(right, queries, parts):
    return right(queries, [Part(part.keys, part.values, jnp.ones_like(part.mask)) for part in parts])


def slot_shifted(patch):
    """The row of the slot before it speaks for each slot."""
    around(patch, propose, "slot_states", lambda right, config, rows: rows[:, : config.num_slots])


def argmin_for_argmax(patch):
    def worst(right, anchor_out, vectors, **options):
        out, in_ = jnp.split(vectors, 2, axis=-1)
        return right(-anchor_out, jnp.concatenate([-out, in_], axis=-1), **options)

    around(patch, propose, "match_walk", worst)


def stale_rows_visible(patch):
    """The drafter's mask is dropped: it sees the rows of rejected drafts, and rows never written."""
    around(patch, dflash, "attend", everything_visible)


def anchor_feature_early(patch):
    """The fused row of the position before the right one."""

    def shifted(right, *arguments):
        calls = right(*arguments)

        def absorb(*block):
            context, cache = calls.absorb(*block)
            return jnp.roll(context, 1, axis=1), cache

        return replace(calls, absorb=absorb)

    around(patch, serve.models, "drafter_calls", shifted)


@pytest.mark.parametrize("plant", [slot_shifted, argmin_for_argmax, stale_rows_visible, anchor_feature_early])
def test_a_block_that_is_not_the_trained_one_is_seen(monkeypatch, state, plant):
    """None of these costs a token of the text: only acceptance would fall."""
    plant(monkeypatch)
    blocks = served.serve("lilicorr", state)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        served.assert_blocks_are_the_trained_ones(blocks)
    served.assert_texts_are_the_targets_own(blocks)


def rows_of_the_other_convention(patch):
    """Domino's rows read as DFlash's: each would speak for the position behind its own."""
    around(patch, propose, "slot_states", lambda right, config, rows: rows[:, 1 : 1 + config.num_slots])


def anchor_forgotten(patch):
    """The tokens before the slots begin with the first draft's place empty."""

    def fault(right, config, folded, logits, states, anchor_id):
        return right(config, folded, logits, states, jnp.zeros_like(anchor_id))

    around(patch, propose, "domino_rollout", fault)


@pytest.mark.parametrize("plant", [rows_of_the_other_convention, anchor_forgotten])
def test_a_rollout_that_is_not_the_trained_one_is_seen(monkeypatch, state, plant):
    """The methods share target and drafter, and so the prefill."""
    plant(monkeypatch)
    blocks = served.serve("domino", state)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        served.assert_rollouts_are_the_trained_ones(blocks, "domino")
    served.assert_texts_are_the_targets_own(blocks)


def test_training_that_sees_the_targets_feature_at_the_anchor_is_seen(monkeypatch, state):
    """Serving does not have it yet."""

    def wider(right, queries, keys, values, own_keys, own_values, anchors, **options):
        return right(queries, keys, values, own_keys, own_values, anchors + 1, **options)

    right = served._train.__wrapped__
    around(monkeypatch, dflash, "block_attention", wider)
    monkeypatch.setattr(served, "_train", served.quick(lambda *arrays: right(*arrays)))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        served.assert_blocks_are_the_trained_ones(served.serve("lilicorr", state))


def test_a_verify_pass_without_its_causal_mask_is_seen(monkeypatch, state):
    around(monkeypatch, target, "attend", everything_visible)
    with pytest.raises(AssertionError):
        served.assert_texts_are_the_targets_own(served.serve("lilicorr", state))
