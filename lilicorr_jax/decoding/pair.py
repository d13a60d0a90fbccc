"""What a speculative block is made of, as callables: a target, and the drafter that goes with it, or none.

The block itself (`decoding.speculate`) knows no model: a test puts a table in the target's place and a script in the
drafter's. `params` is one dict with the trees `target`, `drafter` and that of the corrector (folded), `reranker`,
`domino` or `dspark`: those that the method has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp

from lilicorr_jax.cache import KVCache, append, init_cache
from lilicorr_jax.config import DrafterConfig, TargetConfig
from lilicorr_jax.decoding.propose import Proposer
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.target import Target, TargetPass
from lilicorr_jax.shapes import Array, Float, Int32


@dataclass(frozen=True, kw_only=True)
class TargetCalls:
    """The target of a block.

    Attributes:
        run: (params, token_ids [B, Q], cache, length [B], bucket) -> TargetPass; the cache comes back written.
        unembed: (params, hidden [..., D]) -> logits [..., V].
        init_cache: (batch, capacity) -> an empty cache.
    """

    run: Callable[..., TargetPass]
    unembed: Callable[..., Array]
    init_cache: Callable[[int, int], KVCache]


@dataclass(frozen=True, kw_only=True)
class DrafterCalls:
    """The drafter of a block and the method that turns its states into a proposal.

    Attributes:
        num_slots: S.
        draft: (params, anchor_id [B], cache, length [B], bucket) -> block states [B, Q, D].
        absorb: (params, features [B, P, LD], cache, length [B]) -> (context rows [B, P, D], cache with them written).
        propose: see `decoding.propose`.
        init_cache: (batch, capacity) -> an empty cache.
        init_feature: batch -> zeros [B, D], the shape and dtype of a context row.
    """

    num_slots: int
    draft: Callable[..., Array]
    absorb: Callable[..., tuple[Array, KVCache]]
    propose: Proposer
    init_cache: Callable[[int, int], KVCache]
    init_feature: Callable[[int], Array]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafter; without one, a block is a step of plain autoregressive decoding."""

    target: TargetCalls
    drafter: DrafterCalls | None = None

    @property
    def num_slots(self) -> int:
        """S, 0 without a drafter."""
        return self.drafter.num_slots if self.drafter else 0

    @property
    def verify_rows(self) -> int:
        """P, the rows that one block writes behind a text."""
        return self.num_slots + 1


def target_calls(config: TargetConfig, capture: tuple[int, ...] = ()) -> TargetCalls:
    """The target's passes, which hand the layers in `capture` to a drafter."""
    model = Target(config)

    def run(params, token_ids: Int32[Array, "B Q"], cache: KVCache, length: Int32[Array, "B"], bucket: int | None):
        tree = {"params": params["target"]}
        return model.apply(tree, token_ids, cache=cache, length=length, bucket=bucket, capture=capture)

    return TargetCalls(run=run, unembed=unembed_with(config), init_cache=partial(init_cache, config))


def unembed_with(config: TargetConfig):
    """(params, hidden [..., D]) -> logits [..., V] with the target's matrix; drafters borrow it."""
    return lambda params, hidden: Target(config).apply({"params": params["target"]}, hidden, method="unembed")


def drafter_calls(target: TargetConfig, config: DrafterConfig, propose: Proposer) -> DrafterCalls:
    """The block drafter with its context cache, and one method's `propose`."""
    model = Drafter(config)

    def draft(params, anchor_id: Int32[Array, "B"], cache: KVCache, length: Int32[Array, "B"], bucket: int | None):
        masks = jnp.full((anchor_id.shape[0], config.input_rows - 1), config.mask_id, jnp.int32)
        block_ids = jnp.concatenate([anchor_id[:, None], masks], axis=1)  # [B, Q]
        block = Target(target).apply({"params": params["target"]}, block_ids, method="embed")
        tree = {"params": params["drafter"]}
        return model.apply(tree, block, cache=cache, length=length, bucket=bucket, method="draft")

    def absorb(params, features: Float[Array, "B P LD"], cache: KVCache, length: Int32[Array, "B"]):
        tree = {"params": params["drafter"]}
        context = model.apply(tree, features, method="fuse")
        positions = length[:, None] + jnp.arange(features.shape[1], dtype=jnp.int32)[None, :]
        rows = model.apply(tree, context, positions, method="context_rows")
        return context, append(cache, rows, length)

    return DrafterCalls(
        num_slots=config.num_slots,
        draft=draft,
        absorb=absorb,
        propose=propose,
        init_cache=partial(init_cache, config),
        init_feature=lambda batch: jnp.zeros((batch, config.width), config.dtype),
    )
