"""Small GGUF targets become folders with the same weights, settings and tokens; what can't be computed is refused."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.conversion.gguf import read_file
from lilicorr_jax.conversion.gguf_target import convert_target, target_config, unpermuted
from serve.workload import load_tokenizer, templated
from tests.conversion.gguf_bytes import write_f32

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, FFN, LAYERS = 24, 4, 2, 6, 40, 2
BYTES = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ 1", "1 2", "a b"]
TOKENS = SPECIALS + BYTES + [merge.replace(" ", "") for merge in MERGES]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def metadata(architecture: str, splitter: str, **changes) -> dict:
    """A file's metadata; a change to None leaves the key out."""
    own = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_WIDTH,
    }
    values = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": item for key, item in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": splitter,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    } | changes
    return {key: item for key, item in values.items() if item is not None}


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in GGUF's order for llama: of each head, row i and row i + H/2 side by side."""
    stored, width = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(width // 2):
            stored[head * width + 2 * i] = rows[head * width + i]
            stored[head * width + 2 * i + 1] = rows[head * width + i + width // 2]
    return stored


def tensors_of(rng, *, is_llama: bool) -> tuple[dict, dict]:
    """What a file holds, and what layer 1 of the loaded target must hold."""

    def new(*shape):
        return rng.normal(size=shape).astype(np.float32)

    stored = {"token_embd.weight": new(len(TOKENS), WIDTH), "output_norm.weight": new(WIDTH)}
    if not is_llama:
        stored["output.weight"] = new(len(TOKENS), WIDTH)
    for layer in range(LAYERS):
        q, k, v = new(HEADS * HEAD_WIDTH, WIDTH), new(KV_HEADS * HEAD_WIDTH, WIDTH), new(KV_HEADS * HEAD_WIDTH, WIDTH)
        parts = {
            "attn_norm.weight": new(WIDTH),
            "attn_q.weight": paired(q, HEADS) if is_llama else q,
            "attn_k.weight": paired(k, KV_HEADS) if is_llama else k,
            "attn_v.weight": v,
            "attn_output.weight": new(WIDTH, HEADS * HEAD_WIDTH),
            "ffn_norm.weight": new(WIDTH),
            "ffn_gate.weight": new(FFN, WIDTH),
            "ffn_up.weight": new(FFN, WIDTH),
            "ffn_down.weight": new(WIDTH, FFN),
        }
        if not is_llama:
            parts |= {f"attn_{name}.bias": new(rows.shape[0]) for name, rows in zip("qkv", (q, k, v), strict=True)}
        stored |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    last = stored | {"q": q, "k": k}
    return stored, last


@pytest.mark.parametrize("architecture, splitter", [("llama", "smollm"), ("qwen2", "qwen2")])
def test_a_converted_target_holds_the_weights_of_its_file(tmp_path, rng, architecture, splitter):
    stored, last = tensors_of(rng, is_llama=architecture == "llama")
    source = write_f32(tmp_path / "model.gguf", metadata(architecture, splitter), stored)
    written = convert_target(source, tmp_path / "folder")
    config, params = load_target(tmp_path / "folder")
    assert config == written
    assert (config.num_layers, config.num_kv_heads, config.ffn_width, config.eos_ids) == (LAYERS, KV_HEADS, FFN, (2,))
    assert (config.norm_eps, config.rope.theta, config.vocab_size) == (1e-5, 10000.0, len(TOKENS))
    assert (config.qk_norm, config.attention_bias) == (False, architecture == "qwen2")
    assert config.tie_embeddings == (architecture == "llama")
    attention, mlp = params["layers_1"]["attention"], params["layers_1"]["mlp"]
    np.testing.assert_array_equal(attention["q_proj"]["kernel"], last["q"].T)
    np.testing.assert_array_equal(attention["k_proj"]["kernel"], last["k"].T)
    np.testing.assert_array_equal(attention["o_proj"]["kernel"], stored["blk.1.attn_output.weight"].T)
    np.testing.assert_array_equal(mlp["down_proj"]["kernel"], stored["blk.1.ffn_down.weight"].T)
    np.testing.assert_array_equal(params["layers_0"]["mlp_norm"]["weight"], stored["blk.0.ffn_norm.weight"])
    np.testing.assert_array_equal(params["embed"]["embedding"], stored["token_embd.weight"])
    if architecture == "qwen2":
        np.testing.assert_array_equal(attention["v_proj"]["bias"], stored["blk.1.attn_v.bias"])
        np.testing.assert_array_equal(params["unembed"]["embedding"], stored["output.weight"])


def test_pairs_are_undone_head_by_head(rng):
    rows = rng.normal(size=(3 * 8, 5))
    np.testing.assert_array_equal(unpermuted(paired(rows, 3), 3), rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A converted target of each splitter."""
    made = {}
    for architecture, splitter in (("llama", "smollm"), ("qwen2", "qwen2")):
        home = tmp_path_factory.mktemp(splitter)
        stored, _ = tensors_of(np.random.default_rng(0), is_llama=architecture == "llama")
        convert_target(write_f32(home / "model.gguf", metadata(architecture, splitter), stored), home / "folder")
        made[splitter] = home / "folder"
    return made


@pytest.mark.parametrize("splitter", ["smollm", "qwen2"])
def test_digits_stand_alone_whatever_could_be_merged(folders, splitter):
    tokenizer = Tokenizer.from_file(str(folders[splitter] / "tokenizer.json"))
    assert tokenizer.encode("ab 12").tokens == ["ab", "Ġ", "1", "2"]


@pytest.mark.parametrize("splitter", ["smollm", "qwen2"])
def test_special_tokens_and_the_template_come_along(folders, splitter):
    tokenizer = load_tokenizer(folders[splitter])
    ids = templated(tokenizer, "ab")
    assert ids == (1, TOKENS.index("ab"), 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


def test_rows_that_only_pad_the_embedding_are_no_tokens(tmp_path, rng):
    kinds = [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS) - 1) + [5]
    changes = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": MERGES[:2]}
    stored, _ = tensors_of(rng, is_llama=True)
    source = write_f32(tmp_path / "model.gguf", metadata("llama", "smollm", **changes), stored)
    config = convert_target(source, tmp_path / "folder")
    assert config.vocab_size == len(TOKENS)
    assert TOKENS[-1] not in json.loads((tmp_path / "folder" / "tokenizer.json").read_text())["model"]["vocab"]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"general.architecture": "gemma3"}, "'gemma3'"),
        ({"llama.rope.scaling.type": "linear"}, "rope.scaling.type"),
        ({"llama.rope.dimension_count": 4}, "'rope.dimension_count': 4"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "'llama-bpe'"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' split"),
    ],
)
def test_what_is_not_computed_here_is_refused(tmp_path, rng, changes, problem):
    stored, _ = tensors_of(rng, is_llama=True)
    source = write_f32(tmp_path / "model.gguf", metadata("llama", "smollm", **changes), stored)
    with pytest.raises(NotImplementedError, match=problem):
        convert_target(source, tmp_path / "folder")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"llama.block_count": None}, "block_count"),
        ({"llama.embedding_length": "wide"}, "'wide'"),
        ({"llama.block_count": 2**31}, "2147483648"),
        ({"llama.feed_forward_length": FFN + 8}, r"\(40, 24\) for \(48, 24\)"),
        ({"tokenizer.ggml.eos_token_id": 500}, r"\[500\]"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"'ab'"),
    ],
)
def test_contradictory_files_are_refused_before_weights_are_written(tmp_path, rng, changes, problem):
    stored, _ = tensors_of(rng, is_llama=True)
    source = write_f32(tmp_path / "model.gguf", metadata("llama", "smollm", **changes), stored)
    with pytest.raises(ValueError, match=problem):
        convert_target(source, tmp_path / "folder")
    assert not (tmp_path / "folder" / "model.safetensors").exists()


def test_an_unread_tensor_is_an_error(tmp_path, rng):
    stored, _ = tensors_of(rng, is_llama=True)
    source = write_f32(
        tmp_path / "model.gguf", metadata("llama", "smollm"), stored | {"rope_freqs.weight": np.ones(3, np.float32)}
    )
    with pytest.raises(ValueError, match="unexpected.*rope_freqs"):
        convert_target(source, tmp_path / "folder")


def test_epsilon_is_the_decimal_that_was_meant(tmp_path, rng):
    stored, _ = tensors_of(rng, is_llama=True)
    source = write_f32(tmp_path / "model.gguf", metadata("llama", "smollm"), stored)
    assert target_config(read_file(source)).norm_eps == 1e-5
