"""`python -m benchmarks.training`: one train step and its block attention beside a plain implementation of the same.

The plain one (`benchmarks.plain`) has dense masks and every logit. Both are compiled for this machine, in float32, over
random models; contestants take turns, and each shows its best turn. Temporaries are the compiler's own account.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.plain import PlainObjective, dense_block_attention
from lilicorr_jax.config import ObjectiveConfig, RerankerConfig, TargetConfig, default_target_layer_ids, setting
from lilicorr_jax.conversion.checkpoint import abstract_drafter, abstract_target
from lilicorr_jax.flags import run_main
from lilicorr_jax.presets import Preset, tiny
from lilicorr_jax.sharding import make_mesh
from pallas_kernels.block_attention import block_attention
from serve.provenance import surroundings
from train.config import TrainConfig
from train.data import Batch
from train.objective import Objective
from train.step import TrainState, make_optimizer, make_train_step, place

MIB = 2**20
OURS, PLAIN = "ours", "plain"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Measures memory and time of a train step beside a plain implementation of it."""

    width: int = setting(512, "D of target and drafter.", "Models")
    vocab_size: int = setting(32_000, "V.")
    layers: int = setting(8, "Of the target.")
    drafter_layers: int = setting(2, "Of the drafter.")
    reranker_width: int = setting(256, "W and E of the reranker.")
    rows: int = setting(1, "Sequences of a step.", "Run")
    anchors: tuple[int, ...] = setting((64, 256), "Blocks of a sequence; every one is measured.")
    lengths: tuple[int, ...] = setting((512, 1024), "Tokens of a sequence; every one is measured.")
    rounds: int = setting(5, "Turns of each contestant.")
    vocabulary_chunk: int = setting(1024, "See train.main.")
    anchor_chunk: int = setting(32, "See train.main.")


class Measurement(NamedTuple):
    """Of one contestant at one size."""

    seconds: float  # the best turn
    temporaries: int  # bytes


def models(config: TrainingConfig) -> Preset:
    """A target of the flags' sizes, with the drafter and the reranker that belong to it."""
    small = tiny()
    heads = config.width // 64
    target = TargetConfig(
        vocab_size=config.vocab_size, width=config.width, num_layers=config.layers, num_heads=heads,
        num_kv_heads=max(heads // 2, 1), head_width=64, ffn_width=3 * config.width, max_positions=4096, eos_ids=(1,),
    )  # fmt: skip
    drafter = replace(
        small.drafter, vocab_size=config.vocab_size, width=config.width, num_layers=config.drafter_layers,
        num_heads=heads, num_kv_heads=max(heads // 2, 1), head_width=64, ffn_width=3 * config.width,
        max_positions=4096, num_target_layers=config.layers, mask_id=config.vocab_size - 1, input_rows=16, num_slots=15,
        target_layer_ids=default_target_layer_ids(config.layers, config.drafter_layers),
    )  # fmt: skip
    reranker = RerankerConfig(
        drafter_width=config.width, width=config.reranker_width, num_heads=4, ffn_width=2 * config.reranker_width,
        factor_width=config.reranker_width,
    )  # fmt: skip
    return replace(small, target=target, drafter=drafter, reranker=reranker)


def random_batch(config: TrainingConfig, length: int) -> Batch:
    rng = np.random.default_rng(0)
    return Batch(
        token_ids=rng.integers(0, config.vocab_size - 1, (config.rows, length)).astype(np.int32),
        loss_mask=np.broadcast_to(np.arange(length) >= length // 8, (config.rows, length)).copy(),
        length=np.full(config.rows, length, np.int32),
        example_id=np.arange(config.rows, dtype=np.int32),
    )


def normal(abstract, seed: int):
    """Normal numbers of standard deviation 0.02; norms are 1."""
    rng = np.random.default_rng(seed)
    draw = lambda path, leaf: jnp.asarray(
        np.ones(leaf.shape, np.float32) if path[-1].key == "weight" else rng.normal(0, 0.02, leaf.shape).astype("f4")
    )
    return jax.tree_util.tree_map_with_path(draw, abstract)


class Contestant:
    """A compiled train step that can take turns: its state goes from step to step."""

    def __init__(self, kind: type[Objective], config: TrainingConfig, anchors: int, length: int):
        preset, mesh = models(config), make_mesh()
        objective = kind(
            target=preset.target, drafter=preset.drafter, corrector=preset.reranker, weights=ObjectiveConfig(),
            mesh=mesh, anchors=anchors, num_candidates=preset.reranker.num_candidates, num_steps=1000, seed=0,
            vocabulary_chunk=config.vocabulary_chunk, anchor_chunk=config.anchor_chunk,
        )  # fmt: skip
        optimizer = make_optimizer(TrainConfig(target="", data="", output="", preset="tiny", steps=1000), 1000)
        params = normal(abstract_drafter(preset.drafter, preset.reranker), 0)
        self.frozen = normal(abstract_target(preset.target), 1)
        self.state = TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))
        self.batch = place(random_batch(config, length), mesh)
        step = make_train_step(objective, optimizer, 1, self.state)
        self.step = step.lower(self.state, self.frozen, self.batch).compile()

    def turn(self) -> None:
        self.state, report = self.step(self.state, self.frozen, self.batch)
        jax.block_until_ready(report)


def temporaries(step: jax.stages.Compiled) -> int:
    """Bytes that the compiler sets aside beside arguments and results."""
    sizes = step.memory_analysis()
    if sizes is None:
        raise ValueError("This backend's compiler gives no account of its memory; measure on a CPU or a GPU.")
    return sizes.temp_size_in_bytes


def best_turns(turns: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of the best turn of each; they take turns, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds + 1):
        for name, turn in turns.items():
            start = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(found[1:]) for name, found in seconds.items()}


def measure_step(config: TrainingConfig, anchors: int, length: int) -> dict[str, Measurement]:
    kinds = {OURS: Objective, PLAIN: PlainObjective}
    contestants = {name: Contestant(kind, config, anchors, length) for name, kind in kinds.items()}
    seconds = best_turns({name: contestant.turn for name, contestant in contestants.items()}, config.rounds)
    return {name: Measurement(seconds[name], temporaries(contestants[name].step)) for name in kinds}


def measure_attention(config: TrainingConfig, anchors: int, length: int) -> dict[str, Measurement]:
    """Block attention alone, forward and backward."""
    drafter, rng = models(config).drafter, np.random.default_rng(0)
    rows, heads, kv_heads, width = config.rows, drafter.num_heads, drafter.num_kv_heads, drafter.head_width
    shapes = (
        (rows, anchors, heads, drafter.input_rows, width), *[(rows, kv_heads, length, width)] * 2,
        *[(rows, anchors, kv_heads, drafter.input_rows, width)] * 2,
    )  # fmt: skip
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    places = jnp.asarray(np.sort(rng.choice(length - 1, (rows, anchors), replace=anchors > length - 1)), jnp.int32)
    ours = partial(block_attention, anchor_chunk=config.anchor_chunk)
    compiled = {}
    for name, attention in ((OURS, ours), (PLAIN, dense_block_attention)):
        loss = lambda arrays, attention=attention: jnp.sum(jnp.sin(attention(*arrays, anchors=places)))
        compiled[name] = jax.jit(jax.grad(loss)).lower(arrays).compile()
    turns = {name: (lambda f=f: jax.block_until_ready(f(arrays))) for name, f in compiled.items()}
    seconds = best_turns(turns, config.rounds)
    return {n: Measurement(seconds[n], temporaries(compiled[n])) for n in compiled}


def table(config: TrainingConfig, measure) -> Iterator[tuple[str, dict[str, Measurement]]]:
    """A line for each size, as soon as it is measured, and what it shows."""
    for anchors in config.anchors:
        for length in config.lengths:
            found = measure(config, anchors, length)
            ours, plain = found[OURS], found[PLAIN]
            yield (
                (
                    f"{anchors:>7} {length:>7} {ours.temporaries / MIB:>10,.0f} {plain.temporaries / MIB:>10,.0f} "
                    f"{ours.temporaries / plain.temporaries:>7.2f} {ours.seconds:>9.3f} {plain.seconds:>9.3f} "
                    f"{plain.seconds / ours.seconds:>8.2f}"
                ),
                found,
            )


HEADER = "anchors  tokens   ours MiB  plain MiB   share    ours s   plain s  speed-up"


def growth(sizes: dict[tuple[int, int], float], axis: int) -> str:
    """By what factor the step grows from the smallest to the largest of an axis, the other held."""
    held = sorted({size[1 - axis] for size in sizes})
    ends = [min(size[axis] for size in sizes), max(size[axis] for size in sizes)]
    key = lambda value, other: (value, other) if axis == 0 else (other, value)
    factors = [sizes[key(ends[1], other)] / sizes[key(ends[0], other)] for other in held]
    return f"{ends[0]} to {ends[1]}: x {statistics.fmean(factors):.2f}"


def run(config: TrainingConfig) -> int:
    load = os.getloadavg()
    print(config)
    seconds = {}
    for title, measure in (
        ("One optimizer step", measure_step),
        ("Block attention, forward and backward", measure_attention),
    ):
        print(f"\n{title}\n{HEADER}", flush=True)
        sizes = iter([(a, t) for a in config.anchors for t in config.lengths])
        for line, found in table(config, measure):
            print(line, flush=True)
            size = next(sizes)
            if measure is measure_step:
                seconds[size] = found[OURS].seconds
    print(f"\nOur step's time over anchors {growth(seconds, 0)}; over tokens {growth(seconds, 1)}.")
    print(surroundings(load))
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_main(TrainingConfig, run, program="benchmarks.training", arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
