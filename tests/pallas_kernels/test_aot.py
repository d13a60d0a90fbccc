"""The kernels as machine code for Hopper, compiled without one: they assemble, spill nothing, gather nothing."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lilicorr_jax.sharding import make_mesh
from pallas_kernels.aot import H100, compile_for_gpu, described_devices
from pallas_kernels.cases import TOPK_CASES, WALK_CASES, tagged
from pallas_kernels.match_walk import match_walk
from pallas_kernels.topk_logprobs import topk_logprobs

pytestmark = pytest.mark.aot

TOPK_KERNELS = ("topk_logprobs_chunks", "topk_logprobs_merge")
SHARED_LIMIT = 232_448


def by_name(cases):
    return [pytest.param(case, id=case.name) for case in tagged(cases, "aot")]


@pytest.fixture(scope="module")
def whole():
    return NamedSharding(make_mesh(devices=described_devices(H100)), PartitionSpec())


def place(sharding, *arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]


def check_resources(program, *names):
    """Each kernel stands in the program once; none of those that this process compiled spills or asks for too much."""
    assert program.kernel_calls == dict.fromkeys(names, 1)
    assert set(names) <= {kernel.name for kernel in program.kernels}
    assert [k for k in program.kernels if k.spill_bytes or not 0 < k.shared_bytes <= SHARED_LIMIT] == []


@pytest.mark.parametrize("case", by_name(TOPK_CASES))
def test_topk_assembles_without_a_spill(whole, case):
    run = jax.jit(lambda logits: topk_logprobs(logits, case.num_candidates, implementation="mosaic_gpu"))
    logits = jax.ShapeDtypeStruct((case.rows, case.vocab), case.dtype, sharding=whole)
    check_resources(compile_for_gpu(run.lower(logits)), *TOPK_KERNELS)


@pytest.mark.parametrize("case", by_name(WALK_CASES))
def test_match_walk_assembles_without_a_spill(whole, case, rng):
    def run(vectors, draws):
        settings = dict(cosine_scale=8.0, floor=1e-4, kind=case.kind, implementation="mosaic_gpu")
        return match_walk(*vectors, **settings, **draws)

    shapes = jax.eval_shape(lambda: (case.vectors(rng), case.draws(rng)))
    shapes = jax.tree.map(lambda x: place(whole, x)[0], shapes)
    program = compile_for_gpu(jax.jit(run).lower(*shapes))
    check_resources(program, f"match_walk_{case.kind}")


def test_rows_on_two_devices_are_never_gathered():
    mesh = make_mesh(data=2, devices=described_devices(H100, per_host=2))
    rows = PartitionSpec("data")

    def run(logits):
        own = lambda logits: topk_logprobs(logits, 8, implementation="mosaic_gpu")
        return jax.shard_map(own, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(logits)

    logits = jax.ShapeDtypeStruct((30, 151_936), jnp.bfloat16, sharding=NamedSharding(mesh, rows))
    program = compile_for_gpu(jax.jit(run).lower(logits))
    check_resources(program, *TOPK_KERNELS)
    assert program.collectives == {}
    made = {sizes for i in program.instructions for _, sizes in i.shapes if 151_936 in sizes}
    assert made == {(15, 151_936)}
