"""The kernels as machine code for Hopper, compiled without one: they assemble, spill nothing, gather nothing."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lilicorr_jax.sharding import make_mesh
from pallas_kernels.aot import H100, compile_for_gpu, described_devices
from pallas_kernels.block_attention import block_attention
from pallas_kernels.cases import LATTICE_CASES, TOPK_CASES, WALK_CASES, tagged
from pallas_kernels.lattice_attention import lattice_attention
from pallas_kernels.match_walk import match_walk
from pallas_kernels.topk_logprobs import topk_logprobs

pytestmark = pytest.mark.aot

TOPK_KERNELS = ("topk_logprobs_chunks", "topk_logprobs_merge")
SHARED_LIMIT = 232_448


@pytest.fixture(scope="module")
def whole():
    return NamedSharding(make_mesh(devices=described_devices(H100)), PartitionSpec())


def check_resources(program, calls):
    """Each kernel is called so often; none of those that this process compiled spills or asks for too much."""
    assert program.kernel_calls == calls
    assert set(calls) <= {kernel.name for kernel in program.kernels}
    assert [k for k in program.kernels if k.spill_bytes or not 0 < k.shared_bytes <= SHARED_LIMIT] == []


def test_every_kernel_assembles_without_a_spill(whole, rng):
    """All cases in one program, because every compilation costs seconds."""
    topks, lattices, walks = (tagged(cases, "aot") for cases in (TOPK_CASES, LATTICE_CASES, WALK_CASES))
    settings = dict(implementation="mosaic_gpu")

    def run(logits, arrays, inputs):
        top = [topk_logprobs(rows, case.num_candidates, **settings) for case, rows in zip(topks, logits, strict=True)]
        mixed = [lattice_attention(*some, **settings) for some in arrays]
        walked = [
            match_walk(*vectors, kind=case.kind, cosine_scale=8.0, floor=1e-4, **settings, **draws)
            for case, (vectors, draws) in zip(walks, inputs, strict=True)
        ]
        return top, mixed, walked

    def draw():
        inputs = [(case.vectors(rng), case.draws(rng)) for case in walks]
        return [case.logits(rng) for case in topks], [case.arrays(rng) for case in lattices], inputs

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(draw))
    calls = dict.fromkeys(TOPK_KERNELS, len(topks)) | {f"match_walk_{case.kind}": 1 for case in walks}
    check_resources(compile_for_gpu(jax.jit(run).lower(*shapes)), calls | {"lattice_attention": len(lattices)})


def test_block_attention_in_plain_jax_stores_the_scores_of_one_chunk_of_the_recipe_forward_and_backward(whole):
    """Qwen3-8B's drafter, one row of 3,072 tokens and 512 anchors: 32 of them at a time."""
    anchors, heads, kv_heads, rows, width, context = 512, 32, 8, 16, 128, 3072

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, *sizes), dtype, sharding=whole)

    def run(positions, cotangent, *arrays):
        mixed, pull = jax.vjp(lambda *arrays: block_attention(*arrays, positions, anchor_chunk=32), *arrays)
        return mixed, pull(cotangent)

    queries, sequence = shape(anchors, heads, rows, width), shape(kv_heads, context, width)
    own = shape(anchors, kv_heads, rows, width)
    positions = shape(anchors, dtype=jnp.int32)
    program = compile_for_gpu(jax.jit(run).lower(positions, queries, queries, sequence, sequence, own, own))
    assert program.largest(1)[0].stored_bytes == heads * 32 * rows * context * 4
    assert program.memory.temporary < 0.8e9


def test_rows_on_two_devices_are_never_gathered():
    mesh = make_mesh(data=2, devices=described_devices(H100, per_host=2))
    rows = PartitionSpec("data")

    def run(logits):
        own = lambda logits: topk_logprobs(logits, 8, implementation="mosaic_gpu")
        return jax.shard_map(own, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(logits)

    logits = jax.ShapeDtypeStruct((30, 151_936), jnp.bfloat16, sharding=NamedSharding(mesh, rows))
    program = compile_for_gpu(jax.jit(run).lower(logits))
    check_resources(program, dict.fromkeys(TOPK_KERNELS, 1))
    assert program.collectives == {}
    made = {sizes for i in program.instructions for _, sizes in i.shapes if 151_936 in sizes}
    assert made == {(15, 151_936)}
