"""`python -m benchmarks.block`: one speculative block, this engine beside the PyTorch DFlash reference, in one run.

Random models of the same shapes, float32, batch 1. The accepted length is set, not found: every draft refused, or every
draft kept. Prefill is inside the clock of both, and spread over the blocks; contestants take turns.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.race import peer_command, race
from lilicorr_jax import flags
from lilicorr_jax.config import setting
from serve.provenance import surroundings

PROGRAM = "benchmarks.block"
OURS, THEIRS = "lilicorr_jax", "dflash"


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Times a speculative block beside the PyTorch DFlash reference."""

    width: int = setting(512, "Width of target and drafter.", "Models")
    ffn_width: int = setting(1536, "Of the gated MLP.")
    layers: int = setting(8, "Of the target.")
    drafter_layers: int = setting(2, "Of the drafter.")
    num_heads: int = setting(8, "Query heads.")
    num_kv_heads: int = setting(4, "Key and value heads.")
    head_width: int = setting(64, "Of one head.")
    vocab_size: int = setting(8192, "Vocabulary.")
    num_slots: int = setting(15, "Drafted slots of a block.")
    max_positions: int = setting(4096, "Longest text.")
    prompt_tokens: int = setting(64, "Length of the prompt.", "Run")
    new_tokens: int = setting(128, "Tokens to decode.")
    blocks_per_dispatch: int = setting(4, "Of this engine.")
    threads: tuple[int, ...] = setting((1, 2), "Numbers of CPUs to run on.")
    rounds: int = setting(7, "Turns of each contestant.")
    seed: int = setting(0, "Of the parameters.")


def run(config: BlockConfig) -> None:
    prompt_ids = [1 + 37 * i % (config.vocab_size - 2) for i in range(config.prompt_tokens)]
    settings = asdict(config) | {"prompt_ids": prompt_ids, "mask_id": config.vocab_size - 1}
    for num_threads in config.threads:
        report(settings, num_threads, config.rounds)


def report(settings: dict, num_threads: int, rounds: int) -> None:
    load = os.getloadavg()
    commands = {OURS: [sys.executable, "-m", "benchmarks.contestant"], THEIRS: peer_command("dflash_generate.py")}
    shared = ("rejected", "accepted", "plain")
    tasks = [(OURS, "gemm"), (OURS, "bandwidth"), *((name, task) for task in shared for name in commands)]
    tasks.append((OURS, "lilicorr"))
    about, results = race(commands, settings, tasks, rounds=rounds, num_threads=num_threads)
    gemm = max(row["flops_per_s"] for row in results[OURS, "gemm"].rounds)
    bandwidth = max(row["bytes_per_s"] for row in results[OURS, "bandwidth"].rounds)
    compute_s, read_s = (work / rate for work, rate in zip(block_work(settings), (gemm, bandwidth), strict=True))
    print(f"\n{num_threads} threads; {surroundings(load)}; peer {json.dumps(about[THEIRS])}")
    for task in shared:
        ours, theirs = results[OURS, task], results[THEIRS, task]
        ratios = sorted(b["block_s"] / a["block_s"] for a, b in zip(ours.rounds, theirs.rounds, strict=True))
        for name, result in ((OURS, ours), (THEIRS, theirs)):
            best, median = result.best("block_s") * 1e3, result.median("block_s") * 1e3
            tau = result.rounds[0]["tau"]
            print(f"{task:9s} {name:13s} tau {tau:5.2f}  per block best {best:6.2f} ms, median {median:6.2f} ms")
        best = theirs.best("block_s") / ours.best("block_s")
        print(f"{task:9s} ratio of best {best:.2f}, by turns {ratios[rounds // 2]:.2f}")
    walk = results[OURS, "lilicorr"]
    print(f"lilicorr (greedy walk, reranker 256 wide) per block best {walk.best('block_s') * 1e3:6.2f} ms")
    print(
        f"floors of a block of {settings['num_slots'] + 1} rows: products {compute_s * 1e3:.2f} ms at {gemm / 1e9:.0f} "
        f"GFLOP/s, weights {read_s * 1e3:.2f} ms at {bandwidth / 1e9:.1f} GB/s; without prefill our block takes "
        f"{results[OURS, 'rejected'].best('step_s') * 1e3:.2f} ms"
    )


def block_work(settings: dict) -> tuple[float, float]:
    """Floating-point operations and weight bytes of a block's products; attention and norms are left out."""
    width, rows = settings["width"], settings["num_slots"] + 1
    inner = settings["head_width"] * (settings["num_heads"] + settings["num_kv_heads"]) * 2  # q, o and k, v
    layer = width * (inner + 3 * settings["ffn_width"])
    context = width * settings["head_width"] * settings["num_kv_heads"] * 2  # keys and values of absorbed rows
    drafter = settings["drafter_layers"] * (layer + context + width * width)  # and the fusion of captured features
    weights = settings["layers"] * layer + drafter + 2 * width * settings["vocab_size"]
    return 2.0 * rows * weights, 4.0 * (weights - width * settings["vocab_size"])


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(BlockConfig, run, program=PROGRAM, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
