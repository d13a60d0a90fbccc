"""The dense layer in its two forms: one function, and one tree made from the other."""

import dataclasses

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


def test_layers_that_read_the_same_vectors_lie_one_below_the_other_in_a_decoding_tree():
    ones = {name: {"kernel": jnp.full((2, 3), i + 1.0), "bias": jnp.full(3, -i)} for i, name in enumerate("qkv")}
    tree = for_decoding({"attention": {f"{name}_proj": layer for name, layer in ones.items()}})["attention"]
    assert tree.keys() == {"qkv_proj"}
    np.testing.assert_array_equal(tree["qkv_proj"]["rows"], np.repeat([[1.0], [2.0], [3.0]], 3, axis=0) * np.ones(2))
    np.testing.assert_array_equal(tree["qkv_proj"]["bias"], np.repeat([0.0, -1.0, -2.0], 3))
    alone = for_decoding({"k_proj": ones["k"], "v_proj": ones["v"]})
    assert alone.keys() == {"k_proj", "v_proj"}


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "qk_norm": False}])
def test_a_target_decodes_with_the_joined_matrices_as_it_was_trained(changes):
    config = dataclasses.replace(PRESETS["tiny"]().target, **changes)
    model, ids = Target(config), jnp.arange(10).reshape(2, 5)
    blank, rng = init_parameters(model, jax.random.key(2), ids[:, :1]), np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), blank)
    apart, joined = (model.apply({"params": tree}, ids).hidden for tree in (params, for_decoding(params)))
    assert_close(joined, apart)


def test_a_target_read_to_decode_is_the_target_turned(tmp_path):
    config = PRESETS["tiny"]().target
    save_target(tmp_path, config, init_parameters(Target(config), jax.random.key(1), jnp.zeros((1, 1), jnp.int32)))
    _, trained = load_target(tmp_path)
    _, read = load_target(tmp_path, to_decode=True)
    jax.tree.map(np.testing.assert_array_equal, read, for_decoding(trained))
    with pytest.raises(ValueError, match="to_decode or a mesh"):
        load_target(tmp_path, to_decode=True, mesh=make_mesh())
