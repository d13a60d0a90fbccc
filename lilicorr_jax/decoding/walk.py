"""From matching scores to one path through the lattice: greedy (Eq. 8), exact (Appendix E) or sampled.

One signature for the three rules; the rules themselves are `pallas_kernels.match_walk`.
"""

from typing import Literal, NamedTuple

from lilicorr_jax.shapes import Array, Float, Int32
from pallas_kernels.match_walk import Scores, exact_walk, greedy_walk, sampled_walk

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
    draws = temperature is not None and uniforms is not None
    if kind == "sampled":
        if not draws:
            raise ValueError("A sampled walk needs temperature and uniforms; got None for at least one of them.")
        return Walk(*sampled_walk(scores, temperature, uniforms))
    rules = {"greedy": greedy_walk, "exact": exact_walk}
    if kind not in rules:
        raise ValueError(f"Unknown walk {kind!r}; choose 'greedy', 'exact' or 'sampled'.")
    if temperature is not None or uniforms is not None:
        raise ValueError(f"A {kind} walk draws nothing; leave out temperature and uniforms, or ask for 'sampled'.")
    return Walk(picks=rules[kind](scores), q=None)
