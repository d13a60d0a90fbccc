"""What the machine that decodes can do at best, measured: bytes read and floating-point operations per second."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from serve.pages import on_huge_pages

STREAMED_BYTES = 2**30
GEMM_WIDTH = 1024


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


class Machine:
    """The machine's floors, through the same thread pool that decoding uses."""

    def __init__(self):
        streamed = on_huge_pages(jnp.ones(STREAMED_BYTES // 4, jnp.float32))
        square = jnp.ones((GEMM_WIDTH, GEMM_WIDTH), jnp.float32)
        total, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)
        self._reads = lambda: total(streamed)
        self._multiplies = lambda: product(square, square)

    def bandwidth(self) -> dict:
        """Bytes per second of reading an array that no cache holds, on huge pages, the best of a few."""
        return {"bytes_per_s": STREAMED_BYTES / min(timed(self._reads) for _ in range(5))}

    def gemm(self) -> dict:
        """Floating-point operations per second of a square float32 product, the best of a few."""
        return {"flops_per_s": 2 * GEMM_WIDTH**3 / min(timed(self._multiplies) for _ in range(5))}
