"""Tables from the tensor names of public checkpoints to our parameters, one per family, to read by and to write by.

Owns names and layouts. Opens no file (`safetensors`) and knows no config.json (`config_json`). A table covers its
model exactly: `check_cover` names everything missing, surplus or misshapen at once.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from lilicorr_jax.config import (
    CorrectorConfig,
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    RerankerConfig,
    TargetConfig,
    TransformerConfig,
)
from lilicorr_jax.models.linear import DECODED, JOINED, TRAINED

NAMES_SHOWN = 12


class Layout(NamedTuple):
    """How a stored tensor and our parameter differ: views, in both directions."""

    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def unit_axes(*axes: int) -> Layout:
    """Stored with axes of size one that our parameter lacks."""
    return Layout(read=lambda x: np.squeeze(x, axes), write=lambda x: np.expand_dims(x, axes))


SAME = Layout(_same, _same)
TRANSPOSED = Layout(np.transpose, np.transpose)  # torch's Linear is [out, in], a kernel [in, out]


class Rule(NamedTuple):
    """One tensor: its name in the file, its path in our tree, and how the two are laid out."""

    name: str
    path: str
    layout: Layout = SAME


def target_rules(config: TargetConfig) -> tuple[Rule, ...]:
    """Qwen3ForCausalLM, and by the config's switches Qwen2ForCausalLM and LlamaForCausalLM."""
    layers = (
        Rule(f"model.{rule.name}", rule.path, rule.layout)
        for i in range(config.num_layers)
        for rule in _layer(i, config)
    )
    head = () if config.tie_embeddings else (Rule("lm_head.weight", "unembed/embedding"),)
    return (
        Rule("model.embed_tokens.weight", "embed/embedding"),
        *layers,
        Rule("model.norm.weight", "final_norm/weight"),
        *head,
    )


def drafter_rules(config: DrafterConfig) -> tuple[Rule, ...]:
    """DFlashDraftModel: 3 + 11 tensors per layer. Embedding and unembedding are the target's and are not stored."""
    return (
        Rule("fc.weight", "fc/kernel", TRANSPOSED),
        Rule("hidden_norm.weight", "hidden_norm/weight"),
        *(rule for i in range(config.num_layers) for rule in _layer(i, config)),
        Rule("norm.weight", "norm/weight"),
    )


def reranker_rules(config: RerankerConfig) -> tuple[Rule, ...]:
    """The `lilicorr.*` tensors of LiLiCorrDraftModel: 26 + 10 per layer, two fewer where W equals D."""
    token_proj = () if config.width == config.drafter_width else _linear("token_proj", "token_proj")
    rules = (
        *token_proj,
        *_linear("pass_hidden_proj", "pass_hidden_proj"),
        *_linear("context_proj", "context_proj"),
        Rule("feature_mlp.0.weight", "feature_norm/weight"),
        Rule("feature_mlp.0.bias", "feature_norm/bias"),
        *_linear("feature_mlp.1", "feature_up"),
        *_linear("feature_mlp.3", "feature_out"),
        Rule("slot_embedding", "slot_embedding", unit_axes(0, 1, 3)),  # [1, 1, S, 1, W]
        Rule("rank_embedding", "rank_embedding", unit_axes(0, 1, 2)),  # [1, 1, 1, K, W]
        Rule("relative_slot_bias", "relative_slot_bias"),
        Rule("same_slot_bias", "same_slot_bias"),
        *(rule for i in range(config.num_layers) for rule in _lattice_layer(i)),
        Rule("output_norm.weight", "output_norm/weight"),
        Rule("anchor_norm.weight", "anchor_norm/weight"),
        *_linear("factor_input_proj", "factor_input_proj"),
        *_linear("out_head", "out_head"),
        *_linear("in_head", "in_head"),
        *_linear("anchor_out_head", "anchor_out_head"),
    )
    return tuple(Rule(f"lilicorr.{rule.name}", rule.path, rule.layout) for rule in rules)


def domino_rules(config: DominoConfig) -> tuple[Rule, ...]:
    """The four tensors that DominoDraftModel adds: a GRU without biases, and two matrices."""
    return (
        Rule("prefix_gru.weight_ih_l0", "gru_input/kernel", TRANSPOSED),
        Rule("prefix_gru.weight_hh_l0", "gru_state/kernel", TRANSPOSED),
        Rule("embed_proj.0.weight", "joint/kernel", TRANSPOSED),
        Rule("embed_proj.2.weight", "out/kernel", TRANSPOSED),
    )


def dspark_rules(config: DSparkConfig) -> tuple[Rule, ...]:
    """The tensors that DSparkDraftModel and Qwen3DSparkModel add: two to six."""
    mixing = {"vanilla": (), "gated": ("gate",), "rnn": ("joint",)}[config.kind]
    return (
        Rule("markov_head.markov_w1.weight", "token_in/embedding"),
        Rule("markov_head.markov_w2.weight", "out/kernel", TRANSPOSED),
        *(rule for name in mixing for rule in _linear(f"markov_head.{name}_proj", name)),
        *(_linear("confidence_head.proj", "confidence_proj") if config.has_confidence else ()),
    )


def corrector_rules(config: CorrectorConfig) -> tuple[Rule, ...]:
    """The table of any corrector."""
    if isinstance(config, RerankerConfig):
        return reranker_rules(config)
    return domino_rules(config) if isinstance(config, DominoConfig) else dspark_rules(config)


def under(branch: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same tensors, in a branch of a larger tree."""
    return tuple(Rule(rule.name, f"{branch}/{rule.path}", rule.layout) for rule in rules)


def decoded(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same tensors for a tree of `models.linear.for_decoding`, whose matrices lie as they are stored.

    Several may have one path: there they lie one below the other, in this order.
    """
    joined = {part: name for name, parts in JOINED.items() for part in parts}

    def moved(rule: Rule) -> Rule:
        *parents, layer, leaf = rule.path.split("/")
        path = "/".join([*parents, joined.get(layer, layer), DECODED if leaf == TRAINED else leaf])
        return Rule(rule.name, path, SAME if leaf == TRAINED else rule.layout)

    return tuple(moved(rule) for rule in rules)


def flat(tree: Mapping) -> dict[str, Any]:
    """A parameter tree as {path: leaf}."""
    return dict(flatten_dict(tree, sep="/"))  # type: ignore[arg-type]


def stored_shapes(rules: tuple[Rule, ...], abstract: Mapping) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor has in a file, given the model's parameter shapes."""
    leaves = flat(abstract)
    blank = np.zeros((), np.int8)
    return {rule.name: rule.layout.write(np.broadcast_to(blank, leaves[rule.path].shape)).shape for rule in rules}


def check_cover(where: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises one ValueError with every missing, unexpected and misshapen name, unless the two agree."""
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    misshapen = [
        f"{name} has {found[name]} for {wanted[name]}"
        for name in sorted(wanted.keys() & found.keys())
        if tuple(found[name]) != tuple(wanted[name])
    ]
    problems = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
    reports = [f"{len(names)} {kind} ({_shown(names)})" for kind, names in problems if names]
    if reports:
        raise ValueError(
            f"The tensors of {where} are not the {len(wanted)} that its configuration asks for: {'; '.join(reports)}."
        )


def _shown(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _linear(name: str, path: str, *, use_bias: bool = True) -> Iterator[Rule]:
    yield Rule(f"{name}.weight", f"{path}/kernel", TRANSPOSED)
    if use_bias:
        yield Rule(f"{name}.bias", f"{path}/bias")


def _layer(index: int, config: TransformerConfig) -> Iterator[Rule]:
    """A decoder layer of target or drafter."""
    name, path = f"layers.{index}", f"layers_{index}"
    yield Rule(f"{name}.input_layernorm.weight", f"{path}/attention_norm/weight")
    for part in ("q_proj", "k_proj", "v_proj"):
        yield from _linear(f"{name}.self_attn.{part}", f"{path}/attention/{part}", use_bias=config.attention_bias)
    yield from _linear(f"{name}.self_attn.o_proj", f"{path}/attention/o_proj", use_bias=False)
    for part in ("q_norm", "k_norm") if config.qk_norm else ():
        yield Rule(f"{name}.self_attn.{part}.weight", f"{path}/attention/{part}/weight")
    yield Rule(f"{name}.post_attention_layernorm.weight", f"{path}/mlp_norm/weight")
    for part in ("gate_proj", "up_proj", "down_proj"):
        yield from _linear(f"{name}.mlp.{part}", f"{path}/mlp/{part}", use_bias=False)


def _lattice_layer(index: int) -> Iterator[Rule]:
    """A layer of the reranker; torch's MultiheadAttention joins queries, keys and values in that order, as we do."""
    name, path = f"layers.{index}", f"layers_{index}"
    yield Rule(f"{name}.attn_norm.weight", f"{path}/attention_norm/weight")
    yield Rule(f"{name}.attn.in_proj_weight", f"{path}/attention/qkv_proj/kernel", TRANSPOSED)
    yield Rule(f"{name}.attn.in_proj_bias", f"{path}/attention/qkv_proj/bias")
    yield from _linear(f"{name}.attn.out_proj", f"{path}/attention/out_proj")
    yield Rule(f"{name}.mlp_norm.weight", f"{path}/mlp_norm/weight")
    yield from _linear(f"{name}.mlp.0", f"{path}/mlp_up")
    yield from _linear(f"{name}.mlp.2", f"{path}/mlp_down")
