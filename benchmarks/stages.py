"""`python -m benchmarks.stages`: where a block's time goes on this machine, stage by stage, against measured floors.

Every stage is a program of its own, so their sum is a little more than the block, which fuses across them. A stage's
floor is the longer of two times: reading its weights once at the measured bandwidth, and its matrix products at the
measured rate of a large product. Attention, norms and softmax have none: what exceeds the floor is theirs, or overhead.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.fetch import model_folder
from benchmarks.random_drafter import drafter_for, random_checkpoint
from lilicorr_jax import flags
from lilicorr_jax.config import setting
from lilicorr_jax.decoding.candidates import candidate_pool
from lilicorr_jax.decoding.prefill import empty_state
from lilicorr_jax.decoding.speculate import DecodeState, Finish, run_blocks
from lilicorr_jax.sharding import count_parameters
from serve.machine import Machine, timed
from serve.models import Models, assemble, load_models
from serve.provenance import surroundings

PROGRAM = "benchmarks.stages"
NUM_STOP_IDS = 8


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """Times the stages of a block against this machine's floors."""

    target: str | None = setting(None, "Folder of the target; none takes SmolLM2 out of the cache.")
    drafter: str | None = setting(None, "Folder of the drafter; none makes a random one of the target's shapes.")
    mask_id: int = setting(16, "Of a random drafter.")
    length: int = setting(64, "Tokens cached.")
    bucket: int = setting(128, "Cache rows that attention reads.")
    blocks: int = setting(4, "Blocks in a dispatch.")
    rounds: int = setting(20, "Turns of each stage; the best counts.")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a block.

    Attributes:
        run: does it once.
        weights: parameters that it reads, 4 bytes each.
        rows: rows that multiply each of them.
        share: of a run that one block has.
    """

    name: str
    run: Callable[[], object]
    weights: int
    rows: int
    share: float = 1.0


def models_for(config: StagesConfig) -> Models:
    """The target with its drafter, float32."""
    folder = config.target or model_folder("smollm2")
    if config.drafter:
        return load_models(Path(folder), Path(config.drafter), method="lilicorr", dtype="float32")
    alone = load_models(Path(folder), dtype="float32")
    records = drafter_for(alone.target, layers=2, num_slots=15, mask_id=config.mask_id, width=256)
    trees = {**alone.params, **random_checkpoint(*records, 0).params}
    return assemble(alone.target, trees, drafter=records[0], corrector=records[1], method="lilicorr")


def running_state(pair, config: StagesConfig) -> DecodeState:
    """One text in mid-decoding, with room for every turn: lengths are set back by whoever donates it."""
    state = empty_state(pair, 1, config.bucket + 64, NUM_STOP_IDS)
    return state.replace(
        length=jnp.array([config.length], jnp.int32),
        finish_reason=jnp.array([int(Finish.RUNNING)], jnp.int32),
        num_emitted=jnp.array([1], jnp.int32),
        max_tokens=jnp.array([10**6], jnp.int32),
    )


class Loop:
    """A dispatch of blocks whose caches are donated, as in the engine, and whose text begins anew each time."""

    def __init__(self, models: Models, config: StagesConfig, num_blocks: int):
        pair = models.pair()
        run = partial(run_blocks, pair, num_blocks=num_blocks, mode="greedy", bucket=config.bucket)
        self._run, self._params = jax.jit(run, donate_argnums=1), models.params
        self._state, self._start = running_state(pair, config), config.length

    def __call__(self):
        state, record = self._run(self._params, self._state)
        self._state = state.replace(length=jnp.full_like(state.length, self._start))
        return record


def stages(models: Models, config: StagesConfig) -> Iterator[Stage]:
    """The parts of a block, then the block, then plain decoding."""
    pair, params = models.pair(), models.params
    drafter = pair.drafter
    if drafter is None:
        raise ValueError(f"A block's parts include drafting; method {models.method!r} has none, choose another.")
    state, rows = running_state(pair, config), pair.verify_rows
    size = {name: count_parameters(tree) for name, tree in params.items() if name != "reranker"}
    head = models.target.vocab_size * models.target.width
    body = size["target"] - head * (1 if models.target.tie_embeddings else 2)
    ids = jnp.ones((1, rows), jnp.int32)
    run = jax.jit(partial(pair.target.run, bucket=config.bucket))
    judged = run(params, ids, state.target_cache, state.length)
    draft = jax.jit(partial(drafter.draft, bucket=config.bucket))
    drafted = (params, state.anchor_id, state.draft_cache, state.length)
    states = draft(*drafted)
    unembed = jax.jit(lambda params, hidden: jnp.argmax(pair.target.unembed(params, hidden), axis=-1))
    pool = jax.jit(lambda params, hidden: candidate_pool(pair.target.unembed(params, hidden), 8))
    propose = jax.jit(drafter.propose)
    noise = jnp.zeros((1, pair.num_slots))
    proposed = (params, states, state.anchor_id, state.anchor_feature, state.temperature, noise)
    absorb = jax.jit(drafter.absorb)
    yield Stage(name="draft", run=lambda: draft(*drafted), weights=size["drafter"], rows=rows)
    yield Stage(name="unembed, top-K", run=lambda: pool(params, states[:, 1:]), weights=head, rows=rows - 1)
    yield Stage(name="propose (with it)", run=lambda: propose(*proposed), weights=head, rows=rows - 1)
    yield Stage(
        name="verify", run=lambda: run(params, ids, state.target_cache, state.length).hidden, weights=body, rows=rows
    )
    yield Stage(name="unembed, argmax", run=lambda: unembed(params, judged.hidden), weights=head, rows=rows)
    yield Stage(
        name="absorb",
        run=lambda: absorb(params, judged.features, state.draft_cache, state.length),
        weights=0,
        rows=rows,
    )
    once, several = Loop(models, config, 1), Loop(models, config, config.blocks)
    whole = body + 2 * head + size["drafter"]
    yield Stage(name="block alone", run=once, weights=whole, rows=rows)
    yield Stage(name=f"block of {config.blocks}", run=several, weights=whole, rows=rows, share=1 / config.blocks)
    plain = Loop(replace(models, method="ar"), config, config.blocks)
    yield Stage(name="plain step", run=plain, weights=body + head, rows=1, share=1 / config.blocks)


def rates(rounds: int) -> tuple[float, float]:
    """Bytes and floating-point operations per second, before anything else runs."""
    machine = Machine()
    turns = [(machine.bandwidth()["bytes_per_s"], machine.gemm()["flops_per_s"]) for _ in range(rounds)]
    bandwidths, flops = zip(*turns, strict=True)
    return max(bandwidths), max(flops)


def run(config: StagesConfig) -> None:
    load = os.getloadavg()
    bandwidth, flops = rates(config.rounds)
    parts = list(stages(models_for(config), config))
    for stage in parts:
        timed(stage.run)
    seconds = {stage.name: float("inf") for stage in parts}
    for _ in range(config.rounds):
        for stage in parts:
            seconds[stage.name] = min(seconds[stage.name], timed(stage.run) * stage.share)
    print(f"{surroundings(load)}; {bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s\n")
    print("| stage | ms | weights ms | products ms | over the floor |\n|---|---|---|---|---|")
    for stage in parts:
        read, multiplied = 4 * stage.weights / bandwidth, 2 * stage.weights * stage.rows / flops
        floor = max(read, multiplied)
        over = f"{seconds[stage.name] / floor:.2f}" if floor else ""
        print(
            f"| {stage.name} | {seconds[stage.name] * 1e3:.2f} | {read * 1e3:.2f} | {multiplied * 1e3:.2f} | {over} |"
        )
    steps = (seconds["verify"] + seconds["unembed, argmax"]) / seconds["plain step"]
    print(f"\nA pass of {parts[0].rows} rows, unembedding included, costs {steps:.2f} plain steps.")


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(StagesConfig, run, program=PROGRAM, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
