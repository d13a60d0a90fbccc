"""Attention of training blocks: each over its context and its own rows."""

from pallas_kernels.block_attention.reference import block_attention

__all__ = ["block_attention"]
