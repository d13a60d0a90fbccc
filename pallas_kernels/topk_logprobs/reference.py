"""Top-K and log-partition of rows of logits, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class TopK(NamedTuple):
    """The K largest logits of each row, in descending order; ties to the lower id."""

    ids: Int32[Array, "rows K"]
    logprobs: Float[Array, "rows K"]
    log_partition: Float[Array, "rows"]


def check(logits: Float[Array, "rows V"], num_candidates: int) -> None:
    """Raises ValueError where a row has fewer entries than are asked for, or none is."""
    if not 1 <= num_candidates <= logits.shape[-1]:
        raise ValueError(
            f"num_candidates must lie in [1, {logits.shape[-1]}], the width of the logits; got {num_candidates}."
        )


def topk_logprobs(logits: Float[Array, "rows V"], num_candidates: int) -> TopK:
    """log p = logit - logsumexp over V, for the `num_candidates` largest logits of each row; float32 throughout.

    A row that contains NaN has a NaN log-partition, hence NaN in every log-probability: its ids mean nothing, and
    whoever reads the row sees that. Plus infinity makes the best log-probability NaN; -0.0 ranks below 0.0.
    """
    logits = logits.astype(jnp.float32)
    # The barriers keep XLA from merging a later slice into top_k, which on a CPU would then sort the whole row. There
    # are two, because one over both results ends the compiler of programs for several CPU devices (jax 0.11.2).
    values, ids = (jax.lax.optimization_barrier(x) for x in jax.lax.top_k(logits, num_candidates))
    highest = jax.lax.stop_gradient(values[:, :1])
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1))
    # Subtracting the maximum first keeps the digits that a large log-partition would swallow.
    return TopK(ids=ids, logprobs=values - highest - log_sum[:, None], log_partition=highest[:, 0] + log_sum)
