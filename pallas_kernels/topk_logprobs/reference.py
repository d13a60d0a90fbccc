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


def topk_logprobs(logits: Float[Array, "rows V"], num_candidates: int) -> TopK:
    """log p = logit - logsumexp over V, for the `num_candidates` largest logits of each row; float32 throughout.

    A row that contains NaN has a NaN log-partition, hence NaN in every log-probability: its ids mean nothing, and
    whoever reads the row sees that. Raises ValueError where V holds fewer than `num_candidates` entries.
    """
    if not 1 <= num_candidates <= logits.shape[-1]:
        raise ValueError(
            f"num_candidates must lie in [1, {logits.shape[-1]}], the width of the logits; got {num_candidates}."
        )
    logits = logits.astype(jnp.float32)
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    values, ids = jax.lax.top_k(logits, num_candidates)
    return TopK(ids=ids, logprobs=values - log_partition[:, None], log_partition=log_partition)
