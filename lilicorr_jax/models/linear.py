"""The dense layer, in two forms of its one matrix: as it is trained, and as it is decoded with.

Training keeps a kernel [in, out]. Decoding multiplies a handful of rows at a time, which a CPU does faster, and a GPU
as fast, with the matrix as public checkpoints store it, one contiguous row for each output: `for_decoding` turns a tree
of the first form into one of the second, and every module takes either.
"""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Float

TRAINED, DECODED = "kernel", "rows"


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
            y = self._multiply(x, self.get_variable("params", DECODED), contracted=1)
        else:
            init = nn.with_logical_partitioning(self.kernel_init, self.axes)
            y = self._multiply(x, self.param(TRAINED, init, (x.shape[-1], self.features), jnp.float32), contracted=0)
        if not self.use_bias:
            return y
        init = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.axes[1:])
        bias = self.param("bias", init, (self.features,), jnp.float32)
        return y + jnp.broadcast_to(bias.astype(self.dtype), y.shape)

    def _multiply(self, x: Array, matrix: jax.typing.ArrayLike, contracted: int) -> Array:
        dimensions = (((x.ndim - 1,), (contracted,)), ((), ()))
        return jax.lax.dot_general(x, jnp.asarray(matrix, self.dtype), dimensions)


def for_decoding(params: Mapping) -> dict:
    """The same tree with every `kernel` [in, out] as `rows` [out, in]; one that is so already comes back as it is."""
    return {
        DECODED if name == TRAINED else name: for_decoding(leaf) if isinstance(leaf, Mapping) else _decoded(name, leaf)
        for name, leaf in params.items()
    }


def _decoded(name: str, leaf):
    return leaf.T if name == TRAINED else leaf
