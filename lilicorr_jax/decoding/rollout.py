"""Drafting slot by slot over the whole vocabulary: each token moves the logits of the next (Domino, DSpark).

A rollout is unrolled, so that a whole speculative block stays one device program, and reads folded parameters
(`models.fold`). The base logits come in; their correction and every distribution are float32.
"""

from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.config import DominoConfig, DSparkConfig
from lilicorr_jax.decoding.noise import draw
from lilicorr_jax.models.domino import gru_step
from lilicorr_jax.models.dspark import markov_step
from lilicorr_jax.models.fold import FoldedDomino, FoldedDSpark
from lilicorr_jax.shapes import Array, Float, Int32

RolloutKind = Literal["greedy", "sampled"]


def domino_rollout(
    config: DominoConfig,
    folded: FoldedDomino,
    logits: Float[Array, "B S V"],
    states: Float[Array, "B S D"],
    anchor_id: Int32[Array, "B"],
) -> Int32[Array, "B S"]:
    """x_{s+1} = argmax(U_s + W_2 silu(W_1 [h_s; g_s])), g_s the GRU's state behind x_s, x_0 the anchor.

    The leading `plain_slots` take argmax U_s. Ties go to the lower id.

    Args:
        logits: U, the drafter's own.
        states: h, the rows that were unembedded.
    """
    gates = 3 * config.state_width
    of_hidden = jnp.einsum("bsd,dr->bsr", states, folded.hidden_kernel)
    state = jnp.zeros((anchor_id.shape[0], config.state_width), states.dtype)
    of_state = jnp.zeros((anchor_id.shape[0], gates + config.bottleneck_width), states.dtype)
    token, drafts = anchor_id, []
    for slot in range(logits.shape[1]):
        state = gru_step(folded.input_table[token], of_state[:, :gates], state)
        of_state = jnp.einsum("bi,ij->bj", state, folded.state_kernel)  # next step's gates, and the bottleneck's share
        corrected = logits[:, slot].astype(jnp.float32)
        if slot >= config.plain_slots:
            corrected += _score(nn.silu(of_hidden[:, slot] + of_state[:, gates:]), folded.out_rows)
        token = jnp.argmax(corrected, axis=-1).astype(jnp.int32)
        drafts.append(token)
    return jnp.stack(drafts, axis=1)


class Rolled(NamedTuple):
    """Drafts of a block.

    Attributes:
        draft_ids: slot by slot.
        q: of sampled drafts, the very distributions that each was drawn from.
        confidence: logits of the probability that each draft is kept; None where the model has none.
    """

    draft_ids: Int32[Array, "B S"]
    q: Float[Array, "B S V"] | None
    confidence: Float[Array, "B S"] | None


def dspark_rollout(
    config: DSparkConfig,
    folded: FoldedDSpark,
    logits: Float[Array, "B S V"],
    states: Float[Array, "B S D"],
    anchor_id: Int32[Array, "B"],
    *,
    kind: RolloutKind = "greedy",
    temperature: Float[Array, "B"] | None = None,
    uniforms: Float[Array, "B S"] | None = None,
) -> Rolled:
    """x_{s+1} is the argmax of U_s + B_s(x_s), or is drawn from softmax((U_s + B_s(x_s)) / T); x_0 is the anchor.

    Args:
        logits, states: as of `domino_rollout`.
        kind: greedy, or sampled, which needs the next two.
        temperature: T; where it is 0 the likeliest token is drawn with certainty.
        uniforms: in [0, 1), one per slot.
    """
    if (kind == "sampled") != (temperature is not None and uniforms is not None):
        raise ValueError(f"A sampled rollout, and it alone, needs temperature and uniforms; got the kind {kind!r}.")
    of_hidden = jnp.einsum("bsd,dm->bsm", states, folded.hidden_kernel)
    of_hidden += jnp.broadcast_to(folded.hidden_bias, of_hidden.shape)
    carry = jnp.zeros((anchor_id.shape[0], config.rank), states.dtype)
    token, drafts, q, confidence = anchor_id, [], [], []
    for slot in range(logits.shape[1]):
        row = folded.token_in[token]
        mixed = of_hidden[:, slot] + jnp.einsum("br,rm->bm", row, folded.token_kernel)
        if config.has_confidence:
            mixed, asked = mixed[:, :-1], mixed[:, -1]
            confidence.append(asked.astype(jnp.float32))
        if folded.state_kernel is not None:
            mixed += jnp.einsum("br,rm->bm", carry, folded.state_kernel)
        features, carry = markov_step(config.kind, row, mixed, carry)
        corrected = logits[:, slot].astype(jnp.float32) + _score(features, folded.out_rows)
        if temperature is not None and uniforms is not None:
            q.append(_distribution(corrected, temperature))
            token = draw(q[-1], uniforms[:, slot])
        else:
            token = jnp.argmax(corrected, axis=-1).astype(jnp.int32)
        drafts.append(token)
    stacked = (jnp.stack(rows, axis=1) if rows else None for rows in (q, confidence))
    return Rolled(jnp.stack(drafts, axis=1), *stacked)


def _score(features: Float[Array, "B rank"], rows: Float[Array, "V rank"]) -> Float[Array, "B V"]:
    return jnp.einsum("br,vr->bv", features, rows, preferred_element_type=jnp.float32)


def _distribution(logits: Float[Array, "B V"], temperature: Float[Array, "B"]) -> Float[Array, "B V"]:
    """softmax(logits / T); a point mass at the lowest id among the largest where T is 0."""
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    point = jax.lax.broadcasted_iota(best.dtype, logits.shape, 1) == best
    is_drawn = (temperature > 0)[:, None]
    shifted = logits - jnp.take_along_axis(logits, best, axis=-1)  # largest first: no temperature can overflow
    soft = jax.nn.softmax(shifted / jnp.where(is_drawn, temperature[:, None], 1.0), axis=-1)
    return jnp.where(is_drawn, soft, point.astype(soft.dtype))
