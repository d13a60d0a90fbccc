"""Top-K and log-partition of rows of logits as two Mosaic GPU kernels, in one read of the logits.

The first kernel cuts every row into chunks, one CTA each, so that few rows still fill the device: a chunk leaves its K
best entries, its maximum and its sum of exponentials. The second, one CTA a row, merges the chunks. Both take the best
K times over, always the lowest id of equals, so the result depends on nothing that the device decides.

Logits are compared as integers in the order of their bits, which is the total order of `lax.top_k`: -0.0 ranks below
0.0. What was taken becomes LOWEST, below every number.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.topk_logprobs.reference import TopK

LANES = 128  # threads of a warpgroup: vectors are multiples of it
KEPT = 16  # entries that a chunk leaves, a multiple of 16 bytes for the copy engine; K at most
CHUNK_LINES = 32  # lines of 128 logits of a CTA, at most: as many registers a thread
LOWEST = -(2**31)
NO_ID = 2**31 - 1


def problem(logits: Float[Array, "rows V"], num_candidates: int) -> str | None:
    """What of a call the kernel can't do, in words."""
    if num_candidates not in (1, 2, 4, 8, 16):
        return f"num_candidates must be a power of two up to {KEPT}, and is {num_candidates}"
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits must be float32 or bfloat16, and are {logits.dtype}"
    return None


def topk_logprobs(logits: Float[Array, "rows V"], num_candidates: int, *, interpret=None) -> TopK:
    """See `reference.topk_logprobs`. A vocabulary that is no multiple of 128 is padded first, which copies it."""
    rows, vocab = logits.shape
    lines = -(-vocab // LANES)
    if lines * LANES != vocab:
        logits = jnp.pad(logits, ((0, 0), (0, lines * LANES - vocab)), constant_values=-jnp.inf)
    num_chunks = -(-lines // (8 * CHUNK_LINES)) * 8  # what 8 chunks keep is one line of the second kernel
    parts = _chunks(logits.reshape(rows, lines, LANES), num_chunks, num_candidates, interpret)
    ids, logprobs, log_partition = _merge(*parts, num_candidates=num_candidates, interpret=interpret)
    return TopK(ids[:, :num_candidates], logprobs[:, :num_candidates], log_partition[:, 0])  # a slice of all is free


def _places(shape: tuple[int, ...]) -> Array:
    """0, 1, 2, ... in row-major order."""
    line = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return line if len(shape) == 1 else line * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _order(bits: Array) -> Array:
    """Bits of float32 -> integers in the order of the numbers; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _take_best(keys, ids, count: int):
    """The `count` largest keys with their ids, descending, the lowest id of equals, in the lanes of two vectors."""
    lanes = _places((LANES,))
    best_keys = jnp.full((LANES,), LOWEST, jnp.int32)
    best_ids = jnp.full((LANES,), NO_ID, jnp.int32)
    for rank in range(count):
        key = jnp.max(keys)
        id_ = jnp.min(jnp.where(keys == key, ids, NO_ID))
        keys = jnp.where(ids == id_, LOWEST, keys)
        best_keys = jnp.where(lanes == rank, key, best_keys)
        best_ids = jnp.where(lanes == rank, id_, best_ids)
    return best_keys, best_ids


def _chunks(logits: Float[Array, "rows lines lanes"], num_chunks: int, num_candidates: int, interpret):
    """Of each chunk: keys and ids of its best, its maximum and its sum of exponentials, the latter two in lane 0."""
    rows, lines, _ = logits.shape
    chunk = -(-lines // num_chunks)
    kinds = (jnp.int32, jnp.int32, jnp.float32, jnp.float32)

    def topk_logprobs_chunks(logits_g, keys_g, ids_g, highest_g, total_g, logits_s, keys_s, ids_s, highest_s, total_s,
                             arrived):  # fmt: skip
        row, part = jax.lax.axis_index("row"), jax.lax.axis_index("part")
        begin = part * chunk
        start = jnp.minimum(begin, lines - chunk)  # the last chunks reach back instead of over the end
        plgpu.copy_gmem_to_smem(logits_g.at[row, pl.ds(start, chunk)], logits_s, arrived)
        plgpu.barrier_wait(arrived)
        ids = _places((chunk, LANES)) + start * LANES
        is_own = ids >= begin * LANES
        values = jnp.where(is_own, logits_s[...].astype(jnp.float32), -jnp.inf)
        highest = jnp.max(values)
        total = jnp.sum(jnp.exp(values - jnp.where(highest == -jnp.inf, 0.0, highest)))
        keys = _order(jax.lax.bitcast_convert_type(values, jnp.int32))
        best_keys, best_ids = _take_best(jnp.where(is_own, keys, LOWEST), ids, num_candidates)
        is_first = _places((LANES,)) == 0
        keys_s[...], ids_s[...] = best_keys, best_ids
        highest_s[...] = jnp.where(is_first, highest, -jnp.inf)
        total_s[...] = jnp.where(is_first, total, 0.0)
        plgpu.commit_smem()
        for kept, out in ((keys_s, keys_g), (ids_s, ids_g), (highest_s, highest_g), (total_s, total_g)):
            plgpu.copy_smem_to_gmem(kept.at[pl.ds(0, KEPT)], out.at[row, part])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        topk_logprobs_chunks,
        out_type=tuple(jax.ShapeDtypeStruct((rows, num_chunks, KEPT), kind) for kind in kinds),
        grid=(rows, num_chunks),
        grid_names=("row", "part"),
        scratch_types=[
            plgpu.SMEM((chunk, LANES), logits.dtype),
            *(plgpu.SMEM((LANES,), kind) for kind in kinds),
            plgpu.Barrier(),
        ],
        interpret=interpret,
    )(logits)


def _merge(keys, ids, highest, total, num_candidates: int, interpret):
    """Of each row: ids and log-probabilities of the best in the first lanes, and the log-partition in all."""
    rows = keys.shape[0]
    parts = [part.reshape(rows, -1, LANES) for part in (keys, ids, highest, total)]
    kinds = (jnp.int32, jnp.float32, jnp.float32)
    kept = max(num_candidates, 4)  # 16 bytes at least

    def topk_logprobs_merge(keys_g, ids_g, highest_g, total_g, best_g, logprobs_g, partition_g, keys_s, ids_s,
                            highest_s, total_s, best_s, logprobs_s, partition_s, arrived):  # fmt: skip
        row = jax.lax.axis_index("row")
        for source, here in ((keys_g, keys_s), (ids_g, ids_s), (highest_g, highest_s), (total_g, total_s)):
            plgpu.copy_gmem_to_smem(source.at[row], here, arrived)
        plgpu.barrier_wait(arrived)
        highest = jnp.max(highest_s[...])
        log_sum = jnp.log(jnp.sum(total_s[...] * jnp.exp(highest_s[...] - highest)))
        best_keys, best_ids = _take_best(keys_s[...], ids_s[...], num_candidates)
        values = jax.lax.bitcast_convert_type(_order(best_keys), jnp.float32)
        best_s[...] = best_ids
        logprobs_s[...] = values - highest - log_sum
        partition_s[...] = jnp.full((LANES,), highest + log_sum, jnp.float32)
        plgpu.commit_smem()
        for result, out in ((best_s, best_g), (logprobs_s, logprobs_g), (partition_s, partition_g)):
            plgpu.copy_smem_to_gmem(result.at[pl.ds(0, kept)], out.at[row])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        topk_logprobs_merge,
        out_type=tuple(jax.ShapeDtypeStruct((rows, kept), kind) for kind in kinds),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[
            *(plgpu.SMEM(part.shape[1:], part.dtype) for part in parts),
            *(plgpu.SMEM((LANES,), kind) for kind in kinds),
            plgpu.Barrier(num_arrivals=4),
        ],
        interpret=interpret,
    )(*parts)
