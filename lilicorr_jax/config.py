"""Frozen records of what the models are; every default stands here once, every value is checked at construction.

Owns model facts and the objective's weights. Run choices live in `train.config`, service choices in `serve`.
A comment gives the axis letter (`lilicorr_jax.shapes`) or the paper's symbol of a field.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16"]


def setting(default, help: str, topic: str | None = None):
    """A dataclass field whose help text becomes the flag's; a topic heads this flag and those after it."""
    return field(default=default, metadata={"help": help} | ({"topic": topic} if topic else {}))


def _require(claim: bool, sentence: str) -> None:
    if not claim:
        raise ValueError(sentence)


def _require_positive(record, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        _require(value > 0, f"{type(record).__name__}.{name} must be positive; got {value}.")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: halves rotated, over the whole head width; YaRN when `yarn_factor` is given."""

    theta: float = 1_000_000.0
    yarn_factor: float | None = None
    yarn_original_positions: int | None = None
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_attention_factor: float | None = None  # None: 0.1 ln(factor) + 1

    def __post_init__(self):
        _require_positive(self, "theta", "yarn_beta_fast", "yarn_beta_slow")
        if self.yarn_factor is not None:
            _require(self.yarn_factor >= 1, f"RopeConfig.yarn_factor must be at least 1; got {self.yarn_factor}.")
            _require(
                self.yarn_original_positions is not None and self.yarn_original_positions > 0,
                f"YaRN needs yarn_original_positions, a positive number; got {self.yarn_original_positions}.",
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What target and drafter share: the Qwen3 decoder layer."""

    vocab_size: int  # V
    width: int  # D
    num_layers: int
    num_heads: int  # N
    num_kv_heads: int  # G
    head_width: int  # H, explicit: N*H may differ from D
    ffn_width: int  # F
    max_positions: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    qk_norm: bool = True  # Qwen3: RMSNorm of queries and keys over the head width
    attention_bias: bool = False
    init_std: float = 0.02
    dtype: Dtype = "float32"  # of activations; parameters keep the dtype that they were made or loaded with

    def __post_init__(self):
        _require_positive(self, "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_width")
        _require_positive(self, "ffn_width", "max_positions", "norm_eps", "init_std")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads must divide num_heads; got {self.num_kv_heads} and {self.num_heads}.",
        )
        _require(self.head_width % 2 == 0, f"head_width must be even for rotary embedding; got {self.head_width}.")


@dataclass(frozen=True, kw_only=True)
class TargetConfig(TransformerConfig):
    """The frozen verifier."""

    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        bad = [i for i in self.eos_ids if not 0 <= i < self.vocab_size]
        _require(not bad, f"eos_ids must lie in the vocabulary [0, {self.vocab_size}); got {bad}.")


def default_target_layer_ids(num_target_layers: int, num_drafter_layers: int) -> tuple[int, ...]:
    """The public rule for which target layers a drafter reads: evenly spaced from 1 to num_target_layers - 3."""
    if num_drafter_layers == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    return tuple(round(first + i * (last - first) / (num_drafter_layers - 1)) for i in range(num_drafter_layers))


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(TransformerConfig):
    """The block drafter (DFlash).

    A captured id i means the residual stream after target decoder layer i, counted from 0. The last layer is
    refused: public code reads the final norm's output there, serving stacks do not.
    """

    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # L of them
    mask_id: int
    input_rows: int = 16  # Q: the anchor and the masks
    num_slots: int = 15  # S
    slot_convention: Literal["same", "next"] = "same"  # row j speaks for position anchor + j, or for anchor + j + 1

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "num_slots")
        _require(
            len(self.target_layer_ids) > 0 and all(0 <= i < self.num_target_layers - 1 for i in self.target_layer_ids),
            f"target_layer_ids must lie in [0, {self.num_target_layers - 1}) for a target of "
            f"{self.num_target_layers} layers; got {self.target_layer_ids}.",
        )
        _require(
            0 <= self.mask_id < self.vocab_size,
            f"mask_id must lie in the vocabulary [0, {self.vocab_size}); got {self.mask_id}.",
        )
        rows = self.num_slots + (1 if self.slot_convention == "same" else 0)
        _require(
            self.input_rows >= rows,
            f"{self.num_slots} slots under the '{self.slot_convention}' convention need at least {rows} input rows; "
            f"got {self.input_rows}.",
        )

    @property
    def verify_rows(self) -> int:
        """P, the rows of a verify pass: the anchor and S slots."""
        return self.num_slots + 1

    @property
    def feature_width(self) -> int:
        """LD, the width of the captured target features."""
        return len(self.target_layer_ids) * self.width


@dataclass(frozen=True, kw_only=True)
class RerankerConfig:
    """The LiLiCorr lattice reranker (paper section 3.2 and Appendix A)."""

    drafter_width: int  # D
    num_slots: int = 15  # S
    num_candidates: int = 8  # K
    width: int = 1024  # W
    num_layers: int = 2
    num_heads: int = 8
    ffn_width: int = 2048  # F, not gated
    factor_width: int = 1024  # E, the paper's d_e
    cosine_scale: float = 8.0  # sigma
    vector_floor: float = 1e-4  # norms below it are not divided out
    norm_eps: float = 1e-6
    init: Literal["normal", "fan_in"] = "normal"  # N(0, init_std), the public code's; or N(0, 1 / fan_in)
    init_std: float = 0.02
    dtype: Dtype = "float32"

    def __post_init__(self):
        _require_positive(self, "drafter_width", "num_slots", "width", "num_layers", "num_heads", "ffn_width")
        _require_positive(self, "factor_width", "cosine_scale", "norm_eps", "init_std")
        _require(
            1 <= self.num_candidates <= 16,
            f"num_candidates (K) must lie in [1, 16]; got {self.num_candidates}.",
        )
        _require(
            self.width % self.num_heads == 0,
            f"num_heads must divide the reranker's width; got {self.num_heads} and {self.width}.",
        )
        _require(0 < self.vector_floor < 0.5, f"vector_floor must lie in (0, 0.5); got {self.vector_floor}.")


@dataclass(frozen=True, kw_only=True)
class DominoConfig:
    """Domino's causal correction (arXiv 2605.29707): a GRU over the drafted tokens, and a low-rank step to the logits.

    Which row speaks for which slot is the drafter's `slot_convention`; Domino's "shift_label" is its "next".
    """

    drafter_width: int  # D
    vocab_size: int  # V
    num_slots: int = 15  # S
    state_width: int = 1024  # of the GRU
    bottleneck_width: int = 256  # rank of the correction
    plain_slots: int = 1  # leading slots that keep the drafter's own logits
    init_std: float = 0.02
    dtype: Dtype = "float32"

    def __post_init__(self):
        _require_positive(self, "drafter_width", "vocab_size", "num_slots", "state_width", "bottleneck_width")
        _require_positive(self, "init_std")
        _require(
            0 <= self.plain_slots <= self.num_slots,
            f"plain_slots must lie in [0, {self.num_slots}]; got {self.plain_slots}.",
        )


MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """DSpark's Markov head and confidence (arXiv 2607.05147, section 3): logits that depend on the token before."""

    drafter_width: int  # D
    vocab_size: int  # V
    num_slots: int = 15  # S, its gamma
    rank: int = 256
    kind: MarkovKind = "vanilla"
    has_confidence: bool = True
    confidence_reads_token: bool = True  # beside the drafter's state
    init_std: float = 0.02
    dtype: Dtype = "float32"

    def __post_init__(self):
        _require_positive(self, "drafter_width", "vocab_size", "num_slots", "rank", "init_std")


CorrectorConfig = RerankerConfig | DominoConfig | DSparkConfig
"""What stands behind the drafter and makes its block coherent."""

CORRECTORS: dict[str, type] = {"reranker": RerankerConfig, "domino": DominoConfig, "dspark": DSparkConfig}
"""By the name of the tree that holds their parameters, beside `drafter`."""

Method = Literal["dflash", "lilicorr", "domino", "dspark"]
METHODS: tuple[Method, ...] = get_args(Method)


def corrector_name(config: CorrectorConfig) -> str:
    """The key of a corrector's parameters."""
    return next(name for name, kind in CORRECTORS.items() if isinstance(config, kind))


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Weights of the joint loss, Eq. 7: L = L_DFlash + gamma ((1 - mu) L_CE + lambda L_dist + mu L_margin).

    And of the other methods' losses; each reads its own. Domino's is (1 - w) CE(corrected) + w CE(uncorrected), w
    falling from `base_weight_start` to 0; DSpark's is a sum of cross-entropy, distance and confidence.
    """

    slot_decay: float = setting(7.0, "beta of Eq. 6: slot s weighs exp(-(s - 1) / beta).")
    drafter_weighting: Literal["decay", "dpace"] = setting(
        "decay",
        "Weights of the drafter's slots: by distance, Eq. 6 (decay), or instead by how much each adds to the expected "
        "accepted length under the drafter's own probabilities (dpace; dflash and lilicorr).",
    )
    dpace_alpha: float = setting(0.5, "D-PACE: probabilities are raised to (1 - alpha) q + alpha.")
    rerank_weight: float = setting(0.25, "gamma of Eq. 7: weight of the lattice terms.")
    distractor_weight: float = setting(
        1.0,
        "lambda of Eq. 7: weight of the distractor penalty, Eq. 4-5. Appendix C's ablation gives it to the "
        "cross-entropy: 0 here and twice the rerank_weight.",
    )
    margin_weight: float = setting(0.0, "mu of Eq. 13: share of the hinge; 0.5 is the paper's margin variant.")
    margin: float = setting(2.0, "rho of Eq. 13: width of the hinge.")
    lattice_blocks: Literal["prefix", "whole"] = setting(
        "prefix",
        "Which blocks the lattice terms use: the covered leading run of supervised slots (prefix), or only blocks "
        "with every slot supervised, the public code's rule (whole).",
    )
    base_weight_start: float = setting(1.0, "Domino: weight of the uncorrected cross-entropy at the first step.")
    base_decay_share: float = setting(1.0, "Domino: share of the steps over which that weight falls to 0.")
    cross_entropy_weight: float = setting(0.1, "DSpark: weight of the corrected cross-entropy.")
    distance_weight: float = setting(0.9, "DSpark: weight of the L1 distance between drafter and target.")
    confidence_weight: float = setting(1.0, "DSpark: weight of the confidence's cross-entropy.")

    def __post_init__(self):
        _require_positive(self, "slot_decay", "base_decay_share")
        weights = ("rerank_weight", "distractor_weight", "margin", "cross_entropy_weight", "distance_weight")
        shares = ("margin_weight", "dpace_alpha", "base_weight_start", "base_decay_share")
        for name in (*weights, "confidence_weight", *shares):
            value = getattr(self, name)
            _require(
                math.isfinite(value) and value >= 0, f"ObjectiveConfig.{name} must be finite and >= 0; got {value}."
            )
        for name in shares:
            _require(
                getattr(self, name) <= 1,
                f"ObjectiveConfig.{name} is a share, at most 1; got {getattr(self, name)}.",
            )


def check_pair(target: TargetConfig, drafter: DrafterConfig, corrector: CorrectorConfig | None = None) -> None:
    """Raises ValueError, naming every disagreement, unless the three belong together."""
    problems = [
        f"{name}: target has {left}, drafter expects {right}"
        for name, left, right in (
            ("width", target.width, drafter.width),
            ("vocab_size", target.vocab_size, drafter.vocab_size),
            ("number of target layers", target.num_layers, drafter.num_target_layers),
        )
        if left != right
    ]
    if corrector is not None:
        pairs = [
            ("drafter width", drafter.width, corrector.drafter_width),
            ("number of slots", drafter.num_slots, corrector.num_slots),
        ]
        if not isinstance(corrector, RerankerConfig):
            pairs.append(("vocab_size", drafter.vocab_size, corrector.vocab_size))
        name = corrector_name(corrector)
        problems += [
            f"{what}: drafter has {left}, {name} expects {right}" for what, left, right in pairs if left != right
        ]
    if problems:
        raise ValueError(
            "These models do not belong together: " + "; ".join(problems) + ". Load a drafter trained for this target."
        )
