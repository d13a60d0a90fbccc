"""What a method hands to verification: the drafts of a block and, if they were sampled, what they were sampled from."""

from flax import struct

from lilicorr_jax.shapes import Array, Float, Int32


@struct.dataclass
class SparseQ:
    """A proposal distribution over the K candidates of each slot, zero elsewhere.

    Attributes:
        ids: token ids, distinct within a slot.
        probs: float32, given the drafts before the slot; the very array that was sampled from.
    """

    ids: Int32[Array, "B S K"]
    probs: Float[Array, "B S K"]


@struct.dataclass
class Proposal:
    """The drafts of one block.

    Attributes:
        draft_ids: slot by slot.
        num_proposed: how many leading slots count, at most S; slots behind them are never accepted.
        q: None for deterministic drafts, else what they were sampled from, sparse or as float32 [B, S, V].
        candidate_ids: the K candidates that a walk chose among, by rank.
        picks: the rank chosen in each slot.
    """

    draft_ids: Int32[Array, "B S"]
    num_proposed: Int32[Array, "B"]
    q: SparseQ | Float[Array, "B S V"] | None = None
    candidate_ids: Int32[Array, "B S K"] | None = None
    picks: Int32[Array, "B S"] | None = None
