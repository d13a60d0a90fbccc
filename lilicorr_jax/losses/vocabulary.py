"""The pass over the vocabulary: log-partition and candidates, with a gradient that needs no second pass.

The objective reads only the log-partition, the gold logit and the candidates' logits of a slot. With a frozen
unembedding W the first has the gradient d log Z / dh = E_p[W], one row of width D, which the forward pass keeps. No
[slots, V] array outlives a chunk.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Float, Int, Int32
from pallas_kernels.topk_logprobs import TopK, topk_logprobs


class VocabularyPass(NamedTuple):
    """What the objective needs to know of the drafter's whole distribution.

    Attributes:
        log_partition: log sum_v exp(h . W_v), float32; differentiable in the states.
        candidate_ids: the K tokens of largest logit, descending, ties to the lowest id; membership has no gradient.
    """

    log_partition: Float[Array, "M"]
    candidate_ids: Int32[Array, "M K"]


def vocabulary_pass(
    states: Float[Array, "M D"], unembedding: Float[Array, "V D"], num_candidates: int, chunk: int
) -> VocabularyPass:
    """Log-partition and top-K ids of every slot's logits h W^T, in chunks of `chunk` slots.

    Two vocabulary-sized products forward (one when nothing is differentiated), none backward. Products run in the
    unembedding's dtype with float32 accumulation; log-partition and the kept gradient row are float32. The gradients
    of log-partition and `token_logits` nearly cancel for a good drafter: hand in float32 states to let them meet in
    float32.

    Args:
        states: one row per slot.
        unembedding: frozen: its gradient is zero, and never allocated unless somebody asks for it.
        num_candidates: K.
        chunk: slots per step; need not divide M.
    """
    _check_chunk(chunk)
    return _vocabulary_pass(states, unembedding, num_candidates, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _vocabulary_pass(states, unembedding, num_candidates, chunk) -> VocabularyPass:
    def summary(rows):
        top = _top_logits(rows, unembedding, num_candidates)[1]
        return VocabularyPass(log_partition=top.log_partition, candidate_ids=top.ids)

    return over_chunks(summary, states, chunk)


def _forward(states, unembedding, num_candidates, chunk):
    def summary_and_mean(rows):
        logits, top = _top_logits(rows, unembedding, num_candidates)
        summary = VocabularyPass(log_partition=top.log_partition, candidate_ids=top.ids)
        return summary, _mean_row(logits, top, unembedding)

    summary, mean = over_chunks(summary_and_mean, states, chunk)
    return summary, (mean, jnp.zeros((0,), states.dtype))


def _backward(num_candidates, chunk, residuals, cotangent):
    mean, like_states = residuals
    return (cotangent.log_partition[:, None] * mean).astype(like_states.dtype), None


_vocabulary_pass.defvjp(_forward, _backward)


def _top_logits(rows: Float[Array, "C D"], unembedding: Float[Array, "V D"], num_candidates: int):
    logits = row_logits(rows, unembedding)
    return logits, topk_logprobs(logits, num_candidates)


@jax.custom_vjp
def row_logits(rows: Float[Array, "C D"], unembedding: Float[Array, "V D"]) -> Float[Array, "C V"]:
    """Logits h W^T of a chunk's rows, whole and float32, for objectives that read more of them than `vocabulary_pass`.

    Both products, this one and that of its gradient, run in the unembedding's dtype; the unembedding is frozen.
    """
    return jnp.einsum("cd,vd->cv", rows.astype(unembedding.dtype), unembedding, preferred_element_type=jnp.float32)


def _row_logits_forward(rows, unembedding):
    return row_logits(rows, unembedding), (unembedding, jnp.zeros((0,), rows.dtype))


def _row_logits_backward(residuals, cotangent):
    unembedding, like_rows = residuals
    cotangent = cotangent.astype(unembedding.dtype)
    gradient = jnp.einsum("cv,vd->cd", cotangent, unembedding, preferred_element_type=jnp.float32)
    return gradient.astype(like_rows.dtype), None


row_logits.defvjp(_row_logits_forward, _row_logits_backward)


def _mean_row(logits: Float[Array, "C V"], top: TopK, unembedding: Float[Array, "V D"]) -> Float[Array, "C D"]:
    """E_p[W] in float32.

    The candidates hold most of the mass, so their share is added from gathered rows in float32: rounded to bfloat16
    with the rest, a gold token of probability 0.99 would leave an error as large as its gradient, 1 - 0.99.
    """
    is_candidate = jnp.any(jnp.arange(logits.shape[-1])[None, None, :] == top.ids[:, :, None], axis=1)  # [C, V]
    rest = jnp.where(is_candidate, 0.0, jnp.exp(logits - top.log_partition[:, None]))
    mean = jnp.einsum("cv,vd->cd", rest.astype(unembedding.dtype), unembedding, preferred_element_type=jnp.float32)
    rows = unembedding[top.ids].astype(jnp.float32)  # [C, K, D]
    return mean + jnp.einsum("ck,ckd->cd", jnp.exp(top.logprobs), rows)


@jax.custom_vjp
def token_logits(
    states: Float[Array, "*b D"], unembedding: Float[Array, "V D"], ids: Int[Array, "*b K"]
) -> Float[Array, "*b K"]:
    """Logits h . W_k of a few tokens per slot, as dot products with gathered rows; dtypes as in `vocabulary_pass`.

    The gradient goes to the states alone and gathers the rows anew instead of keeping them.

    Args:
        states: one row per slot.
        unembedding: frozen.
        ids: tokens, such as the candidates and the gold token.
    """
    rows = unembedding[ids]  # [*b, K, D]
    return jnp.einsum("...d,...kd->...k", states.astype(rows.dtype), rows, preferred_element_type=jnp.float32)


def _token_logits_forward(states, unembedding, ids):
    return token_logits(states, unembedding, ids), (unembedding, ids, jnp.zeros((0,), states.dtype))


def _token_logits_backward(residuals, cotangent):
    unembedding, ids, like_states = residuals
    rows = unembedding[ids].astype(jnp.float32)  # [*b, K, D]
    return jnp.einsum("...k,...kd->...d", cotangent, rows).astype(like_states.dtype), None, None


token_logits.defvjp(_token_logits_forward, _token_logits_backward)


def over_chunks[Rows, Result](function: Callable[[Rows], Result], rows: Rows, chunk: int) -> Result:
    """`function(rows)` for a function that treats every row alike, computed `chunk` rows at a time.

    What `function` makes inside is freed with its chunk, in the backward pass too, which recomputes it. Chunk j takes
    every n-th row: rows that are sharded in contiguous pieces stay where they are.

    Args:
        function: from arrays of up to `chunk` rows to arrays of as many rows, in any trees.
        rows: arrays with the leading axis M; the last chunk is padded with zeros, whose results are dropped.
        chunk: need not divide M.
    """
    _check_chunk(chunk)
    total = jax.tree.leaves(rows)[0].shape[0]
    chunk = min(chunk, total)
    steps = -(-total // chunk)

    def split(x):
        padded = jnp.pad(x, [(0, steps * chunk - total)] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(padded.reshape(chunk, steps, *x.shape[1:]), 1, 0)  # [steps, chunk, ...]

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(steps * chunk, *x.shape[2:])[:total]  # [M, ...]

    return jax.tree.map(join, jax.lax.map(jax.checkpoint(function), jax.tree.map(split, rows)))


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise ValueError(f"The vocabulary is passed over in chunks of at least 1 slot; got chunk={chunk}.")
