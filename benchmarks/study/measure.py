"""Measuring one kept arm: from the chain of blocks where drafts are deterministic, by decoding where they are drawn.

Adds two files to the kept arm: blocks.jsonl (see `blocks`) and, last, measured.json: curves over slots, and how many
replies the engine decoded with the very blocks that the chain predicts.
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
from benchmarks.study.arms import Arm
from benchmarks.study.bigram import bigram_walk, pair_gains
from benchmarks.study.chain import Text, chain_request, slot_curves
from benchmarks.study.lattice import Drafted, draft_everywhere, greedy_texts, sampled_texts
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
        greedy: held-out prompts with the target's greedy replies.
        drawn: the same with replies drawn at temperature 1, for each seed of sampling.
        gains: `bigram.pair_gains` of the training replies.
    """

    target: str
    prompts: str
    greedy: tuple[Text, ...]
    drawn: tuple[Text, ...]
    gains: np.ndarray

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(text.seed for text in self.drawn))


def read_workload(target: str, prompts: str, data: str, seeds: Sequence[int], count: int | None) -> Workload:
    """Held-out texts as plain decoding writes them, and pair counts of the training replies."""
    vocab_size = load_target(target)[0].vocab_size
    greedy = greedy_texts(target, prompts, count)
    return Workload(
        target=target,
        prompts=prompts,
        greedy=tuple(greedy),
        drawn=tuple(sampled_texts(target, greedy, seeds)),
        gains=pair_gains(read_token_file(data, vocab_size), vocab_size),
    )


def measure_arm(arm: Arm, workload: Workload, work: Path, keep: Path) -> dict:
    """Measures a kept arm, unless it is measured already, and returns its record."""
    kept = keep / arm.name
    if (kept / MEASURED_FILE).exists():
        return json.loads((kept / MEASURED_FILE).read_text())
    export = kept / EXPORT
    predicted, curves = measure_chain(arm, workload, export)
    kinds, _ = decoded(arm)
    engine = decode(arm, workload, export, work / arm.name / "bench") if kinds else []
    record = {"curves": curves, "engine": compare(predicted, engine), "revision": provenance.revision()}
    drawn = [request for request in engine if request.arm == "sampled" and request.temperature > 0]
    blocks.write(kept / BLOCKS_FILE, [blocks.short(request) for request in [*predicted, *drawn]])
    (kept / MEASURED_FILE).write_text(json.dumps(record) + "\n")
    return record


def measure_chain(arm: Arm, workload: Workload, export: Path) -> tuple[list[Request], dict]:
    """Every deterministic way of drafting: replies as served, at both temperatures; and curves of greedy replies."""
    models = load_models(workload.target, export)
    ways = {kind: arms.ways(models)[kind] for kind in arm.variant.kinds}
    texts = [*workload.greedy, *workload.drawn]
    found = draft_everywhere(models, ways, texts)
    if arm.variant.is_base:
        found = list(map(partial(with_bigrams, gains=workload.gains), texts, found))
    requests, curves, count = [], {}, len(workload.greedy)
    for way in found[0].drafts:
        requests += [
            chain_request(way, text, drafted.drafts[way], drafted.pool_ids, drafted.best_ids)
            for text, drafted in zip(texts, found, strict=True)
        ]
        greedy = [drafted.drafts[way] for drafted in found[:count]]
        curves[way] = slot_curves(workload.greedy, greedy, [drafted.pool_ids for drafted in found[:count]])
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


def decoded(arm: Arm) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The ways of drafting that the engine decodes, and at which temperatures; of a variant's first seed alone.

    What is drawn can't be predicted; a confirmed variant is decoded in every way, to be compared.
    """
    variant = arm.variant
    if arm.seed != variant.seeds[0]:
        return (), ()
    return ((*variant.kinds, *variant.drawn), (0, 1)) if variant.confirmed else (variant.drawn, (1,))


def bench_flags(arm: Arm, workload: Workload, export: Path, output: Path) -> list[str]:
    kinds, temperatures = decoded(arm)
    return [
        f"--target={workload.target}",
        f"--drafter={export}",
        f"--arms={','.join(('ar', *kinds))}",
        f"--prompts={workload.prompts}",
        f"--num_prompts={len(workload.greedy)}",
        "--max_new_tokens=160",
        f"--temperature={','.join(map(str, temperatures))}",
        f"--seed={','.join(map(str, workload.seeds))}",
        f"--concurrency={CONCURRENCY}",
        f"--chunk_prompts={len(workload.greedy)}",
        "--trace=true",
        f"--output_dir={output}",
    ]


def compare(predicted: Sequence[Request], engine: Sequence[Request]) -> dict[str, dict[str, int]]:
    """By way of drafting: replies that the engine decoded, and how many have the chain's blocks."""

    def key(request: Request) -> tuple:
        return request.arm, request.temperature, request.seed if request.temperature else 0, request.id

    chain = {key(request): request.emitted for request in predicted}
    found = [request for request in engine if key(request) in chain]
    return {
        way: {
            "replies": sum(request.arm == way for request in found),
            "same_blocks": sum(request.arm == way and request.emitted == chain[key(request)] for request in found),
        }
        for way in dict.fromkeys(request.arm for request in found)
    }
