"""Matching scores (Eq. 1) and the three walks through the lattice, in plain JAX.

The loops over slots are unrolled, so that a whole speculative block stays one device program.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

MIN_TEMPERATURE = 1e-5


class Scores(NamedTuple):
    """Matching scores of a block, float32, times the cosine scale.

    Attributes:
        start: anchor -> candidate of slot 0.
        pair: [s, j, k] is candidate j of slot s -> candidate k of slot s + 1; S - 1 transitions.
    """

    start: Float[Array, "*batch K"]
    pair: Float[Array, "*batch S-1 K K"]


class Walked(NamedTuple):
    """One path through the lattice.

    Attributes:
        picks: the rank chosen in each slot.
        q: of a sampled walk, what each pick was drawn from.
        scores: where they were asked for.
    """

    picks: Int32[Array, "B S"]
    q: Float[Array, "B S K"] | None
    scores: Scores | None


def check_draws(kind: str, temperature: Array | None, uniforms: Array | None) -> None:
    """Raises ValueError unless the kind of walk is known and has the numbers that it draws with, and only then."""
    given = [number is not None for number in (temperature, uniforms)]
    if kind == "sampled":
        if not all(given):
            raise ValueError("A sampled walk needs temperature and uniforms; got None for at least one of them.")
    elif kind not in ("greedy", "exact"):
        raise ValueError(f"Unknown walk {kind!r}; choose 'greedy', 'exact' or 'sampled'.")
    elif any(given):
        raise ValueError(f"A {kind} walk draws nothing; leave out temperature and uniforms, or ask for 'sampled'.")


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
) -> Walked:
    """From vectors of any length to a path: x / max(|x|, floor) in float32, the scores (Eq. 1), the walk.

    `kind`, `temperature` and `uniforms` as in `greedy_walk`, `exact_walk` and `sampled_walk`.
    """
    unit = (_unit(x, floor) for x in (anchor_out, *jnp.split(vectors, 2, axis=-1)))
    scores = match_scores(*unit, cosine_scale=cosine_scale)
    q = None
    if kind == "sampled":
        picks, q = sampled_walk(scores, temperature, uniforms)
    else:
        picks = {"greedy": greedy_walk, "exact": exact_walk}[kind](scores)
    return Walked(picks=picks, q=q, scores=scores if with_scores else None)


def _unit(x: Float[Array, "*batch E"], floor: float) -> Float[Array, "*batch E"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), floor**2))


def match_scores(
    anchor_out: Float[Array, "*batch E"],
    out: Float[Array, "*batch S K E"],
    in_: Float[Array, "*batch S K E"],
    cosine_scale: float,
) -> Scores:
    """phi(s, j, k) = sigma cos(o_{s,j}, i_{s+1,k}), Eq. 1, of unit vectors; the anchor alone stands before slot 0.

    There is no other term: a candidate's own probability counts only through what the vectors learned from it.
    """
    start = jnp.einsum("...e,...ke->...k", anchor_out, in_[..., 0, :, :], preferred_element_type=jnp.float32)
    pair = jnp.einsum(
        "...sje,...ske->...sjk", out[..., :-1, :, :], in_[..., 1:, :, :], preferred_element_type=jnp.float32
    )
    return Scores(start=start * cosine_scale, pair=pair * cosine_scale)


def _transition(pair: Float[Array, "*batch K K"], picked: Int32[Array, "*batch"]) -> Float[Array, "*batch K"]:
    """The row of scores out of the picked candidate."""
    return jnp.take_along_axis(pair, picked[..., None, None], axis=-2)[..., 0, :]


def greedy_walk(scores: Scores) -> Int32[Array, "*batch S"]:
    """c_s = argmax_k phi(s-1, c_{s-1}, k), Eq. 8; ties to the lower rank."""
    first = jnp.argmax(scores.start, axis=-1).astype(jnp.int32)

    def step(picked, pair):
        picked = jnp.argmax(_transition(pair, picked), axis=-1).astype(jnp.int32)
        return picked, picked

    _, rest = jax.lax.scan(step, first, jnp.moveaxis(scores.pair, -3, 0), unroll=True)
    return jnp.moveaxis(jnp.concatenate([first[None], rest]), 0, -1)  # [S, *batch] -> [*batch, S]


def exact_walk(scores: Scores) -> Int32[Array, "*batch S"]:
    """The path of highest total score g(c) = sum_s phi(s-1, c_{s-1}, c_s), Eq. 12, by Viterbi: O(S K^2).

    A pass from the last slot backwards adds to each score the best that can follow; the greedy walk over those sums
    is the best path. Of several best paths it takes the lower rank in the earliest slot in which they differ.
    """

    def step(best_after, pair):
        through = pair + best_after[..., None, :]  # [*batch, K, K]
        return jnp.max(through, axis=-1), through

    pairs = jnp.moveaxis(scores.pair, -3, 0)
    best, through = jax.lax.scan(step, jnp.zeros_like(scores.start), pairs, reverse=True, unroll=True)
    return greedy_walk(Scores(start=scores.start + best, pair=jnp.moveaxis(through, 0, -3)))


def sampled_walk(
    scores: Scores, temperature: Float[Array, "*batch"], uniforms: Float[Array, "*batch S"]
) -> tuple[Int32[Array, "*batch S"], Float[Array, "*batch S K"]]:
    """Draws c_s from q_s = softmax(phi(s-1, c_{s-1}, .) / T), the row out of the candidate that was itself drawn.

    Args:
        temperature: T of each batch row, at least 1e-5; 0 means the greedy walk, whose q is a point mass.
        uniforms: one number in [0, 1) per slot. The pick is the number of cumulative sums of q that do not exceed it.

    Returns:
        The picks and the very q that each was drawn from, float32; a verifier divides by it.
    """
    is_greedy = (temperature == 0)[..., None]
    divisor = jnp.maximum(temperature, MIN_TEMPERATURE)[..., None]

    def draw(row, uniform):
        point = jax.nn.one_hot(jnp.argmax(row, axis=-1), row.shape[-1], dtype=row.dtype)
        q = jnp.where(is_greedy, point, jax.nn.softmax(row / divisor, axis=-1))
        below = jnp.sum(jnp.cumsum(q, axis=-1) <= uniform[..., None], axis=-1, dtype=jnp.int32)
        return jnp.minimum(below, row.shape[-1] - 1), q

    def step(picked, slot):
        pair, uniform = slot
        picked, q = draw(_transition(pair, picked), uniform)
        return picked, (picked, q)

    first, first_q = draw(scores.start, uniforms[..., 0])
    slots = (jnp.moveaxis(scores.pair, -3, 0), jnp.moveaxis(uniforms[..., 1:], -1, 0))
    _, (rest, rest_q) = jax.lax.scan(step, first, slots, unroll=True)
    picks = jnp.concatenate([first[None], rest])
    return jnp.moveaxis(picks, 0, -1), jnp.moveaxis(jnp.concatenate([first_q[None], rest_q]), 0, -2)
