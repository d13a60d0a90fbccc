"""The one table of tolerances, and the assertions that use it.

Tests name a row and never write a number of their own; a new number is a new row, with its reason.
"""

from collections.abc import Sequence

import jax
import numpy as np

TOLERANCES = {
    "forward": 2e-5,  # float32 activations, against another float32 implementation
    "golden": 1e-4,  # hidden states and logits of the golden data, whose magnitudes are large
    "folded": 1e-5,  # weights multiplied out at load, against the unfolded network
    "loss": 2e-6,  # relative
    "gradient": 2e-5,  # ||g - g'|| / ||g||, leaf by leaf
    "devices_loss": 1e-6,  # relative, between device counts
    "devices_metric": 1e-6,  # means and rates, between device counts
    "devices_gradient": 1e-5,  # as "gradient", between device counts
    "bfloat16": 2e-2,  # indicative
    "cancelling_gradient": 1e-2,  # as "gradient", in bfloat16 near convergence, where careless sums lose a tenth of it
    "pretrained_logits": 2e-4,  # absolute; logits of a pretrained model reach 38, and float32 programs differ by 1e-4
}
RELATIVE_ONLY = ("loss", "devices_loss")

TEXT_GAP = 1e-4
"""Two texts may part where the target's two best logits lie closer than this, in float32."""


def assert_close(actual, expected, kind: str = "forward"):
    """Every leaf of `actual` has the shape of `expected` and agrees within the table's row `kind`."""
    tolerance = TOLERANCES[kind]
    absolute = 0.0 if kind in RELATIVE_ONLY else tolerance

    def check(path, actual_leaf, expected_leaf):
        actual_leaf, expected_leaf = as_float64(actual_leaf), as_float64(expected_leaf)
        name = jax.tree_util.keystr(path) or "array"
        assert actual_leaf.shape == expected_leaf.shape, f"{name}: {actual_leaf.shape} != {expected_leaf.shape}"
        np.testing.assert_allclose(actual_leaf, expected_leaf, rtol=tolerance, atol=absolute, err_msg=f"{name}, {kind}")

    jax.tree_util.tree_map_with_path(check, actual, expected)


def assert_gradients_close(actual, expected, kind: str = "gradient"):
    """||g - g'|| / ||g|| is within the table's row `kind` for each leaf g of `expected`.

    A leaf whose gradient is zero but for rounding is measured against a hundredth of the whole gradient's norm.
    """
    whole_norm = np.sqrt(sum(np.sum(as_float64(leaf) ** 2) for leaf in jax.tree.leaves(expected)))

    def check(path, actual_leaf, expected_leaf):
        actual_leaf, expected_leaf = as_float64(actual_leaf), as_float64(expected_leaf)
        name = jax.tree_util.keystr(path) or "gradient"
        assert actual_leaf.shape == expected_leaf.shape, f"{name}: {actual_leaf.shape} != {expected_leaf.shape}"
        difference = np.linalg.norm(actual_leaf - expected_leaf)
        scale = max(np.linalg.norm(expected_leaf), 0.01 * whole_norm)
        assert difference <= TOLERANCES[kind] * scale, f"{name}: ||g - g'|| = {difference:.3g}, ||g|| = {scale:.3g}"

    jax.tree_util.tree_map_with_path(check, actual, expected)


def assert_same_text(
    actual: Sequence[int], expected: Sequence[int], gaps: Sequence[float] | None = None, tolerance: float = TEXT_GAP
):
    """Two texts have the same token ids.

    `gaps[i]` is the gap between the target's two best logits where `expected[i]` was chosen. With gaps, a first
    difference at one below `tolerance` is excused and printed; what follows it can't be compared. Without, nothing is.
    """
    actual, expected = [int(token) for token in actual], [int(token) for token in expected]
    if actual == expected:
        return
    parted = next(
        (i for i, (one, other) in enumerate(zip(actual, expected, strict=False)) if one != other),
        min(len(actual), len(expected)),
    )
    story = f"texts part at {parted}: {actual[parted : parted + 3]} instead of {expected[parted : parted + 3]}"
    is_choice = parted < min(len(actual), len(expected))
    assert gaps is not None and is_choice, f"{story} (lengths {len(actual)} and {len(expected)})"
    assert gaps[parted] < tolerance, f"{story}, where the two best logits lie {gaps[parted]:.3g} apart"
    print(f"{story}; excused: the two best logits lie {gaps[parted]:.3g} apart, below {tolerance:.3g}")


def as_float64(array) -> np.ndarray:
    """bfloat16 and float32 leaves on one footing, so that the comparison itself does not round."""
    return np.asarray(jax.device_get(array)).astype(np.float64)


def without_keys_biases(params):
    """Softmax does not see a bias of keys: its gradient is rounding alone, and Adam makes steps of it."""

    def kept(path, leaf):
        is_joined = jax.tree_util.keystr(path).endswith("['qkv_proj']['bias']")
        return np.delete(leaf, slice(len(leaf) // 3, 2 * len(leaf) // 3)) if is_joined else leaf

    return jax.tree_util.tree_map_with_path(kept, params)
