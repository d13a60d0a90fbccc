"""Measuring one kept arm: temperature 0 from the chain of blocks, temperature 1 by decoding, and the two held together.

Adds two files to the kept arm: blocks.jsonl (see `blocks`) and, last, measured.json: curves over slots, and how many
replies the engine decoded at temperature 0 with the very blocks that the chain predicts.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.study import blocks
from benchmarks.study.arms import BASE, Arm
from benchmarks.study.bigram import bigram_walk, pair_gains
from benchmarks.study.chain import Text, chain_request, slot_curves
from benchmarks.study.lattice import Drafted, draft_everywhere, greedy_texts
from benchmarks.study.train import EXPORT
from lilicorr_jax.conversion.checkpoint import load_target
from serve import arms, provenance, results
from serve.models import load_models
from serve.report import Request
from train.tokens import read_token_file

MEASURED_FILE, BLOCKS_FILE = "measured.json", "blocks.jsonl"
BETAS = (0.25, 0.5, 1.0)
CONCURRENCY = 25


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every arm is measured on.

    Attributes:
        texts: held-out prompts with the target's greedy replies.
        gains: `bigram.pair_gains` of the training replies.
        seeds: of sampling.
    """

    target: str
    prompts: str
    texts: tuple[Text, ...]
    gains: np.ndarray
    seeds: tuple[int, ...]


def read_workload(target: str, prompts: str, data: str, seeds: Sequence[int], count: int | None) -> Workload:
    """Held-out texts, and pair counts of the training replies."""
    vocab_size = load_target(target)[0].vocab_size
    return Workload(
        target=target,
        prompts=prompts,
        texts=tuple(greedy_texts(target, prompts, count)),
        gains=pair_gains(read_token_file(data, vocab_size), vocab_size),
        seeds=tuple(seeds),
    )


def measure_arm(arm: Arm, workload: Workload, work: Path, keep: Path) -> dict:
    """Measures a kept arm, unless it is measured already, and returns its record."""
    kept = keep / arm.name
    if (kept / MEASURED_FILE).exists():
        return json.loads((kept / MEASURED_FILE).read_text())
    export = kept / EXPORT
    predicted, curves = measure_chain(arm, workload, export)
    decoded = decode(arm, workload, export, work / arm.name / "bench")
    record = {
        "curves": curves,
        "engine": compare(predicted, decoded),
        "revision": provenance.revision(),
    }
    at_one = [request for request in decoded if request.temperature > 0 and request.arm != "ar"]
    blocks.write(kept / BLOCKS_FILE, [blocks.short(request) for request in [*predicted, *at_one]])
    (kept / MEASURED_FILE).write_text(json.dumps(record) + "\n")
    return record


def measure_chain(arm: Arm, workload: Workload, export: Path) -> tuple[list[Request], dict]:
    """Every way of drafting at temperature 0: the replies as served, and the curves over slots by way."""
    models = load_models(workload.target, export)
    ways = {kind: arms.ways(models)[kind] for kind in arm.variant.kinds}
    found = list(draft_everywhere(models, ways, workload.texts))
    if arm.variant.name == BASE:
        found = list(map(partial(with_bigrams, gains=workload.gains), workload.texts, found))
    pools = [drafted.pool_ids for drafted in found]
    requests, curves = [], {}
    for way in found[0].drafts:
        drafts = [drafted.drafts[way] for drafted in found]
        requests += map(chain_request, [way] * len(drafts), workload.texts, drafts, pools)
        curves[way] = slot_curves(workload.texts, drafts, pools)
    return requests, curves


def with_bigrams(text: Text, drafted: Drafted, gains: np.ndarray) -> Drafted:
    """The same, with walks by pair counts."""
    anchor_ids = np.array(text.reply_ids[:-1])
    walks = {
        f"bigram {beta:g}": bigram_walk(anchor_ids, drafted.pool_ids, drafted.logprobs, gains, beta) for beta in BETAS
    }
    return drafted._replace(drafts={**drafted.drafts, **walks})


def decode(arm: Arm, workload: Workload, export: Path, output: Path) -> list[Request]:
    """The arm's requests as `serve.bench` measured them in a process of its own.

    Raises:
        ValueError: it failed, or a text is not plain decoding's.
    """
    if not (output / results.SUMMARY_FILE).exists():
        shutil.rmtree(output, ignore_errors=True)
        command = [sys.executable, "-m", "serve.bench", *bench_flags(arm, workload, export, output)]
        done = subprocess.run(command, env=environment(output.parent.parent), capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return results.read_requests(output)


def environment(work: Path) -> dict[str, str]:
    """Arms of one method run the same programs, so they are compiled once."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(work / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | {"JAX_PLATFORMS": "cpu"} | cache


def bench_flags(arm: Arm, workload: Workload, export: Path, output: Path) -> list[str]:
    return [
        f"--target={workload.target}",
        f"--drafter={export}",
        f"--arms={','.join(('ar', *arm.variant.decoded))}",
        f"--prompts={workload.prompts}",
        f"--num_prompts={len(workload.texts)}",
        "--max_new_tokens=160",
        f"--temperature={'0,1' if arm.variant.confirmed and arm.seed == 0 else '1'}",
        f"--seed={','.join(map(str, workload.seeds))}",
        f"--concurrency={CONCURRENCY}",
        f"--chunk_prompts={len(workload.texts)}",
        "--trace=true",
        f"--output_dir={output}",
    ]


def compare(predicted: Sequence[Request], decoded: Sequence[Request]) -> dict[str, dict[str, int]]:
    """By way of drafting: replies that the engine decoded at temperature 0, and how many have the chain's blocks."""
    chain = {(request.arm, request.id): request.emitted for request in predicted}
    engine = {(r.arm, r.id): r.emitted for r in decoded if r.temperature == 0 and (r.arm, r.id) in chain}
    return {
        way: {
            "replies": sum(key[0] == way for key in engine),
            "same_blocks": sum(key[0] == way and emitted == chain[key] for key, emitted in engine.items()),
        }
        for way in dict.fromkeys(key[0] for key in engine)
    }
