"""The block drafter against the public code's numbers, and what holds for any weights: causality, caches, one function
in training and in serving."""

import dataclasses
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax import presets, sharding
from lilicorr_jax.cache import append, init_cache
from lilicorr_jax.config import default_target_layer_ids
from lilicorr_jax.conversion.checkpoint import load_drafter, load_target
from lilicorr_jax.models.dflash import Drafter, drafter_shapes, join_context
from lilicorr_jax.models.layers import DecoderLayer
from lilicorr_jax.models.linear import for_decoding
from lilicorr_jax.models.target import Target
from tests.conftest import GOLDEN
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

TINY = presets.tiny().drafter


@partial(jax.jit, static_argnums=0)
def add_context(ours, params, features, positions, cache, length):
    """Fused rows of new positions, and the cache with their keys and values."""

    def both(drafter: Drafter):
        fused = drafter.fuse(features)
        return fused, drafter.context_rows(fused, positions)

    fused, rows = nn.apply(both, Drafter(ours))({"params": params})
    return fused, append(cache, rows, length)


@partial(jax.jit, static_argnames=("ours", "bucket"))
def draft(ours, params, block, cache, length, bucket=None):
    """States of a block, and what each layer put out."""
    states, kept = Drafter(ours).apply(
        {"params": params}, block, cache=cache, length=length, bucket=bucket, method="draft",
        capture_intermediates=lambda module, name: isinstance(module, DecoderLayer) and name == "__call__",
    )  # fmt: skip
    layers = kept["intermediates"]
    return states, [layers[f"layers_{i}"]["__call__"][0][0] for i in range(ours.num_layers)]


@partial(jax.jit, static_argnums=0)
def train(ours, params, features, blocks, anchors):
    return Drafter(ours).apply({"params": params}, features, blocks, anchors, method="from_features")


def lengths(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


@pytest.fixture(scope="module", params=["tied", "untied"])
def case(request):
    """A golden set's folder, its drafter, and its target as (configuration, parameters)."""
    folder = GOLDEN / "dflash" / request.param
    return folder, load_drafter(folder / "drafter"), load_target(folder / "target")


@pytest.fixture(scope="module")
def tiny():
    """Random parameters, features of 12 positions in two rows, and one block's embeddings a row."""
    rng = np.random.default_rng(3)
    shapes = sharding.abstract_parameters(Drafter(TINY), *drafter_shapes(TINY), method="from_features")
    params = jax.tree.map(lambda leaf: jnp.array(0.3 * rng.normal(size=leaf.shape), leaf.dtype), shapes)
    features, blocks = rng.normal(size=(2, 12, TINY.feature_width)), rng.normal(size=(2, 1, 6, TINY.width))
    return params, jnp.array(features, jnp.float32), jnp.array(blocks, jnp.float32)


def served(params, features, block, length, bucket=None):
    """The states of `block` [B, Q, D] after `length` context rows of each row, as serving computes them."""
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], (2, 12))
    _, cache = add_context(TINY, params, features, positions, init_cache(TINY, 2, 32), lengths(0, 0))
    return draft(TINY, params, block, cache, length, bucket)[0]


def test_three_blocks_in_a_row_are_the_public_codes(case):
    folder, checkpoint, (target, target_params) = case
    ours, params = checkpoint.drafter, checkpoint.params["drafter"]
    with np.load(folder / "drafter_forward.npz") as file:
        golden = dict(file)
    cache, done = init_cache(ours, 1, 32), 0
    for call in ("first", "second", "third"):
        want = {name.removeprefix(f"{call}_"): array for name, array in golden.items() if name.startswith(call)}
        start = int(want["start"])
        positions = jnp.array(want["position_ids"][:, : start - done], jnp.int32)
        fused, cache = add_context(ours, params, jnp.array(want["target_hidden"]), positions, cache, lengths(done))
        assert_close(fused, want["fused"], "golden")
        block_ids = jnp.array(want["block_ids"], jnp.int32)
        block = Target(target).apply({"params": target_params}, block_ids, method="embed")
        assert_close(block, want["noise_embedding"])
        states, layers = draft(ours, params, block, cache, lengths(start))
        assert_close(jnp.stack(layers), want["layer_outputs"], "golden")
        assert_close(states, want["hidden"], "golden")
        logits = Target(target).apply({"params": target_params}, states, method="unembed")
        assert_close(logits, want["logits"], "golden")
        np.testing.assert_array_equal(np.argmax(logits[:, 1:], axis=-1), want["draft_ids"])
        for i in range(ours.num_layers):
            assert_close(cache.keys[i][:, :, :start], want[f"cache_k{i}"], "golden")
            assert_close(cache.values[i][:, :, :start], want[f"cache_v{i}"], "golden")
        done = start


def test_training_blocks_are_the_public_codes(case):
    """Five blocks a sequence at once; one anchor's block runs past the end, and padded blocks carry no meaning."""
    folder, checkpoint, (target, target_params) = case
    ours = checkpoint.drafter
    with np.load(folder / "training.npz") as file:
        want = dict(file)
    anchors = want["anchor_positions"].astype(np.int32)
    ids = np.full((2, 5, ours.input_rows), ours.mask_id, np.int32)
    ids[:, :, 0] = np.take_along_axis(want["input_ids"], anchors, axis=1)
    blocks = Target(target).apply({"params": target_params}, jnp.array(ids), method="embed")
    states = train(ours, checkpoint.params["drafter"], jnp.array(want["target_hidden"]), blocks, jnp.array(anchors))
    keep = want["block_keep_mask"]
    assert_close(np.asarray(states)[keep], want["output_hidden"][keep], "golden")


@pytest.mark.parametrize("anchor", [0, 1, 7, 12])
def test_training_and_serving_are_one_function(tiny, anchor):
    params, features, blocks = tiny
    trained = train(TINY, params, features, blocks, jnp.full((2, 1), anchor, jnp.int32))
    assert_close(trained[:, 0], served(params, features, blocks[:, 0], lengths(anchor, anchor)))


def test_features_from_the_anchor_on_change_nothing_bit_for_bit(tiny):
    """Neither in training nor in serving, where they are stale rows of the cache."""
    params, features, blocks = tiny
    anchors = lengths(7, 4)
    later = features.at[0, 7:].add(1000.0).at[1, 4:].add(1000.0)
    np.testing.assert_array_equal(
        train(TINY, params, features, blocks, anchors[:, None]), train(TINY, params, later, blocks, anchors[:, None])
    )
    np.testing.assert_array_equal(
        served(params, features, blocks[:, 0], anchors), served(params, later, blocks[:, 0], anchors)
    )


def test_the_feature_before_the_anchor_matters(tiny):
    params, features, blocks = tiny
    before = served(params, features, blocks[:, 0], lengths(7, 4))
    after = served(params, features.at[0, 6].add(1.0), blocks[:, 0], lengths(7, 4))
    assert np.abs(after[0] - before[0]).max() > 1e-3
    np.testing.assert_array_equal(after[1], before[1])


def test_every_row_of_a_block_sees_every_other(tiny):
    params, features, blocks = tiny
    before = served(params, features, blocks[:, 0], lengths(7, 4))
    for row in (0, 5):
        after = served(params, features, blocks[:, 0].at[:, row].add(1.0), lengths(7, 4))
        assert (np.abs(after - before).max(axis=(0, 2)) > 1e-4).all()


def test_the_bucket_bounds_what_is_read_and_changes_no_state(tiny):
    params, features, blocks = tiny
    whole = served(params, features, blocks[:, 0], lengths(7, 4))
    assert_close(served(params, features, blocks[:, 0], lengths(7, 4), 8), whole)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_joined_projections_give_every_layer_its_own_rows(rng, attention_bias):
    ours = dataclasses.replace(TINY, attention_bias=attention_bias)
    shapes = sharding.abstract_parameters(Drafter(ours), *drafter_shapes(ours), method="from_features")
    params = jax.tree.map(lambda leaf: jnp.array(0.3 * rng.normal(size=leaf.shape), leaf.dtype), shapes)
    features = jnp.array(rng.normal(size=(2, 3, ours.feature_width)), jnp.float32)
    arguments = features, jnp.arange(3)[None] + jnp.array([[4], [0]]), init_cache(ours, 2, 8), lengths(4, 0)
    apart = add_context(ours, params, *arguments)
    assert_close(add_context(ours, join_context(ours, for_decoding(params)), *arguments), apart)


def test_an_explicit_head_width_shapes_projections_and_cache():
    ours = dataclasses.replace(TINY, width=80, num_heads=4, num_kv_heads=2, head_width=32)
    shapes = sharding.abstract_parameters(Drafter(ours), *drafter_shapes(ours), method="from_features")
    assert shapes["layers_0"]["attention"]["q_proj"]["kernel"].shape == (80, 128)
    assert shapes["fc"]["kernel"].shape == (2 * 80, 80)
    assert init_cache(ours, 1, 8).values[0].shape == (1, 2, 8, 32)


@pytest.mark.parametrize("preset, count", [("qwen3_8b", 1_048_626_432), ("qwen3_4b", 537_427_200)])
def test_public_drafters_have_the_published_number_of_parameters(preset, count):
    ours = presets.PRESETS[preset]().drafter
    shapes = sharding.abstract_parameters(Drafter(ours), *drafter_shapes(ours), method="from_features")
    assert sharding.count_parameters(shapes) == count


@pytest.mark.parametrize(
    "depths, ids", [((36, 5), (1, 9, 17, 25, 33)), ((6, 2), (1, 3)), ((28, 5), (1, 7, 13, 19, 25)), ((8, 1), (4,))]
)
def test_default_target_layers_are_the_published_ones(depths, ids):
    assert default_target_layer_ids(*depths) == ids


@pytest.mark.parametrize("field, value", [("target_layer_ids", (1, 5)), ("mask_id", 96), ("target_layer_ids", ())])
def test_a_drafter_that_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=re.escape(str(value))):
        dataclasses.replace(TINY, **{field: value})
