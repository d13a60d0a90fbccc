"""The suite's own strictness: what should be refused is refused, and the assertions of `tests.tolerance` can fail."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from lilicorr_jax.cache import KVCache, append_rows
from tests.conftest import NUM_CPU_DEVICES, missing_requirements
from tests.tolerance import assert_close, assert_gradients_close, assert_same_text


def test_a_wrong_axis_is_refused_at_our_borders():
    rows, new = jnp.zeros((2, 3, 8, 4)), jnp.zeros((2, 3, 5, 6))
    with pytest.raises(TypeCheckError, match=r"f32\[2,3,5,6\]"):
        append_rows(rows, new, jnp.zeros(2, jnp.int32))


def test_a_pytree_record_may_hold_shapes():
    cache = KVCache(keys=(jnp.zeros((1, 2, 3, 4)),), values=(jnp.zeros((1, 2, 3, 4)),))
    shapes = jax.eval_shape(lambda cache: cache, cache)
    assert shapes.keys[0].shape == (1, 2, 3, 4)


def test_ranks_are_not_promoted():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) + jnp.zeros(3)


def test_dtypes_are_not_promoted_where_a_test_asks_for_it(strict_dtypes):
    with pytest.raises(Exception, match="strict"):
        jnp.zeros(3, jnp.float32) + jnp.zeros(3, jnp.bfloat16)


def test_a_warning_is_an_error():
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


def test_several_devices_are_simulated():
    assert jax.default_backend() != "cpu" or jax.device_count() == NUM_CPU_DEVICES


def test_an_extra_that_is_not_installed_is_named():
    assert missing_requirements("dev") == []
    assert set(missing_requirements("aot")) <= {
        *("jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm")
    }


@pytest.mark.parametrize("kind, error", [("forward", 1e-4), ("loss", 1e-5), ("bfloat16", 0.1)])
def test_closeness_is_within_the_tables_row(kind, error):
    expected = {"a": np.ones((2, 3)), "b": [np.full(4, 2.0)]}
    assert_close(jax.tree.map(lambda leaf: leaf * (1 + error / 100), expected), expected, kind)
    with pytest.raises(AssertionError, match=kind):
        assert_close({"a": expected["a"], "b": [expected["b"][0] * (1 + error)]}, expected, kind)


def test_shapes_that_would_broadcast_are_not_close():
    with pytest.raises(AssertionError, match=r"\(1, 3\) != \(2, 3\)"):
        assert_close(np.ones((1, 3)), np.ones((2, 3)))


def test_nan_is_not_close():
    with pytest.raises(AssertionError):
        assert_close(np.array([np.nan, 1.0]), np.array([0.0, 1.0]))


def test_one_wrong_gradient_is_not_hidden_by_large_ones():
    expected = {"large": np.full(100, 10.0), "small": np.ones(100)}
    assert_gradients_close({"large": expected["large"] * (1 + 1e-5), "small": expected["small"]}, expected)
    with pytest.raises(AssertionError, match="small"):
        assert_gradients_close({"large": expected["large"], "small": expected["small"] * 1.001}, expected)
    with pytest.raises(AssertionError, match="large"):
        assert_gradients_close({"large": expected["large"] * np.nan, "small": expected["small"]}, expected)


def test_texts_may_part_only_at_a_small_gap(capsys):
    gaps = [1.0, 0.5, 1e-5, 2.0]
    assert_same_text([5, 6, 7, 8], [5, 6, 7, 8])
    assert_same_text([5, 6, 1, 9], [5, 6, 7, 8], gaps)
    assert "part at 2" in capsys.readouterr().out
    with pytest.raises(AssertionError, match=r"part at 1: \[0, 7, 8\] instead of \[6, 7, 8\], where .* 0.5 apart"):
        assert_same_text([5, 0, 7, 8], [5, 6, 7, 8], gaps)
    with pytest.raises(AssertionError, match="part at 2"):
        assert_same_text([5, 6, 1, 9], [5, 6, 7, 8])


def test_a_text_that_ends_early_or_late_is_another_text():
    for actual in ([5, 6], [5, 6, 7, 8]):
        with pytest.raises(AssertionError, match="lengths"):
            assert_same_text(actual, [5, 6, 7], [1e-9] * 3)
