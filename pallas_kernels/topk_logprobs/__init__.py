"""The K most probable entries of each row of logits, with their log-probabilities."""

from pallas_kernels.topk_logprobs.reference import TopK, topk_logprobs

__all__ = ["TopK", "topk_logprobs"]
