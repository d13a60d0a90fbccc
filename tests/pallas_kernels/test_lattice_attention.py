"""Attention of a lattice's nodes in plain JAX against loops in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lattice_attention import lattice_attention
from tests.tolerance import as_float64, assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def attention_loop(qkv, bias) -> np.ndarray:
    """One query of one head of one text at a time, in float64."""
    qkv, bias = as_float64(qkv), as_float64(bias)
    batch, nodes, _ = qkv.shape
    heads = bias.shape[0]
    mixed = np.zeros((batch, nodes, heads, qkv.shape[-1] // (3 * heads)))
    columns = qkv.reshape(batch, nodes, 3, heads, -1)
    for b, head, i in np.ndindex(batch, heads, nodes):
        query, keys, values = columns[b, i, 0, head], columns[b, :, 1, head], columns[b, :, 2, head]
        scores = keys @ query / np.sqrt(len(query)) + bias[head, i]
        weights = np.exp(scores - scores.max())
        mixed[b, i, head] = weights @ values / weights.sum()
    return mixed.reshape(batch, nodes, -1)


def draw(rng, *batch: int):
    """qkv and bias of 7 nodes, 2 heads of 4 columns."""
    qkv, bias = rng.normal(size=(*batch, 7, 24)), rng.normal(size=(2, 7, 7))
    return jnp.asarray(qkv, jnp.float32), jnp.asarray(bias, jnp.float32)


def test_reference_equals_loops(rng):
    qkv, bias = draw(rng, 3)
    assert_close(lattice_attention(qkv, bias), attention_loop(qkv, bias))


def test_leading_axes_are_texts(rng):
    qkv, bias = draw(rng, 2, 3)
    mixed = lattice_attention(qkv, bias)
    assert_close(mixed.reshape(6, 7, 8), attention_loop(qkv.reshape(6, 7, 24), bias))


def test_columns_that_the_heads_cannot_share_are_refused(rng):
    qkv, bias = draw(rng, 1)
    with pytest.raises(ValueError, match="2 heads; got 21"):
        lattice_attention(qkv[..., :21], bias)
