"""Attention of a lattice's nodes to each other, between its two projections."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.lattice_attention import kernel, reference

__all__ = ["lattice_attention"]


def lattice_attention(
    qkv: Float[Array, "*batch M three_W"],
    bias: Float[Array, "N M M"],
    *,
    implementation: Implementation = "auto",
    interpret=None,
) -> Float[Array, "*batch M W"]:
    """softmax(q k^T / sqrt(H) + bias) v in each of N heads, from the joined projection to what the next one takes.

    Args:
        qkv: queries, keys and values side by side, each head by head, H = W / N columns each; M nodes.
        bias: added to the scaled scores; nothing is masked.
        implementation: see `dispatch`. The kernel has no gradient and, under a mesh, must run inside `shard_map`.
        interpret: for tests, how to run the kernel without a GPU.

    Raises:
        ValueError: columns that can't be shared out to the heads.
        NotImplementedError: `mosaic_gpu` is named for a call that it can't do.
    """
    reference.check(qkv, bias)
    if choose("lattice_attention", implementation, kernel.problem(qkv, bias)).implementation == "reference":
        return reference.lattice_attention(qkv, bias)
    return kernel.lattice_attention(qkv, bias, interpret=interpret)
