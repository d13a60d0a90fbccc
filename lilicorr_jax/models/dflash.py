"""The block drafter (DFlash): one pass turns an anchor and Q - 1 masks into one state per drafted slot.

The target's captured features of every earlier position are fused once into context rows, whose keys and values the
drafter attends to beside its own block. The context never passes through the drafter's layers.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.cache import KVCache
from lilicorr_jax.config import DrafterConfig
from lilicorr_jax.models.layers import DecoderLayer, Part, RMSNorm, attend, rotary
from lilicorr_jax.models.linear import Linear
from lilicorr_jax.shapes import Array, Float, Int
from pallas_kernels.block_attention import block_attention

JOINED = "context_proj"
"""Where `join_context` puts the matrix [layers * 2 * G * H, D] of every layer's keys and values."""


class Drafter(nn.Module):
    """Serving: `fuse` and `context_rows` after each verify pass, `draft` for each block. Training: the call itself.

    Parameters: `fc/kernel` [LD, D], `hidden_norm`, `layers_i/...`, `norm`. Embedding and unembedding are the target's.
    """

    config: DrafterConfig

    def setup(self):
        c = self.config
        init = nn.initializers.normal(c.init_std)
        self.fc = Linear(c.width, ("features", "width"), dtype=c.dtype, kernel_init=init)
        self.hidden_norm = RMSNorm(c.norm_eps, c.dtype)
        self.layers = [DecoderLayer(c) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.norm_eps, c.dtype)

    def fuse(self, features: Float[Array, "*batch LD"]) -> Float[Array, "*batch D"]:
        """hidden_norm(fc features): the context row of a position, one for all layers."""
        return self.hidden_norm(self.fc(features))

    def context_rows(self, context: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> KVCache:
        """Keys (normed and rotated) and values of context rows for every layer; `cache.append` stores them."""
        table = rotary(self.config.rope, self.config.head_width, positions)
        if self.has_variable("params", JOINED):
            projected = zip(self.layers, self._joined_rows(context), strict=True)
            rows = [(layer.attention.keys(keys, table), values) for layer, (keys, values) in projected]
        else:
            rows = [layer.attention.keys_values(context, table) for layer in self.layers]
        keys, values = zip(*rows, strict=True)
        return KVCache(keys=keys, values=values)

    def _joined_rows(self, context: Float[Array, "B T D"]) -> Float[Array, "layers two B G T H"]:
        """Projected keys and values of all layers by one product, biases included."""
        c = self.config
        joined = self.get_variable("params", JOINED)
        rows = jnp.einsum("btd,od->bto", context.astype(c.dtype), joined["rows"].astype(c.dtype))
        if "bias" in joined:
            rows = rows + jnp.broadcast_to(joined["bias"].astype(c.dtype), rows.shape)
        heads = rows.reshape(*rows.shape[:2], c.num_layers, 2, c.num_kv_heads, c.head_width)
        return jnp.moveaxis(heads, (2, 3, 4), (0, 1, 3))

    def draft(
        self,
        block: Float[Array, "B Q D"],
        *,
        cache: KVCache,
        length: Int[Array, "B"],
        bucket: int | None = None,
    ) -> Float[Array, "B Q D"]:
        """States of a block whose anchor sits at position `length`, after the final norm.

        Args:
            block: target embeddings of the anchor and of Q - 1 masks.
            cache: context rows; those before `length` count, and every block row sees all of them and all of the
                block, in both directions. The block's own rows are not stored.
            bucket: attention reads only the first `bucket` context rows; must cover `length`. None: all.
        """
        c = self.config
        batch, rows, _ = block.shape
        table = rotary(c.rope, c.head_width, length[:, None] + jnp.arange(rows)[None, :])
        reach = bucket or cache.capacity
        before = jnp.broadcast_to((jnp.arange(reach)[None, :] < length[:, None])[:, None, :], (batch, rows, reach))
        own = jnp.ones((batch, rows, rows), bool)
        x = block
        for i, layer in enumerate(self.layers):

            def mix(queries, keys, values, i=i):
                context = Part(cache.keys[i][:, :, :reach], cache.values[i][:, :, :reach], before)
                return attend(queries, [context, Part(keys, values, own)]), None

            x, _ = layer(x, table, mix)
        return self.norm(x)

    def __call__(
        self,
        context: Float[Array, "B T D"],
        blocks: Float[Array, "B A Q D"],
        anchors: Int[Array, "B A"],
        *,
        start: Int[Array, "B A"] | None = None,
        anchor_chunk: int = 32,
    ) -> Float[Array, "B A Q D"]:
        """Training: states of A blocks per sequence at once, each as `draft` would compute it.

        Args:
            context: fused rows of positions 0..T-1 (`fuse` of the target's features).
            blocks: target embeddings, anchor then masks.
            anchors: position of each block's anchor; its context is the rows [start, anchor).
            start: first context row of each block, for packed rows; None means 0.
            anchor_chunk: anchors per step of the attention, which bounds its memory.
        """
        c = self.config
        context_positions = jnp.broadcast_to(jnp.arange(context.shape[1])[None, :], context.shape[:2])
        context_table = rotary(c.rope, c.head_width, context_positions)
        block_positions = anchors[:, :, None] + jnp.arange(blocks.shape[2])[None, None, :]  # [B, A, Q]
        table = rotary(c.rope, c.head_width, block_positions)
        x = blocks
        for layer in self.layers:
            context_keys, context_values = layer.attention.keys_values(context, context_table)

            def mix(queries, keys, values, context_keys=context_keys, context_values=context_values):
                mixed = block_attention(
                    queries, context_keys, context_values, keys, values, anchors, start=start, anchor_chunk=anchor_chunk
                )
                return mixed, None

            x, _ = layer(x, table, mix)
        return self.norm(x)

    def from_features(
        self, features: Float[Array, "B T LD"], blocks: Float[Array, "B A Q D"], anchors: Int[Array, "B A"]
    ) -> Float[Array, "B A Q D"]:
        """Fusion and training pass in one; touches every parameter, so `init` goes through it."""
        return self(self.fuse(features), blocks, anchors)


def join_context(config: DrafterConfig, params: Mapping) -> dict:
    """A tree to decode with (`models.linear`), in which the key and value matrices of all layers also lie in one.

    A new context row needs all of them; apart they would be copied side by side for every block, to multiply once. The
    second copy stays in memory instead: 84 MB of Qwen3-8B's drafter.
    """
    queries = config.num_heads * config.head_width
    layers = [params[f"layers_{i}"]["attention"]["qkv_proj"] for i in range(config.num_layers)]
    return {
        **params,
        JOINED: {leaf: jnp.concatenate([layer[leaf][queries:] for layer in layers]) for leaf in layers[0]},
    }


def drafter_shapes(config: DrafterConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The smallest arguments of `Drafter.from_features`, to make parameters from shapes alone."""
    features = jax.ShapeDtypeStruct((1, 1, config.feature_width), config.dtype)
    blocks = jax.ShapeDtypeStruct((1, 1, config.input_rows, config.width), config.dtype)
    return features, blocks, jax.ShapeDtypeStruct((1, 1), jnp.int32)
