"""`train.main --dry_run`: compiles the train step for GPUs that are not here, and says what it takes on each of them.

The step is the run's own on shapes alone: no weights, no data, no GPU. It is an estimate of structure, never of speed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lilicorr_jax.conversion.checkpoint import abstract_drafter
from lilicorr_jax.models.target import Target
from lilicorr_jax.presets import PRESETS
from lilicorr_jax.sharding import abstract_parameters, batch_sharding, make_mesh, replicated
from pallas_kernels import report
from pallas_kernels.aot import GPUS, compile_for_gpu, described_devices
from pallas_kernels.program import Instruction, Program
from train.config import TrainConfig
from train.data import Batch
from train.objective import make_objective
from train.step import TrainState, make_optimizer, make_train_step

ASSUMED_STEPS = 1000
"""The schedule's length where only the data would tell; it changes a constant in the program."""


def abstract_run(config: TrainConfig, mesh: Mesh) -> tuple[TrainState, dict, Batch]:
    """State, target parameters and batch of a run as shapes with their shardings."""
    preset = PRESETS[config.preset]()
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    target = abstract_parameters(Target(preset.target), token, mesh=mesh)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, preset.target.dtype, sharding=x.sharding), target)
    params = abstract_drafter(*config.models(), mesh)
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh)),
        params=params,
        opt_state=abstract_moments(config, params, mesh),
    )
    rows, length = config.batch_rows, config.sequence_length
    shapes = Batch(
        token_ids=((rows, length), jnp.int32), loss_mask=((rows, length), jnp.bool_), length=((rows,), jnp.int32),
        example_id=((rows,), jnp.int32),
    )  # fmt: skip
    place = lambda shape: jax.ShapeDtypeStruct(*shape, sharding=batch_sharding(mesh))
    return state, target, jax.tree.map(place, shapes, is_leaf=lambda x: isinstance(x, tuple))


def abstract_moments(config: TrainConfig, params: dict, mesh: Mesh) -> Any:
    """The optimizer's state: a moment lies where its parameter does, a counter everywhere."""
    optimizer = make_optimizer(config, ASSUMED_STEPS)
    places = {_names(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def place(path, leaf):
        names = _names(path)
        found = [places[names[i:]] for i in range(len(names)) if names[i:] in places]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=found[0] if found else replicated(mesh))

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def _names(path) -> tuple[str, ...]:
    """The dict keys of a path."""
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))


def compile_step(config: TrainConfig) -> Program:
    """The whole optimizer step on the mesh of the configuration."""
    hosts, per_host = (int(part) for part in config.topology.split("x"))
    devices = described_devices(GPUS[config.gpu], hosts, per_host)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices=devices)
    state, target, batch = abstract_run(config, mesh)
    objective = make_objective(config, PRESETS[config.preset]().target, mesh, ASSUMED_STEPS)
    step = make_train_step(objective, make_optimizer(config, ASSUMED_STEPS), config.accumulation, state)
    return compile_for_gpu(step.lower(state, target, batch))


def vocabulary_wide(config: TrainConfig, program: Program) -> list[Instruction]:
    """What has the vocabulary's width and more rows than a chunk, but for the tables of the target themselves."""
    target = PRESETS[config.preset]().target

    def is_wide(kind: str, sizes: tuple[int, ...]) -> bool:
        rows = math.prod(sizes) // target.vocab_size
        is_table = sorted(sizes)[-2:] == sorted((target.vocab_size, target.width))
        return target.vocab_size in sizes and rows > config.vocabulary_chunk and not is_table

    return [i for i in program.instructions if any(is_wide(*shape) for shape in i.shapes) and i.opcode != "tuple"]


def dry_run(config: TrainConfig) -> int:
    """Compiles, prints, and fails where a device would not hold the step."""
    jax.config.update("jax_platforms", "cpu")  # beside a GPU platform the CUDA compiler wants its device
    program = compile_step(config)
    found = report.findings(program, GPUS[config.gpu])
    wide = vocabulary_wide(config, program)
    mesh, rows = config.mesh, config.batch_rows // config.accumulation
    lines = [
        f"One optimizer step for {config.topology} {found['gpu']} (hosts x GPUs), mesh data {mesh.data} x fsdp "
        f"{mesh.fsdp} x tensor {mesh.tensor}: {config.preset}, {config.method}, {rows} rows at a time of "
        f"{config.sequence_length} tokens, {config.anchors} anchors",
        "",
        *report.memory_lines(found),
        "",
        "Collectives: "
        + (", ".join(f"{count} {name}" for name, count in sorted(found["collectives"].items())) or "none"),
        f"While loops {found['loops']}, conditionals {found['conditionals']}, host transfers "
        f"{len(found['host_transfers'])}",
        f"Arrays of the vocabulary's width with more than {config.vocabulary_chunk} rows, tables apart: "
        + ("; ".join(map(report.describe, wide)) or "none"),
        "",
        *report.work_lines(found, GPUS[config.gpu]),
        "",
        found["caveat"],
    ]
    print("\n".join(lines))
    return 0 if found["fits"] else 1
