"""The folded reranker against the network that it was folded from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax import presets
from lilicorr_jax.config import RerankerConfig
from lilicorr_jax.models.fold import fold_for_serving, folded_vectors
from lilicorr_jax.models.lilicorr import Reranker
from tests.models.reranker import random_arguments, random_parameters
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

TINY = presets.tiny().reranker
VOCAB = presets.tiny().target.vocab_size
fold = jax.jit(fold_for_serving, static_argnums=0)
vectors = jax.jit(folded_vectors, static_argnums=0)


def draw(ours: RerankerConfig, rng) -> tuple:
    """A vocabulary's embedding, ids, and the arguments that both forms share; the first anchor is invalid."""
    _, *shared, _ = random_arguments(ours, rng, 2)
    embedding = jnp.asarray(rng.normal(size=(VOCAB, ours.drafter_width)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, VOCAB, size=shared[1].shape), jnp.int32)
    return embedding, ids, (*shared, jnp.array([False, True]))


def unfolded(ours: RerankerConfig, params: dict, *arguments):
    return jax.jit(Reranker(ours).apply)({"params": params}, *arguments)


@pytest.mark.parametrize("drafter_width", [TINY.drafter_width, TINY.width], ids=["projected", "equal widths"])
def test_folded_equals_unfolded(rng, drafter_width):
    ours = dataclasses.replace(TINY, drafter_width=drafter_width)
    params = random_parameters(ours, rng)
    embedding, ids, shared = draw(ours, rng)
    actual = vectors(ours, fold(ours, params, embedding), ids, *shared)
    expected = unfolded(ours, params, embedding[ids], *shared)
    assert_close(actual, expected, "folded")


def test_what_was_multiplied_out_is_not_kept_twice(rng):
    embedding, _, _ = draw(TINY, rng)
    params = random_parameters(TINY, rng)
    folded = fold(TINY, params, embedding)
    replaced = {"token_proj", "feature_up", "factor_input_proj", "anchor_out_head", "out_head", "in_head"}
    assert not replaced & set(folded.params)
    expected = np.asarray(embedding) @ params["token_proj"]["kernel"] + np.asarray(params["token_proj"]["bias"])[None]
    assert_close(folded.token_table, expected)


def test_folding_keeps_the_activations_dtype(rng):
    ours = dataclasses.replace(TINY, dtype="bfloat16")
    params = random_parameters(TINY, rng)
    embedding, ids, shared = draw(ours, rng)
    folded = fold(ours, params, embedding)
    assert folded.token_table.dtype == folded.factor_kernel.dtype == folded.fusion_kernel.dtype == jnp.bfloat16
    actual = vectors(ours, folded, ids, *shared)
    expected = unfolded(ours, params, embedding[ids], *shared)
    assert actual.out.dtype == jnp.bfloat16
    assert_close(actual, expected, "bfloat16")


def test_another_lattice_than_the_trained_one_is_refused(rng):
    embedding, ids, (states, logprobs, anchor, valid) = draw(TINY, rng)
    folded = fold(TINY, random_parameters(TINY, rng), embedding)
    with pytest.raises(ValueError, match="5 slots x 3 candidates; got 5 x 2"):
        vectors(TINY, folded, ids[..., :2], states, logprobs[..., :2], anchor, valid)
