"""The frozen target: a Qwen3 decoder that returns hidden states, the captured features and its cache.

Logits are a separate call (`unembed`), because training never multiplies by the whole unembedding.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from lilicorr_jax.cache import KVCache, append_rows
from lilicorr_jax.config import TargetConfig
from lilicorr_jax.models.layers import DecoderLayer, Part, RMSNorm, attend, rotary
from lilicorr_jax.models.linear import multiply_rows
from lilicorr_jax.shapes import Array, Float, Int


class TargetPass(NamedTuple):
    """What one pass of the target returns.

    Attributes:
        hidden: after the final norm; `unembed` turns it into logits.
        features: residual stream after each captured layer, side by side in the order asked for.
        cache: with the rows of this pass written at each row's length; None when the pass had no cache.
    """

    hidden: Float[Array, "B Q D"]
    features: Float[Array, "B Q LD"]
    cache: KVCache | None


class Target(nn.Module):
    """Qwen3 (also Llama and Qwen2.5 by the config's switches).

    Parameters: `embed/embedding` [V, D], `layers_i/...`, `final_norm/weight`, and `unembed/embedding` [V, D] unless
    the config ties them.
    """

    config: TargetConfig

    def setup(self):
        c = self.config
        table = nn.with_logical_partitioning(nn.initializers.normal(c.init_std), ("vocab", "width"))
        self.embed_table = nn.Embed(c.vocab_size, c.width, dtype=jnp.dtype(c.dtype), embedding_init=table, name="embed")
        self.layers = [DecoderLayer(c) for _ in range(c.num_layers)]
        self.final_norm = RMSNorm(c.norm_eps, c.dtype)
        if not c.tie_embeddings:
            self.unembed_table = nn.Embed(
                c.vocab_size, c.width, dtype=jnp.dtype(c.dtype), embedding_init=table, name="unembed"
            )

    def __call__(
        self,
        token_ids: Int[Array, "B Q"],
        *,
        cache: KVCache | None = None,
        length: Int[Array, "B"] | None = None,
        bucket: int | None = None,
        capture: tuple[int, ...] = (),
    ) -> TargetPass:
        """Runs Q new tokens of each row behind its `length` cached ones.

        Args:
            token_ids: new tokens; padding goes to the right, where causality keeps it from mattering.
            cache: rows written so far; None runs the tokens as a whole text from position 0.
            length: rows of the cache that count, per batch row.
            bucket: attention reads only the first `bucket` rows of the cache; must cover length + Q. None: all.
            capture: target layers whose output becomes `features`, in this order.
        """
        c = self.config
        if (cache is None) != (length is None):
            raise ValueError("A pass of the target takes cache and length together, or neither; got one of them.")
        rows = jnp.arange(token_ids.shape[1])[None, :]
        positions = rows if length is None else length[:, None] + rows  # [B or 1, Q]
        positions = jnp.broadcast_to(positions, token_ids.shape)
        table = rotary(c.rope, c.head_width, positions)
        reach = token_ids.shape[1] if cache is None else (bucket or cache.capacity)
        mask = jnp.arange(reach)[None, None, :] <= positions[:, :, None]  # [B, Q, reach]
        x = self.embed_table(token_ids)
        captured, written = {}, []
        for i, layer in enumerate(self.layers):

            def mix(queries, keys, values, i=i):
                if cache is not None:
                    keys, values = (
                        append_rows(cache.keys[i], keys, length),
                        append_rows(cache.values[i], values, length),
                    )
                seen = Part(keys[:, :, :reach], values[:, :, :reach], mask)
                return attend(queries, [seen]), (keys, values)

            x, rows_of_layer = layer(x, table, mix)
            written.append(rows_of_layer)
            if i in capture:
                captured[i] = x
        features = jnp.concatenate([captured[i] for i in capture], axis=-1) if capture else x[..., :0]
        if self.is_initializing():
            self.unembed(x)  # so that `init` through this call also makes an untied unembedding
        keys, values = zip(*written, strict=True)
        new_cache = None if cache is None else KVCache(keys=keys, values=values)
        return TargetPass(hidden=self.final_norm(x), features=features, cache=new_cache)

    def embed(self, token_ids: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Rows of the input embedding; the drafter and the reranker borrow it."""
        return self.embed_table(token_ids)

    def unembed(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Logits in the model's dtype; the drafter borrows it."""
        table = self.embed_table if self.config.tie_embeddings else self.unembed_table
        matrix = table.embedding.astype(self.config.dtype)
        # Not `table.attend`, which multiplies with a transposed copy: six times a row's time on a CPU.
        return multiply_rows(hidden.astype(self.config.dtype), matrix)


def unembedding(params, config: TargetConfig) -> Float[Array, "V D"]:
    """The matrix that `Target.unembed` multiplies with, out of a parameter tree."""
    return params["embed" if config.tie_embeddings else "unembed"]["embedding"]
