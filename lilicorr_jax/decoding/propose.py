"""The one function in which the methods differ: states of a drafted block become a proposal.

A proposer is `propose(params, block_states [B, Q, D], anchor_id [B], anchor_state [B, D], temperature [B],
noise [B, S]) -> Proposal`. `params` holds all trees of the pair; `anchor_state` is the fused context row of the
position before the anchor; `noise` are the uniform numbers of purpose DRAFT at the slots' positions. A proposer picks
its rows of the block and calls `unembed` itself.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lilicorr_jax.config import DominoConfig, DrafterConfig, DSparkConfig, RerankerConfig
from lilicorr_jax.decoding.candidates import candidate_pool
from lilicorr_jax.decoding.proposal import Proposal, SparseQ
from lilicorr_jax.decoding.rollout import RolloutKind, domino_rollout, dspark_rollout
from lilicorr_jax.decoding.schedule import confident_prefix
from lilicorr_jax.decoding.walk import WalkKind
from lilicorr_jax.models.fold import folded_factors
from lilicorr_jax.shapes import Array, Float, Int32
from pallas_kernels.dispatch import Implementation
from pallas_kernels.match_walk import match_walk

Proposer = Callable[..., Proposal]
Unembed = Callable[[dict, Array], Array]
"""(params, states [..., D]) -> logits [..., V] with the target's own matrix."""


def slot_states(config: DrafterConfig, block_states: Float[Array, "B Q D"]) -> Float[Array, "B S D"]:
    """The rows that speak for slots 1..S: the masks behind the anchor, or ("next") the anchor and all masks but one."""
    first = 1 if config.slot_convention == "same" else 0
    return block_states[:, first : first + config.num_slots]


def _all_slots(draft_ids: Int32[Array, "B S"]) -> Int32[Array, "B"]:
    return jnp.full(draft_ids.shape[:1], draft_ids.shape[1], jnp.int32)


def dflash(config: DrafterConfig, unembed: Unembed) -> Proposer:
    """The likeliest token of each slot on its own; deterministic at every temperature."""

    def propose(params, block_states, anchor_id, anchor_state, temperature, noise) -> Proposal:
        logits = unembed(params, slot_states(config, block_states))
        draft_ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return Proposal(draft_ids=draft_ids, num_proposed=_all_slots(draft_ids))

    return propose


def lilicorr(
    config: DrafterConfig,
    reranker: RerankerConfig,
    unembed: Unembed,
    kind: WalkKind,
    kernels: Implementation = "auto",
) -> Proposer:
    """One path through the lattice of K candidates per slot (section 3.3); `params["reranker"]` is folded.

    Greedy (Eq. 8) and exact walks (Appendix E) are deterministic; a sampled walk has its q over the candidates.
    `kernels` chooses the implementation of top-K, of the lattice's attention and of the walk.
    """

    def propose(params, block_states, anchor_id, anchor_state, temperature, noise) -> Proposal:
        states = slot_states(config, block_states)
        logits = unembed(params, states)
        with jax.named_scope("candidates"):
            candidates = candidate_pool(logits, reranker.num_candidates, kernels)
        has_anchor_state = jnp.ones(anchor_id.shape, bool)  # a prompt has a token before the anchor
        with jax.named_scope("rerank"):
            factors = folded_factors(
                reranker,
                params["reranker"],
                candidates.ids,
                states,
                candidates.logprobs,
                anchor_state,
                has_anchor_state,
                kernels,
            )
        draws = dict(temperature=temperature, uniforms=noise) if kind == "sampled" else {}
        with jax.named_scope("walk"):
            picks, q, _ = match_walk(
                *factors, cosine_scale=reranker.cosine_scale, floor=reranker.vector_floor, kind=kind,
                implementation=kernels, **draws,
            )  # fmt: skip
        draft_ids = jnp.take_along_axis(candidates.ids, picks[..., None], axis=-1)[..., 0]  # [B, S]
        return Proposal(
            draft_ids=draft_ids,
            num_proposed=_all_slots(draft_ids),
            q=None if q is None else SparseQ(ids=candidates.ids, probs=q),
            candidate_ids=candidates.ids,
            picks=picks,
        )

    return propose


def domino(config: DrafterConfig, corrector: DominoConfig, unembed: Unembed) -> Proposer:
    """The likeliest token of each slot after those drafted before it, of the whole vocabulary; deterministic.

    `params["domino"]` is folded.
    """

    def propose(params, block_states, anchor_id, anchor_state, temperature, noise) -> Proposal:
        states = slot_states(config, block_states)
        logits = unembed(params, states)
        with jax.named_scope("rollout"):
            draft_ids = domino_rollout(corrector, params["domino"], logits, states, anchor_id)
        return Proposal(draft_ids=draft_ids, num_proposed=_all_slots(draft_ids))

    return propose


def dspark(
    config: DrafterConfig,
    corrector: DSparkConfig,
    unembed: Unembed,
    kind: RolloutKind = "greedy",
    threshold: float = 0.0,
) -> Proposer:
    """Drafts whose logits depend on the token before: the likeliest, or drawn, whose q is dense over the vocabulary.

    `params["dspark"]` is folded. With a threshold (static), drafts from the first of lower confidence on are not
    proposed. A slot's confidence never reads its own draft, so this changes no law.
    """
    if threshold and not corrector.has_confidence:
        raise ValueError(f"A confidence threshold of {threshold} needs a DSpark with a confidence; this one has none.")

    def propose(params, block_states, anchor_id, anchor_state, temperature, noise) -> Proposal:
        states = slot_states(config, block_states)
        logits = unembed(params, states)
        draws = dict(temperature=temperature, uniforms=noise) if kind == "sampled" else {}
        with jax.named_scope("rollout"):
            rolled = dspark_rollout(corrector, params["dspark"], logits, states, anchor_id, kind=kind, **draws)
        num_proposed = _all_slots(rolled.draft_ids)
        if threshold and rolled.confidence is not None:
            num_proposed = confident_prefix(jax.nn.sigmoid(rolled.confidence), threshold)
        return Proposal(draft_ids=rolled.draft_ids, num_proposed=num_proposed, q=rolled.q)

    return propose
