"""KVCache: preallocated keys and values, appended at each row's own length.

Owns storage only. The length of a row is the caller's (one length serves the target's and the drafter's cache);
rolling back is setting that length, since rows past it are masked and later overwritten. Capacity is the caller's
too: `lax.dynamic_update_slice` clamps silently, so whoever allocates leaves head-room for the rows that a dispatch
can write past the longest text (`serve.engine`).
"""

import jax
import jax.numpy as jnp
from flax import struct

from lilicorr_jax.config import TransformerConfig
from lilicorr_jax.shapes import Array, Float, Int


@struct.dataclass
class KVCache:
    """Keys and values of every layer, capacity C rows each.

    Attributes:
        keys: one [B, G, C, H] array per layer, after key norm and rotary embedding.
        values: the same shapes.
    """

    keys: tuple[Float[Array, "B G C H"], ...]
    values: tuple[Float[Array, "B G C H"], ...]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def init_cache(config: TransformerConfig, batch: int, capacity: int) -> KVCache:
    """An empty cache of `capacity` rows in the model's dtype."""
    shape = (batch, config.num_kv_heads, capacity, config.head_width)
    zeros = tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))
    return KVCache(keys=zeros, values=tuple(jnp.zeros_like(z) for z in zeros))


def append_rows(
    rows: Float[Array, "B G C H"], new: Float[Array, "B G Q H"], length: Int[Array, "B"]
) -> Float[Array, "B G C H"]:
    """Writes Q new rows of each batch row at that row's own length."""

    def write(row, new_row, start):
        return jax.lax.dynamic_update_slice(row, new_row.astype(row.dtype), (0, start, 0))

    return jax.vmap(write)(rows, new, length)


def append(cache: KVCache, new: KVCache, length: Int[Array, "B"]) -> KVCache:
    """Writes the rows of `new` (the same layers, Q rows each) behind `length` rows of `cache`."""

    def write(layers, new_layers):
        return tuple(append_rows(old, rows, length) for old, rows in zip(layers, new_layers, strict=True))

    return KVCache(keys=write(cache.keys, new.keys), values=write(cache.values, new.values))
