"""A target, its drafter and the way of drafting: from folders or from parameters to the callables of a block."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from lilicorr_jax.config import DrafterConfig, Dtype, RerankerConfig, TargetConfig, check_pair
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.conversion.export import load_any
from lilicorr_jax.decoding import propose
from lilicorr_jax.decoding.pair import Pair, drafter_calls, target_calls, unembed_with
from lilicorr_jax.decoding.walk import WalkKind
from lilicorr_jax.models.fold import fold_for_serving
from lilicorr_jax.models.target import Target
from pallas_kernels.dispatch import Implementation

Method = Literal["ar", "dflash", "lilicorr"]


@dataclass(frozen=True, kw_only=True)
class Models:
    """Weights on the device, and how they draft; `dataclasses.replace` gives another method of the same weights.

    Attributes:
        params: trees `target`, `drafter` and `reranker` (folded), those that are there.
        method: plain decoding (ar), the drafter's likeliest token per slot (dflash), or a walk (lilicorr).
        walk: of lilicorr.
        kernels: implementation of the GPU kernels, see `pallas_kernels.dispatch`.
    """

    target: TargetConfig
    drafter: DrafterConfig | None = None
    reranker: RerankerConfig | None = None
    params: dict
    method: Method = "ar"
    walk: WalkKind = "greedy"
    kernels: Implementation = "auto"

    def __post_init__(self):
        if self.method not in ("ar", "dflash", "lilicorr"):
            raise ValueError(f"Unknown method {self.method!r}; choose 'ar', 'dflash' or 'lilicorr'.")
        missing = {"dflash": self.drafter, "lilicorr": self.reranker}.get(self.method, self.target) is None
        if missing:
            part = "a drafter" if self.drafter is None else "a reranker, and this drafter's checkpoint has none"
            raise ValueError(f"Method {self.method!r} needs {part}; load one that has it, or choose another method.")
        if self.drafter is not None:
            check_pair(self.target, self.drafter, self.reranker if self.method == "lilicorr" else None)

    @property
    def context_limit(self) -> int:
        """Tokens that every model of the method was made for."""
        used = [self.target] if self.method == "ar" or self.drafter is None else [self.target, self.drafter]
        return min(model.max_positions for model in used)

    def pair(self) -> Pair:
        """The callables of a block."""
        if self.method == "ar" or self.drafter is None:
            return Pair(target=target_calls(self.target))
        unembed = unembed_with(self.target)
        if self.method == "dflash" or self.reranker is None:
            proposer = propose.dflash(self.drafter, unembed)
        else:
            proposer = propose.lilicorr(self.drafter, self.reranker, unembed, self.walk, self.kernels)
        return Pair(
            target=target_calls(self.target, self.drafter.target_layer_ids),
            drafter=drafter_calls(self.target, self.drafter, proposer),
        )


def assemble(
    target: TargetConfig,
    params: dict,
    *,
    drafter: DrafterConfig | None = None,
    reranker: RerankerConfig | None = None,
    method: Method = "ar",
    walk: WalkKind = "greedy",
) -> Models:
    """Models from parameters as they were trained: the reranker's tree is folded here, once."""
    if reranker is not None:
        every_id = partial(Target(target).apply, method="embed", token_ids=jnp.arange(target.vocab_size))
        fold = jax.jit(lambda tree, weights: fold_for_serving(reranker, tree, every_id({"params": weights})))
        params = {**params, "reranker": fold(params["reranker"], params["target"])}  # closed over, they would be folded
    return Models(target=target, drafter=drafter, reranker=reranker, params=params, method=method, walk=walk)


def load_models(
    target_folder: Path | str,
    drafter_folder: Path | str | None = None,
    *,
    method: Method = "ar",
    walk: WalkKind = "greedy",
    dtype: Dtype | None = None,
) -> Models:
    """Reads a target and a drafter (an Orbax export or a Hugging Face folder).

    Args:
        dtype: of all weights and activations; None takes the target's.
    """
    target, params = load_target(target_folder, dtype=dtype)
    if drafter_folder is None:
        return assemble(target, {"target": params}, method=method, walk=walk)
    checkpoint = load_any(drafter_folder)
    cast = jax.tree.map(lambda leaf: leaf.astype(target.dtype), checkpoint.params)
    return assemble(
        target,
        {"target": params, **cast},
        drafter=replace(checkpoint.drafter, dtype=target.dtype),
        reranker=checkpoint.reranker and replace(checkpoint.reranker, dtype=target.dtype),
        method=method,
        walk=walk,
    )
