"""What is trained, on one batch: target pass, anchors, blocks, what stands behind them, and their losses as terms.

The frozen target runs once, without gradient. LiLiCorr reads of its logits only differences on candidates, so nothing
is multiplied with the whole unembedding but the drafter's own states; DSpark reads whole rows. Pure: random numbers are
a function of (seed, step, example). Knows nothing of optimizers or of how micro-batches are added up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from lilicorr_jax.config import (
    CorrectorConfig,
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    ObjectiveConfig,
    RerankerConfig,
    TargetConfig,
)
from lilicorr_jax.losses.baselines import (
    SlotReadings,
    SlotRows,
    domino_mixture,
    domino_terms,
    dspark_mixture,
    dspark_terms,
    read_slots,
)
from lilicorr_jax.losses.prefix import gold_ranks
from lilicorr_jax.losses.rerank import gold_gaps
from lilicorr_jax.losses.terms import (
    DRAFTER_ALONE,
    Mixture,
    Scalar,
    Terms,
    drafter_terms,
    joint_loss,
    lattice_terms,
    loss_sums,
    spread_terms,
)
from lilicorr_jax.losses.vocabulary import over_chunks, token_logits, vocabulary_pass
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.domino import Domino
from lilicorr_jax.models.dspark import DSpark
from lilicorr_jax.models.lilicorr import Reranker, Vectors
from lilicorr_jax.models.target import Target, unembedding
from lilicorr_jax.presets import PRESETS
from lilicorr_jax.shapes import Array, Bool, Float, Int, Int32
from lilicorr_jax.sharding import MESH_AXES, batch_sharding, replicated
from pallas_kernels.match_walk import match_scores
from train.config import TrainConfig
from train.data import Batch

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The function of (parameters, batch, step) that a run minimises; its corrector decides what it reads.

    Without one the drafter is trained alone; its candidates are still counted.
    """

    target: TargetConfig
    drafter: DrafterConfig
    corrector: CorrectorConfig | None
    weights: ObjectiveConfig
    mesh: Mesh
    anchors: int  # A
    num_candidates: int  # K: the reranker's, or those among which the gold token is looked for
    num_steps: int  # of the run
    seed: int
    vocabulary_chunk: int
    anchor_chunk: int

    def __call__(self, params: Params, target_params: Params, batch: Batch, step: Int[Array, ""]) -> Terms:
        """Sums and counts over the batch.

        Args:
            params: `drafter` and the corrector's under its name.
            target_params: frozen; its embedding and unembedding serve the drafter too.
            batch: rows over the mesh's data and fsdp axes.
            step: decides the anchors, together with the seed and each row's example.
        """
        target_params = gather_tables(self, target_params)
        lesson = read_target(self, target_params, batch)
        anchors = choose_anchors(batch, self.anchors, self.seed, step)
        labels = label_slots(batch, anchors, self.drafter.num_slots)
        context, states = draft_states(self, params["drafter"], target_params, batch, lesson, anchors)
        blocks = Blocks(lesson=lesson, anchors=anchors, labels=labels, context=context, states=states)
        if isinstance(self.corrector, DominoConfig):
            return corrected_by_domino(self, params["domino"], target_params, blocks)
        if isinstance(self.corrector, DSparkConfig):
            return corrected_by_dspark(self, params["dspark"], target_params, blocks)
        return drafted_and_reranked(self, params, target_params, blocks)

    def mixture(self, step: Int[Array, ""] | int) -> Mixture:
        """What the block terms weigh in a step's loss; only Domino's weights depend on the step."""
        if isinstance(self.corrector, DominoConfig):
            return domino_mixture(self.weights, step, self.num_steps)
        return dspark_mixture(self.weights) if isinstance(self.corrector, DSparkConfig) else DRAFTER_ALONE

    def loss(self, terms: Terms, step: Int[Array, ""] | int) -> Scalar:
        """The loss of a step whose terms these are."""
        return joint_loss(terms, self.weights, self.mixture(step))

    def numerators(self, terms: Terms, step: Int[Array, ""] | int) -> dict[str, Scalar]:
        """The loss's numerators by their names in `LossParts`; only with a reranker is there one of the lattice."""
        sums = loss_sums(terms, self.weights, self.mixture(step))
        return sums._asdict() if isinstance(self.corrector, RerankerConfig) else {"block": sums.block}


def make_objective(config: TrainConfig, target: TargetConfig, mesh: Mesh, num_steps: int) -> Objective:
    """The objective that a run's flags describe."""
    drafter, corrector = config.models()
    return Objective(
        target=target,
        drafter=drafter,
        corrector=corrector,
        weights=config.objective,
        mesh=mesh,
        anchors=config.anchors,
        num_candidates=PRESETS[config.preset]().reranker.num_candidates,
        num_steps=num_steps,
        seed=config.seed,
        vocabulary_chunk=config.vocabulary_chunk,
        anchor_chunk=config.anchor_chunk,
    )


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

    The draw of a row depends on (seed, step, example id) only: not on its place in the batch, nor on its padding, nor
    on the devices. A row shorter than A has as many anchors as positions.
    """
    length = batch.token_ids.shape[1]
    is_valid = jnp.pad(batch.loss_mask[:, :-1] & batch.loss_mask[:, 1:], ((0, 0), (0, 1)))
    key = jax.random.fold_in(jax.random.key(seed), step)
    noise = jax.vmap(lambda example: jax.random.uniform(jax.random.fold_in(key, example), (length,)))(batch.example_id)
    chosen, position = jax.lax.top_k(jnp.where(is_valid, noise, -1.0), min(num_anchors, length))
    position = jnp.sort(jnp.where(chosen >= 0, position, length), axis=-1).astype(jnp.int32)
    is_kept = position < length
    return Anchors(position=jnp.where(is_kept, position, 0), is_kept=is_kept)


class Labels(NamedTuple):
    """The gold token of slot s = 1..S is the text's token at anchor + s, if that exists and is supervised.

    `previous_ids` are the tokens before them: the anchor, then the gold tokens of slots 1..S-1.
    """

    gold_ids: Int32[Array, "B A S"]
    previous_ids: Int32[Array, "B A S"]
    is_supervised: Bool[Array, "B A S"]


def label_slots(batch: Batch, anchors: Anchors, num_slots: int) -> Labels:
    """Gold tokens of every slot; those of unsupervised slots mean nothing."""
    length = batch.token_ids.shape[1]
    place = anchors.position[:, :, None] + jnp.arange(1, num_slots + 1)[None, None, :]  # [B, A, S]
    inside = jnp.minimum(place, length - 1)
    take = jax.vmap(lambda row, places: row[places])
    return Labels(
        gold_ids=take(batch.token_ids, inside),
        previous_ids=take(batch.token_ids, jnp.minimum(place - 1, length - 1)),
        is_supervised=anchors.is_kept[:, :, None] & (place < length) & take(batch.loss_mask, inside),
    )


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


class Blocks(NamedTuple):
    """The blocks of a batch as the drafter leaves them, and what they are judged by."""

    lesson: Lesson
    anchors: Anchors
    labels: Labels
    context: Float[Array, "B T D"]
    states: Float[Array, "B A S D"]


def drafted_and_reranked(objective: Objective, params: Params, target_params: Params, blocks: Blocks) -> Terms:
    """DFlash's terms and, with a reranker, LiLiCorr's on top of them (Eq. 7)."""
    labels, head = blocks.labels, unembedding(target_params, objective.target)
    pool = draw_pool(objective, blocks.states, head, labels)
    gold = gold_ranks(pool.ids, labels.gold_ids)
    terms = drafter_terms(pool.gold_logprobs, gold, labels.is_supervised, objective.weights)
    if not isinstance(objective.corrector, RerankerConfig):
        return terms
    vectors = read_lattices(objective, params["reranker"], target_params["embed"], pool, blocks)
    scores = match_scores(vectors.anchor_out, vectors.out, vectors.in_, objective.corrector.cosine_scale)
    gaps = target_gaps(blocks.lesson.hidden, head, blocks.anchors, labels, pool.ids)
    spread = spread_terms(vectors.out, vectors.in_, labels.is_supervised)
    return terms + spread + lattice_terms(scores, gold, gaps, labels.is_supervised, objective.weights)


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
    read = partial(vocabulary_pass, num_candidates=objective.num_candidates, chunk=objective.vocabulary_chunk)
    log_partition, ids = over_own_rows(objective, read, states, head)
    ids = jax.lax.stop_gradient(ids)
    wanted = jnp.concatenate([ids, labels.gold_ids[..., None]], axis=-1)
    logprobs = token_logits(states, head, wanted) - log_partition[..., None]
    return Pool(ids=ids, logprobs=logprobs[..., :-1], gold_logprobs=logprobs[..., -1])


class Lattices(NamedTuple):
    """What the reranker reads of each block."""

    ids: Int32[Array, "*batch S K"]
    states: Float[Array, "*batch S D"]
    logprobs: Float[Array, "*batch S K"]
    anchor: Float[Array, "*batch D"]
    anchor_valid: Bool[Array, "*batch"]


def read_lattices(objective: Objective, params: Params, embed_params: Params, pool: Pool, blocks: Blocks) -> Vectors:
    """The reranker's vectors of every candidate, a few blocks at a time, on the blocks' own devices.

    One call over all blocks would keep some twenty arrays of [B, A, S, K, W] for the backward pass.
    """
    place = blocks.anchors.position - 1
    rows = Lattices(
        ids=pool.ids,
        states=blocks.states,
        logprobs=pool.logprobs,
        anchor=take_positions(blocks.context, jnp.maximum(place, 0)),
        anchor_valid=place >= 0,
    )

    def read(rows: Lattices, params: Params, embed_params: Params) -> Vectors:
        def some(rows: Lattices) -> Vectors:
            embeddings = embed(objective, {"embed": embed_params}, rows.ids)
            return Reranker(objective.corrector).apply({"params": params}, embeddings, *rows[1:])

        if len(rows.ids) <= objective.anchor_chunk:  # nothing to free, so nothing is computed twice
            return some(rows)
        return over_chunks(some, rows, objective.anchor_chunk)

    return over_own_rows(objective, read, rows, params, embed_params, axes=2)


def over_own_rows(objective: Objective, function: Callable[..., Any], rows: Any, *whole: Any, axes: int = 3) -> Any:
    """`function(rows, *whole)` on each device's own rows, so that nothing that it makes crosses devices.

    Args:
        function: from arrays with one row for each slot, or for each block, and whole arrays, to such arrays.
        rows: a tree of arrays [B, A, S, ...], or [B, A, ...] where `axes` is 2; the result is one, too.
        whole: trees of arrays that every device gets whole: tables as wide as the vocabulary, a small network.
    """
    shape = jax.tree.leaves(rows)[0].shape[:axes]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), rows)  # [B*A*S, ...]
    mesh = objective.mesh
    placed = PartitionSpec(MESH_AXES if math.prod(shape) % mesh.size == 0 else MESH_AXES[:2])
    specs = (placed, *(PartitionSpec() for _ in whole))
    result = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=placed, check_vma=False)(flat, *whole)
    return _by_row(objective, jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), result))


def corrected_by_domino(objective: Objective, params: Params, target_params: Params, blocks: Blocks) -> Terms:
    """Domino's terms, the correction fed with gold tokens."""
    domino, labels = Domino(objective.corrector).bind({"params": params}), blocks.labels
    features = domino.features(embed(objective, target_params, labels.previous_ids), blocks.states)
    slots = read_corrected(objective, params, target_params, blocks, features, None)
    return domino_terms(slots, labels.gold_ids, labels.is_supervised, objective.weights)


def corrected_by_dspark(objective: Objective, params: Params, target_params: Params, blocks: Blocks) -> Terms:
    """DSpark's terms, the correction fed with gold tokens."""
    dspark, labels = DSpark(objective.corrector).bind({"params": params}), blocks.labels
    opinions = target_opinions(blocks.lesson.hidden, blocks.anchors, labels.gold_ids.shape[-1])
    features = dspark.features(labels.previous_ids, blocks.states)
    slots = read_corrected(objective, params, target_params, blocks, features, opinions)
    confidence = dspark.confidence(labels.previous_ids, blocks.states) if dspark.config.has_confidence else None
    return dspark_terms(slots, confidence, labels.gold_ids, labels.is_supervised, objective.weights)


def read_corrected(
    objective: Objective,
    params: Params,
    target_params: Params,
    blocks: Blocks,
    features: Float[Array, "B A S E"],
    opinions: Float[Array, "B A S D"] | None,
) -> SlotReadings:
    """What a corrector's terms read of every slot's distributions; `features` are what its `out` multiplies."""
    rows = SlotRows(blocks.states.astype(jnp.float32), features, blocks.labels.gold_ids, opinions)
    read = partial(read_slots, num_candidates=objective.num_candidates, chunk=objective.vocabulary_chunk)
    head = unembedding(target_params, objective.target)
    return over_own_rows(objective, read, rows, head, params["out"]["kernel"])


def target_gaps(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    anchors: Anchors,
    labels: Labels,
    candidate_ids: Int[Array, "B A S K"],
) -> Float[Array, "B A S K"]:
    """ReLU(log q_g - log q_k) of Eq. 4 by K + 1 dot products per slot."""
    rows = target_opinions(hidden, anchors, labels.gold_ids.shape[-1])
    wanted = jnp.concatenate([candidate_ids, labels.gold_ids[..., None]], axis=-1)
    logits = token_logits(rows, head, wanted)
    return gold_gaps(logits[..., -1], logits[..., :-1])


def target_opinions(hidden: Float[Array, "B T D"], anchors: Anchors, num_slots: int) -> Float[Array, "B A num_slots D"]:
    """The target's final states that speak of each slot's token: slot s is judged by the row before its token."""
    place = anchors.position[:, :, None] + jnp.arange(num_slots)[None, None, :]  # [B, A, S]: slot s at anchor + s - 1
    return take_positions(hidden, jnp.minimum(place, hidden.shape[1] - 1))


def embed(objective: Objective, target_params: Params, token_ids: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    """Rows of the target's frozen embedding."""
    return Target(objective.target).bind({"params": target_params}).embed(token_ids)


def take_positions(rows: Float[Array, "B T D"], positions: Int[Array, "B *b"]) -> Float[Array, "B *b D"]:
    """rows[b, positions[b, ...]] for every batch row b."""
    return jax.vmap(lambda row, places: row[places])(rows, positions)


def _by_row(objective: Objective, tree: Any) -> Any:
    """Keeps rows of the batch on their own devices: without it XLA may rather move activations than parameters."""
    return jax.lax.with_sharding_constraint(tree, batch_sharding(objective.mesh))
