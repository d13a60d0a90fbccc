"""The dense layer, in two forms of its one matrix: as it is trained, and as it is decoded with.

Training keeps a kernel [in, out]. Decoding multiplies a handful of rows at a time, which a CPU does faster, and a GPU
as fast, with the matrix as public checkpoints store it, one contiguous row for each output. Matrices that multiply the
same vectors then lie one below the other: one product is one launch, and large enough for all threads. `for_decoding`
turns a tree of the first form into one of the second, and every module takes either.
"""

import math
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Float

TRAINED, DECODED = "kernel", "rows"

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that read the same vectors, and the one layer that decoding has in their place."""


class Linear(nn.Module):
    """y = x W + b, with `kernel` [in, out] or, where the tree has it, `rows` [out, in].

    Attributes:
        features: outputs.
        axes: logical names of the kernel's axes (see `lilicorr_jax.sharding`).
        dtype: of the product; parameters keep the dtype that they were made or loaded with.
    """

    features: int
    axes: tuple[str, str]
    dtype: str
    kernel_init: nn.initializers.Initializer
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch U"]:
        x = x.astype(self.dtype)
        if self.has_variable("params", DECODED):
            y = multiply_rows(x, jnp.asarray(self.get_variable("params", DECODED), self.dtype))
        else:
            init = nn.with_logical_partitioning(self.kernel_init, self.axes)
            kernel = self.param(TRAINED, init, (x.shape[-1], self.features), jnp.float32)
            y = x @ jnp.asarray(kernel, self.dtype)
        if not self.use_bias:
            return y
        init = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.axes[1:])
        bias = self.param("bias", init, (self.features,), jnp.float32)
        return y + jnp.broadcast_to(bias.astype(self.dtype), y.shape)


def multiply_rows(x: Float[Array, "*batch I"], rows: Float[Array, "U I"]) -> Float[Array, "*batch U"]:
    """x rowsᵀ: each output is the product with one contiguous row of the matrix.

    XLA's CPU backend packs the right side of a product anew each time. Where that would be the matrix, and several
    vectors share it, the matrix stands on the left, behind a barrier, for XLA would turn the product round again.
    """

    def forward(x, rows):
        return jax.lax.dot_general(x, rows, (((x.ndim - 1,), (1,)), ((), ())))

    def turned(x, rows):
        y = jax.lax.dot_general(rows, x.reshape(-1, x.shape[-1]), (((1,), (1,)), ((), ())))  # [U, vectors]
        return jax.lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1)

    if math.prod(x.shape[:-1]) == 1:
        return forward(x, rows)
    return jax.lax.platform_dependent(x, rows, cpu=turned, default=forward)


def for_decoding(params: Mapping) -> dict:
    """The same tree with every `kernel` [in, out] as `rows` [out, in] and the layers of `JOINED` as one.

    A tree that is so already comes back as it is.
    """
    tree = {
        DECODED if name == TRAINED else name: for_decoding(leaf) if isinstance(leaf, Mapping) else _decoded(name, leaf)
        for name, leaf in params.items()
    }
    for joined, names in JOINED.items():
        if all(name in tree for name in names):
            parts = [tree.pop(name) for name in names]
            tree[joined] = {leaf: jnp.concatenate([part[leaf] for part in parts]) for leaf in parts[0]}
    return tree


def _decoded(name: str, leaf):
    return leaf.T if name == TRAINED else leaf
