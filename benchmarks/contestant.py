"""This project's engine as a contestant: plain decoding, speculative blocks, and what the machine itself can do.

A program for `benchmarks.race`: `python -m benchmarks.contestant SETTINGS` answers JSON tasks on stdin.
"""

import json
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.random_drafter import drafter_for, random_checkpoint
from lilicorr_jax.config import RopeConfig, TargetConfig
from lilicorr_jax.models.target import Target
from lilicorr_jax.sharding import init_parameters
from serve.engine import Engine, EngineConfig, Request
from serve.machine import Machine
from serve.models import assemble, load_models


def engine_for(models, settings: dict) -> Engine:
    longest = len(settings["prompt_ids"]) + settings["new_tokens"]
    blocks = settings.get("blocks_per_dispatch", EngineConfig.blocks_per_dispatch)
    return Engine(models, EngineConfig(rows=1, context_limit=longest, blocks_per_dispatch=blocks))


def decode(engine: Engine, settings: dict) -> dict:
    """One text, prefill included."""
    request = Request(
        id="0", prompt_ids=settings["prompt_ids"], max_tokens=settings["new_tokens"], stop_ids=()
    )  # fmt: skip
    start = time.perf_counter()
    (reply,) = engine.run([request])
    seconds = time.perf_counter() - start
    while engine.num_pending:
        engine.retire()
    blocks, times = len(reply.blocks), reply.times
    return {
        "seconds": seconds,
        "prefill_s": times.first_s - times.sent_s,
        "token_ids": list(reply.token_ids),
        "tokens": len(reply.token_ids),
        "blocks": blocks,
        "tau": sum(block.emitted for block in reply.blocks) / blocks,
        "block_s": seconds / blocks,
        "step_s": (times.last_s - times.first_s) / blocks,
    }


def random_target(settings: dict) -> tuple[TargetConfig, dict]:
    config = TargetConfig(
        vocab_size=settings["vocab_size"],
        width=settings["width"],
        num_layers=settings["layers"],
        num_heads=settings["num_heads"],
        num_kv_heads=settings["num_kv_heads"],
        head_width=settings["head_width"],
        ffn_width=settings["ffn_width"],
        max_positions=settings["max_positions"],
        rope=RopeConfig(theta=1e6),
    )
    key = jax.random.key(settings["seed"])
    return config, init_parameters(Target(config), key, jnp.zeros((1, 1), jnp.int32))


def random_engines(settings: dict) -> dict[str, Engine]:
    """Engines of the tasks that `benchmarks/peers/dflash_generate.py` has too."""
    target, params = random_target(settings)
    sizes = {"layers": settings["drafter_layers"], "num_slots": settings["num_slots"]}
    drafter, reranker = drafter_for(target, **sizes, mask_id=settings["mask_id"], width=256)
    trees = random_checkpoint(drafter, reranker, settings["seed"]).params
    blank = params | {"unembed": jax.tree.map(jnp.zeros_like, params["unembed"])}

    def engine(method, target_params):
        everything = {"target": target_params, **trees}
        models = assemble(target, everything, drafter=drafter, corrector=reranker, method=method)
        return engine_for(models, settings)

    return {
        "rejected": engine("dflash", params),
        "accepted": engine("dflash", blank),
        "lilicorr": engine("lilicorr", params),
        "plain": engine("ar", params),
    }


def engines_of(settings: dict) -> dict[str, Engine]:
    if "target" in settings:
        return {"plain": engine_for(load_models(settings["target"]), settings)}
    return random_engines(settings)


def answers(settings: dict, tasks: Iterator[str]) -> Iterator[dict]:
    engines, machine = engines_of(settings), Machine()
    yield {"jax": jax.__version__}
    for task in tasks:
        if task in ("bandwidth", "gemm"):
            yield getattr(machine, task)()
        else:
            yield decode(engines[task], settings)


if __name__ == "__main__":
    for answer in answers(json.loads(sys.argv[1]), map(json.loads, sys.stdin)):
        print(json.dumps(answer), flush=True)
