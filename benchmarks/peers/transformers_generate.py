"""transformers' greedy generate on a target folder. A program for `benchmarks.race`, run in the peers' environment."""

import json
import os
import sys
import time

import torch  # pyright: ignore[reportMissingImports]  the peers' environment has it
import transformers
from transformers import AutoModelForCausalLM

settings = json.loads(sys.argv[1])
torch.set_num_threads(len(os.sched_getaffinity(0)))
model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=torch.float32).eval()
prompt = torch.tensor([settings["prompt_ids"]])
print(
    json.dumps(
        {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "attention": model.config._attn_implementation,
            "threads": torch.get_num_threads(),
        }
    ),
    flush=True,
)
for _ in sys.stdin:
    with torch.inference_mode():
        start = time.perf_counter()
        text = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=settings["new_tokens"],
            min_new_tokens=settings["new_tokens"],
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "token_ids": text[0, prompt.shape[1] :].tolist()}), flush=True)
