"""Named problem sizes of the kernels, shared by tests and bench.

A tag says where a case goes: `interpret` is small enough to be interpreted on a CPU, `aot` is compiled for Hopper
without one, `gpu` is run and timed on one.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Tag = Literal["interpret", "aot", "gpu"]
AOT_AND_GPU: frozenset[Tag] = frozenset({"aot", "gpu"})
GPU: frozenset[Tag] = frozenset({"gpu"})
INTERPRET: frozenset[Tag] = frozenset({"interpret"})


@dataclass(frozen=True, kw_only=True)
class TopKCase:
    """Rows of logits. `fill`: normal; few levels, so that most are equal; all but one -inf; one NaN; signed zeros."""

    name: str
    rows: int
    vocab: int
    num_candidates: int
    dtype: Literal["float32", "bfloat16"]
    fill: Literal["normal", "ties", "one_finite", "nan", "zeros"] = "normal"
    tags: frozenset[Tag] = field(default=INTERPRET)

    def logits(self, rng: np.random.Generator) -> Array:
        shape = (self.rows, self.vocab)
        if self.fill == "ties":
            drawn = rng.integers(0, 3, shape).astype(np.float32)
        elif self.fill == "zeros":
            drawn = rng.choice([0.0, -0.0], shape).astype(np.float32)
        elif self.fill == "one_finite":
            drawn = np.full(shape, -np.inf, np.float32)
            drawn[np.arange(self.rows), rng.integers(0, self.vocab, self.rows)] = 2.5
        else:
            drawn = (5 * rng.normal(size=shape)).astype(np.float32)
            if self.fill == "nan":
                drawn[0, self.vocab // 2] = np.nan
        return jnp.asarray(drawn, self.dtype)

    @property
    def bytes_moved(self) -> int:
        return self.rows * self.vocab * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class WalkCase:
    """Vectors of blocks. `fill`: normal; unit coordinates, whose cosines tie; so short that the floor divides them."""

    name: str
    kind: Literal["greedy", "exact", "sampled"]
    batch: int
    slots: int
    ranks: int
    width: int
    fill: Literal["normal", "ties", "short"] = "normal"
    tags: frozenset[Tag] = field(default=INTERPRET)

    def vectors(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Anchors' and candidates' vectors in bfloat16."""
        lattice = (self.batch, self.slots, self.ranks, 2, self.width)
        anchors, drawn = (self._draw(rng, shape) for shape in ((self.batch, self.width), lattice))
        return anchors, drawn.reshape(*lattice[:3], -1)

    def draws(self, rng: np.random.Generator) -> dict[str, Array]:
        """Temperature and uniforms of a sampled walk, its last block at temperature 0; nothing for another."""
        if self.kind != "sampled":
            return {}
        temperature = rng.uniform(0.5, 1.5, self.batch).astype(np.float32)
        temperature[-1] = 0.0
        uniforms = rng.uniform(size=(self.batch, self.slots)).astype(np.float32)
        return {"temperature": jnp.asarray(temperature), "uniforms": jnp.asarray(uniforms)}

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if self.fill == "ties":
            drawn = np.eye(self.width)[rng.integers(0, 3, shape[:-1])]
        else:
            drawn = rng.normal(size=shape) * (1e-6 if self.fill == "short" else 1.0)
        return jnp.asarray(drawn, jnp.bfloat16)

    @property
    def bytes_moved(self) -> int:
        return 2 * 2 * self.batch * self.slots * self.ranks * self.width


@dataclass(frozen=True, kw_only=True)
class LatticeCase:
    """Queries, keys and values of lattices, and a bias. `fill`: normal; scores of hundreds; values such that the result
    is each node's weight times the number of nodes."""

    name: str
    batch: int
    nodes: int
    heads: int
    head_width: int
    bias_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    fill: Literal["normal", "peaked", "weights"] = "normal"
    tags: frozenset[Tag] = field(default=INTERPRET)

    def arrays(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """qkv in bfloat16, bias."""
        shape = (self.batch, self.nodes, 3, self.heads, self.head_width)
        qkv = rng.normal(size=shape)
        if self.fill == "peaked":
            qkv[:, :, :2] *= 20
        if self.fill == "weights":
            own = np.arange(self.nodes)[:, None] % self.head_width == np.arange(self.head_width)
            qkv[:, :, 2] = self.nodes * own[:, None]
        bias = rng.normal(size=(self.heads, self.nodes, self.nodes))
        return jnp.asarray(qkv.reshape(*shape[:2], -1), jnp.bfloat16), jnp.asarray(bias, self.bias_dtype)

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        bias = self.heads * self.nodes**2 * jnp.dtype(self.bias_dtype).itemsize
        return bias + 2 * 4 * self.batch * self.nodes * self.heads * self.head_width


TOPK_CASES = (
    TopKCase(name="odd vocabulary", rows=1, vocab=1_001, num_candidates=8, dtype="float32"),
    TopKCase(name="smaller than a line", rows=1, vocab=17, num_candidates=16, dtype="bfloat16"),
    TopKCase(name="one candidate", rows=1, vocab=512, num_candidates=1, dtype="bfloat16"),
    TopKCase(name="ties", rows=1, vocab=2_100, num_candidates=8, dtype="bfloat16", fill="ties"),
    TopKCase(name="signed zeros", rows=1, vocab=256, num_candidates=16, dtype="float32", fill="zeros"),
    TopKCase(name="one finite", rows=1, vocab=300, num_candidates=4, dtype="float32", fill="one_finite"),
    TopKCase(name="not a number", rows=2, vocab=256, num_candidates=2, dtype="float32", fill="nan"),
    TopKCase(name="Qwen3, one text", rows=15, vocab=151_936, num_candidates=8, dtype="bfloat16", tags=AOT_AND_GPU),
    TopKCase(name="Qwen3, 32 texts", rows=480, vocab=151_936, num_candidates=8, dtype="bfloat16", tags=GPU),
    TopKCase(name="Qwen3, float32", rows=15, vocab=151_936, num_candidates=16, dtype="float32", tags=AOT_AND_GPU),
)

WALK_CASES = (
    WalkCase(name="whole lattice", kind="greedy", batch=1, slots=15, ranks=8, width=64),
    WalkCase(name="ties", kind="greedy", batch=1, slots=4, ranks=8, width=64, fill="ties"),
    WalkCase(name="short vectors", kind="greedy", batch=1, slots=3, ranks=8, width=64, fill="short"),
    WalkCase(name="best sum", kind="exact", batch=1, slots=4, ranks=8, width=64),
    WalkCase(name="drawn", kind="sampled", batch=2, slots=4, ranks=8, width=64),
    WalkCase(name="more texts than ranks", kind="greedy", batch=10, slots=2, ranks=8, width=64),
    WalkCase(name="sixteen candidates", kind="greedy", batch=1, slots=5, ranks=16, width=64),
    *(
        WalkCase(
            name=f"paper, {texts} text(s), {kind}", kind=kind, batch=texts, slots=15, ranks=8, width=1024,
            tags=AOT_AND_GPU if texts == 1 else GPU,
        )
        for texts in (1, 32)
        for kind in ("greedy", "exact", "sampled")
    ),
)  # fmt: skip

LATTICE_CASES = (
    LatticeCase(name="whole lattice", batch=1, nodes=120, heads=2, head_width=64, fill="weights"),
    LatticeCase(name="wide heads", batch=2, nodes=72, heads=1, head_width=128, bias_dtype="float32"),
    LatticeCase(name="whole squares", batch=1, nodes=128, heads=1, head_width=128, fill="weights"),
    LatticeCase(name="high scores", batch=1, nodes=64, heads=2, head_width=64, fill="peaked"),
    LatticeCase(name="padded square", batch=1, nodes=30, heads=2, head_width=64, fill="weights"),
    LatticeCase(name="padded line", batch=1, nodes=135, heads=1, head_width=64, fill="weights"),
    LatticeCase(name="paper, 1 text(s)", batch=1, nodes=120, heads=8, head_width=128, tags=AOT_AND_GPU),
    LatticeCase(name="paper, 32 text(s)", batch=32, nodes=120, heads=8, head_width=128, tags=GPU),
    LatticeCase(name="sixteen candidates", batch=2, nodes=240, heads=8, head_width=128, tags=AOT_AND_GPU),
    LatticeCase(
        name="narrow heads", batch=1, nodes=120, heads=16, head_width=64, bias_dtype="float32", tags=AOT_AND_GPU
    ),
)


def tagged(cases: tuple, tag: Tag) -> list:
    """The cases that go where `tag` says."""
    return [case for case in cases if tag in case.tags]
