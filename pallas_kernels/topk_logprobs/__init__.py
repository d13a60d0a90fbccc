"""The K most probable entries of each row of logits, with their log-probabilities."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.topk_logprobs import kernel, reference
from pallas_kernels.topk_logprobs.reference import TopK

__all__ = ["TopK", "topk_logprobs"]


def topk_logprobs(
    logits: Float[Array, "rows V"],
    num_candidates: int,
    *,
    implementation: Implementation = "auto",
    interpret=None,
) -> TopK:
    """log p = logit - logsumexp over V, for the `num_candidates` largest logits of each row; float32 throughout.

    Descending; of equal logits the lower id first, and -0.0 below 0.0. A row that contains NaN or plus infinity, or
    nothing but minus infinity, says so by NaN: in its log-partition or in its best log-probability.

    Args:
        implementation: see `dispatch`. The kernel has no gradient and, under a mesh, must run inside `shard_map`.
        interpret: for tests, how to run the kernel without a GPU.

    Raises:
        ValueError: where V holds fewer than `num_candidates` entries.
        NotImplementedError: `mosaic_gpu` is named for a call that it can't do.
    """
    reference.check(logits, num_candidates)
    problem = kernel.problem(logits, num_candidates)
    if choose("topk_logprobs", implementation, problem).implementation == "reference":
        return reference.topk_logprobs(logits, num_candidates)
    return kernel.topk_logprobs(logits, num_candidates, interpret=interpret)
