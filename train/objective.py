"""What is trained, on one batch: target pass, anchors, blocks, candidates, reranker, and their losses as terms.

The frozen target runs once, without gradient; of its logits only differences on candidates are read, so nothing is
multiplied with the whole unembedding but the drafter's own states. Pure: random numbers are a function of (seed, step,
example). Knows nothing of optimizers or of how micro-batches are added up.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from lilicorr_jax.config import DrafterConfig, ObjectiveConfig, RerankerConfig, TargetConfig
from lilicorr_jax.losses.prefix import gold_ranks
from lilicorr_jax.losses.rerank import gold_gaps
from lilicorr_jax.losses.terms import Terms, drafter_terms, lattice_terms
from lilicorr_jax.losses.vocabulary import VocabularyPass, token_logits, vocabulary_pass
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.lilicorr import Reranker
from lilicorr_jax.models.target import Target, unembedding
from lilicorr_jax.shapes import Array, Bool, Float, Int, Int32
from lilicorr_jax.sharding import MESH_AXES, batch_sharding, replicated
from pallas_kernels.match_walk import match_scores
from train.data import Batch

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The function of (parameters, batch, step) that a run minimises.

    Without a `reranker` in the parameters the drafter is trained alone; its candidates are still counted.
    """

    target: TargetConfig
    drafter: DrafterConfig
    reranker: RerankerConfig
    weights: ObjectiveConfig
    mesh: Mesh
    anchors: int  # A
    seed: int
    vocabulary_chunk: int
    anchor_chunk: int

    def __call__(self, params: Params, target_params: Params, batch: Batch, step: Int[Array, ""]) -> Terms:
        """Sums and counts over the batch.

        Args:
            params: `drafter` and, for the joint objective, `reranker`.
            target_params: frozen; its embedding and unembedding serve the drafter too.
            batch: rows over the mesh's data and fsdp axes.
            step: decides the anchors, together with the seed and each row's example.
        """
        target_params = gather_tables(self, target_params)
        lesson = read_target(self, target_params, batch)
        anchors = choose_anchors(batch, self.anchors, self.seed, step)
        labels = label_slots(batch, anchors, self.drafter.num_slots)
        context, states = draft_states(self, params["drafter"], target_params, batch, lesson, anchors)
        head = unembedding(target_params, self.target)
        pool = draw_pool(self, states, head, labels)
        gold = gold_ranks(pool.ids, labels.gold_ids)
        terms = drafter_terms(pool.gold_logprobs, gold, labels.is_supervised, self.weights)
        if "reranker" not in params:
            return terms
        rows = anchors.position - 1
        reranker = Reranker(self.reranker).bind({"params": params["reranker"]})
        vectors = reranker(
            embed(self, target_params, pool.ids),
            states,
            pool.logprobs,
            take_positions(context, jnp.maximum(rows, 0)),
            rows >= 0,
        )
        scores = match_scores(vectors.anchor_out, vectors.out, vectors.in_, self.reranker.cosine_scale)
        gaps = target_gaps(lesson.hidden, head, anchors, labels, pool.ids)
        return terms + lattice_terms(scores, gold, gaps, labels.is_supervised, self.weights)


def gather_tables(objective: Objective, target_params: Params) -> Params:
    """The target with its embedding and unembedding whole on every device: rows of them are read everywhere."""
    tables = {name: target_params[name] for name in ("embed", "unembed") if name in target_params}
    return target_params | jax.lax.with_sharding_constraint(tables, replicated(objective.mesh))


class Lesson(NamedTuple):
    """What the target says about a batch; no gradient.

    Attributes:
        features: captured layers side by side; row p serves blocks whose anchor lies behind p.
        hidden: after the final norm; row p holds the target's opinion of token p + 1.
    """

    features: Float[Array, "B T LD"]
    hidden: Float[Array, "B T D"]


def read_target(objective: Objective, target_params: Params, batch: Batch) -> Lesson:
    """One pass of the frozen target over the rows; padding stands on the right, where causality hides it."""
    target = Target(objective.target).bind({"params": target_params})
    result = target(batch.token_ids, capture=objective.drafter.target_layer_ids)
    lesson = Lesson(features=result.features, hidden=result.hidden)
    return _by_row(objective, jax.lax.stop_gradient(lesson))


class Anchors(NamedTuple):
    """Where blocks begin, in rising order; rows with fewer valid places end in anchors at 0 that are not kept."""

    position: Int32[Array, "B A"]
    is_kept: Bool[Array, "B A"]


def choose_anchors(batch: Batch, num_anchors: int, seed: int, step: Int[Array, ""]) -> Anchors:
    """Draws up to A positions p with p and p + 1 both supervised, uniformly without replacement.

    The draw of a row depends on (seed, step, example id) only: not on its place in the batch, nor on the devices.
    """
    length = batch.token_ids.shape[1]
    is_valid = jnp.pad(batch.loss_mask[:, :-1] & batch.loss_mask[:, 1:], ((0, 0), (0, 1)))
    key = jax.random.fold_in(jax.random.key(seed), step)
    noise = jax.vmap(lambda example: jax.random.uniform(jax.random.fold_in(key, example), (length,)))(batch.example_id)
    chosen, position = jax.lax.top_k(jnp.where(is_valid, noise, -1.0), num_anchors)
    position = jnp.sort(jnp.where(chosen >= 0, position, length), axis=-1).astype(jnp.int32)
    is_kept = position < length
    return Anchors(position=jnp.where(is_kept, position, 0), is_kept=is_kept)


class Labels(NamedTuple):
    """The gold token of slot s = 1..S is the text's token at anchor + s, if that exists and is supervised."""

    gold_ids: Int32[Array, "B A S"]
    is_supervised: Bool[Array, "B A S"]


def label_slots(batch: Batch, anchors: Anchors, num_slots: int) -> Labels:
    """Gold tokens of every slot; those of unsupervised slots mean nothing."""
    length = batch.token_ids.shape[1]
    place = anchors.position[:, :, None] + jnp.arange(1, num_slots + 1)[None, None, :]  # [B, A, S]
    inside = jnp.minimum(place, length - 1)
    take = jax.vmap(lambda row, places: row[places])
    is_supervised = anchors.is_kept[:, :, None] & (place < length) & take(batch.loss_mask, inside)
    return Labels(gold_ids=take(batch.token_ids, inside), is_supervised=is_supervised)


def draft_states(
    objective: Objective, params: Params, target_params: Params, batch: Batch, lesson: Lesson, anchors: Anchors
) -> tuple[Float[Array, "B T D"], Float[Array, "B A S D"]]:
    """The drafter's context rows, and its states at the rows that speak for slots 1..S."""
    config = objective.drafter
    drafter = Drafter(config).bind({"params": params})
    anchor_ids = jnp.take_along_axis(batch.token_ids, anchors.position, axis=1)  # [B, A]
    masks = jnp.full((*anchor_ids.shape, config.input_rows - 1), config.mask_id, anchor_ids.dtype)
    block_ids = jnp.concatenate([anchor_ids[:, :, None], masks], axis=-1)  # [B, A, Q]
    context = _by_row(objective, drafter.fuse(lesson.features))
    blocks = embed(objective, target_params, block_ids)
    rows = drafter(context, blocks, anchors.position, anchor_chunk=objective.anchor_chunk)
    first = 1 if config.slot_convention == "same" else 0
    return context, _by_row(objective, rows[:, :, first : first + config.num_slots])


class Pool(NamedTuple):
    """The drafter's K best tokens of each slot, best first, never with the gold token injected.

    Log-probabilities are float32, over the whole vocabulary, and carry gradients; membership does not.
    """

    ids: Int32[Array, "B A S K"]
    logprobs: Float[Array, "B A S K"]
    gold_logprobs: Float[Array, "B A S"]


def draw_pool(objective: Objective, states: Float[Array, "B A S D"], head: Float[Array, "V D"], labels: Labels) -> Pool:
    """Candidates of every slot and the log-probabilities of them and of the gold token."""
    states = states.astype(jnp.float32)  # gradients of log-partition and logits nearly cancel: they meet in float32
    flat = states.reshape(-1, states.shape[-1])  # [B*A*S, D]
    summary = _vocabulary_pass(objective, flat, head)
    ids = jax.lax.stop_gradient(summary.candidate_ids).reshape(*states.shape[:-1], -1)  # [B, A, S, K]
    log_partition = summary.log_partition.reshape(*states.shape[:-1], 1)
    ids, log_partition = _by_row(objective, (ids, log_partition))
    wanted = jnp.concatenate([ids, labels.gold_ids[..., None]], axis=-1)
    logprobs = token_logits(states, head, wanted) - log_partition
    return Pool(ids=ids, logprobs=logprobs[..., :-1], gold_logprobs=logprobs[..., -1])


def _vocabulary_pass(objective: Objective, states: Float[Array, "M D"], head: Float[Array, "V D"]) -> VocabularyPass:
    """The pass over the vocabulary on each device's own slots, so that nothing of that width crosses devices."""
    mesh = objective.mesh
    axes = MESH_AXES if states.shape[0] % mesh.size == 0 else MESH_AXES[:2]
    slots = PartitionSpec(axes)

    def own_slots(states, head):
        return vocabulary_pass(states, head, objective.reranker.num_candidates, objective.vocabulary_chunk)

    return jax.shard_map(
        own_slots, mesh=mesh, in_specs=(slots, PartitionSpec()), out_specs=slots, check_vma=False
    )(states, head)  # fmt: skip


def target_gaps(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    anchors: Anchors,
    labels: Labels,
    candidate_ids: Int[Array, "B A S K"],
) -> Float[Array, "B A S K"]:
    """ReLU(log q_g - log q_k) of Eq. 4 by K + 1 dot products per slot; slot s is judged by the row before its token."""
    num_slots = labels.gold_ids.shape[-1]
    place = anchors.position[:, :, None] + jnp.arange(num_slots)[None, None, :]  # [B, A, S]: slot s at anchor + s - 1
    rows = take_positions(hidden, jnp.minimum(place, hidden.shape[1] - 1))
    wanted = jnp.concatenate([candidate_ids, labels.gold_ids[..., None]], axis=-1)
    logits = token_logits(rows, head, wanted)
    return gold_gaps(logits[..., -1], logits[..., :-1])


def embed(objective: Objective, target_params: Params, token_ids: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    """Rows of the target's frozen embedding."""
    return Target(objective.target).bind({"params": target_params}).embed(token_ids)


def take_positions(rows: Float[Array, "B T D"], positions: Int[Array, "B *b"]) -> Float[Array, "B *b D"]:
    """rows[b, positions[b, ...]] for every batch row b."""
    return jax.vmap(lambda row, places: row[places])(rows, positions)


def _by_row(objective: Objective, tree: Any) -> Any:
    """Keeps rows of the batch on their own devices: without it XLA may rather move activations than parameters."""
    return jax.lax.with_sharding_constraint(tree, batch_sharding(objective.mesh))
