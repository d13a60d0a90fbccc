"""Which slots count: coverage of the gold token by the pool, and the oracle prefix (paper section 3.4).

The one place that decides where the lattice terms apply. It owns no loss and does not know how slots are supervised.
"""

from typing import NamedTuple

import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Bool, Int, Int32


class GoldRanks(NamedTuple):
    """Where each slot's gold token stands among its candidates.

    Attributes:
        rank: 0..K-1; 0 where the pool misses the gold token, so that it can index without harm.
        is_covered: whether the pool holds the gold token.
    """

    rank: Int32[Array, "*b S"]
    is_covered: Bool[Array, "*b S"]


def gold_ranks(candidate_ids: Int[Array, "*b S K"], gold_ids: Int[Array, "*b S"]) -> GoldRanks:
    """Finds the gold token among the candidates, which are distinct and never have it injected."""
    matches = candidate_ids == gold_ids[..., None]  # [*b, S, K]
    return GoldRanks(rank=jnp.argmax(matches, axis=-1).astype(jnp.int32), is_covered=jnp.any(matches, axis=-1))


def leading_run(flags: Bool[Array, "*b S"]) -> Bool[Array, "*b S"]:
    """True up to, and not including, the first False."""
    return jnp.cumprod(flags.astype(jnp.int32), axis=-1).astype(bool)


def lattice_slots(
    is_covered: Bool[Array, "*b S"], is_supervised: Bool[Array, "*b S"], rule: str
) -> Bool[Array, "*b S"]:
    """The set of slots over which Eq. 3, 5 and 13 are means: the oracle prefix.

    A slot belongs to it if the pool holds its own and every earlier gold token; a first-slot miss leaves none.

    Args:
        is_covered: `gold_ranks(...).is_covered`.
        is_supervised: slots whose label exists and counts.
        rule: "prefix" stops at the first unsupervised slot; "whole", the public code's rule, drops every block that
            has one.

    Raises:
        ValueError: for another rule.
    """
    if rule == "prefix":
        return leading_run(is_covered & is_supervised)
    if rule == "whole":
        return leading_run(is_covered) & jnp.all(is_supervised, axis=-1, keepdims=True)
    raise ValueError(f"lattice_slots was asked for the rule {rule!r}; use 'prefix' or 'whole'.")
