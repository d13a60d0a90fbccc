"""From matching scores to one path through the lattice: greedy (Eq. 8), exact (Appendix E) or sampled.

One signature for the three rules; the rules themselves are `pallas_kernels.match_walk`.
"""

from typing import Literal, NamedTuple

from lilicorr_jax.shapes import Array, Float, Int32
from pallas_kernels.match_walk import Scores, exact_walk, greedy_walk, sampled_walk
from pallas_kernels.match_walk.reference import check_draws

WalkKind = Literal["greedy", "exact", "sampled"]


class Walk(NamedTuple):
    """The rank picked in each slot and, for a sampled walk only, the distribution that each pick was drawn from."""

    picks: Int32[Array, "*batch S"]
    q: Float[Array, "*batch S K"] | None


def walk(
    scores: Scores,
    kind: WalkKind,
    *,
    temperature: Float[Array, "*batch"] | None = None,
    uniforms: Float[Array, "*batch S"] | None = None,
) -> Walk:
    """One rank per slot.

    Args:
        scores: matching scores, times the cosine scale.
        temperature, uniforms: what a sampled walk draws with, see `sampled_walk`; the other two take neither.
    """
    check_draws(kind, temperature, uniforms)
    if kind == "sampled":
        return Walk(*sampled_walk(scores, temperature, uniforms))
    return Walk(picks={"greedy": greedy_walk, "exact": exact_walk}[kind](scores), q=None)
