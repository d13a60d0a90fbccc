"""Random rerankers and arguments for them, for the tests of every file that runs one."""

import jax
import jax.numpy as jnp
import numpy as np

from lilicorr_jax import sharding
from lilicorr_jax.config import RerankerConfig
from lilicorr_jax.models.lilicorr import Reranker, reranker_shapes


def random_parameters(config: RerankerConfig, rng: np.random.Generator) -> dict:
    """Parameters none of which is zero, so that every table takes part; norms lie around one."""

    def fill(path, leaf):
        around = 1.0 if "norm" in jax.tree_util.keystr(path[-2:]) else 0.0
        return jnp.asarray(around + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    shapes = sharding.abstract_parameters(Reranker(config), *reranker_shapes(config))
    return jax.tree_util.tree_map_with_path(fill, shapes)


def random_arguments(config: RerankerConfig, rng: np.random.Generator, *batch: int) -> list:
    """Embeddings, states, descending log-probabilities, anchor; every anchor is valid."""
    slots, ranks, width = config.num_slots, config.num_candidates, config.drafter_width

    def normal(*shape):
        return jnp.asarray(rng.normal(size=(*batch, *shape)), jnp.float32)

    logits = -np.sort(-3 * rng.normal(size=(*batch, slots, ranks)))
    logprobs = jnp.asarray(logits - np.log(2 * np.exp(logits).sum(-1, keepdims=True)), jnp.float32)
    return [normal(slots, ranks, width), normal(slots, width), logprobs, normal(width), jnp.ones(batch, bool)]
