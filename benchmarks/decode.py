"""`python -m benchmarks.decode`: plain greedy decoding, this engine beside transformers, on one target in one run.

Same weights, float32, batch 1, the same prompt and number of tokens, the prefill inside the clock of both; contestants
take turns. Also the floor: the time in which this machine reads the weights once, measured between the same turns.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fetch import model_folder
from benchmarks.race import peer_command, race
from lilicorr_jax import flags
from lilicorr_jax.config import setting
from lilicorr_jax.conversion.safetensors import read_folder
from serve.provenance import surroundings
from serve.workload import load_tokenizer, templated

PROGRAM = "benchmarks.decode"
OURS, THEIRS = "lilicorr_jax", "transformers"


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Times plain greedy decoding beside transformers' generate."""

    target: str | None = setting(None, "Folder of the target; none takes SmolLM2 out of the cache.")
    prompt: str = setting("What is the capital of France?", "Prompt, put in the chat template.")
    new_tokens: int = setting(64, "Tokens to decode; end-of-text ids don't stop it.")
    blocks_per_dispatch: int = setting(16, "Steps of this engine in one device program.")
    threads: tuple[int, ...] = setting((1, 2), "Numbers of CPUs to run on.")
    rounds: int = setting(7, "Turns of each contestant.")


def run(config: DecodeConfig) -> None:
    folder = Path(config.target) if config.target else model_folder("smollm2")
    settings = {
        "target": str(folder),
        "prompt_ids": list(templated(load_tokenizer(folder), config.prompt)),
        "new_tokens": config.new_tokens,
        "blocks_per_dispatch": config.blocks_per_dispatch,
    }
    for num_threads in config.threads:
        report(settings, weight_bytes(folder), num_threads, config.rounds)


def weight_bytes(folder: Path) -> int:
    """Bytes that one decoding step must read: all weights; an untied embedding is only looked up."""
    entries = read_folder(folder)
    unread = entries["model.embed_tokens.weight"].num_bytes if "lm_head.weight" in entries else 0
    return sum(entry.num_bytes for entry in entries.values()) - unread


def report(settings: dict, num_bytes: int, num_threads: int, rounds: int) -> None:
    load = os.getloadavg()
    commands = {OURS: [sys.executable, "-m", "benchmarks.contestant"], THEIRS: peer_command("transformers_generate.py")}
    tasks = [(OURS, "bandwidth"), (OURS, "plain"), (THEIRS, "plain")]
    about, results = race(commands, settings, tasks, rounds=rounds, num_threads=num_threads)
    ours, theirs = results[OURS, "plain"], results[THEIRS, "plain"]
    count = settings["new_tokens"]
    ratios = [their["seconds"] / our["seconds"] for our, their in zip(ours.rounds, theirs.rounds, strict=True)]
    bandwidth = max(row["bytes_per_s"] for row in results[OURS, "bandwidth"].rounds)
    same = ours.rounds[0]["token_ids"] == theirs.rounds[0]["token_ids"]
    print(f"\n{num_threads} threads; {surroundings(load)}; peer {json.dumps(about[THEIRS])}")
    print(f"{len(settings['prompt_ids'])} prompt tokens, {count} new; texts equal: {same}")
    for name, result in ((OURS, ours), (THEIRS, theirs)):
        best, median = count / result.best("seconds"), count / result.median("seconds")
        print(f"{name:13s} best {best:6.1f} tok/s, median {median:6.1f} tok/s")
    print(
        f"ratio of best {theirs.best('seconds') / ours.best('seconds'):.2f}, by turns {sorted(ratios)[rounds // 2]:.2f}"
    )
    floor, step = num_bytes / bandwidth, ours.best("step_s")
    read = f"{num_bytes / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s"
    print(f"step {step * 1e3:.1f} ms, floor {floor * 1e3:.1f} ms ({read}): {step / floor:.2f} of it")
    bound = theirs.best("seconds") / count / floor
    print(f"at that rate no float32 decoder that reads its weights for each token is over {bound:.2f} times {THEIRS}")


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(DecodeConfig, run, program=PROGRAM, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
