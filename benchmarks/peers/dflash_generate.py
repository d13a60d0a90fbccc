"""The PyTorch DFlash reference's own loop on random models. A program for `benchmarks.race`, in the peers' environment.

Two tasks bracket the accepted length: "rejected" keeps the random unembedding, so that nearly every draft is refused;
"accepted" zeroes it, so that target and drafter agree on token 0 and every draft is kept.
"""

import json
import os
import sys
import time

import dflash.model as reference  # pyright: ignore[reportMissingImports]  the peers' environment has it
import torch  # pyright: ignore[reportMissingImports]  the peers' environment has it
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

settings = json.loads(sys.argv[1])
torch.set_num_threads(len(os.sched_getaffinity(0)))
torch.manual_seed(settings["seed"])
reference._cuda_time = time.perf_counter  # its own clock asks CUDA, which is not here

shape = {
    "vocab_size": settings["vocab_size"],
    "hidden_size": settings["width"],
    "intermediate_size": settings["ffn_width"],
    "num_attention_heads": settings["num_heads"],
    "num_key_value_heads": settings["num_kv_heads"],
    "head_dim": settings["head_width"],
    "max_position_embeddings": settings["max_positions"],
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
target = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=settings["layers"], **shape)).eval()
config = Qwen3Config(num_hidden_layers=settings["drafter_layers"], **shape)
config.block_size, config.num_target_layers = settings["num_slots"] + 1, settings["layers"]
config.dflash_config = {
    "mask_token_id": settings["mask_id"],
    "target_layer_ids": reference.build_target_layer_ids(settings["layers"], settings["drafter_layers"]),
}
drafter = reference.DFlashDraftModel(config).eval()
prompt = torch.tensor([settings["prompt_ids"]])
unembedding = target.lm_head.weight.detach().clone()
about = {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
print(json.dumps(about | {"attention": target.config._attn_implementation}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    with torch.no_grad():
        target.lm_head.weight.copy_(unembedding * (task != "accepted"))
    block = 1 if task == "plain" else config.block_size
    start = time.perf_counter()
    run = reference.dflash_generate(
        drafter, target, prompt, settings["new_tokens"], None, 0.0, block_size=block, return_stats=True
    )
    seconds = time.perf_counter() - start
    lengths = run.acceptance_lengths
    answer = {"seconds": seconds, "prefill_s": run.time_to_first_token, "blocks": len(lengths)}
    answer |= {"tokens": run.num_output_tokens, "tau": sum(lengths) / len(lengths)}
    answer["block_s"] = seconds / len(lengths)
    print(json.dumps(answer), flush=True)
