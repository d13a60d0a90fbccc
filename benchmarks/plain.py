"""The train objective as one writes it first: dense masks, every logit, gradients by autodiff. Good code, no tricks.

It is what `benchmarks.training` compares with, and what tests hold the objective against: the same function by other
means. Anchors, labels and the losses of a slot are shared; attention of blocks, the target's opinion and everything of
the vocabulary's width are written anew.
"""

from unittest import mock

import jax
import jax.numpy as jnp

from lilicorr_jax.losses.prefix import gold_ranks
from lilicorr_jax.losses.terms import Terms, drafter_terms, lattice_terms
from lilicorr_jax.models import dflash
from lilicorr_jax.models.lilicorr import Reranker
from lilicorr_jax.models.target import Target, unembedding
from lilicorr_jax.shapes import Array, Float, Int
from pallas_kernels.match_walk import match_scores
from train.data import Batch
from train.objective import Objective, Params, choose_anchors, draft_states, label_slots, read_target


def dense_block_attention(
    queries: Float[Array, "B A N Q H"],
    context_keys: Float[Array, "B G T H"],
    context_values: Float[Array, "B G T H"],
    block_keys: Float[Array, "B A G Q H"],
    block_values: Float[Array, "B A G Q H"],
    anchors: Int[Array, "B A"],
    *,
    start: Int[Array, "B A"] | None = None,
    anchor_chunk: int = 0,
) -> Float[Array, "B A N Q H"]:
    """`pallas_kernels.block_attention` by one softmax over T + A*Q keys under one mask; no chunks."""
    batch, num_blocks, heads, rows, width = queries.shape
    kv_heads, length = context_keys.shape[1:3]
    start = jnp.zeros_like(anchors) if start is None else start

    def flat(x):
        return jnp.moveaxis(x, 1, 2).reshape(batch, x.shape[2], num_blocks * rows, width)  # [B, heads, A*Q, H]

    keys = jnp.concatenate([context_keys, flat(block_keys)], axis=2)  # [B, G, T+A*Q, H]
    values = jnp.concatenate([context_values, flat(block_values)], axis=2)
    places = jnp.arange(length)[None, None, :]
    sees_context = (places >= start[:, :, None]) & (places < anchors[:, :, None])  # [B, A, T]
    block_of = jnp.arange(num_blocks * rows) // rows
    sees_block = jnp.broadcast_to(block_of[:, None] == block_of[None, :], (batch, len(block_of), len(block_of)))
    mask = jnp.concatenate([jnp.repeat(sees_context, rows, axis=1), sees_block], axis=-1)  # [B, A*Q, T+A*Q]
    grouped = flat(queries).reshape(batch, kv_heads, heads // kv_heads, num_blocks * rows, width)
    scores = jnp.einsum("bgrqh,bgkh->bgrqk", grouped, keys) * width**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bgrqk,bgkh->bgrqh", weights, values)
    return jnp.moveaxis(mixed.reshape(batch, heads, num_blocks, rows, width), 1, 2)


class PlainObjective(Objective):
    """`Objective` for DFlash and LiLiCorr, without its tricks."""

    def __call__(self, params: Params, target_params: Params, batch: Batch, step: Int[Array, ""]) -> Terms:
        lesson = read_target(self, target_params, batch)
        head = unembedding(target_params, self.target)
        anchors = choose_anchors(batch, self.anchors, self.seed, step)
        labels = label_slots(batch, anchors, self.drafter.num_slots)
        with mock.patch.object(dflash, "block_attention", dense_block_attention):
            context, states = draft_states(self, params["drafter"], target_params, batch, lesson, anchors)
        logprobs = jax.nn.log_softmax(jnp.einsum("basd,vd->basv", states, head), axis=-1)
        ids = jax.lax.stop_gradient(jax.lax.top_k(logprobs, self.num_candidates)[1])
        gold_logprobs = jnp.take_along_axis(logprobs, labels.gold_ids[..., None], axis=-1)[..., 0]
        gold = gold_ranks(ids, labels.gold_ids)
        terms = drafter_terms(gold_logprobs, gold, labels.is_supervised, self.weights)
        if self.corrector is None:
            return terms
        row = jnp.arange(len(anchors.position))[:, None]
        vectors = Reranker(self.corrector).bind({"params": params["reranker"]})(
            Target(self.target).bind({"params": target_params}).embed(ids),
            states,
            jnp.take_along_axis(logprobs, ids, axis=-1),
            context[row, jnp.maximum(anchors.position - 1, 0)],
            anchors.position > 0,
        )
        scores = match_scores(vectors.anchor_out, vectors.out, vectors.in_, self.corrector.cosine_scale)
        opinions = jax.lax.stop_gradient(jnp.einsum("btd,vd->btv", lesson.hidden, head))  # [B, T, V]
        place = anchors.position[:, :, None] + jnp.arange(self.drafter.num_slots)[None, None, :]
        place = jnp.minimum(place, opinions.shape[1] - 1)[..., None]  # [B, A, S, 1]
        of = lambda tokens: opinions[row[:, :, None, None], place, tokens]
        gaps = jax.nn.relu(of(labels.gold_ids[..., None]) - of(ids))
        return terms + lattice_terms(scores, gold, gaps, labels.is_supervised, self.weights)
