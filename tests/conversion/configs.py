"""Public config.json files, as Python objects, and how a test changes one."""

import json

from tests.conftest import GOLDEN

DFLASH = json.loads((GOLDEN / "dflash/tied/drafter/config.json").read_text())
LILICORR = json.loads((GOLDEN / "lilicorr/config.json").read_text())
DOMINO = json.loads((GOLDEN / "domino/config.json").read_text()) | {"torch_dtype": "float32"}
DSPARK = json.loads((GOLDEN / "dspark/config.json").read_text()) | {"torch_dtype": "float32"}
TARGET = json.loads((GOLDEN / "dflash/tied/target/config.json").read_text())

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA = {  # SmolLM2-135M
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "rope_scaling": None,
    "rope_interleaved": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
QWEN2 = {  # Qwen2.5-0.5B
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    "max_position_embeddings": 32768, "max_window_layers": 21, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 151645,
}  # fmt: skip


def changed(base: dict, **changes) -> dict:
    """A copy with keys set; `a__b` sets b inside a, `...` deletes."""
    copy = json.loads(json.dumps(base))
    for key, value in changes.items():
        *outer, last = key.split("__")
        place = copy
        for part in outer:
            place = place[part]
        place.pop(last, None)
        if value is not ...:
            place[last] = value
    return copy
