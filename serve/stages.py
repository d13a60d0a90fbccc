"""`python -m serve.bench --stages`: what stands behind the drafter, alone, at the dimensions of a published model.

LiLiCorr's candidates, reranker and walk, Domino's rollout and DSpark's, from the drafter's states and logits to the
drafts, as they are served: folded, one program each. Weights are random, float32. The pass over the vocabulary that
makes the logits is common to all and left out. The methods take turns. Each has two floors, the time to read once what
it multiplies with and to do its products, at this machine's rates, measured between the turns, and at an H100's.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from lilicorr_jax import flags
from lilicorr_jax.config import (
    CorrectorConfig,
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    Method,
    RerankerConfig,
    corrector_name,
    setting,
)
from lilicorr_jax.decoding import propose
from lilicorr_jax.decoding.rollout import RolloutKind
from lilicorr_jax.models.corrector import corrector_shapes, make_corrector
from lilicorr_jax.models.fold import anchor_copies, fold_for_serving
from lilicorr_jax.presets import PRESETS
from lilicorr_jax.sharding import abstract_parameters
from serve.machine import Machine, timed
from serve.provenance import surroundings

PROGRAM = "serve.bench --stages"
EXAMPLES = """
python -m serve.bench --stages
python -m serve.bench --stages --preset=qwen3_4b --rows=1,16
"""
H100_BYTES, H100_FLOPS = 3.35e12, 990e12  # SXM datasheet: HBM3, dense bfloat16
PAPER = "the paper, one H100, optimised: LiLiCorr 0.28 ms, Domino 0.67 ms a block"


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """Times the correctors of a preset side by side against the floors of this machine and of an H100."""

    preset: Literal["tiny", "demo", "qwen3_4b", "qwen3_8b"] = setting("qwen3_8b", "Dimensions.")
    rows: tuple[int, ...] = setting((1, 8, 32), "Texts side by side.")
    rounds: int = setting(5, "Turns of each method at each number of rows.")
    seed: int = setting(0, "Of weights and logits.")

    def __post_init__(self):
        if not self.rows or min(self.rows) < 1 or self.rounds < 1:
            raise ValueError(f"--rows and --rounds must be at least 1; got {self.rows} and {self.rounds}.")


class Work(NamedTuple):
    """What one block needs, in numbers read and floating-point operations.

    Attributes:
        weights: numbers read of matrices; one that the next slot reads again counts again, since a matrix over the
            vocabulary outlives no cache.
        values: other numbers read or written: logits, rows of tables; twice for what is written and read.
        wide: of these, the ones that are float32 in every precision, a distribution.
        products: multiply-adds of the matrix products.
    """

    weights: int
    values: int
    wide: int
    products: int

    def read_bytes(self, size: int) -> int:
        """With weights and values of `size` bytes."""
        return size * (self.weights + self.values) + 4 * self.wide

    @property
    def flops(self) -> int:
        return 2 * self.products


def rollout_work(config: DominoConfig | DSparkConfig, rows: int, *, is_sampled: bool = False) -> Work:
    """A matrix over the vocabulary in every corrected slot, and little else."""
    slots, vocab, width = config.num_slots, config.vocab_size, config.drafter_width
    if isinstance(config, DominoConfig):
        rank, gates = config.bottleneck_width, 3 * config.state_width
        once, every = width * rank, config.state_width * (gates + rank)
        looked_up, corrected = gates, slots - config.plain_slots
    else:
        rank = config.rank
        mixed = {"vanilla": 0, "gated": rank, "rnn": 3 * rank}[config.kind] + config.has_confidence
        once, every = width * mixed, rank * mixed + (3 * rank**2 if config.kind == "rnn" else 0)
        looked_up, corrected = rank, slots
    return Work(
        weights=once + slots * every + corrected * rank * vocab,
        values=rows * slots * (vocab + width + looked_up),
        wide=2 * rows * slots * vocab if is_sampled else 0,
        products=rows * (slots * once + slots * every + corrected * rank * vocab),
    )


def lattice_work(config: RerankerConfig, rows: int, vocab_size: int) -> Work:
    """Every matrix once, for all candidates of all slots at once; the pool reads the logits."""
    width, factor, slots = config.width, config.factor_width, config.num_slots
    nodes = slots * config.num_candidates
    layer = 4 * width**2 + 2 * width * config.ffn_width
    per_node = width**2 + config.num_layers * layer + 2 * width**2 + 2 * width * factor
    per_anchor = config.drafter_width * width + width * (width + factor)
    per_slot = config.drafter_width * width
    attention = config.num_layers * 2 * nodes**2 * width
    walk = factor * (config.num_candidates + (slots - 1) * config.num_candidates**2)
    return Work(
        weights=5 * width + per_node + per_anchor + per_slot,  # five scalars: summed, not a matrix product
        values=rows * (slots * (vocab_size + config.drafter_width) + nodes * width),
        wide=0,
        products=rows * (nodes * per_node + anchor_copies(rows) * per_anchor + slots * per_slot + attention + walk),
    )


class Contestant(NamedTuple):
    """A method: how it proposes from (params, block states, anchor ids and states, temperatures, noise)."""

    name: str
    corrector: CorrectorConfig
    run: Callable
    work: Callable[[int], Work]


def contestants(config: StagesConfig) -> list[Contestant]:
    preset = PRESETS[config.preset]()
    vocab_size = preset.target.vocab_size

    def unembed(params, states):
        return params["logits"]

    def drafter(method: Method) -> DrafterConfig:
        return replace(preset.for_method(method)[0], dtype="float32")

    reranker = replace(preset.reranker, dtype="float32")
    domino, dspark = replace(preset.domino, dtype="float32"), replace(preset.dspark, dtype="float32")
    lattice = propose.lilicorr(drafter("lilicorr"), reranker, unembed, "greedy")
    chained = propose.domino(drafter("domino"), domino, unembed)
    greedy, sampled = (propose.dspark(drafter("dspark"), dspark, unembed, kind) for kind in get_args(RolloutKind))
    return [
        Contestant("lilicorr", reranker, jax.jit(lattice), partial(lattice_work, reranker, vocab_size=vocab_size)),
        Contestant("domino", domino, jax.jit(chained), partial(rollout_work, domino)),
        Contestant("dspark", dspark, jax.jit(greedy), partial(rollout_work, dspark)),
        Contestant("dspark sampled", dspark, jax.jit(sampled), partial(rollout_work, dspark, is_sampled=True)),
    ]


def random_folded(config: CorrectorConfig, vocab_size: int, rng: np.random.Generator):
    """Folded parameters without folding: a table over the vocabulary is a few random rows again and again."""
    module, shapes = make_corrector(config), corrector_shapes(config)
    embedding = jax.ShapeDtypeStruct((vocab_size, config.drafter_width), jnp.float32)
    folded = jax.eval_shape(partial(fold_for_serving, config), abstract_parameters(module, *shapes), embedding)
    few = rng.normal(0, 0.02, 2**20).astype(np.float32)
    return jax.tree.map(lambda leaf: jnp.asarray(np.resize(few, leaf.shape)), folded)


def arguments(config: StagesConfig, rows: int, rng: np.random.Generator) -> tuple:
    """Logits, and what a proposer takes behind its parameters; the block has a row for every convention."""
    drafter = PRESETS[config.preset]().drafter
    slots = drafter.num_slots
    logits = rng.normal(0, 3, (rows, slots, drafter.vocab_size)).astype(np.float32)
    states = rng.normal(size=(rows, slots + 1, drafter.width)).astype(np.float32)
    noise = rng.random((rows, slots), dtype=np.float32)
    rest = (np.arange(rows, dtype=np.int32), states[:, 0], np.ones(rows, np.float32), noise)
    return jnp.asarray(logits), jax.tree.map(jnp.asarray, (states, *rest))


def measure(config: StagesConfig, ways: list[Contestant], params: dict, rows: int, machine: Machine) -> dict:
    """Seconds of every method by turns, and the machine's rates between them."""
    logits, rest = arguments(config, rows, np.random.default_rng(config.seed))
    calls = {w.name: partial(w.run, params[corrector_name(w.corrector)] | {"logits": logits}, *rest) for w in ways}
    for call in calls.values():
        timed(call)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    rates: dict[str, float] = {"bytes_per_s": 0.0, "flops_per_s": 0.0}
    for turn in range(config.rounds):
        for rate in (machine.bandwidth(), machine.gemm()):
            rates |= {name: max(value, rates[name]) for name, value in rate.items()}
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(timed(calls[name]))
    return {"seconds": seconds, "rates": rates}


def summarise(way: Contestant, rows: int, seconds: list[float], rates: dict[str, float]) -> dict:
    work = way.work(rows)
    floor = max(work.read_bytes(4) / rates["bytes_per_s"], work.flops / rates["flops_per_s"])
    h100 = max(work.read_bytes(2) / H100_BYTES, work.flops / H100_FLOPS)
    return {
        "method": way.name,
        "rows": rows,
        "best_ms": min(seconds) * 1e3,
        "median_ms": statistics.median(seconds) * 1e3,
        "megabytes": work.read_bytes(4) / 1e6,
        "gigaflops": work.flops / 1e9,
        "floor_ms": floor * 1e3,
        "h100_megabytes": work.read_bytes(2) / 1e6,
        "h100_floor_ms": h100 * 1e3,
    }


def run(config: StagesConfig) -> None:
    load, ways, machine = os.getloadavg(), contestants(config), Machine()
    vocab_size, rng = PRESETS[config.preset]().target.vocab_size, np.random.default_rng(config.seed)
    trees = {corrector_name(way.corrector): way.corrector for way in ways}
    params = {name: {name: random_folded(record, vocab_size, rng)} for name, record in trees.items()}
    lines, rates = [], {"bytes_per_s": 0.0, "flops_per_s": 0.0}
    for rows in config.rows:
        measured = measure(config, ways, params, rows, machine)
        rates = {name: max(value, measured["rates"][name]) for name, value in rates.items()}
        lines += [(way, rows, measured["seconds"][way.name]) for way in ways]
    found = [summarise(way, rows, seconds, rates) for way, rows, seconds in lines]
    print(f"{config.preset}, float32; {surroundings(load)}; {rates['bytes_per_s'] / 1e9:.1f} GB/s, ", end="")
    print(f"{rates['flops_per_s'] / 1e9:.0f} GFLOP/s; an H100: 3.35 TB/s, 990 TFLOP/s in bfloat16 (datasheet)\n")
    print(table(found))
    print(f"\n{PAPER}\n")
    print(json.dumps({"preset": config.preset, "load": load, "rates": rates, "results": found}))


def table(found: list[dict]) -> str:
    """One line for each method at each number of rows, with its time over LiLiCorr's."""
    first = {row["rows"]: row for row in reversed(found) if row["method"] == found[0]["method"]}
    text = [
        "| rows | method | best ms | median ms | times the first | MB | GFLOP | floor ms | H100 MB | H100 floor ms |",
        "|---" * 10 + "|",
    ]
    for row in found:
        times = row["best_ms"] / first[row["rows"]]["best_ms"]
        text.append(
            f"| {row['rows']} | {row['method']} | {row['best_ms']:.1f} | {row['median_ms']:.1f} | {times:.2f} | "
            f"{row['megabytes']:.0f} | {row['gigaflops']:.2f} | {row['floor_ms']:.1f} | {row['h100_megabytes']:.0f} | "
            f"{row['h100_floor_ms']:.3f} |"
        )
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(StagesConfig, run, program=PROGRAM, examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
