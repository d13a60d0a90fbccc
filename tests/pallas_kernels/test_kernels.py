"""Every implementation of an operation on the same cases: against NumPy, and the kernels for races besides.

The Mosaic kernels are interpreted on a CPU, which simulates shared memory, barriers and copies, with a race detector;
where there is a GPU, they run on it, at Qwen3's sizes too.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cases import LATTICE_CASES, TOPK_CASES, WALK_CASES, WalkCase, tagged
from pallas_kernels.lattice_attention import lattice_attention
from pallas_kernels.match_walk import kernel, match_walk
from pallas_kernels.topk_logprobs import topk_logprobs
from tests.conftest import has_gpu
from tests.pallas_kernels.test_lattice_attention import attention_loop
from tests.pallas_kernels.test_match_walk import best_path, greedy_loop, path_score, sampled_loop
from tests.tolerance import as_float64, assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)


@pytest.fixture(autouse=True)
def watch_tensor_cores(monkeypatch):
    """JAX's detector does not see what a product reads: while a kernel is interpreted, its threads read the same."""
    multiply = plgpu.wgmma

    def watched(total, left, right):
        left[...], right[...]
        multiply(total, left, right)

    if not has_gpu():
        monkeypatch.setattr(plgpu, "wgmma", watched)


def races_found() -> bool:
    """Of the kernel that was interpreted last; JAX has no public handle."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def every_run(cases):
    """(case, implementation, how it is interpreted) of all that can run somewhere."""
    small, every = tagged(cases, "interpret"), tagged(cases, "interpret") + tagged(cases, "gpu")
    runs = [pytest.param(case, "reference", None, id=f"reference: {case.name}") for case in small]
    runs += [pytest.param(case, "mosaic_gpu", INTERPRETED, id=f"interpreted: {case.name}") for case in small]
    gpu = pytest.mark.gpu
    return runs + [pytest.param(case, "mosaic_gpu", None, id=f"GPU: {case.name}", marks=gpu) for case in every]


def total_order(logits) -> np.ndarray:
    """Float32 as integers in the order of `lax.top_k`: -0.0 below 0.0."""
    bits = np.asarray(logits, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)


class TestTopK:
    @pytest.mark.parametrize("case, implementation, interpret", every_run(TOPK_CASES))
    def test_equals_numpy_and_races_with_nothing(self, rng, case, implementation, interpret):
        logits = case.logits(rng)
        settings = dict(implementation=implementation, interpret=interpret)
        ids, logprobs, log_partition = topk_logprobs(logits, case.num_candidates, **settings)
        assert interpret is None or not races_found()
        wide = np.asarray(logits.astype(jnp.float32), np.float64)
        spoiled = np.isnan(wide).any(axis=-1)
        assert np.isnan(np.asarray(logprobs)[spoiled]).all() and np.isnan(np.asarray(log_partition)[spoiled]).all()
        wide, ids = wide[~spoiled], np.asarray(ids)[~spoiled]
        order = np.argsort(-total_order(wide), axis=-1, kind="stable")[:, : case.num_candidates]
        np.testing.assert_array_equal(ids, order)
        highest = wide.max(-1)
        partition = np.log(np.exp(wide - highest[:, None]).sum(-1)) + highest
        assert_close(np.asarray(log_partition)[~spoiled], partition)
        assert_close(np.asarray(logprobs)[~spoiled], np.take_along_axis(wide, order, -1) - partition[:, None])


class TestLatticeAttention:
    @pytest.mark.parametrize("case, implementation, interpret", every_run(LATTICE_CASES))
    def test_equals_loops_and_races_with_nothing(self, rng, case, implementation, interpret):
        qkv, bias = case.arrays(rng)
        mixed = jax.block_until_ready(lattice_attention(qkv, bias, implementation=implementation, interpret=interpret))
        assert interpret is None or not races_found()
        assert mixed.dtype == jnp.bfloat16
        assert_close(mixed, attention_loop(qkv, bias), "bfloat16")


class TestMatchWalk:
    def run(self, rng, case, **settings):
        vectors, draws = case.vectors(rng), case.draws(rng)
        settings |= dict(cosine_scale=8.0, floor=1e-4, kind=case.kind, with_scores=True)
        run = jax.jit(lambda *vectors, **draws: match_walk(*vectors, **settings, **draws))
        return vectors, draws, jax.block_until_ready(run(*vectors, **draws))

    @pytest.mark.parametrize("case, implementation, interpret", every_run(WALK_CASES))
    def test_equals_loops_and_races_with_nothing(self, rng, case, implementation, interpret):
        vectors, draws, walked = self.run(rng, case, implementation=implementation, interpret=interpret)
        assert interpret is None or not races_found()
        wide = as_float64(vectors[0]), *np.split(as_float64(vectors[1]), 2, axis=-1)
        anchor, out, in_ = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-4) for x in wide)
        start = 8 * np.einsum("be,bke->bk", anchor, in_[:, 0])
        pair = 8 * np.einsum("bsje,bske->bsjk", out[:, :-1], in_[:, 1:])
        assert_close(tuple(walked.scores), (start, pair))
        for block in range(case.batch):
            # The walk is judged on the scores that it walked: equal cosines are equal there to the last bit.
            own = np.asarray(walked.scores.start[block]), np.asarray(walked.scores.pair[block])
            self.check_walk(case, own, draws, walked, block)

    def check_walk(self, case, scores, draws, walked, block):
        picks = np.asarray(walked.picks[block]).tolist()
        if case.kind == "greedy":
            assert picks == greedy_loop(*scores)
        elif case.kind == "exact":
            assert path_score(*scores, picks) == pytest.approx(best_sum(*scores), rel=1e-6)
        else:
            temperature, uniforms = float(draws["temperature"][block]), np.asarray(draws["uniforms"][block])
            expected, q = sampled_loop(*scores, temperature, uniforms)
            if temperature == 0:
                expected, q = greedy_loop(*scores), np.eye(case.ranks)[picks]
            assert picks == expected
            assert_close(walked.q[block], q)


def test_a_stage_of_shared_memory_is_filled_again_only_when_it_was_read(rng, monkeypatch):
    """Four pieces through two stages: at full width there are sixteen through five."""
    case = WalkCase(name="two stages", kind="greedy", batch=1, slots=3, ranks=8, width=256)
    monkeypatch.setattr(kernel, "SHARED", 2 * 4 * kernel.SQUARE * kernel.COLUMNS)
    TestMatchWalk().test_equals_loops_and_races_with_nothing(rng, case, "mosaic_gpu", INTERPRETED)


def best_sum(start, pair) -> float:
    """The highest score of any path, slot by slot."""
    best = start.astype(np.float64)
    for transition in pair:
        best = (best[:, None] + transition).max(axis=0)
    return float(best.max())


def test_the_highest_sum_is_that_of_the_best_path(rng):
    start, pair = rng.normal(size=3), rng.normal(size=(3, 3, 3))
    assert best_sum(start, pair) == pytest.approx(path_score(start, pair, best_path(start, pair)))


def test_a_planted_race_is_found():
    """The copy's arrival is not awaited before its target is read."""

    def careless(source_g, out_g, held_s, result_s, arrived):
        plgpu.copy_gmem_to_smem(source_g, held_s, arrived)
        result_s[...] = held_s[...] + 1.0
        plgpu.barrier_wait(arrived)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result_s, out_g)
        plgpu.wait_smem_to_gmem(0)

    held = plgpu.SMEM((128,), jnp.float32)
    run = plgpu.kernel(
        careless, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), scratch_types=[held, held, plgpu.Barrier()],
        interpret=INTERPRETED,
    )  # fmt: skip
    jax.block_until_ready(run(jnp.zeros(128, jnp.float32)))
    assert races_found()


@pytest.mark.parametrize("left_out", [0, 1])
def test_a_product_before_its_rows_have_arrived_is_found(rng, monkeypatch, left_out):
    """One of the two waits of the lattice's kernel is left out: for queries and keys, for values."""
    case, waits, wait = tagged(LATTICE_CASES, "interpret")[3], itertools.count(), plgpu.barrier_wait
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None if next(waits) == left_out else wait(barrier))
    lattice = lattice_attention(*case.arrays(rng), implementation="mosaic_gpu", interpret=INTERPRETED)
    jax.block_until_ready(lattice)
    assert next(waits) == 2 and races_found()


def test_a_named_implementation_is_never_replaced():
    with pytest.raises(NotImplementedError, match="power of two up to 16, and is 3"):
        topk_logprobs(jnp.zeros((1, 512)), 3, implementation="mosaic_gpu")
    vectors = jnp.zeros((1, 64)), jnp.zeros((1, 2, 8, 128))
    with pytest.raises(NotImplementedError, match="bfloat16, and are float32"):
        match_walk(*vectors, cosine_scale=8.0, floor=1e-4, kind="greedy", implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "nodes, width, dtype, match",
    [(16, 32, "bfloat16", "64 or 128 wide, and are 32"), (16, 64, "float32", "bfloat16, and are float32"),
     (264, 64, "bfloat16", "at most 256 nodes, and there are 264")],
)  # fmt: skip
def test_what_the_lattice_kernel_cannot_do_is_refused_by_name(nodes, width, dtype, match):
    qkv, bias = jnp.zeros((1, nodes, 3 * 2 * width), dtype), jnp.zeros((2, nodes, nodes))
    with pytest.raises(NotImplementedError, match=match):
        lattice_attention(qkv, bias, implementation="mosaic_gpu")


def test_a_choice_that_falls_back_says_why_once(caplog):
    from pallas_kernels import dispatch

    dispatch._say.cache_clear()
    with caplog.at_level("INFO", logger="pallas_kernels"):
        for _ in range(2):
            assert dispatch.choose("topk_logprobs", "auto").implementation == "reference"
    assert [record.getMessage() for record in caplog.records] == [
        "topk_logprobs runs its reference: the default device is a CPU"
    ]
