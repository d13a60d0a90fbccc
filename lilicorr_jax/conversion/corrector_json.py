"""The corrector's part of a drafter's config.json <-> our records: LiLiCorr's reranker, Domino, DSpark.

Owns which architecture has which corrector, the keys that describe it, and what its layout says about rows and slots.
Domino and DSpark are written as SpecForge does (keys in `dflash_config`); DSpark is also read as DeepSpec writes it
(`Qwen3DSparkModel`, all keys at the top level).
"""

import math
from typing import Any, cast, get_args

from lilicorr_jax.config import (
    CorrectorConfig,
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    MarkovKind,
    RerankerConfig,
    corrector_name,
)
from lilicorr_jax.conversion.fields import Fields, agreed

DFLASH, LILICORR, DOMINO, DSPARK = "DFlashDraftModel", "LiLiCorrDraftModel", "DominoDraftModel", "DSparkDraftModel"
_KINDS = {DFLASH: None, LILICORR: "reranker", DOMINO: "domino", DSPARK: "dspark", "Qwen3DSparkModel": "dspark"}
_PROJECTORS = {"lilicorr": "reranker", "domino": "domino", "dspark": "dspark"}

_DFLASH_KEYS = ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "causal", "projector_type")
_LILICORR_KEYS = (
    "lilicorr_candidate_topk",
    "lilicorr_hidden_size",
    "lilicorr_num_layers",
    "lilicorr_num_heads",
    "lilicorr_mlp_ratio",
    "lilicorr_factor_dim",
    "lilicorr_vector_eps",
    "lilicorr_logit_scale",
)
_DOMINO_KEYS = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
_DSPARK_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",  # of its loss
    "shift_label",
)
_KEYS = {
    None: (*_LILICORR_KEYS, "lilicorr_enabled"),
    "reranker": (*_LILICORR_KEYS, "lilicorr_enabled"),
    "domino": _DOMINO_KEYS,
    "dspark": _DSPARK_KEYS,
}
_REQUIRED: dict[str | None, tuple[str, ...]] = {"domino": _DOMINO_KEYS, "dspark": _DSPARK_KEYS[:3]}


def corrector_kind(fields: Fields, nested: Fields) -> str | None:
    """The name of a drafter's corrector; ValueError when architecture and dflash_config disagree about it."""
    architectures = fields.values.get("architectures")
    if architectures not in [[name] for name in _KINDS]:
        names = " or ".join(f"[{name!r}]" for name in _KINDS)
        raise NotImplementedError(f"{fields.name}'s architectures is {architectures!r}; drafters are {names}.")
    architecture, projector = architectures[0], nested.text("projector_type", None)
    kind = _KINDS[architecture]
    if architecture == DFLASH and projector == "domino":
        kind = "domino"  # an early spelling of SpecForge's
    odd = {key: value for key, value in nested.values.items() if key not in (*_DFLASH_KEYS, *_KEYS[kind])}
    if odd or projector not in (None, *_PROJECTORS):
        odd = odd or {"projector_type": projector}
        raise NotImplementedError(f"{nested.name} has settings that are not computed here: {odd}.")
    enabled = nested.flag("lilicorr_enabled", kind == "reranker")
    described = projector and _PROJECTORS[projector]
    if kind is None and (enabled or any(key in nested for key in _LILICORR_KEYS)):
        described = "reranker"
    if described not in (None, kind):
        right = next(name for name, kind in _KINDS.items() if kind == described)
        raise ValueError(
            f"{fields.name} says {architecture!r}, under which servers ignore the {described} that {nested.name} "
            f"describes; set architectures to [{right!r}]."
        )
    nested.require(*(key for key in _REQUIRED.get(kind, ()) if key not in fields and key not in nested))
    return kind if kind != "reranker" or enabled else None


def slots_from_json(kind: str | None, block_size: int, places: tuple[Fields, ...]) -> dict:
    """Rows, slots and convention: which row of a block speaks for which position.

    A block has `block_size` rows. DFlash and LiLiCorr draft with all but the anchor's; DSpark with all, its row 0
    speaking for the position behind the anchor; Domino with one less than it has, from row 0 ("shift_label") or row 1.
    """
    shifted = agreed("shift_label", places)
    if kind == "dspark":
        if not shifted.flag("shift_label", True):
            raise ValueError(
                f"{shifted.name}'s shift_label is False, but the first row of a DSpark block speaks for the token "
                f"behind the anchor; it would be read one slot late."
            )
        return dict(input_rows=block_size, num_slots=block_size, slot_convention="next")
    is_next = kind == "domino" and shifted.flag("shift_label")
    return dict(input_rows=block_size, num_slots=block_size - 1, slot_convention="next" if is_next else "same")


def corrector_from_json(kind: str | None, drafter: DrafterConfig, places: tuple[Fields, ...]) -> CorrectorConfig | None:
    """The record of a corrector, described in one of two places. No key has a default: some change no shape, so a
    guess would load and mislead."""
    shared: dict[str, Any] = dict(
        drafter_width=drafter.width, num_slots=drafter.num_slots, init_std=drafter.init_std, dtype=drafter.dtype
    )
    if kind == "domino":
        return DominoConfig(
            vocab_size=drafter.vocab_size,
            state_width=agreed("gru_hidden_dim", places).integer("gru_hidden_dim"),
            bottleneck_width=agreed("emb_dim", places).integer("emb_dim"),
            plain_slots=agreed("pure_draft_prefix_len", places).integer("pure_draft_prefix_len"),
            **shared,
        )
    if kind == "dspark":
        has_confidence = agreed("enable_confidence_head", places).flag("enable_confidence_head")
        reads_token = agreed("confidence_head_with_markov", places)
        return DSparkConfig(
            vocab_size=drafter.vocab_size,
            rank=agreed("markov_rank", places).integer("markov_rank"),
            kind=_markov_kind(agreed("markov_head_type", places)),
            has_confidence=has_confidence,
            confidence_reads_token=not has_confidence or reads_token.flag("confidence_head_with_markov"),
            **shared,
        )
    return _reranker(drafter, places[-1], shared) if kind else None


def _markov_kind(place: Fields) -> MarkovKind:
    kind = place.text("markov_head_type")
    if kind not in get_args(MarkovKind):
        raise NotImplementedError(f"{place.name}'s markov_head_type is {kind!r}; {get_args(MarkovKind)} are computed.")
    return cast(MarkovKind, kind)


def _reranker(drafter: DrafterConfig, nested: Fields, shared: dict) -> RerankerConfig:
    nested.require(*_LILICORR_KEYS)
    width = nested.integer("lilicorr_hidden_size") or drafter.width
    return RerankerConfig(
        num_candidates=nested.integer("lilicorr_candidate_topk"),
        width=width,
        num_layers=nested.integer("lilicorr_num_layers", most=1000),
        num_heads=nested.integer("lilicorr_num_heads", least=1),
        ffn_width=int(width * nested.number("lilicorr_mlp_ratio")),
        factor_width=nested.integer("lilicorr_factor_dim"),
        vector_floor=nested.number("lilicorr_vector_eps"),
        cosine_scale=nested.number("lilicorr_logit_scale"),
        norm_eps=drafter.norm_eps,
        **shared,
    )


def corrector_to_json(drafter: DrafterConfig, corrector: CorrectorConfig | None) -> dict:
    """The keys of config.json that depend on the corrector: `architectures` and `dflash_config`, and one twice."""
    check_public_form(drafter, corrector)
    shared = {"mask_token_id": drafter.mask_id, "target_layer_ids": list(drafter.target_layer_ids)}
    if corrector is None:
        return {"architectures": [DFLASH], "dflash_config": shared}
    if isinstance(corrector, RerankerConfig):
        return {"architectures": [LILICORR], "dflash_config": shared | _reranker_to_json(corrector)}
    shifted = drafter.slot_convention == "next"
    if isinstance(corrector, DominoConfig):
        described = {
            "projector_type": "domino",
            "pure_draft_prefix_len": corrector.plain_slots,
            "emb_dim": corrector.bottleneck_width,
            "gru_hidden_dim": corrector.state_width,
            "shift_label": shifted,
        }
        top = {"emb_dim": corrector.bottleneck_width}
        return {"architectures": [DOMINO], "dflash_config": shared | described, **top}
    described = {
        "projector_type": "dspark",
        "markov_rank": corrector.rank,
        "markov_head_type": corrector.kind,
        "enable_confidence_head": corrector.has_confidence,
        "confidence_head_with_markov": corrector.has_confidence and corrector.confidence_reads_token,
        "shift_label": shifted,
    }
    return {"architectures": [DSPARK], "dflash_config": shared | described}


def _reranker_to_json(config: RerankerConfig) -> dict:
    ratio = config.ffn_width / config.width
    if int(config.width * ratio) < config.ffn_width:  # readers truncate the product
        ratio = math.nextafter(ratio, math.inf)
    return {
        "causal": False,
        "projector_type": "lilicorr",
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": config.num_candidates,
        "lilicorr_hidden_size": config.width,
        "lilicorr_num_layers": config.num_layers,
        "lilicorr_num_heads": config.num_heads,
        "lilicorr_mlp_ratio": ratio,
        "lilicorr_factor_dim": config.factor_width,
        "lilicorr_vector_eps": config.vector_floor,
        "lilicorr_logit_scale": config.cosine_scale,
    }


def check_public_form(drafter: DrafterConfig, corrector: CorrectorConfig | None) -> None:
    """Raises unless the public layout, which has one place for what the two share, can say all of it."""
    if not drafter.qk_norm or drafter.attention_bias:
        raise NotImplementedError(
            f"The public drafter layout has qk_norm=True and attention_bias=False; got {drafter.qk_norm} and "
            f"{drafter.attention_bias}."
        )
    name = "dflash" if corrector is None else corrector_name(corrector)
    conventions = {"domino": ("same", "next"), "dspark": ("next",)}.get(name, ("same",))
    spare = 0 if name == "dspark" else 1
    if drafter.slot_convention not in conventions or drafter.input_rows != drafter.num_slots + spare:
        raise NotImplementedError(
            f"The public {name} layout drafts block_size - {spare} slots from block_size rows under the convention "
            f"{' or '.join(conventions)}; got {drafter.num_slots} slots from {drafter.input_rows} rows under "
            f"{drafter.slot_convention!r}."
        )
    if corrector is None:
        return
    pairs: dict[str, tuple] = {
        "width": (drafter.width, corrector.drafter_width),
        "number of slots": (drafter.num_slots, corrector.num_slots),
        "dtype": (drafter.dtype, corrector.dtype),
    }
    if isinstance(corrector, RerankerConfig):
        pairs["norm_eps"] = (drafter.norm_eps, corrector.norm_eps)
    else:
        pairs["vocab_size"] = (drafter.vocab_size, corrector.vocab_size)
    if odd := {name: values for name, values in pairs.items() if values[0] != values[1]}:
        raise ValueError(f"One config.json can't describe drafter and {name}, which differ in (theirs, its): {odd}.")
