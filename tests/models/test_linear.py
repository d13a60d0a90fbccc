"""The dense layer in its two forms: one function, and one tree made from the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from lilicorr_jax.conversion.checkpoint import load_target, save_target
from lilicorr_jax.models.linear import Linear, for_decoding
from lilicorr_jax.models.target import Target
from lilicorr_jax.presets import PRESETS
from lilicorr_jax.sharding import init_parameters, make_mesh
from tests.tolerance import assert_close


def layer(use_bias: bool) -> Linear:
    init = nn.initializers.normal(1.0)
    return Linear(5, ("width", "ffn"), dtype="float32", kernel_init=init, use_bias=use_bias)


@pytest.mark.parametrize("use_bias", [False, True])
def test_both_forms_are_the_product_of_the_equation(use_bias):
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    module = layer(use_bias)
    params = init_parameters(module, jax.random.key(0), jnp.asarray(x))
    if use_bias:
        params = params | {"bias": jnp.arange(5.0)}
    wanted = np.zeros((2, 3, 5), np.float32)
    for b, q, out in np.ndindex(2, 3, 5):
        wanted[b, q, out] = np.dot(x[b, q], np.asarray(params["kernel"])[:, out]) + (out if use_bias else 0)
    for form in (params, for_decoding(params)):
        assert_close(module.apply({"params": form}, jnp.asarray(x)), wanted)


def test_a_decoding_tree_has_every_matrix_turned_and_nothing_else_touched():
    tree = {
        "a": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)},
        "embed": {"embedding": jnp.ones((4, 2))},
    }
    turned = for_decoding(tree)
    np.testing.assert_array_equal(turned["a"]["rows"], [[0, 3], [1, 4], [2, 5]])
    assert turned["a"].keys() == {"rows", "bias"} and turned["embed"]["embedding"].shape == (4, 2)
    jax.tree.map(np.testing.assert_array_equal, for_decoding(turned), turned)


def test_a_target_read_to_decode_is_the_target_turned(tmp_path):
    config = PRESETS["tiny"]().target
    save_target(tmp_path, config, init_parameters(Target(config), jax.random.key(1), jnp.zeros((1, 1), jnp.int32)))
    _, trained = load_target(tmp_path)
    _, read = load_target(tmp_path, to_decode=True)
    jax.tree.map(np.testing.assert_array_equal, read, for_decoding(trained))
    with pytest.raises(ValueError, match="to_decode or a mesh"):
        load_target(tmp_path, to_decode=True, mesh=make_mesh())
