"""The candidate pool of each slot: top-K ids, their log-probabilities, and the five confidence scalars.

Owns what the reranker is told about the drafter's distribution. No gradient crosses the choice of the pool.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Float, Int32
from pallas_kernels.dispatch import Implementation
from pallas_kernels.topk_logprobs import topk_logprobs


class Candidates(NamedTuple):
    """The K most probable tokens of each slot, in descending order; ties to the lower id."""

    ids: Int32[Array, "*batch S K"]
    logprobs: Float[Array, "*batch S K"]  # float32, over the whole vocabulary


def candidate_pool(
    logits: Float[Array, "*batch S V"], num_candidates: int, kernels: Implementation = "auto"
) -> Candidates:
    """Top-K of the raw logits: no temperature, no filter, so the pool does not depend on how the text is sampled.

    A row that contains NaN has NaN log-probabilities throughout (`topk_logprobs`).
    """
    top = topk_logprobs(logits.reshape(-1, logits.shape[-1]), num_candidates, implementation=kernels)
    shape = (*logits.shape[:-1], num_candidates)
    return Candidates(ids=top.ids.reshape(shape), logprobs=top.logprobs.reshape(shape))


def confidence_features(logprobs: Float[Array, "*batch K"]) -> Float[Array, "*batch K 5"]:
    """Five scalars per candidate, in this order, in the dtype of `logprobs` (float32), which is in descending order.

    log p; p; log p minus the slot's maximum; rank / (K - 1), 0 where K is 1; 1 for rank 0 and 0 for the others.
    """
    num_candidates = logprobs.shape[-1]
    shape = (*logprobs.shape, 5)
    rank, feature = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (len(shape) - 2, len(shape) - 1))
    rank = rank.astype(logprobs.dtype)
    scalars = (
        jnp.broadcast_to(logprobs[..., None], shape),
        jnp.broadcast_to(jnp.exp(logprobs)[..., None], shape),
        jnp.broadcast_to((logprobs - logprobs[..., :1])[..., None], shape),  # the pool is in descending order
        rank / max(num_candidates - 1, 1),
        (rank == 0).astype(logprobs.dtype),
    )
    return jax.lax.select_n(feature, *scalars)  # chosen, not stacked: one launch on a GPU with what follows
