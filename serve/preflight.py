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

from lilicorr_jax.config import corrector_name, setting
from lilicorr_jax.decoding.prefill import empty_state
from lilicorr_jax.decoding.speculate import STAGES, speculative_block
from lilicorr_jax.decoding.verify import Mode
from lilicorr_jax.flags import run_main
from lilicorr_jax.models.corrector import corrector_shapes, make_corrector
from lilicorr_jax.models.dflash import Drafter, drafter_shapes, join_context
from lilicorr_jax.models.fold import fold_for_serving
from lilicorr_jax.models.layers import RMSNorm
from lilicorr_jax.models.linear import for_decoding
from lilicorr_jax.models.target import Target
from lilicorr_jax.presets import PRESETS, Preset
from lilicorr_jax.sharding import abstract_parameters, make_mesh
from pallas_kernels import report
from pallas_kernels.aot import GPUS, compile_for_gpu, described_devices
from pallas_kernels.program import Program
from serve.models import Method, Models, ProposalKind

EXAMPLES = """
python -m serve.preflight --target=qwen3_8b --gpu=h100 --concurrency=1 --context=4096
python -m serve.preflight --target=qwen3_8b --concurrency=32 --kernels=reference --json=true
"""


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """Compiles the speculative block of a preset for a GPU that need not be there, and prints what it is made of."""

    target: Literal["tiny", "demo", "qwen3_4b", "qwen3_8b"] = setting("qwen3_8b", "Shapes of target and drafter.")
    gpu: Literal["h100"] = setting("h100", "What to compile for.")
    method: Method = setting("lilicorr", "Plain decoding, the drafter alone, or with a corrector.")
    proposal: ProposalKind = setting("greedy", "How a corrector drafts.")
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
    """The models of a preset as shapes in the preset's dtype, the corrector folded."""

    def place(tree, dtype=None):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding), tree)

    dtype, target = preset.target.dtype, preset.target
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = {"target": place(jax.eval_shape(for_decoding, abstract_parameters(Target(target), token)), dtype)}
    drafter, corrector = preset.for_method("dflash" if config.method == "ar" else config.method)
    if config.method != "ar":
        tree = abstract_parameters(Drafter(drafter), *drafter_shapes(drafter), method="from_features")
        params["drafter"] = place(jax.eval_shape(lambda tree: join_context(drafter, for_decoding(tree)), tree), dtype)
    if corrector is not None:
        tree = place(abstract_parameters(make_corrector(corrector), *corrector_shapes(corrector)), dtype)
        fold = partial(fold_for_serving, corrector)
        params[corrector_name(corrector)] = place(jax.eval_shape(fold, tree, params["target"]["embed"]["embedding"]))
    return Models(
        target=target, drafter=drafter, corrector=corrector, params=params, method=config.method,
        proposal=config.proposal, kernels=config.kernels,
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
    drafter, calls = models.drafter, models.pair().drafter
    if drafter is None or calls is None:
        raise ValueError(f"Method {config.method!r} drafts nothing that could be compiled alone; choose another.")
    rows, width, batch = drafter.input_rows, drafter.width, config.concurrency

    def drafting(params, residual, anchor_id, anchor_state, temperature, noise):
        norm = {"params": params["drafter"]["norm"]}
        states = RMSNorm(drafter.norm_eps, drafter.dtype).apply(norm, residual)
        proposal = calls.propose(params, states, anchor_id, anchor_state, temperature, noise)
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
    stages = Counter((stage_of(launch.scope), launch.kind) for launch in block.launches)
    return {
        "program": {name: getattr(config, name) for name in ("target", "method", "proposal", "mode", "kernels")},
        "concurrency": config.concurrency,
        "context": config.context,
        **report.findings(block, GPUS[config.gpu], looked_up_tables(config)),
        "launches_by_stage": {f"{stage} {kind}": count for (stage, kind), count in sorted(stages.items())},
        "drafting_launches": {name: len(program.launches) for name, program in drafting.items()},
    }


def looked_up_tables(config: PreflightConfig) -> tuple[str, ...]:
    """Parts of the names of arguments of which a block reads rows only; a tied embedding is multiplied with as well."""
    tables = ("token_table", "input_table", "token_in")  # of the reranker, Domino and DSpark
    return tables if PRESETS[config.target]().target.tie_embeddings else (*tables, "['embed']")


def as_table(config: PreflightConfig, found: dict[str, Any]) -> str:
    """The report for people."""
    what = ", ".join(f"{name} {value}" for name, value in found["program"].items())
    lines = [
        f"One speculative block for {found['gpu']}: {what}; {config.concurrency} texts, context {config.context}",
        "",
        *report.memory_lines(found),
        "",
        f"Launches per block: {found['launches']}, {found['launches_captured']} of them in "
        f"{found['command_buffers']} command buffer(s)",
        *(f"  {name:<28}{count:>6}" for name, count in found["launches_by_stage"].items()),
        f"  while loops {found['loops']}, conditionals {found['conditionals']}, host transfers "
        f"{len(found['host_transfers'])}",
        *_drafting_lines(found),
        "",
        *report.work_lines(found, GPUS[config.gpu]),
        "",
        *report.kernel_lines(found),
        "",
        found["caveat"],
    ]
    return "\n".join(lines)


def _drafting_lines(found: dict[str, Any]) -> list[str]:
    if not found["drafting_launches"]:
        return []
    names = {"reference": "plain XLA"}
    counts = ", ".join(f"{count} with {names.get(name, name)}" for name, count in found["drafting_launches"].items())
    return [f"  from the drafter's final norm to the drafted ids, compiled alone: {counts}"]


def preflight(config: PreflightConfig) -> int:
    """Compiles, prints, and fails where the block would not fit."""
    block, drafting = compile_block(config), {}
    if config.method != "ar":
        wanted = dict.fromkeys([config.kernels, "reference"]) if config.method == "lilicorr" else ["reference"]
        drafting = {kernels: compile_drafting(replace(config, kernels=kernels)) for kernels in wanted}
    found = findings(config, block, drafting)
    print(json.dumps(found) if config.json else as_table(config, found))
    return 0 if found["fits"] else 1


def main(arguments: list[str] | None = None) -> int:
    jax.config.update("jax_platforms", "cpu")  # beside a GPU platform the CUDA compiler wants its device
    return run_main(PreflightConfig, preflight, program="serve.preflight", examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
