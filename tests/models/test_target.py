"""The target against the public code's numbers, and what holds for any weights: caches, buckets, masks, positions."""

import dataclasses
import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax import presets, sharding
from lilicorr_jax.cache import KVCache, init_cache
from lilicorr_jax.config import RopeConfig, TargetConfig
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.models import layers
from lilicorr_jax.models.layers import DecoderLayer, Part, attend, rotary, rotary_frequencies
from lilicorr_jax.models.target import Target, TargetPass, unembedding
from tests.conftest import GOLDEN
from tests.program import shapes_made
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

SMALL = dataclasses.replace(presets.tiny().target, num_layers=1)


@partial(jax.jit, static_argnames=("ours", "bucket", "capture"))
def run(ours, params, token_ids, cache=None, length=None, bucket=None, capture=()) -> tuple[TargetPass, jax.Array]:
    """A pass of the target and its logits."""

    def both(target: Target):
        out = target(token_ids, cache=cache, length=length, bucket=bucket, capture=capture)
        return out, target.unembed(out.hidden)

    return nn.apply(both, Target(ours))({"params": params})


def lengths(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


@pytest.fixture(scope="module", params=["tied", "untied"])
def case(request):
    """Configuration, parameters and reference numbers of one golden set."""
    folder = GOLDEN / "dflash" / request.param
    with np.load(folder / "target_forward.npz") as file:
        return *load_target(folder / "target"), dict(file)


@pytest.fixture(scope="module")
def small():
    """A random target of one layer, and a text for it."""
    rng = np.random.default_rng(1)
    shapes = sharding.abstract_parameters(Target(SMALL), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    params = jax.tree.map(lambda leaf: jnp.array(0.3 * rng.normal(size=leaf.shape), leaf.dtype), shapes)
    return params, jnp.array(rng.integers(0, SMALL.vocab_size, (1, 40)), jnp.int32)


def test_hidden_states_and_logits_are_the_public_codes(case):
    ours, params, want = case
    capture = (3, 1, 0, 2, 4)  # features stand in the order asked for
    out, logits = run(ours, params, jnp.array(want["input_ids"], jnp.int32), capture=capture)
    assert_close(out.features, np.concatenate([want["hidden_states"][i + 1] for i in capture], axis=-1), "golden")
    assert_close(out.hidden, want["hidden_states"][6], "golden")
    assert_close(logits, want["logits"], "golden")


def test_a_block_behind_a_cached_prefill_continues_the_text(case):
    ours, params, want = case
    token_ids, prefill = jnp.array(want["input_ids"], jnp.int32), int(want["cached_prefill_len"])
    first, _ = run(ours, params, token_ids[:, :prefill], init_cache(ours, 2, 32), lengths(0, 0))
    out, logits = run(
        ours, params, token_ids[:, prefill:], first.cache, lengths(prefill, prefill), capture=(0, 1, 2, 3, 4)
    )
    assert_close(out.features, np.concatenate(want["cached_block_hidden_states"][1:6], axis=-1), "golden")
    assert_close(out.hidden, want["cached_block_hidden_states"][6], "golden")
    assert_close(logits, want["cached_block_logits"], "golden")


def test_embeddings_are_the_public_codes(case):
    ours, params, want = case
    rows = Target(ours).apply({"params": params}, jnp.array(want["input_ids"], jnp.int32), method="embed")
    np.testing.assert_array_equal(rows, want["hidden_states"][0])


def test_an_untied_unembedding_is_a_matrix_of_its_own(small):
    params, token_ids = small
    out, logits = run(SMALL, params, token_ids)
    other = np.asarray(params["unembed"]["embedding"])
    assert not np.array_equal(other, params["embed"]["embedding"])
    assert_close(logits, np.asarray(out.hidden) @ other.T)
    np.testing.assert_array_equal(unembedding(params, SMALL), other)


def test_layer_ids_count_decoder_layers_from_zero():
    """A target whose layer i puts out the constant i."""
    ours = TargetConfig(
        vocab_size=8, width=4, num_layers=36, num_heads=2, num_kv_heads=1, head_width=2, ffn_width=4, max_positions=8
    )

    def constant_layers(next_call, args, kwargs, context):
        if not isinstance(context.module, DecoderLayer) or context.method_name != "__call__":
            return next_call(*args, **kwargs)
        index = float(context.module.name.removeprefix("layers_"))
        return jnp.full_like(args[0], index), (jnp.zeros((1, 1, 3, 2)), jnp.zeros((1, 1, 3, 2)))

    params = {"embed": {"embedding": jnp.ones((8, 4))}, "final_norm": {"weight": jnp.ones(4)}}
    ids = (1, 9, 17, 25, 33)
    with nn.intercept_methods(constant_layers):
        out = Target(ours).apply({"params": params}, jnp.zeros((1, 3), jnp.int32), capture=ids)
    np.testing.assert_array_equal(out.features, np.broadcast_to(np.repeat(ids, 4), (1, 3, 20)))


def test_a_text_begins_at_position_zero_with_and_without_a_cache(small):
    params, token_ids = small
    plain, _ = run(SMALL, params, token_ids)
    cached, _ = run(SMALL, params, token_ids, init_cache(SMALL, 1, 64), lengths(0))
    assert_close(cached.hidden, plain.hidden)


def test_padding_and_company_change_no_row(small):
    params, token_ids = small
    alone = [run(SMALL, params, token_ids[:, :n])[0].hidden[0] for n in (7, 24)]
    padded = jnp.concatenate([token_ids[:, :7], jnp.full((1, 17), 5, jnp.int32)], axis=1)
    together, _ = run(SMALL, params, jnp.concatenate([padded, token_ids[:, :24]]))
    assert_close(together.hidden[0, :7], alone[0])
    assert_close(together.hidden[1], alone[1])


@pytest.fixture(scope="module")
def one_by_one(small):
    """Logits of every position from passes of one token each, and the cache they leave; each pass in its own bucket."""
    params, token_ids = small
    cache, rows = init_cache(SMALL, 1, 64), []
    for position in range(33):
        bucket = max(8, 1 << position.bit_length())
        out, logits = run(SMALL, params, token_ids[:, position : position + 1], cache, lengths(position), bucket)
        cache, rows = out.cache, [*rows, logits[0, 0]]
    return np.stack(rows), cache


QUICK_ROWS = (1, 2, 3, 5, 8, 11, 15, 16)  # each compiles a program; the others run with --slow


@pytest.mark.parametrize(
    "rows", [pytest.param(n, marks=() if n in QUICK_ROWS else pytest.mark.slow) for n in range(1, 17)]
)
def test_a_verify_pass_gives_the_logits_of_one_token_passes(small, one_by_one, rows):
    """Contexts around every bucket's edge, in one ragged batch; rows past each context are poisoned."""
    params, token_ids = small
    want, full = one_by_one
    bucket = 16 if rows % 2 else 32
    starts = sorted({max(0, n) for n in (0, 7, 8, 9, bucket - rows - 1, bucket - rows) if n + rows <= bucket})
    starts = (starts * 6)[:6]  # one batch size, so that little is compiled

    def poisoned(leaf):
        stale = jnp.arange(leaf.shape[2], dtype=jnp.int32)[None, :] >= lengths(*starts)[:, None]
        return jnp.where(stale[:, None, :, None], 1000.0, jnp.broadcast_to(leaf, (6, *leaf.shape[1:])))

    block = jnp.stack([token_ids[0, n : n + rows] for n in starts])
    out, logits = run(SMALL, params, block, jax.tree.map(poisoned, full), lengths(*starts), bucket)
    for row, start in enumerate(starts):
        assert_close(logits[row], want[start : start + rows], "folded")
        np.testing.assert_array_equal(np.argmax(logits[row], -1), np.argmax(want[start : start + rows], -1))
        keys = out.cache.keys[0][row, :, start : start + rows]
        assert_close(keys, full.keys[0][0, :, start : start + rows])


def test_a_masked_key_changes_nothing_bit_for_bit(rng):
    queries, keys, values = (jnp.array(rng.normal(size=(2, n, 7, 8)), jnp.float32) for n in (4, 2, 2))
    mask = jnp.array(rng.random((2, 7, 7)) < 0.5).at[:, :, 0].set(True).at[:, :, 3].set(False)
    before = attend(queries, [Part(keys, values, mask)])
    after = attend(queries, [Part(keys.at[:, :, 3].add(1000), values.at[:, :, 3].add(1000), mask)])
    np.testing.assert_array_equal(before, after)
    visible = attend(queries, [Part(keys.at[:, :, 0].add(1000), values, mask)])
    assert not np.array_equal(before, visible)


@pytest.mark.parametrize("query_rows, scored", [(512, 5), (3, 3), (2, 2)])
def test_attention_over_two_ranges_is_softmax_over_all_visible_keys(rng, monkeypatch, query_rows, scored):
    """However many rows are scored at a time, and no more than those: all five, then three and two, then two by two."""
    monkeypatch.setattr(layers, "QUERY_ROWS", query_rows)
    batch, heads, groups, rows, width = 2, 6, 2, 5, 8
    queries = rng.normal(size=(batch, heads, rows, width)).astype(np.float32)
    ranges = [
        (*rng.normal(size=(2, batch, groups, n, width)).astype(np.float32), rng.random((batch, rows, n)) < 0.6)
        for n in (5, 4)
    ]
    ranges[1][2][:, :, 0] = True
    want = np.zeros(queries.shape)
    for b, n, q in np.ndindex(batch, heads, rows):
        seen = [(k[b, n // 3, t], v[b, n // 3, t]) for k, v, m in ranges for t in range(m.shape[2]) if m[b, q, t]]
        weights = np.exp([queries[b, n, q] @ key / math.sqrt(width) for key, _ in seen])
        want[b, n, q] = sum(w * value for w, (_, value) in zip(weights / weights.sum(), seen, strict=True))
    attended = lambda queries: attend(queries, [Part(*map(jnp.array, r)) for r in ranges])
    assert_close(attended(jnp.array(queries)), want)
    scores = {math.prod(shape) for shape in shapes_made(attended, jnp.array(queries)) if shape[-1:] == (5,)}
    assert max(scores) == batch * heads * scored * 5


def test_an_explicit_head_width_shapes_projections_and_cache():
    ours = dataclasses.replace(SMALL, width=80, num_heads=4, num_kv_heads=2, head_width=32)
    shapes = sharding.abstract_parameters(Target(ours), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    projections = shapes["layers_0"]["attention"]
    assert projections["q_proj"]["kernel"].shape == (80, 128)
    assert projections["k_proj"]["kernel"].shape == (80, 64)
    assert projections["o_proj"]["kernel"].shape == (128, 80)
    assert init_cache(ours, 3, 16).keys[0].shape == (3, 2, 16, 32)


def yarn(width, theta, factor, original, fast, slow):
    """Inverse frequencies of YaRN (arXiv 2309.00071, section 3.2) in float64, dimension by dimension."""
    wanted = []
    bounds = [width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), width - 1)
    for i in range(width // 2):
        plain = theta ** (-2 * i / width)
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        wanted.append(plain / factor * interpolated + plain * (1 - interpolated))
    return np.array(wanted)


@pytest.mark.parametrize("factor, original, fast, slow", [(4.0, 32768, 32.0, 1.0), (2.0, 4096, 16.0, 2.0)])
def test_yarn_frequencies_follow_the_paper(factor, original, fast, slow):
    rope = RopeConfig(
        theta=1e6, yarn_factor=factor, yarn_original_positions=original, yarn_beta_fast=fast, yarn_beta_slow=slow
    )
    frequencies, scale = rotary_frequencies(rope, 128)
    np.testing.assert_allclose(frequencies, yarn(128, 1e6, factor, original, fast, slow), rtol=2e-6)
    assert scale == pytest.approx(0.1 * math.log(factor) + 1)
    assert rotary_frequencies(dataclasses.replace(rope, yarn_attention_factor=1.5), 128)[1] == 1.5


def test_yarns_factor_scales_cosine_and_sine():
    rope = RopeConfig(theta=1e4, yarn_factor=4.0, yarn_original_positions=64, yarn_attention_factor=1.25)
    table = rotary(rope, 16, jnp.arange(5, dtype=jnp.int32)[None])
    assert_close(jnp.square(table.cos) + jnp.square(table.sin), np.full((1, 5, 8), 1.25**2))


def test_a_cache_without_lengths_is_refused(small):
    params, token_ids = small
    with pytest.raises(ValueError, match="length"):
        Target(SMALL).apply({"params": params}, token_ids, cache=init_cache(SMALL, 1, 64))


def test_the_cache_is_a_tree_of_every_layers_rows():
    cache = init_cache(SMALL, 2, 16)
    assert isinstance(cache, KVCache) and cache.capacity == 16
    assert [leaf.shape for leaf in jax.tree.leaves(cache)] == [(2, 2, 16, 16)] * 2
