"""Matching scores between adjacent slots, and the walks through them."""

from typing import Literal

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.match_walk import kernel, reference
from pallas_kernels.match_walk.reference import (
    Scores,
    Walked,
    exact_walk,
    greedy_walk,
    match_scores,
    sampled_walk,
)

__all__ = ["Scores", "Walked", "exact_walk", "greedy_walk", "match_scores", "match_walk", "sampled_walk"]


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
    implementation: Implementation = "auto",
    interpret=None,
) -> Walked:
    """Cosines of the vectors times `cosine_scale` (Eq. 1), and one path through them; for serving, no gradient.

    Args:
        anchor_out: out vectors of the anchors, E wide.
        vectors: each candidate's out vector, then its in vector. They may have any length; a norm below `floor` is
            divided by the floor instead.
        kind: the best next candidate (Eq. 8), the path of highest sum (Appendix E), or a draw from the softmax of each
            committed row at `temperature` (0: the greedy walk with certainty) with `uniforms` in [0, 1).
        with_scores: return them too.
        implementation: see `dispatch`.
        interpret: for tests, how to run the kernel without a GPU.

    Raises:
        ValueError: another kind, or a sampled walk without its draws, or another with them.
        NotImplementedError: `mosaic_gpu` is named for a call that it can't do.
    """
    reference.check_draws(kind, temperature, uniforms)
    run = reference.match_walk
    if choose("match_walk", implementation, kernel.problem(vectors)).implementation == "mosaic_gpu":
        run = kernel.match_walk if interpret is None else _interpreted(interpret)
    return run(
        anchor_out, vectors, cosine_scale=cosine_scale, floor=floor, kind=kind, temperature=temperature,
        uniforms=uniforms, with_scores=with_scores,
    )  # fmt: skip


def _interpreted(interpret):
    return lambda *vectors, **settings: kernel.match_walk(*vectors, **settings, interpret=interpret)
