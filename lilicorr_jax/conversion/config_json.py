"""The config.json of public checkpoints <-> our records: targets and drafters; the correctors' part: `corrector_json`.

Nothing that shapes the model is guessed: an absent key, two places that differ, and a setting that would change the
mathematics are errors (`NotImplementedError` where only this implementation lacks it).
"""

import re
from typing import NamedTuple, cast, get_args

from lilicorr_jax.config import CorrectorConfig, DrafterConfig, Dtype, TargetConfig, TransformerConfig
from lilicorr_jax.conversion.corrector_json import (
    corrector_from_json,
    corrector_kind,
    corrector_to_json,
    slots_from_json,
)
from lilicorr_jax.conversion.fields import Fields, agreed
from lilicorr_jax.conversion.rope_json import rope_from_json, rope_to_json

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


class _Family(NamedTuple):
    architecture: str
    qk_norm: bool
    attention_bias: bool  # of queries, keys and values


_FAMILIES = {
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True, attention_bias=False),
    "qwen2": _Family("Qwen2ForCausalLM", qk_norm=False, attention_bias=True),
    "llama": _Family("LlamaForCausalLM", qk_norm=False, attention_bias=False),
}

_CHANGES_MATHS = re.compile(
    r"sink|softcap|multiplier|quantization|logits?_scal|embedding_scale|partial_rotary|mlp_bias|expert|alibi|"
    r"attention_chunk|query_pre_attn|own_lm_head|causal|^conv_|^lilicorr_"
)


def target_from_json(config: dict, generation: dict | None = None, *, dtype: Dtype | None = None) -> TargetConfig:
    """A target's record. `eos_token_id` of generation_config.json, one id or a list, goes before config.json's."""
    fields = Fields(config, CONFIG_FILE)
    model_type = fields.text("model_type")
    if model_type not in _FAMILIES:
        raise NotImplementedError(f"{CONFIG_FILE}'s model_type is {model_type!r}; {', '.join(_FAMILIES)} are computed.")
    family = _FAMILIES[model_type]
    if not family.attention_bias and fields.flag("attention_bias", False):
        raise NotImplementedError(f"{CONFIG_FILE}'s attention_bias is true, which for {model_type} biases o_proj too.")
    eos_ids = Fields(generation or {}, GENERATION_FILE).integers("eos_token_id", None)
    return TargetConfig(
        **_transformer(fields, dtype),
        qk_norm=family.qk_norm,
        attention_bias=family.attention_bias,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        eos_ids=fields.integers("eos_token_id", ()) if eos_ids is None else eos_ids,
    )


def target_to_json(config: TargetConfig) -> dict:
    """The config.json of a target."""
    switches = (config.qk_norm, config.attention_bias)
    names = [name for name, family in _FAMILIES.items() if (family.qk_norm, family.attention_bias) == switches]
    if not names:
        raise NotImplementedError(f"No public family has qk_norm={switches[0]} with attention_bias={switches[1]}.")
    return {
        "architectures": [_FAMILIES[names[0]].architecture],
        "model_type": names[0],
        **_shared(config),
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": config.eos_ids[0] if config.eos_ids else None,
    }


def generation_to_json(config: TargetConfig) -> dict:
    """The generation_config.json of a target: every end-of-text id."""
    return {"eos_token_id": list(config.eos_ids)}


def drafter_from_json(config: dict, *, dtype: Dtype | None = None) -> tuple[DrafterConfig, CorrectorConfig | None]:
    """The records of a drafter's config.json; no corrector for a plain DFlash drafter.

    Block size, mask id and target layers stand at the top level or in `dflash_config`; in both only if equal.
    """
    fields = Fields(config, CONFIG_FILE)
    nested = fields.nested("dflash_config")
    kind = corrector_kind(fields, nested)
    if (model_type := fields.text("model_type")) != "qwen3":
        raise NotImplementedError(f"{CONFIG_FILE}'s model_type is {model_type!r}; drafters of type qwen3 are computed.")
    if fields.flag("attention_bias", False) or nested.flag("causal", False):
        raise NotImplementedError(
            f"{CONFIG_FILE} asks for attention_bias or causal blocks, which are not computed here."
        )
    places = (fields, nested)
    block_size = agreed("block_size", places).integer("block_size", least=2)
    drafter = DrafterConfig(
        **_transformer(fields, dtype),
        num_target_layers=agreed("num_target_layers", places).integer("num_target_layers"),
        target_layer_ids=agreed("target_layer_ids", places).integers("target_layer_ids"),
        mask_id=agreed("mask_token_id", places).integer("mask_token_id"),
        **slots_from_json(kind, block_size, places),
    )
    return drafter, corrector_from_json(kind, drafter, places)


def drafter_to_json(drafter: DrafterConfig, corrector: CorrectorConfig | None = None) -> dict:
    """The config.json of a drafter, with the keys by which public engines load it."""
    described = corrector_to_json(drafter, corrector)
    return {
        "architectures": described.pop("architectures"),
        "model_type": "qwen3",
        "block_size": drafter.input_rows,
        **described,
        **_shared(drafter),
        "tie_word_embeddings": False,
        "num_target_layers": drafter.num_target_layers,
    }


def _transformer(fields: Fields, dtype: Dtype | None) -> dict:
    """The arguments of TransformerConfig that all families spell alike."""
    required = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields.require(*required, "intermediate_size", "max_position_embeddings", "rms_norm_eps")
    num_layers = fields.integer("num_hidden_layers", most=1000)
    _refuse_other_maths(fields, num_layers)
    width, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", least=1)
    if fields.text("model_type") == "qwen3":
        fields.require("head_dim")  # transformers' default for it is a constant, not width / heads
    max_positions = fields.integer("max_position_embeddings")
    return dict(
        vocab_size=fields.integer("vocab_size"),
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", least=1),
        head_width=fields.integer("head_dim", width // num_heads),
        ffn_width=fields.integer("intermediate_size"),
        max_positions=max_positions,
        rope=rope_from_json(fields, max_positions),
        norm_eps=fields.number("rms_norm_eps"),
        init_std=fields.number("initializer_range", TransformerConfig.init_std),
        dtype=dtype or _dtype(fields),
    )


def _shared(config: TransformerConfig) -> dict:
    """The keys that all families spell alike."""
    bias = {} if config.attention_bias else {"attention_bias": False}  # qwen2 has biases and no such key
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.ffn_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        **bias,
        "attention_dropout": 0.0,
        **rope_to_json(config.rope),
        "torch_dtype": config.dtype,
        "layer_types": ["full_attention"] * config.num_layers,
    }


def _dtype(fields: Fields) -> Dtype:
    """`dtype`, formerly `torch_dtype`."""
    names = sorted({fields.text(key) for key in ("dtype", "torch_dtype") if key in fields})
    if len(names) != 1 or names[0] not in get_args(Dtype):
        raise ValueError(
            f"{fields.name}'s dtype must be one of {', '.join(get_args(Dtype))}; got {' and '.join(names) or 'none'}. "
            f"Ask for a dtype by name to convert while loading."
        )
    return cast(Dtype, names[0])


def _refuse_other_maths(fields: Fields, num_layers: int) -> None:
    """Raises NotImplementedError for settings under which the same weights mean another function."""
    odd = {
        key: value
        for key, value in fields.values.items()
        if _CHANGES_MATHS.search(key) and (value is True or value not in (False, 1, "", [], {}))
    }
    if fields.text("hidden_act", "silu") != "silu":
        odd["hidden_act"] = fields.values["hidden_act"]
    if fields.values.get("layer_types", ["full_attention"] * num_layers) != ["full_attention"] * num_layers:
        odd["layer_types"] = fields.values["layer_types"]
    if "sliding_window" in fields and fields.flag("use_sliding_window", True):
        odd["sliding_window"] = fields.values["sliding_window"]
    elif fields.flag("use_sliding_window", False):
        odd["use_sliding_window"] = True
    if fields.values.get("draft_vocab_size", fields.values["vocab_size"]) != fields.values["vocab_size"]:
        odd["draft_vocab_size"] = fields.values["draft_vocab_size"]
    if odd:
        raise NotImplementedError(f"{fields.name} has settings that are not computed here: {odd}.")
