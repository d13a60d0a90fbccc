"""`train.main --dry_run`: compiles the train step for GPUs that are not here, and says what it takes on each of them.

The step is the run's own on shapes alone: no weights, no data, no GPU. It is an estimate of structure, never of speed.
"""

import json
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
from pallas_kernels.program import Instruction, Program, shape_bytes
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


def described_mesh(config: TrainConfig) -> Mesh:
    """The configuration's mesh, of GPUs that are not here."""
    hosts, per_host = (int(part) for part in config.topology.split("x"))
    devices = described_devices(GPUS[config.gpu], hosts, per_host)
    return make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices=devices)


def compile_step(config: TrainConfig) -> Program:
    """The whole optimizer step on the mesh of the configuration."""
    mesh = described_mesh(config)
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

    return [i for i in program.largest() if any(is_wide(*shape) for shape in i.shapes)]


def parameter_shapes(config: TrainConfig) -> dict[tuple[int, ...], str]:
    """Sizes of every parameter, whole and as it lies on a device, in rising order -> the name of the first of them."""
    state, target, _ = abstract_run(config, described_mesh(config))
    leaves = jax.tree_util.tree_leaves_with_path({"target": target, **state.params})
    named = [("/".join(_names(path)), leaf) for path, leaf in leaves]
    found = {}
    for name, leaf in named:
        for sizes in (leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
            found.setdefault(_sizes(sizes), name)
    return found


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def chunk_bytes(config: TrainConfig) -> int:
    """Float32 logits of one chunk of slots: what the largest array may take, parameters apart."""
    return config.vocabulary_chunk * PRESETS[config.preset]().target.vocab_size * 4


def findings(config: TrainConfig, program: Program) -> dict[str, Any]:
    """Everything that is reported, as one JSON-able record."""
    parameters = parameter_shapes(config)
    large = [i for i in program.largest() if i.stored_bytes > chunk_bytes(config)]
    gathered = {report.describe(i): parameters.get(_sizes(report.largest_shape(i)[1])) for i in large}
    foreign = {report.describe(i): _foreign_bytes(i, parameters) for i in program.moved}
    return {
        "program": {name: getattr(config, name) for name in ("preset", "method", "topology")},
        "mesh": vars(config.mesh),
        "rows_at_a_time": config.batch_rows // config.accumulation,
        **{name: getattr(config, name) for name in ("sequence_length", "anchors", "accumulation")},
        **report.findings(program, GPUS[config.gpu]),
        "chunk_bytes": chunk_bytes(config),
        "wider_than_a_chunk": [report.describe(i) for i in vocabulary_wide(config, program)],
        "larger_than_a_chunk": [name for name, parameter in gathered.items() if parameter is None],
        "gathered_parameters": {name: parameter for name, parameter in gathered.items() if parameter},
        "activations_moved": dict(sorted(foreign.items(), key=lambda item: -item[1])[:5]),
    }


def _foreign_bytes(collective: Instruction, parameters: dict[tuple[int, ...], str]) -> int:
    """Bytes of those results of a collective that have no parameter's shape."""
    return sum(shape_bytes(*shape) for shape in collective.shapes if _sizes(shape[1]) not in parameters)


def as_table(config: TrainConfig, found: dict[str, Any]) -> str:
    """The report for people."""
    mesh = ", ".join(f"{name} {size}" for name, size in found["mesh"].items())
    listed = lambda names: "; ".join(names) or "none"
    chunk = f"a chunk of {config.vocabulary_chunk} x V float32 ({report.gigabytes(found['chunk_bytes']).strip()})"
    lines = [
        f"One optimizer step on {config.topology} {found['gpu']} (hosts x GPUs; mesh: {mesh}): {config.preset}, "
        f"{config.method}, {config.batch_rows} rows of {config.sequence_length} tokens with {config.anchors} anchors, "
        f"{found['rows_at_a_time']} rows at a time",
        "",
        *report.memory_lines(found),
        f"Larger than {chunk}:",
        f"  gathered parameters: {listed(found['gathered_parameters'].values())}",
        f"  other: {listed(found['larger_than_a_chunk'])}",
        f"As wide as the vocabulary, with more than {config.vocabulary_chunk} rows, the target's tables apart: "
        + listed(found["wider_than_a_chunk"]),
        "",
        *report.collective_lines(found),
        "Of them without the shape of a parameter, the largest",
        *(f"  {report.gigabytes(size)}  {name}" for name, size in found["activations_moved"].items()),
        f"While loops {found['loops']}, conditionals {found['conditionals']}, host transfers "
        f"{len(found['host_transfers'])}",
        "",
        *report.work_lines(found, GPUS[config.gpu]),
        "",
        found["caveat"],
    ]
    return "\n".join(lines)


def dry_run(config: TrainConfig) -> int:
    """Compiles, prints, and fails where a device would not hold the step."""
    jax.config.update("jax_platforms", "cpu")  # beside a GPU platform the CUDA compiler wants its device
    found = findings(config, compile_step(config))
    print(json.dumps(found) if config.json else as_table(config, found))
    return 0 if found["fits"] else 1
