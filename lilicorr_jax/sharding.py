"""Logical axis names of parameters and arrays, and the one table that places them on a mesh (data, fsdp, tensor).

The unembedding, and what corrects its logits, is split on the width or replicated, never on the vocabulary: top-K is
not sharded.
"""

import math

import flax.linen as nn
import jax
from flax.linen.spmd import logical_to_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_RULES = (
    ("batch", ("data", "fsdp")),
    ("vocab", None),
    ("width", "fsdp"),
    ("features", None),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("ffn", "tensor"),
    ("rerank_width", "fsdp"),
    ("rerank_heads", "tensor"),
    ("factor", "tensor"),
    ("rank", "fsdp"),
    ("state", "tensor"),
    ("norm", None),
    ("table", None),
)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices=None) -> Mesh:
    """A mesh of data x fsdp x tensor devices, with automatic (GSPMD) axes."""
    devices = jax.devices() if devices is None else devices
    wanted = data * fsdp * tensor
    if wanted > len(devices):
        raise ValueError(
            f"A mesh of data={data} x fsdp={fsdp} x tensor={tensor} needs {wanted} devices; {len(devices)} are here."
        )
    return jax.make_mesh(
        (data, fsdp, tensor), MESH_AXES, devices=devices[:wanted], axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the data and fsdp axes."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(boxed, mesh: Mesh):
    """Shardings of a (possibly abstract) parameter tree that still carries its logical axis names.

    An axis that the mesh does not divide is replicated: small models run on any mesh.
    """
    specs = logical_to_mesh(nn.get_partition_spec(boxed), LOGICAL_RULES)

    def place(spec: PartitionSpec, leaf) -> NamedSharding:
        sizes = [1 if axis is None else mesh.shape[axis] for axis in spec]
        kept = [axis if leaf.shape[i] % sizes[i] == 0 else None for i, axis in enumerate(spec)]
        return NamedSharding(mesh, PartitionSpec(*kept))

    return jax.tree.map(place, specs, nn.meta.unbox(boxed), is_leaf=lambda x: isinstance(x, PartitionSpec))


def init_parameters(module: nn.Module, key, *args, mesh: Mesh | None = None, method=None):
    """Parameters of a module, made directly under their shardings (plain arrays, no metadata boxes)."""

    def init(key):
        return module.init(key, *args, method=method)["params"]

    if mesh is None:
        return nn.meta.unbox(jax.jit(init)(key))
    shardings = parameter_shardings(jax.eval_shape(init, key), mesh)
    return jax.jit(lambda k: nn.meta.unbox(init(k)), out_shardings=shardings)(key)


def abstract_parameters(module: nn.Module, *args, mesh: Mesh | None = None, method: str | None = None):
    """Shapes, dtypes and, given a mesh, shardings of a module's parameters, from shapes alone: nothing is allocated."""

    def init(key, *arrays):
        return module.init(key, *arrays, method=method)["params"]

    def place(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    boxed = jax.eval_shape(init, jax.random.key(0), *args)
    if mesh is None:
        return nn.meta.unbox(boxed)
    return jax.tree.map(place, nn.meta.unbox(boxed), parameter_shardings(boxed, mesh))


def count_parameters(tree) -> int:
    """Number of parameters of a concrete or abstract tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
