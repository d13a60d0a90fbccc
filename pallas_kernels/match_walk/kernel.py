"""Matching scores and the walk through them as one Mosaic GPU kernel: one CTA for each block.

The vectors stream through shared memory in pieces of 64 columns, out and in vector of a candidate from the one row that
they share. A transition needs only the products of one slot's out vectors with the next slot's in vectors, K x K of
them, which lie on the diagonal of (all out rows) x (all in rows)^T when the anchor stands in front of the out rows; it
comes among those of other blocks, because the copy engine takes rows by the eight. The tensor cores compute that
diagonal in squares of 64 rows. Norms are summed beside them. The walk then reads scores one by one.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.match_walk.reference import MIN_TEMPERATURE, Scores, Walked

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  public in JAX's documents, not marked so in its source
SQUARE = 64  # rows of a tensor-core product
COLUMNS = 64  # of bfloat16: the 128 bytes of a swizzle
SHARED = 160 * 1024  # bytes for vectors in flight


def problem(vectors: Float[Array, "B S K out_in"]) -> str | None:
    """What of a call the kernel can't do, in words."""
    _, slots, ranks, both = vectors.shape
    if ranks not in (8, 16):
        return f"it takes 8 or 16 candidates per slot, and there are {ranks}"
    if slots * ranks > 256:
        return f"it takes at most 256 candidates in all, and there are {slots} slots of {ranks}"
    if both % (2 * COLUMNS):
        return f"vectors must be a multiple of {COLUMNS} wide, and are {both / 2:g}"
    if vectors.dtype != jnp.bfloat16:
        return f"vectors must be bfloat16, and are {vectors.dtype}"
    return None


def match_walk(
    anchor_out: Float[Array, "B E"],
    vectors: Float[Array, "B S K out_in"],
    *,
    cosine_scale: float,
    floor: float,
    kind: Literal["greedy", "exact", "sampled"],
    temperature: Float[Array, "B"] | None = None,
    uniforms: Float[Array, "B S"] | None = None,
    with_scores: bool = False,
    interpret=None,
) -> Walked:
    """See `reference.match_walk`."""
    batch, slots, ranks, both = vectors.shape
    width, rows = both // 2, slots * ranks
    squares = -(-rows // SQUARE)
    held = max(rows, SQUARE)
    stages = min(SHARED // (4 * held * COLUMNS), width // COLUMNS)
    picks_size = -(-slots // 4) * 4  # copies move multiples of 16 bytes
    anchors = jnp.pad(anchor_out, ((0, -batch % ranks), (0, 0)))
    inputs = [anchors, vectors.reshape(batch, rows, both)]
    results = {"picks": ((picks_size,), jnp.int32)}
    if kind == "sampled":
        assert temperature is not None and uniforms is not None  # check_draws saw to it
        draws = jnp.concatenate([temperature[:, None], uniforms], axis=1)
        inputs.append(jnp.pad(draws, ((0, 0), (0, -(slots + 1) % 4))))
        results["q"] = ((rows,), jnp.float32)
    if with_scores:
        results["scores"] = ((squares, SQUARE, SQUARE), jnp.float32)
    scratch = {
        "out_s": _vectors(stages, held),
        "in_s": _vectors(stages, held),
        "scale_s": plgpu.SMEM((SQUARE,), jnp.float32),
        "scores_s": plgpu.SMEM((squares, SQUARE, SQUARE), jnp.float32),
        "picks_s": plgpu.SMEM((picks_size,), jnp.int32),
        "q_s": plgpu.SMEM((rows,), jnp.float32),
        "after_s": plgpu.SMEM((rows,), jnp.float32),
        "draws_s": plgpu.SMEM((slots + 1 + -(slots + 1) % 4,), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        "drawn": plgpu.Barrier(),
    }
    body = partial(_body, kind=kind, slots=slots, ranks=ranks, scale=cosine_scale, floor=floor, names=tuple(results))
    body.__name__ = f"match_walk_{kind}"  # type: ignore[attr-defined]
    values = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((batch, *shape), kind_) for shape, kind_ in results.values()),
        grid=(batch,),
        grid_names=("block",),
        scratch_types=scratch,
        interpret=interpret,
    )(*inputs)
    found = dict(zip(results, values, strict=True))
    return Walked(
        picks=found["picks"][:, :slots],
        q=found["q"].reshape(batch, slots, ranks) if "q" in found else None,
        scores=_unpack(found["scores"], slots, ranks) if "scores" in found else None,
    )


def _vectors(stages: int, rows: int):
    # Either class lacks a method of JAX's protocol of transforms, one that nothing here calls.
    tiling = plgpu.TilingTransform((8, COLUMNS))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * COLUMNS)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM((stages, rows, COLUMNS), jnp.bfloat16, transforms=(tiling, swizzle))


def _begins(rows: int) -> list[int]:
    """First row of each square; the last one reaches back instead of over the end."""
    return [max(min(begin, rows - SQUARE), 0) for begin in range(0, rows, SQUARE)]


def _unpack(squares: Float[Array, "B M R R"], slots: int, ranks: int) -> Scores:
    """The K x K products on the diagonal of the squares."""
    begins, steps = _begins(slots * ranks), []
    for slot in range(slots):
        square = min(slot * ranks // SQUARE, len(begins) - 1)
        first = slot * ranks - begins[square]
        steps.append(squares[:, square, first : first + ranks, first : first + ranks])
    own = jnp.arange(len(squares)) % ranks
    start = jnp.take_along_axis(steps[0], own[:, None, None], axis=1)[:, 0]
    return Scores(start=start, pair=jnp.stack(steps, axis=1)[:, 1:])


def _body(*refs, kind, slots, ranks, scale, floor, names, out_s, in_s, scale_s, scores_s, picks_s, q_s, after_s,
          draws_s, arrived, drawn):  # fmt: skip
    """Scores, then the walk, then both on their way out."""
    num_inputs = len(refs) - len(names)
    inputs, results = refs[:num_inputs], dict(zip(names, refs[num_inputs:], strict=True))
    block = jax.lax.axis_index("block")
    own = jax.lax.rem(block, ranks)
    if kind == "sampled":
        plgpu.copy_gmem_to_smem(inputs[2].at[block], draws_s, drawn)
    anchors = inputs[0].at[pl.ds(block // ranks * ranks, ranks)]
    _scores(anchors, inputs[1].at[block], out_s, in_s, scale_s, scores_s, arrived, slots * ranks, ranks, scale, floor)
    read = partial(_read, scores_s, slots * ranks, ranks)
    if kind == "sampled":
        plgpu.barrier_wait(drawn)
        _sample(read, own, draws_s, picks_s, q_s, slots, ranks)
    else:
        _climb(read, own, after_s if kind == "exact" else None, picks_s, slots, ranks)
    plgpu.commit_smem()
    for name, source in (("picks", picks_s), ("q", q_s), ("scores", scores_s)):
        if name in results:
            plgpu.copy_smem_to_gmem(source, results[name].at[block])
    plgpu.wait_smem_to_gmem(0)


def _scores(anchors_g, vectors_g, out_s, in_s, scale_s, scores_s, arrived, rows, ranks, scale, floor):
    """sigma times the cosines, in the squares of `scores_s`."""
    stages, width = out_s.shape[0], anchors_g.shape[-1]
    steps, begins = width // COLUMNS, _begins(rows)

    def fetch(step, stage):
        of_out, of_in = (pl.ds(begin + step * COLUMNS, COLUMNS) for begin in (0, width))
        arrival = arrived.at[stage]
        plgpu.copy_gmem_to_smem(anchors_g.at[:, of_out], out_s.at[stage, pl.ds(0, ranks)], arrival)
        before_last = pl.ds(0, rows - ranks)
        plgpu.copy_gmem_to_smem(vectors_g.at[before_last, of_out], out_s.at[stage, pl.ds(ranks, rows - ranks)], arrival)
        plgpu.copy_gmem_to_smem(vectors_g.at[:, of_in], in_s.at[stage, pl.ds(0, rows)], arrival)

    def accumulate(*sums):
        def step_(step, squares):
            stage = jax.lax.rem(step, stages)
            plgpu.barrier_wait(arrived.at[stage])
            for sum_, begin in zip(sums, begins, strict=True):
                here = pl.ds(begin, SQUARE)
                plgpu.wgmma(sum_, out_s.at[stage, here], in_s.at[stage, here].transpose((1, 0)))
            squares = [
                total + _squares(ref.at[stage, pl.ds(begin, SQUARE)])
                for total, (begin, ref) in zip(squares, [(b, r) for b in begins for r in (out_s, in_s)], strict=True)
            ]
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # nobody reads this stage any more

            @pl.when(step + stages < steps)
            def _():
                fetch(step + stages, stage)

            return squares

        nothing = [plgpu.layout_cast(jnp.zeros((SQUARE,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))] * 2 * len(begins)
        squares = jax.lax.fori_loop(0, steps, step_, nothing)
        return [sum_[...] for sum_ in sums], squares

    for stage in range(stages):
        fetch(stage, stage)
    shapes = [ACC((SQUARE, SQUARE), jnp.float32)] * len(begins)
    products, squares = pl.run_scoped(accumulate, *shapes)
    for i, product in enumerate(products):
        out_scale, in_scale = (jax.lax.rsqrt(jnp.maximum(s, floor**2)) for s in squares[2 * i : 2 * i + 2])
        scale_s[...] = in_scale
        plgpu.commit_smem()
        columns = plgpu.load(scale_s, layout=plgpu.Layout.WGMMA.reduce(0))
        product = product * jax.lax.broadcast_in_dim(out_scale, product.shape, [0])
        scores_s[i] = product * jax.lax.broadcast_in_dim(columns, product.shape, [1]) * scale
        plgpu.commit_smem()


def _squares(ref):
    """Sum of squares of each row."""
    values = plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return jnp.sum(values * values, axis=1)


def _read(scores_s, rows: int, ranks: int, slot, before, rank):
    """The score from candidate `before` of the slot before to candidate `rank` of `slot`."""
    last = len(_begins(rows)) - 1
    square = jnp.minimum(slot * ranks // SQUARE, last)
    begin = jnp.minimum(square * SQUARE, max(rows - SQUARE, 0))
    first = slot * ranks - begin
    return scores_s[square, first + before, first + rank]


def _argmax(values: list):
    """Rank and value of the first of the largest."""
    best, rank = values[0], jnp.int32(0)
    for other, value in enumerate(values[1:], start=1):
        is_better = value > best
        best, rank = jnp.where(is_better, value, best), jnp.where(is_better, jnp.int32(other), rank)
    return rank, best


def _climb(read, anchor, after_s, picks_s, slots: int, ranks: int):
    """The greedy walk (Eq. 8) from row `anchor`.

    If `after_s` is there, over scores plus the best that can follow (Appendix E).
    """
    if after_s is not None:
        for rank in range(ranks):
            after_s[(slots - 1) * ranks + rank] = jnp.float32(0)

        def back(step, _):
            slot = slots - 1 - step
            after = [after_s[slot * ranks + rank] for rank in range(ranks)]
            for before in range(ranks):
                _, best = _argmax([read(slot, before, rank) + after[rank] for rank in range(ranks)])
                after_s[(slot - 1) * ranks + before] = best
            return ()

        jax.lax.fori_loop(0, slots - 1, back, ())

    def forward(slot, picked):
        values = [read(slot, picked, rank) for rank in range(ranks)]
        if after_s is not None:
            values = [value + after_s[slot * ranks + rank] for rank, value in enumerate(values)]
        picked, _ = _argmax(values)
        picks_s[slot] = picked
        return picked

    jax.lax.fori_loop(0, slots, forward, anchor)


def _sample(read, anchor, draws_s, picks_s, q_s, slots: int, ranks: int):
    """Draws from softmax(row / T) of the row that was drawn; certainty of the best at T = 0."""
    temperature = draws_s[0]
    is_greedy = temperature == 0
    divisor = jnp.maximum(temperature, MIN_TEMPERATURE)

    def draw(slot, picked):
        row = [read(slot, picked, rank) / divisor for rank in range(ranks)]
        best, highest = _argmax(row)
        weights = [jnp.exp(value - highest) for value in row]
        total = sum(weights[1:], weights[0])
        uniform, passed, below = draws_s[slot + 1], jnp.float32(0), jnp.int32(0)
        for rank, weight in enumerate(weights):
            q = jnp.where(is_greedy, jnp.where(best == rank, jnp.float32(1), jnp.float32(0)), weight / total)
            q_s[slot * ranks + rank] = q
            passed = passed + q
            below = below + jnp.where(passed <= uniform, jnp.int32(1), jnp.int32(0))
        picked = jnp.minimum(below, ranks - 1)
        picks_s[slot] = picked
        return picked

    jax.lax.fori_loop(0, slots, draw, anchor)
