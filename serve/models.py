"""A target, its drafter and the way of drafting: from folders or from parameters to the callables of a block."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from lilicorr_jax.config import (
    CORRECTORS,
    CorrectorConfig,
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    Dtype,
    RerankerConfig,
    TargetConfig,
    check_pair,
    corrector_name,
)
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.conversion.export import load_any
from lilicorr_jax.decoding import propose
from lilicorr_jax.decoding.pair import Pair, drafter_calls, target_calls, unembed_with
from lilicorr_jax.decoding.propose import Proposer
from lilicorr_jax.models.dflash import join_context
from lilicorr_jax.models.fold import fold_for_serving
from lilicorr_jax.models.linear import for_decoding
from lilicorr_jax.models.target import Target
from pallas_kernels.dispatch import Implementation
from serve.pages import on_huge_pages

Method = Literal["ar", "dflash", "lilicorr", "domino", "dspark"]
ProposalKind = Literal["greedy", "exact", "sampled"]

NEEDS = {"lilicorr": "reranker", "domino": "domino", "dspark": "dspark"}
"""The corrector of each method that has one."""

PROPOSALS: dict[str, tuple[ProposalKind, ...]] = {
    "lilicorr": ("greedy", "exact", "sampled"),
    "domino": ("greedy",),
    "dspark": ("greedy", "sampled"),
}
"""How each of them drafts. Plain decoding and the drafter alone have no choice, and read none."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """Weights on the device, and how they draft; `dataclasses.replace` gives another method of the same weights.

    Attributes:
        params: trees `target`, `drafter` and the corrector's (folded) under its name, those that are there.
        method: plain decoding (ar), the drafter's likeliest token per slot (dflash), or with its corrector.
        proposal: of a corrector: the greedy or, of lilicorr, the exact path; or drawn, with what it was drawn from.
        threshold: of dspark: drafts from the first of lower confidence on are not proposed.
        kernels: implementation of the GPU kernels, see `pallas_kernels.dispatch`.
    """

    target: TargetConfig
    drafter: DrafterConfig | None = None
    corrector: CorrectorConfig | None = None
    params: dict
    method: Method = "ar"
    proposal: ProposalKind = "greedy"
    threshold: float = 0.0
    kernels: Implementation = "auto"

    def __post_init__(self):
        if self.method not in get_args(Method):
            raise ValueError(f"Unknown method {self.method!r}; choose {', '.join(get_args(Method))}.")
        if self.method != "ar" and self.drafter is None:
            raise ValueError(f"Method {self.method!r} needs a drafter; load one, or choose 'ar'.")
        name = NEEDS.get(self.method)
        if name and not isinstance(self.corrector, CORRECTORS[name]):
            found = "none" if self.corrector is None else f"a {corrector_name(self.corrector)}"
            raise ValueError(
                f"Method {self.method!r} needs a {name}, and this drafter's checkpoint has {found}; load one that has "
                f"it, or choose another method."
            )
        if self.proposal not in PROPOSALS.get(self.method, get_args(ProposalKind)):
            ways = ", ".join(PROPOSALS.get(self.method, get_args(ProposalKind)))
            raise ValueError(f"Method {self.method!r} drafts in these ways: {ways}; got {self.proposal!r}.")
        if not 0 <= self.threshold < 1 or (self.threshold and self.method != "dspark"):
            raise ValueError(f"A threshold in [0, 1) is dspark's; got {self.threshold} for method {self.method!r}.")
        if self.drafter is not None:
            check_pair(self.target, self.drafter, self.corrector if name else None)

    @property
    def context_limit(self) -> int:
        """Tokens that every model of the method was made for."""
        used = [self.target] if self.method == "ar" or self.drafter is None else [self.target, self.drafter]
        return min(model.max_positions for model in used)

    def pair(self) -> Pair:
        """The callables of a block."""
        if self.method == "ar" or self.drafter is None:
            return Pair(target=target_calls(self.target))
        return Pair(
            target=target_calls(self.target, self.drafter.target_layer_ids),
            drafter=drafter_calls(self.target, self.drafter, self._proposer(self.drafter)),
        )

    def _proposer(self, drafter: DrafterConfig) -> Proposer:
        unembed = unembed_with(self.target)
        match self.method, self.corrector:
            case "lilicorr", RerankerConfig() as reranker:
                return propose.lilicorr(drafter, reranker, unembed, self.proposal, self.kernels)
            case "domino", DominoConfig() as correction:
                return propose.domino(drafter, correction, unembed)
            case "dspark", DSparkConfig() as markov:
                return propose.dspark(drafter, markov, unembed, self.proposal, self.threshold)  # type: ignore[arg-type]
        return propose.dflash(drafter, unembed)


def assemble(
    target: TargetConfig,
    params: dict,
    *,
    drafter: DrafterConfig | None = None,
    corrector: CorrectorConfig | None = None,
    method: Method = "ar",
    proposal: ProposalKind = "greedy",
) -> Models:
    """Models from parameters as they were trained: what decodes faster in another form gets it here, once."""
    if corrector is not None:
        name = corrector_name(corrector)
        every_id = partial(Target(target).apply, method="embed", token_ids=jnp.arange(target.vocab_size))
        fold = jax.jit(lambda tree, weights: fold_for_serving(corrector, tree, every_id({"params": weights})))
        params = {**params, name: fold(params[name], params["target"])}  # closed over, they would be folded
    params = params | {name: for_decoding(params[name]) for name in ("target", "drafter") if name in params}
    if drafter is not None:
        params["drafter"] = join_context(drafter, params["drafter"])
    params = on_huge_pages(params)
    return Models(target=target, drafter=drafter, corrector=corrector, params=params, method=method, proposal=proposal)


def load_models(
    target_folder: Path | str,
    drafter_folder: Path | str | None = None,
    *,
    method: Method = "ar",
    proposal: ProposalKind = "greedy",
    dtype: Dtype | None = None,
) -> Models:
    """Reads a target and a drafter (an Orbax export or a Hugging Face folder).

    Args:
        dtype: of all weights and activations; None takes the target's.
    """
    target, params = load_target(target_folder, dtype=dtype, to_decode=True)
    if drafter_folder is None:
        return assemble(target, {"target": params}, method=method, proposal=proposal)
    checkpoint = load_any(drafter_folder)
    cast = jax.tree.map(lambda leaf: leaf.astype(target.dtype), checkpoint.params)
    return assemble(
        target,
        {"target": params, **cast},
        drafter=replace(checkpoint.drafter, dtype=target.dtype),
        corrector=checkpoint.corrector and replace(checkpoint.corrector, dtype=target.dtype),
        method=method,
        proposal=proposal,
    )
