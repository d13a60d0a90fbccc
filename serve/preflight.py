"""`python -m serve.preflight`: compiles a speculative block for a GPU that is not here, and says what it is made of.

The program is the engine's own block on shapes alone: no weights, no GPU. It is an estimate of structure (what is
launched, what is allocated, what waits for whom), never of speed.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lilicorr_jax.config import PRESETS, Preset, setting
from lilicorr_jax.decoding.prefill import empty_state
from lilicorr_jax.decoding.speculate import STAGES, speculative_block
from lilicorr_jax.decoding.verify import Mode
from lilicorr_jax.decoding.walk import WalkKind
from lilicorr_jax.flags import run_main
from lilicorr_jax.models.dflash import Drafter, drafter_shapes
from lilicorr_jax.models.fold import fold_for_serving
from lilicorr_jax.models.layers import RMSNorm
from lilicorr_jax.models.lilicorr import Reranker, reranker_shapes
from lilicorr_jax.models.target import Target
from lilicorr_jax.sharding import abstract_parameters, make_mesh
from pallas_kernels.aot import GPUS, compile_for_gpu, described_devices
from pallas_kernels.program import Program
from serve.models import Method, Models

EXAMPLES = """
python -m serve.preflight --target=qwen3_8b --gpu=h100 --concurrency=1 --context=4096
python -m serve.preflight --target=qwen3_8b --concurrency=32 --kernels=reference --json=true
"""

UNKNOWN = (
    "An estimate of structure, never of speed. What only a GPU can tell: which matrix products its autotuner picks "
    "(here every one is an untuned default), whether the driver captures each custom call into a command buffer, and "
    "how long anything takes."
)


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """Compiles the speculative block of a preset for a GPU that need not be there, and prints what it is made of."""

    target: Literal["tiny", "demo", "qwen3_4b", "qwen3_8b"] = setting("qwen3_8b", "Shapes of target and drafter.")
    gpu: Literal["h100"] = setting("h100", "What to compile for.")
    method: Method = setting("lilicorr", "Plain decoding, the drafter alone, or the walk.")
    walk: WalkKind = setting("greedy", "Walk of lilicorr.")
    mode: Mode = setting("greedy", "How rows are sampled.")
    concurrency: int = setting(1, "Texts side by side.")
    context: int = setting(4096, "Tokens of prompt and reply that the caches hold and attention reads.")
    kernels: Literal["auto", "mosaic_gpu", "reference"] = setting("mosaic_gpu", "Implementation of our kernels.")
    json: bool = setting(False, "One JSON line instead of the table.")

    def __post_init__(self):
        for name in ("concurrency", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1; got {getattr(self, name)}.")


def abstract_models(config: PreflightConfig, preset: Preset, sharding: NamedSharding) -> Models:
    """The models of a preset as shapes in the preset's dtype, the reranker folded."""

    def place(tree, dtype=None):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding), tree)

    dtype, target = preset.target.dtype, preset.target
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = {"target": place(abstract_parameters(Target(target), token), dtype)}
    if config.method != "ar":
        shapes = drafter_shapes(preset.drafter)
        tree = abstract_parameters(Drafter(preset.drafter), *shapes, method="from_features")
        params["drafter"] = place(tree, dtype)
    if config.method == "lilicorr":
        tree = place(abstract_parameters(Reranker(preset.reranker), *reranker_shapes(preset.reranker)), dtype)
        fold = partial(fold_for_serving, preset.reranker)
        params["reranker"] = place(jax.eval_shape(fold, tree, params["target"]["embed"]["embedding"]))
    return Models(
        target=target, drafter=preset.drafter, reranker=preset.reranker, params=params, method=config.method,
        walk=config.walk, kernels=config.kernels,
    )  # fmt: skip


def one_device(gpu: str) -> NamedSharding:
    return NamedSharding(make_mesh(devices=described_devices(GPUS[gpu])), PartitionSpec())


def compile_block(config: PreflightConfig, preset: Preset | None = None) -> Program:
    """The speculative block that the engine runs, its state donated."""
    sharding = one_device(config.gpu)
    models = abstract_models(config, preset or PRESETS[config.target](), sharding)
    pair = models.pair()
    capacity = config.context + pair.verify_rows
    state = jax.eval_shape(lambda: empty_state(pair, config.concurrency, capacity, 8))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
    block = partial(speculative_block, pair, mode=config.mode, bucket=config.context)
    return compile_for_gpu(jax.jit(block, donate_argnums=1).lower(models.params, state))


def compile_drafting(config: PreflightConfig, preset: Preset | None = None) -> Program:
    """From the drafter's last residual stream, through its final norm, to the drafted ids."""
    sharding = one_device(config.gpu)
    preset = preset or PRESETS[config.target]()
    models = abstract_models(config, preset, sharding)
    drafter, propose = preset.drafter, models.pair().drafter.propose
    rows, width, batch = drafter.input_rows, drafter.width, config.concurrency

    def drafting(params, residual, anchor_id, anchor_state, temperature, noise):
        norm = {"params": params["drafter"]["norm"]}
        states = RMSNorm(drafter.norm_eps, drafter.dtype).apply(norm, residual)
        proposal = propose(params, states, anchor_id, anchor_state, temperature, noise)
        return proposal.draft_ids, proposal.q

    shapes = [((rows, width), drafter.dtype), ((), "int32"), ((width,), drafter.dtype), ((), "float32"),
              ((drafter.num_slots,), "float32")]  # fmt: skip
    arguments = [jax.ShapeDtypeStruct((batch, *shape), dtype, sharding=sharding) for shape, dtype in shapes]
    return compile_for_gpu(jax.jit(drafting).lower(models.params, *arguments))


def stage_of(scope: str) -> str:
    """The stage of a block that a launch belongs to."""
    return next((part for part in scope.split("/") if part in STAGES), "other")


def findings(config: PreflightConfig, block: Program, drafting: dict[str, Program]) -> dict[str, Any]:
    """Everything that is reported, as one JSON-able record."""
    gpu, memory = GPUS[config.gpu], block.memory
    stages = Counter((stage_of(launch.scope), launch.kind) for launch in block.launches)
    arguments = sorted(block.arguments.items(), key=lambda item: -item[1])
    made = [(f"{i.opcode} {i.scope or i.name} {_shape(i)}", i.stored_bytes) for i in block.largest(10)]
    return {
        "gpu": gpu.name,
        "program": {name: getattr(config, name) for name in ("target", "method", "walk", "mode", "kernels")},
        "concurrency": config.concurrency,
        "context": config.context,
        "memory_bytes": {
            "arguments": memory.arguments,
            "temporary": memory.temporary,
            "outputs": memory.outputs - memory.aliased,
            "total": memory.total,
            "device": gpu.memory_bytes,
        },
        "fits": memory.total <= gpu.memory_bytes,
        "largest_arguments": dict(arguments[:10]),
        "largest_temporaries": dict(made),
        "launches": len(block.launches),
        "launches_by_stage": {f"{stage} {kind}": count for (stage, kind), count in sorted(stages.items())},
        "command_buffers": block.command_buffers,
        "launches_captured": block.captured,
        "loops": block.opcodes["while"],
        "conditionals": block.opcodes["conditional"],
        "host_transfers": block.host_transfers,
        "drafting_launches": {name: len(program.launches) for name, program in drafting.items()},
        "flops": block.flops,
        "bytes_accessed": block.bytes_accessed,
        "floor_seconds": floor_seconds(block, config.gpu),
        "kernels": [vars(kernel) for kernel in block.kernels],
        "kernel_calls": dict(block.kernel_calls),
        "caveat": UNKNOWN,
    }


def floor_seconds(program: Program, gpu: str) -> float:
    """No device with the data sheet's figures does it faster: every argument read once, every product counted."""
    return max(program.memory.arguments / GPUS[gpu].bandwidth, program.flops / GPUS[gpu].bfloat16_flops)


def _shape(instruction) -> str:
    kind, sizes = max(instruction.shapes, key=lambda shape: _size(shape[1]))
    return f"{kind}{list(sizes)}"


def _size(sizes: tuple[int, ...]) -> int:
    size = 1
    for one in sizes:
        size *= one
    return size


def as_table(found: dict[str, Any]) -> str:
    """The report for people."""
    program, memory = found["program"], found["memory_bytes"]
    what = ", ".join(f"{name} {value}" for name, value in program.items())
    lines = [
        f"One speculative block for {found['gpu']}: {what}; {found['concurrency']} texts, context {found['context']}",
        "",
        "Memory per device",
        *(f"  {name:<12}{gigabytes(memory[name])}" for name in ("arguments", "temporary", "outputs", "total")),
        f"  {'fits' if found['fits'] else 'DOES NOT FIT'} {gigabytes(memory['device']).strip()}",
        "",
        "Ten largest arguments",
        *(f"  {gigabytes(size)}  {name}" for name, size in found["largest_arguments"].items()),
        "Ten largest results inside the block (they share memory over time)",
        *(f"  {gigabytes(size)}  {name}" for name, size in found["largest_temporaries"].items()),
        "",
        f"Launches per block: {found['launches']}, {found['launches_captured']} of them in "
        f"{found['command_buffers']} command buffers",
        *(f"  {name:<28}{count:>6}" for name, count in found["launches_by_stage"].items()),
        f"  while loops {found['loops']}, conditionals {found['conditionals']}, host transfers "
        f"{len(found['host_transfers'])}",
        *_drafting_lines(found),
        "",
        f"Work: {found['flops'] / 1e9:,.1f} GFLOP and {found['bytes_accessed'] / 1e9:,.2f} GB by XLA's count, which "
        "leaves out custom calls",
        f"Floor: {found['floor_seconds'] * 1e3:.2f} ms at the data sheet's 3.35 TB/s and 990 TFLOP/s (bf16), every "
        "argument read once",
        "",
        *_kernel_lines(found),
        "",
        found["caveat"],
    ]
    return "\n".join(lines)


def _drafting_lines(found: dict[str, Any]) -> list[str]:
    if not found["drafting_launches"]:
        return []
    counts = ", ".join(f"{count} with {name}" for name, count in found["drafting_launches"].items())
    return [f"  from the drafter's final norm to the drafted ids, compiled alone: {counts}"]


def _kernel_lines(found: dict[str, Any]) -> list[str]:
    if not found["kernels"]:
        return ["Our kernels: none in this program"]
    calls = found["kernel_calls"]
    return ["Our kernels"] + [
        f"  {k['name']:<28}{calls.get(k['name'], 0)} call(s), {k['registers']} registers, {k['spill_bytes']} bytes "
        f"spilled, {k['shared_bytes']} bytes of shared memory"
        for k in found["kernels"]
    ]


def gigabytes(size: float) -> str:
    return f"{size / 1e9:>9.3f} GB"


def preflight(config: PreflightConfig) -> int:
    """Compiles, prints, and fails where the block would not fit."""
    block, drafting = compile_block(config), {}
    if config.method != "ar":
        wanted = dict.fromkeys([config.kernels, "reference"]) if config.method == "lilicorr" else [config.kernels]
        drafting = {kernels: compile_drafting(replace(config, kernels=kernels)) for kernels in wanted}
    found = findings(config, block, drafting)
    print(json.dumps(found) if config.json else as_table(found))
    return 0 if found["fits"] else 1


def main(arguments: list[str] | None = None) -> int:
    jax.config.update("jax_platforms", "cpu")  # beside a GPU platform the CUDA compiler wants its device
    return run_main(PreflightConfig, preflight, program="serve.preflight", examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
