"""`python -m pallas_kernels.bench`: kernels against their references and against the time that their bytes take.

Times whole calls on the default device, median of many, over several input sets so that no cache flatters anyone. The
last line is JSON. Without a GPU there is nothing to measure, and it says so.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from pallas_kernels.aot import H100
from pallas_kernels.cases import LATTICE_CASES, TOPK_CASES, WALK_CASES, LatticeCase, TopKCase, WalkCase, tagged
from pallas_kernels.lattice_attention import lattice_attention
from pallas_kernels.match_walk import match_walk
from pallas_kernels.topk_logprobs import topk_logprobs

INPUT_SETS = 4
IMPLEMENTATIONS = ("reference", "mosaic_gpu")
Case = TopKCase | WalkCase | LatticeCase


def calls(case: Case, implementation: str) -> tuple[Callable, list[tuple]]:
    """A case as a jitted function and the input sets that it is called with."""
    rngs = [np.random.default_rng(seed) for seed in range(INPUT_SETS)]
    if isinstance(case, TopKCase):
        run = jax.jit(lambda x: topk_logprobs(x, case.num_candidates, implementation=implementation))
        return run, [(case.logits(rng),) for rng in rngs]
    if isinstance(case, LatticeCase):
        return jax.jit(partial(lattice_attention, implementation=implementation)), [case.arrays(rng) for rng in rngs]
    settings = dict(cosine_scale=8.0, floor=1e-4, kind=case.kind, implementation=implementation)
    run = jax.jit(lambda *vectors, **draws: match_walk(*vectors, **settings, **draws))
    sets = [(case.vectors(rng), case.draws(rng)) for rng in rngs]
    return lambda vectors, draws: run(*vectors, **draws), sets


def median_seconds(run: Callable, inputs: list[tuple], repeats: int) -> float:
    """Median over `repeats` rounds of the mean time of a call, one call on each input set in a round."""
    for arguments in inputs:
        jax.block_until_ready(run(*arguments))
    rounds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready([run(*arguments) for arguments in inputs])
        rounds.append((time.perf_counter() - begin) / len(inputs))
    return statistics.median(rounds)


def measure(case: Case, repeats: int) -> dict:
    """Both implementations and the floor, in microseconds."""
    row = {"op": type(case).__name__.removesuffix("Case").lower(), "case": case.name}
    for implementation in IMPLEMENTATIONS:
        run, inputs = calls(case, implementation)
        row[f"{implementation}_us"] = 1e6 * median_seconds(run, inputs, repeats)
    row["floor_us"] = 1e6 * case.bytes_moved / H100.bandwidth
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pallas_kernels.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=50, help="rounds per implementation (default: 50)")
    repeats = parser.parse_args(arguments).repeats
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        print(f"No GPU here (JAX's default device is a {device.platform.upper()}): nothing to measure.")
        print(json.dumps({"device": device.device_kind, "measured": False, "rows": []}))
        return 0
    rows = []
    for case in tagged(TOPK_CASES + LATTICE_CASES + WALK_CASES, "gpu"):
        rows.append(measure(case, repeats))
        print(
            "  ".join(f"{name} {value:.1f}" if name.endswith("us") else str(value) for name, value in rows[-1].items())
        )
    print(json.dumps({"device": device.device_kind, "measured": True, "repeats": repeats, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
