"""Attention of a lattice's nodes as one Mosaic GPU kernel: one CTA for 64 queries of a head of a text.

Queries, keys and values of a head are columns of the joined projection, which the copy engine reads where they lie, and
the result is written where the next projection reads it: nothing is transposed. The tensor cores work in squares of 64
nodes. Where the nodes are no multiple of 64, the last square reaches back instead of over the end: as keys, the nodes
that it shares with the square before it get no weight; as queries, they are not written again.

The weights go to the second product through shared memory, since JAX interprets no product of registers.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  public in JAX's documents, not marked so in its source
SQUARE = 64  # nodes of a tensor-core product
LINE = 8  # rows that the copy engine lays into shared memory together
COLUMNS = 64  # of bfloat16: the 128 bytes of a swizzle
MAX_NODES = 256
HEAD_WIDTHS = (64, 128)


def problem(qkv: Float[Array, "*batch M three_W"], bias: Float[Array, "N M M"]) -> str | None:
    """What of a call the kernel can't do, in words."""
    head_width = qkv.shape[-1] // (3 * bias.shape[0])
    if head_width not in HEAD_WIDTHS:
        return f"heads must be {' or '.join(map(str, HEAD_WIDTHS))} wide, and are {head_width}"
    if qkv.shape[-2] > MAX_NODES:
        return f"it takes at most {MAX_NODES} nodes, and there are {qkv.shape[-2]}"
    if qkv.dtype != jnp.bfloat16:
        return f"queries, keys and values must be bfloat16, and are {qkv.dtype}"
    return None


def lattice_attention(
    qkv: Float[Array, "*batch M three_W"], bias: Float[Array, "N M M"], *, interpret=None
) -> Float[Array, "*batch M W"]:
    """See `reference.lattice_attention`. Fewer nodes than 64, or no multiple of 8, are padded first: a copy."""
    nodes, width, heads = qkv.shape[-2], qkv.shape[-1] // 3, bias.shape[0]
    joined = qkv.reshape(-1, nodes, 3 * width)
    padding = max(-(-nodes // LINE) * LINE, SQUARE) - nodes
    if padding:
        joined = jnp.pad(joined, ((0, 0), (0, padding), (0, 0)))
        lowest = jnp.finfo(bias.dtype).min
        bias = jnp.pad(bias, ((0, 0), (0, padding), (0, padding)), constant_values=lowest)
    texts, rows = joined.shape[:2]
    squares = -(-rows // SQUARE)
    body = partial(_body, rows=rows, heads=heads, head_width=width // heads)
    body.__name__ = "lattice_attention"  # type: ignore[attr-defined]
    mixed = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((texts, rows, width), joined.dtype),
        grid=(texts, heads, squares),
        grid_names=("text", "head", "square"),
        scratch_types={
            "queries_s": _rows(SQUARE, width // heads),
            "keys_s": _rows(rows, width // heads),
            "values_s": _rows(rows, width // heads),
            "weights_s": _rows(squares, SQUARE, SQUARE),
            "scorable": plgpu.Barrier(num_arrivals=2),
            "mixable": plgpu.Barrier(),
        },
        interpret=interpret,
    )(joined, bias)
    return mixed[:, :nodes].reshape(*qkv.shape[:-1], width)


def _rows(*shape: int):
    # Either class lacks a method of JAX's protocol of transforms, one that nothing here calls.
    tiling = plgpu.TilingTransform((LINE, COLUMNS))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * COLUMNS)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, swizzle))


def _begins(rows: int) -> list[int]:
    """First node of each square."""
    return [min(begin, rows - SQUARE) for begin in range(0, rows, SQUARE)]


def _body(qkv_g, bias_g, mixed_g, *, rows, heads, head_width, queries_s, keys_s, values_s, weights_s, scorable,
          mixable):  # fmt: skip
    """What is needed is on its way while the bias is read; keys first, since values wait for the weights."""
    text, head, square = (jax.lax.axis_index(name) for name in ("text", "head", "square"))
    begin = jnp.minimum(square * SQUARE, rows - SQUARE)
    queries, keys, values = (pl.ds((part * heads + head) * head_width, head_width) for part in range(3))
    plgpu.copy_gmem_to_smem(qkv_g.at[text, pl.ds(begin, SQUARE), queries], queries_s, scorable)
    plgpu.copy_gmem_to_smem(qkv_g.at[text, :, keys], keys_s, scorable)
    plgpu.copy_gmem_to_smem(qkv_g.at[text, :, values], values_s, mixable)
    biases = [_square_of(bias_g.at[head, pl.ds(begin, SQUARE), pl.ds(first, SQUARE)]) for first in _begins(rows)]
    plgpu.barrier_wait(scorable)
    scores = [
        product * head_width**-0.5 + bias
        for product, bias in zip(_products(queries_s, keys_s, rows), biases, strict=True)
    ]
    for here, weights in enumerate(_softmax(scores, shared=len(scores) * SQUARE - rows)):
        weights_s[here] = weights.astype(weights_s.dtype)
    plgpu.commit_smem()
    plgpu.barrier_wait(mixable)
    queries_s[...] = _mix(weights_s, values_s, rows).astype(queries_s.dtype)
    plgpu.commit_smem()
    _write(queries_s, mixed_g.at[text, :, queries], square, rows)
    plgpu.wait_smem_to_gmem(0)


def _square_of(ref):
    """A square of float32 as the tensor cores hold it."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)


def _products(queries_s, keys_s, rows: int) -> list[Array]:
    """q k^T with each square of keys."""

    def multiply(*sums):
        for sum_, first in zip(sums, _begins(rows), strict=True):
            plgpu.wgmma(sum_, queries_s, keys_s.at[pl.ds(first, SQUARE)].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return [sum_[...] for sum_ in sums]

    return pl.run_scoped(multiply, *[ACC((SQUARE, SQUARE), jnp.float32)] * len(_begins(rows)))


def _softmax(scores: list[Array], shared: int) -> list[Array]:
    """Over all squares, less the first `shared` columns of the last one."""
    if shared:
        column = plgpu.broadcasted_iota(jnp.int32, (SQUARE, SQUARE), 1, layout=plgpu.Layout.WGMMA)
        scores = [*scores[:-1], jnp.where(column >= shared, scores[-1], -jnp.inf)]

    def along(row: Array) -> Array:
        return jax.lax.broadcast_in_dim(row, (SQUARE, SQUARE), [0])

    highest = [jnp.max(square, axis=1) for square in scores]
    for other in highest[1:]:
        highest[0] = jnp.maximum(highest[0], other)
    raised = [jnp.exp(square - along(highest[0])) for square in scores]
    totals = [jnp.sum(square, axis=1) for square in raised]
    total = along(sum(totals[1:], totals[0]))
    return [square / total for square in raised]


def _mix(weights_s, values_s, rows: int) -> Array:
    """Weighted sum of the values."""

    def multiply(sum_):
        for here, first in enumerate(_begins(rows)):
            plgpu.wgmma(sum_, weights_s.at[here], values_s.at[pl.ds(first, SQUARE)])
        plgpu.wgmma_wait(0)
        return sum_[...]

    return pl.run_scoped(multiply, ACC((SQUARE, values_s.shape[-1]), jnp.float32))


def _write(mixed_s, mixed_g, square, rows: int) -> None:
    """Each node once: of the last square only what is not in the one before it."""
    last = len(_begins(rows)) - 1
    own = rows - last * SQUARE

    @pl.when(square < last)
    def _():
        plgpu.copy_smem_to_gmem(mixed_s, mixed_g.at[pl.ds(square * SQUARE, SQUARE)])

    @pl.when(square == last)
    def _():
        plgpu.copy_smem_to_gmem(mixed_s.at[pl.ds(SQUARE - own, own)], mixed_g.at[pl.ds(last * SQUARE, own)])
