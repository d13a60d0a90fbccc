"""Arrays for the tests of the losses: the golden ones, and random lattices."""

from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from lilicorr_jax.config import DrafterConfig, TargetConfig
from pallas_kernels.match_walk import Scores


@cache
def golden_arrays(golden: Path) -> dict[str, np.ndarray]:
    """What the public code was given and what it computed, by the names in golden/lilicorr/README.md."""
    folder = golden / "lilicorr"
    return load_file(folder / "inputs.safetensors") | load_file(folder / "forward.safetensors")


def golden_scores(arrays: dict[str, np.ndarray]) -> Scores:
    return Scores(start=jnp.asarray(arrays["log_start"]), pair=jnp.asarray(arrays["log_pair"]))


def golden_target_logits(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The target's logits of each slot's gold token and of its candidates; the row before a token speaks of it."""
    batch, blocks, slots = arrays["slot_mask"].shape
    gold, candidates = np.zeros((batch, blocks, slots)), np.zeros(arrays["candidate_token_ids"].shape)
    for b, a, s in np.ndindex(batch, blocks, slots):
        row = arrays["target_logits"][
            b, min(arrays["anchor_positions"][b, a] + s, arrays["target_logits"].shape[1] - 1)
        ]
        gold[b, a, s] = row[arrays["target_ids"][b, a, 1 + s]]
        candidates[b, a, s] = row[arrays["candidate_token_ids"][b, a, s]]
    return gold.astype(np.float32), candidates.astype(np.float32)


def target_of(drafter: DrafterConfig) -> TargetConfig:
    """A target to which a golden drafter belongs, untied."""
    same = ("vocab_size", "width", "num_heads", "num_kv_heads", "head_width", "ffn_width", "max_positions")
    return TargetConfig(num_layers=drafter.num_target_layers, **{name: getattr(drafter, name) for name in same})


def random_scores(rng: np.random.Generator, *batch: int, slots: int = 5, candidates: int = 4) -> Scores:
    start = rng.normal(size=(*batch, candidates))
    pair = rng.normal(size=(*batch, slots - 1, candidates, candidates))
    return Scores(start=jnp.asarray(3 * start, jnp.float32), pair=jnp.asarray(3 * pair, jnp.float32))
