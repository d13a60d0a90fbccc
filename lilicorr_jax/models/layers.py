"""The Qwen3 decoder layer in pieces: RMSNorm, rotary embedding (with YaRN), gated MLP, grouped-query attention.

Knows no model. A layer is handed a `mix` function that turns queries, keys and values into attention output, so that
the target with a cache, the drafter over its context and the drafter in training share one class.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.config import RopeConfig, TransformerConfig
from lilicorr_jax.models.linear import Linear
from lilicorr_jax.shapes import Array, Bool, Float, Int


class Rotary(NamedTuple):
    """Cosine and sine of every position's angles, float32."""

    cos: Float[Array, "*batch Q half"]
    sin: Float[Array, "*batch Q half"]


def rotary_frequencies(config: RopeConfig, head_width: int) -> tuple[Float[Array, "half"], float]:
    """Inverse frequencies and the factor on cosine and sine; YaRN (arXiv 2309.00071, section 3.4) where configured.

    YaRN divides the low frequencies by `yarn_factor`, keeps the high ones, and ramps linearly between the dimensions
    that turn `yarn_beta_fast` and `yarn_beta_slow` times over the original context.
    """
    exponents = jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width
    frequencies = 1.0 / config.theta**exponents
    if config.yarn_factor is None:
        return frequencies, 1.0

    def dimension_turning(rotations: float) -> float:
        positions = config.yarn_original_positions or 0
        return head_width * math.log(positions / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(dimension_turning(config.yarn_beta_fast)), 0)
    high = min(math.ceil(dimension_turning(config.yarn_beta_slow)), head_width - 1)
    ramp = (jnp.arange(head_width // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    keep = 1.0 - jnp.clip(ramp, 0.0, 1.0)
    scale = config.yarn_attention_factor
    if scale is None:
        scale = 0.1 * math.log(config.yarn_factor) + 1.0
    return frequencies / config.yarn_factor * (1.0 - keep) + frequencies * keep, scale


def rotary(config: RopeConfig, head_width: int, positions: Int[Array, "*batch Q"]) -> Rotary:
    """Cosine and sine tables of absolute positions (from 0)."""
    frequencies, scale = rotary_frequencies(config, head_width)
    # A product, not an outer einsum: a dot may be rounded to TF32 on a GPU, which spoils angles at long positions.
    angles = positions.astype(jnp.float32)[..., None] * jnp.broadcast_to(
        frequencies, (*positions.shape, head_width // 2)
    )
    return Rotary(cos=jnp.cos(angles) * scale, sin=jnp.sin(angles) * scale)


def rotate(x: Float[Array, "*batch N Q H"], table: Rotary) -> Float[Array, "*batch N Q H"]:
    """Rotates halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), in the dtype of x."""
    cos, sin = (t.astype(x.dtype)[..., None, :, :] for t in table)  # [..., 1, Q, H/2]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Part(NamedTuple):
    """Keys and values that a query may see, and which of them: True means visible."""

    keys: Float[Array, "B G T H"]
    values: Float[Array, "B G T H"]
    mask: Bool[Array, "B Q T"]


QUERY_ROWS = 512
"""Rows of queries that are scored at a time: against each other, those of a long text would make N T^2 numbers."""


def attend(queries: Float[Array, "B N Q H"], parts: Sequence[Part]) -> Float[Array, "B N Q H"]:
    """Grouped-query softmax attention over several key ranges under one softmax, scaled by 1/sqrt(H).

    Consecutive query heads share a key/value head. Scores and softmax are float32. Ranges are not concatenated (a
    cache would be copied), only their scores are. Every query must see at least one key.
    """
    rows = queries.shape[2]
    if rows <= QUERY_ROWS:
        return _attend(queries, parts)
    steps = -(-rows // QUERY_ROWS)
    chunk = -(-rows // steps)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, steps * chunk - rows)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(x.shape[0], steps, chunk, *x.shape[2:]), 1, 0)  # [steps, B, chunk, ...]

    def attend_some(some):
        queries, masks = some
        seen = [part._replace(mask=mask) for part, mask in zip(parts, masks, strict=True)]
        return jnp.moveaxis(_attend(jnp.moveaxis(queries, 1, 2), seen), 2, 1)

    mixed = jax.lax.map(attend_some, (split(jnp.moveaxis(queries, 2, 1)), [split(part.mask) for part in parts]))
    joined = jnp.moveaxis(mixed, 0, 1).reshape(queries.shape[0], -1, *mixed.shape[3:])  # [B, steps * chunk, N, H]
    return jnp.moveaxis(joined[:, :rows], 1, 2)


def _attend(queries: Float[Array, "B N Q H"], parts: Sequence[Part]) -> Float[Array, "B N Q H"]:
    batch, heads, rows, width = queries.shape
    groups = parts[0].keys.shape[1]
    grouped = queries.reshape(batch, groups, -1, width)  # [B, G, N/G * Q, H]: a group's heads are rows of one product
    lowest = jnp.finfo(jnp.float32).min
    scores = []
    for part in parts:
        score = jnp.einsum("bgrh,bgth->bgrt", grouped, part.keys, preferred_element_type=jnp.float32)
        visible = jnp.tile(part.mask, (1, heads // groups, 1))[:, None]  # [B, 1, N/G * Q, T]
        scores.append(jnp.where(visible, score * width**-0.5, lowest))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)
    bounds = [sum(p.keys.shape[2] for p in parts[: i + 1]) for i in range(len(parts) - 1)]
    mixed = [
        jnp.einsum("bgrt,bgth->bgrh", weight, part.values)
        for weight, part in zip(jnp.split(weights, bounds, axis=-1), parts, strict=True)
    ]
    return sum(mixed[1:], mixed[0]).reshape(batch, heads, rows, width)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; statistics in float32, cast back before the weight (Qwen3's order)."""

    eps: float
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("norm",))
        weight = self.param("weight", init, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x.astype(self.dtype) * jnp.broadcast_to(weight.astype(self.dtype), x.shape)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        c = self.config
        make = dict(dtype=c.dtype, kernel_init=nn.initializers.normal(c.init_std))
        if self.has_variable("params", "gate_up_proj"):
            gate, up = jnp.split(Linear(2 * c.ffn_width, ("width", "ffn"), name="gate_up_proj", **make)(x), 2, axis=-1)
        else:
            gate = Linear(c.ffn_width, ("width", "ffn"), name="gate_proj", **make)(x)
            up = Linear(c.ffn_width, ("width", "ffn"), name="up_proj", **make)(x)
        return Linear(c.width, ("ffn", "width"), name="down_proj", **make)(nn.silu(gate) * up)


class Attention(nn.Module):
    """Projections of grouped-query attention, with Qwen3's per-head norm of queries and keys.

    Parameters: `q_proj`, `k_proj`, `v_proj`, or in a tree to decode with `qkv_proj` (`models.linear`); `o_proj`, norms.
    """

    config: TransformerConfig

    def setup(self):
        c = self.config
        make = dict(dtype=c.dtype, kernel_init=nn.initializers.normal(c.init_std))
        query_width, kv_width = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
        self.q_proj = Linear(query_width, ("width", "heads"), use_bias=c.attention_bias, **make)
        self.k_proj = Linear(kv_width, ("width", "kv_heads"), use_bias=c.attention_bias, **make)
        self.v_proj = Linear(kv_width, ("width", "kv_heads"), use_bias=c.attention_bias, **make)
        self.qkv_proj = Linear(query_width + 2 * kv_width, ("width", "heads"), use_bias=c.attention_bias, **make)
        self.o_proj = Linear(c.width, ("heads", "width"), **make)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.norm_eps, c.dtype)
            self.k_norm = RMSNorm(c.norm_eps, c.dtype)

    def _heads(self, x: Float[Array, "*batch Q NH"]) -> Float[Array, "*batch N Q H"]:
        return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, self.config.head_width), -2, -3)

    def project(
        self, x: Float[Array, "*batch Q D"], table: Rotary
    ) -> tuple[Float[Array, "*batch N Q H"], Float[Array, "*batch G Q H"], Float[Array, "*batch G Q H"]]:
        """Queries and keys, normed and rotated, and values."""
        if not self.has_variable("params", "qkv_proj"):
            return self._queries(self._heads(self.q_proj(x)), table), *self.keys_values(x, table)
        c = self.config
        ends = c.num_heads, c.num_heads + c.num_kv_heads
        queries, keys, values = jnp.split(self._heads(self.qkv_proj(x)), ends, axis=-3)
        return self._queries(queries, table), self.keys(keys, table), values

    def _queries(self, heads: Float[Array, "*batch N Q H"], table: Rotary) -> Float[Array, "*batch N Q H"]:
        return rotate(self.q_norm(heads) if self.config.qk_norm else heads, table)

    def keys_values(
        self, x: Float[Array, "*batch Q D"], table: Rotary
    ) -> tuple[Float[Array, "*batch G Q H"], Float[Array, "*batch G Q H"]]:
        """Keys and values of rows that no query comes from."""
        if self.has_variable("params", "qkv_proj"):
            return self.project(x, table)[1:]
        return self.keys(self._heads(self.k_proj(x)), table), self._heads(self.v_proj(x))

    def keys(self, heads: Float[Array, "*batch G Q H"], table: Rotary) -> Float[Array, "*batch G Q H"]:
        """Projected keys, normed and rotated."""
        return rotate(self.k_norm(heads) if self.config.qk_norm else heads, table)

    def output(self, mixed: Float[Array, "*batch N Q H"]) -> Float[Array, "*batch Q D"]:
        merged = jnp.moveaxis(mixed, -3, -2)
        return self.o_proj(merged.reshape(*merged.shape[:-2], -1))  # [..., Q, N*H] -> [..., Q, D]


Mix = Callable[[Array, Array, Array], tuple[Array, object]]
"""(queries, keys, values of the new rows) -> (attention output [..., N, Q, H], anything to hand back)."""


class DecoderLayer(nn.Module):
    """Pre-norm layer: x += attention(norm x); x += mlp(norm x)."""

    config: TransformerConfig

    def setup(self):
        c = self.config
        self.attention_norm = RMSNorm(c.norm_eps, c.dtype)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.norm_eps, c.dtype)
        self.mlp = GatedMLP(c)

    def __call__(self, x: Float[Array, "*batch Q D"], table: Rotary, mix: Mix):
        mixed, extra = mix(*self.attention.project(self.attention_norm(x), table))
        x = x + self.attention.output(mixed)
        return x + self.mlp(self.mlp_norm(x)), extra
