"""A GGUF file of a target, written as the Hugging Face folder that everything else reads.

Weights are dequantised to float32. Owns GGUF's names for metadata and tensors of the architectures `llama` and `qwen2`;
settings of the file that would change the mathematics and are not computed here are refused.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lilicorr_jax.config import RopeConfig, TargetConfig
from lilicorr_jax.conversion.checkpoint import abstract_target
from lilicorr_jax.conversion.config_json import CONFIG_FILE, GENERATION_FILE, generation_to_json, target_to_json
from lilicorr_jax.conversion.fields import Fields
from lilicorr_jax.conversion.folder import write_json
from lilicorr_jax.conversion.gguf import File, read_file
from lilicorr_jax.conversion.gguf_tokenizer import write_tokenizer
from lilicorr_jax.conversion.rules import check_cover, stored_shapes, target_rules
from lilicorr_jax.conversion.safetensors import SINGLE_FILE, write_file

ATTENTION_BIAS = {"llama": False, "qwen2": True}
PERMUTED = ("llama",)  # architectures whose query and key rows are stored in pairs (i, i + H/2)
UNEMBEDDING = "output.weight"
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    UNEMBEDDING: "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_target(source: Path, folder: Path) -> TargetConfig:
    """Writes config, weights and tokenizer of the GGUF file `source` into `folder`; returns what the target is.

    Raises:
        ValueError: the file is damaged, or its tensors are not those of its architecture.
        NotImplementedError: an architecture, tokenizer or setting that is not computed here.
    """
    file = read_file(source)
    config = target_config(file)
    names = dict(_public_names(config))
    found = {names.get(name, name): tensor.shape for name, tensor in file.tensors.items()}
    check_cover(str(source), stored_shapes(target_rules(config), abstract_target(config)), found)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file, folder, context=config.max_positions)
    write_json(folder, CONFIG_FILE, target_to_json(config))
    write_json(folder, GENERATION_FILE, generation_to_json(config))
    write_file(folder / SINGLE_FILE, {public: _weights(file, name, config) for name, public in names.items()})
    return config


def target_config(file: File) -> TargetConfig:
    """The record that a file's metadata describe; embeddings are tied where it has no unembedding of its own."""
    every = Fields(file.metadata, f"{file.path}'s metadata")
    architecture = every.text("general.architecture")
    if architecture not in ATTENTION_BIAS:
        raise NotImplementedError(
            f"{file.path} is of architecture {architecture!r}; {', '.join(ATTENTION_BIAS)} are converted."
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    fields = Fields(own, f"{file.path}'s {architecture} metadata")
    width, num_heads = fields.integer("embedding_length", least=1), fields.integer("attention.head_count", least=1)
    head_width = fields.integer("attention.key_length", width // num_heads)
    _refuse_other_maths(fields, head_width)
    return TargetConfig(
        vocab_size=len(every.values.get("tokenizer.ggml.tokens", ())),
        width=width,
        num_layers=fields.integer("block_count", least=1, most=1000),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads, least=1),
        head_width=head_width,
        ffn_width=fields.integer("feed_forward_length", least=1),
        max_positions=fields.integer("context_length", least=1),
        rope=RopeConfig(theta=fields.number("rope.freq_base")),
        norm_eps=_decimal(fields.number("attention.layer_norm_rms_epsilon")),
        qk_norm=False,
        attention_bias=ATTENTION_BIAS[architecture],
        tie_embeddings=UNEMBEDDING not in file.tensors,
        eos_ids=(every.integer("tokenizer.ggml.eos_token_id"),),
    )


def unpermuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows [N*H, D] in the order of rotate-half embedding, out of GGUF's pairs (i, i + H/2)."""
    out, width = rows.shape
    return rows.reshape(num_heads, out // num_heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _refuse_other_maths(fields: Fields, head_width: int) -> None:
    odd = {key: value for key, value in fields.values.items() if "rope.scaling" in key or "expert" in key}
    if fields.integer("rope.dimension_count", head_width) != head_width:
        odd["rope.dimension_count"] = fields.values["rope.dimension_count"]
    if fields.integer("attention.value_length", head_width) != head_width:
        odd["attention.value_length"] = fields.values["attention.value_length"]
    if odd:
        raise NotImplementedError(f"{fields.name} have settings that are not computed here: {odd}.")


def _public_names(config: TargetConfig) -> Iterator[tuple[str, str]]:
    for name, public in OUTER_NAMES.items():
        if name != UNEMBEDDING or not config.tie_embeddings:
            yield name, public
    for layer in range(config.num_layers):
        for name, public in LAYER_NAMES.items():
            yield f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{public}.weight"
            if config.attention_bias and name in ("attn_q", "attn_k", "attn_v"):
                yield f"blk.{layer}.{name}.bias", f"model.layers.{layer}.{public}.bias"


def _weights(file: File, name: str, config: TargetConfig) -> np.ndarray:
    weights = file.tensors[name].read()
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if heads and file.metadata["general.architecture"] in PERMUTED:
        return unpermuted(weights, heads)
    return weights


def _decimal(value: float) -> float:
    """The shortest number whose float32 is the one in the file: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
