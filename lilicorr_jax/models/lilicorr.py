"""The LiLiCorr reranker (section 3.2, Appendix A): a lattice of candidates becomes unit in and out vectors.

Each candidate of each slot is a node. All nodes of a block attend to each other, are joined with the anchor's state,
and leave as two vectors, whose cosines between adjacent slots are the matching scores (`pallas_kernels.match_walk`).
Owns the network and its initialisation; what serving multiplies out at load is in `models.fold`.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.config import RerankerConfig
from lilicorr_jax.decoding.candidates import confidence_features
from lilicorr_jax.models.layers import RMSNorm
from lilicorr_jax.models.linear import Linear
from lilicorr_jax.shapes import Array, Bool, Float
from pallas_kernels.dispatch import Implementation
from pallas_kernels.lattice_attention import lattice_attention

FEATURE_NORM_EPS = 1e-5


class Vectors(NamedTuple):
    """Unit vectors of a block, in the reranker's dtype; a norm below the floor is divided by the floor instead."""

    anchor_out: Float[Array, "*batch E"]
    out: Float[Array, "*batch S K E"]
    in_: Float[Array, "*batch S K E"]


class Fusion(NamedTuple):
    """The layer on [x; a; x*a], its kernel split by what it multiplies, so that `anchor` acts once per block."""

    node: Float[Array, "W W"]
    anchor: Float[Array, "W W"]
    product: Float[Array, "W W"]
    bias: Float[Array, "W"]


def split_fusion(kernel: Float[Array, "rows W"], bias: Float[Array, "W"], dtype: str) -> Fusion:
    """Splits the kernel [3W, W] of `factor_input_proj`; rows in the order node, anchor, product."""
    node, anchor, product = jnp.split(kernel.astype(dtype), 3)
    return Fusion(node=node, anchor=anchor, product=product, bias=bias.astype(dtype))


def fuse(fusion: Fusion, nodes: Float[Array, "*batch S K W"], anchor: Float[Array, "*batch W"]) -> Array:
    """silu(F [x; a; x*a] + b) for the nodes x of a block and its anchor state a -> [*batch, S, K, W]."""
    product = nodes * anchor[..., None, None, :]
    own = jnp.einsum("...w,wu->...u", nodes, fusion.node) + jnp.einsum("...w,wu->...u", product, fusion.product)
    shared = jnp.einsum("...w,wu->...u", anchor, fusion.anchor)
    shared = shared + jnp.broadcast_to(fusion.bias, shared.shape)
    return nn.silu(own + shared[..., None, None, :])


def unit(x: Float[Array, "*batch E"], floor: float) -> Float[Array, "*batch E"]:
    """x / max(|x|, floor), the norm in float32; its gradient is finite at zero."""
    wide = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.maximum(square, floor**2))).astype(x.dtype)


def kernel_init(config: RerankerConfig) -> nn.initializers.Initializer:
    """N(0, init_std), as the public code has it, or N(0, 1 / fan_in). Never zero: with both vectors zero no gradient
    would reach either."""
    if config.init == "normal":
        return nn.initializers.normal(config.init_std)
    return nn.initializers.variance_scaling(1.0, "fan_in", "normal")


class FeatureNorm(nn.Module):
    """LayerNorm over the confidence scalars: statistics and affine in float32, rounded once."""

    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        ones, zeros = nn.initializers.ones_init(), nn.initializers.zeros_init()
        weight = self.param("weight", nn.with_logical_partitioning(ones, ("norm",)), (x.shape[-1],), jnp.float32)
        bias = self.param("bias", nn.with_logical_partitioning(zeros, ("norm",)), (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + FEATURE_NORM_EPS)
        weight, bias = (jnp.broadcast_to(p.astype(jnp.float32), x.shape) for p in (weight, bias))
        return (x * weight + bias).astype(self.dtype)


class LatticeAttention(nn.Module):
    """Attention of every node to every node, with an additive bias per head; no mask, no rotary embedding."""

    config: RerankerConfig
    kernels: Implementation

    def setup(self):
        c = self.config
        init = nn.initializers.xavier_uniform() if c.init == "normal" else kernel_init(c)
        make = dict(dtype=c.dtype, use_bias=True)
        self.qkv_proj = Linear(3 * c.width, ("rerank_width", "rerank_heads"), kernel_init=init, **make)
        self.out_proj = Linear(c.width, ("rerank_heads", "rerank_width"), kernel_init=kernel_init(c), **make)

    def __call__(self, x: Float[Array, "*batch M W"], bias: Float[Array, "N M M"]) -> Float[Array, "*batch M W"]:
        return self.out_proj(lattice_attention(self.qkv_proj(x), bias, implementation=self.kernels))


class LatticeLayer(nn.Module):
    """Pre-norm layer: x += attention(norm x); x += down(silu(up(norm x)))."""

    config: RerankerConfig
    kernels: Implementation

    def setup(self):
        c = self.config
        make = dict(dtype=c.dtype, use_bias=True, kernel_init=kernel_init(c))
        self.attention_norm = RMSNorm(c.norm_eps, c.dtype)
        self.attention = LatticeAttention(c, self.kernels)
        self.mlp_norm = RMSNorm(c.norm_eps, c.dtype)
        self.mlp_up = Linear(c.ffn_width, ("rerank_width", "ffn"), **make)
        self.mlp_down = Linear(c.width, ("ffn", "rerank_width"), **make)

    def __call__(self, x: Float[Array, "*batch M W"], bias: Float[Array, "N M M"]) -> Float[Array, "*batch M W"]:
        x = x + self.attention(self.attention_norm(x), bias)
        return x + self.mlp_down(nn.silu(self.mlp_up(self.mlp_norm(x))))


class FusionLayer(nn.Module):
    """`fuse` with the parameters kernel [3W, W] and bias [W]."""

    config: RerankerConfig

    @nn.compact
    def __call__(self, nodes: Float[Array, "*batch S K W"], anchor: Float[Array, "*batch W"]) -> Array:
        c = self.config
        init = nn.with_logical_partitioning(kernel_init(c), ("rerank_width", "ffn"))
        zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("ffn",))
        kernel = self.param("kernel", init, (3 * c.width, c.width), jnp.float32)
        bias = self.param("bias", zeros, (c.width,), jnp.float32)
        return fuse(split_fusion(kernel, bias, c.dtype), nodes, anchor)


class Reranker(nn.Module):
    """Candidates of a block -> `Vectors`. The call composes the methods below; `models.fold` composes them otherwise.

    Parameters: `token_proj` (absent where W equals D), `pass_hidden_proj`, `context_proj`, `feature_norm`,
    `feature_up`, `feature_out`, `slot_embedding` [S, W], `rank_embedding` [K, W], `relative_slot_bias` [N, 2P-1],
    `same_slot_bias` [N], `layers_i/...`, `output_norm`, `anchor_norm`, `factor_input_proj`, `out_head`, `in_head`,
    `anchor_out_head`.

    Attributes:
        kernels: implementation of the attention; only the reference has a gradient.
    """

    config: RerankerConfig
    kernels: Implementation = "reference"

    def setup(self):
        c = self.config
        make = dict(dtype=c.dtype, use_bias=True, kernel_init=kernel_init(c))
        if c.width != c.drafter_width:
            self.token_proj = Linear(c.width, ("width", "rerank_width"), **make)
        self.pass_hidden_proj = Linear(c.width, ("width", "rerank_width"), **make)
        self.context_proj = Linear(c.width, ("width", "rerank_width"), **make)
        self.feature_norm = FeatureNorm(c.dtype)
        self.feature_up = Linear(c.width, ("features", "ffn"), **make)
        self.feature_out = Linear(c.width, ("ffn", "rerank_width"), **make)
        self.slot_embedding = self._table("slot_embedding", ("table", "rerank_width"), c.num_slots, c.width)
        self.rank_embedding = self._table("rank_embedding", ("table", "rerank_width"), c.num_candidates, c.width)
        distances = 2 * (c.num_slots + 1) - 1
        self.relative_slot_bias = self._table("relative_slot_bias", ("rerank_heads", "table"), c.num_heads, distances)
        self.same_slot_bias = self._table("same_slot_bias", ("rerank_heads",), c.num_heads)
        self.layers = [LatticeLayer(c, self.kernels) for _ in range(c.num_layers)]
        self.output_norm = RMSNorm(c.norm_eps, c.dtype)
        self.anchor_norm = RMSNorm(c.norm_eps, c.dtype)
        self.factor_input_proj = FusionLayer(c)
        self.out_head = Linear(c.factor_width, ("ffn", "factor"), **make)
        self.in_head = Linear(c.factor_width, ("ffn", "factor"), **make)
        self.anchor_out_head = Linear(c.factor_width, ("rerank_width", "factor"), **make)

    def _table(self, name: str, axes: tuple[str, ...], *shape: int) -> Array:
        zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), axes)
        return self.param(name, zeros, shape, jnp.float32)

    def token_rows(self, embeddings: Float[Array, "*batch D"]) -> Float[Array, "*batch W"]:
        """The token's part of a node: a function of the token id alone."""
        if self.config.width == self.config.drafter_width:
            return embeddings.astype(self.config.dtype)
        return self.token_proj(embeddings)

    def attention_bias(self, num_slots: int, num_candidates: int) -> Float[Array, "N M M"]:
        """relative[query slot - key slot] + same-slot term, over the slot-major nodes M = S*K.

        An earlier key stands at a positive distance. A narrower lattice uses the trained table from its middle.
        """
        slots = jnp.repeat(jnp.arange(num_slots), num_candidates)  # [M]
        distance = slots[:, None] - slots[None, :]
        relative = self.relative_slot_bias[:, distance + self.config.num_slots]  # [N, M, M]
        same = self.same_slot_bias[:, None, None] * (distance == 0)[None].astype(self.same_slot_bias.dtype)
        return relative + same

    def features(self, logprobs: Float[Array, "*batch S K"]) -> Float[Array, "*batch S K features"]:
        """The confidence scalars of each node, normed."""
        return self.feature_norm(confidence_features(logprobs).astype(self.config.dtype))

    def node_states(
        self,
        token_rows: Float[Array, "*batch S K W"],
        states: Float[Array, "*batch S D"],
        confidence: Float[Array, "*batch S K W"],
    ) -> Float[Array, "*batch S K W"]:
        """Token, drafter state and confidence of each node, with its slot's and its rank's embedding; no norm."""
        dtype = self.config.dtype
        slots, ranks = token_rows.shape[-3:-1]
        nodes = token_rows + self.pass_hidden_proj(states)[..., None, :]
        nodes = nodes + self.feature_out(nn.silu(confidence))
        nodes = nodes + jnp.broadcast_to(self.slot_embedding[:slots, None].astype(dtype), nodes.shape)
        return nodes + jnp.broadcast_to(self.rank_embedding[:ranks].astype(dtype), nodes.shape)

    def lattice(
        self,
        token_rows: Float[Array, "*batch S K W"],
        states: Float[Array, "*batch S D"],
        confidence: Float[Array, "*batch S K W"],
        bias: Float[Array, "N M M"],
    ) -> Float[Array, "*batch S K W"]:
        """Node states after every layer and the output norm; `confidence` is `feature_up` of the features."""
        nodes = self.node_states(token_rows, states, confidence)
        x = nodes.reshape(*nodes.shape[:-3], -1, nodes.shape[-1])  # [*batch, S*K, W], slot-major
        for layer in self.layers:
            x = layer(x, bias)
        return self.output_norm(x).reshape(nodes.shape)

    def anchor_state(
        self, anchor: Float[Array, "*batch D"], anchor_valid: Bool[Array, "*batch"]
    ) -> Float[Array, "*batch W"]:
        """The anchor's state; zero, after the projection's bias, where there is no row before the anchor."""
        projected = self.context_proj(anchor)
        return self.anchor_norm(jnp.where(anchor_valid[..., None], projected, jnp.zeros_like(projected)))

    def unit_vectors(
        self,
        anchor_state: Float[Array, "*batch W"],
        out: Float[Array, "*batch S K E"],
        in_: Float[Array, "*batch S K E"],
    ) -> Vectors:
        floor = self.config.vector_floor
        return Vectors(unit(self.anchor_out_head(anchor_state), floor), unit(out, floor), unit(in_, floor))

    def __call__(
        self,
        embeddings: Float[Array, "*batch S K D"],
        states: Float[Array, "*batch S D"],
        logprobs: Float[Array, "*batch S K"],
        anchor: Float[Array, "*batch D"],
        anchor_valid: Bool[Array, "*batch"],
    ) -> Vectors:
        """In and out vectors of every candidate (Eq. 1 is their cosine).

        Args:
            embeddings: the target's embedding of each candidate; frozen, so the caller stops the gradient.
            states: the drafter's states of the slots, those that were unembedded. The anchor's row is left out.
            logprobs: float32 log-probabilities over the whole vocabulary, in descending order. Fewer slots or
                candidates than configured use the first rows of the tables; more is a ValueError.
            anchor: the drafter's fused context row at the position before the anchor token.
            anchor_valid: False where there is no such row.
        """
        c = self.config
        slots, ranks = logprobs.shape[-2:]
        if slots > c.num_slots or ranks > c.num_candidates:
            raise ValueError(
                f"This reranker takes lattices of at most {c.num_slots} slots x {c.num_candidates} candidates; got "
                f"{slots} x {ranks}. Draft fewer slots, or train a reranker of that size."
            )
        confidence = self.feature_up(self.features(logprobs))
        nodes = self.lattice(self.token_rows(embeddings), states, confidence, self.attention_bias(slots, ranks))
        state = self.anchor_state(anchor, anchor_valid)
        hidden = self.factor_input_proj(nodes, state)
        return self.unit_vectors(state, self.out_head(hidden), self.in_head(hidden))


def reranker_shapes(config: RerankerConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The smallest arguments of a `Reranker`, to make parameters from shapes alone."""
    slots, width = (1, 1), config.drafter_width
    return (
        jax.ShapeDtypeStruct((*slots, 1, width), config.dtype),
        jax.ShapeDtypeStruct((*slots, width), config.dtype),
        jax.ShapeDtypeStruct((*slots, 1), jnp.float32),
        jax.ShapeDtypeStruct((1, width), config.dtype),
        jax.ShapeDtypeStruct((1,), jnp.bool_),
    )
