"""Training the drafter alone, against the public training code: mask, states, loss and every gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.conversion.checkpoint import load_drafter, load_target
from lilicorr_jax.conversion.rules import drafter_rules, flat
from lilicorr_jax.losses.drafter import block_cross_entropy, supervised_weights
from lilicorr_jax.losses.vocabulary import token_logits, vocabulary_pass
from lilicorr_jax.models.dflash import Drafter
from lilicorr_jax.models.target import unembedding
from pallas_kernels.block_attention import block_attention
from tests.tolerance import assert_close, assert_gradients_close


class Lesson(NamedTuple):
    """One golden batch, and what we make of it."""

    arrays: dict  # of training.npz
    config: object
    hidden: np.ndarray  # drafter states, [B, A, Q, D]
    cross_entropy: np.ndarray  # per slot, [B, A, S]
    gradients: dict  # of the decayed loss, by the public names of the parameters


@pytest.fixture(scope="module", params=["tied", "untied"])
def lesson(golden, request):
    folder = golden / "dflash" / request.param
    arrays = {name: value for name, value in np.load(folder / "training.npz").items()}
    target_config, target = load_target(folder / "target")
    checkpoint = load_drafter(folder / "drafter")
    config, params = checkpoint.drafter, checkpoint.params["drafter"]
    head = unembedding(target, target_config)
    anchors = jnp.asarray(arrays["anchor_positions"], jnp.int32)
    block_ids = np.full((*anchors.shape, config.input_rows), config.mask_id)
    block_ids[..., 0] = np.take_along_axis(arrays["input_ids"], arrays["anchor_positions"], axis=1)
    blocks = target["embed"]["embedding"][block_ids]
    gold = jnp.asarray(arrays["target_ids"][..., 1:])
    weights = supervised_weights(jnp.asarray(arrays["weight_mask"][..., 1:] > 0), 7.0)

    @jax.jit
    def loss(params, features):
        hidden = Drafter(config).apply({"params": params}, features, blocks, anchors, method="from_features")
        states = hidden[:, :, 1:]
        log_partition = vocabulary_pass(states.reshape(-1, config.width), head, 1, 16).log_partition
        logprobs = token_logits(states, head, gold[..., None])[..., 0] - log_partition.reshape(gold.shape)
        per_slot = block_cross_entropy(logprobs, weights)
        return jnp.sum(per_slot) / jnp.sum(weights), (hidden, -logprobs)

    gradients, (hidden, cross_entropy) = jax.grad(loss, has_aux=True)(params, jnp.asarray(arrays["target_hidden"]))
    found = flat(gradients)
    named = {rule.name: rule.layout.write(np.asarray(found[rule.path])) for rule in drafter_rules(config)}
    return Lesson(arrays, config, np.asarray(hidden), np.asarray(cross_entropy), named)


def test_states_are_those_of_the_public_model(lesson):
    kept = lesson.arrays["block_keep_mask"]
    assert_close(lesson.hidden[kept], lesson.arrays["output_hidden"][kept], "golden")


def test_cross_entropy_of_every_slot_is_that_of_the_public_code(lesson):
    kept = lesson.arrays["block_keep_mask"]
    assert_close(lesson.cross_entropy[kept], lesson.arrays["nll"][kept][:, 1:], "golden")


def test_every_gradient_is_that_of_the_public_code(lesson):
    prefix = "grad."
    full = {name: value for name, value in lesson.arrays.items() if name.startswith(prefix)}
    assert len(full) == 8
    assert_gradients_close({name: lesson.gradients[name.removeprefix(prefix)] for name in full}, full)
    norms = {name: np.linalg.norm(gradient) for name, gradient in lesson.gradients.items()}
    assert len(norms) == 25
    assert_close(norms, {name: lesson.arrays[f"gradnorm.{name}"] for name in norms})
    assert_close(np.sqrt(sum(norm**2 for norm in norms.values())), lesson.arrays["decay7_grad_norm"])


def test_blocks_see_what_the_public_mask_allows(lesson):
    """With one-hot values a row's output says how much it took of each."""
    arrays = lesson.arrays
    (batch, blocks), rows, length = arrays["anchor_positions"].shape, lesson.config.input_rows, 30
    columns = length + blocks * rows
    values = jnp.broadcast_to(jnp.eye(columns), (batch, 1, columns, columns))
    own = values[:, :, length:].reshape(batch, 1, blocks, rows, columns)
    ones = jnp.ones((batch, blocks, 1, rows, columns))
    seen = block_attention(
        ones,
        jnp.ones((batch, 1, length, columns)),
        values[:, :, :length],
        ones,
        jnp.moveaxis(own, 2, 1),
        jnp.asarray(arrays["anchor_positions"], jnp.int32),
        anchor_chunk=2,
    )
    seen = np.asarray(seen)[:, :, 0].reshape(batch, blocks * rows, columns) > 0
    allowed = arrays["attention_mask_full"][:, 0]
    kept = np.repeat(arrays["block_keep_mask"], rows, axis=1)
    np.testing.assert_array_equal(seen[kept], allowed[kept])
    np.testing.assert_array_equal(seen, rebuilt_mask(arrays["anchor_positions"], rows, length))


def rebuilt_mask(anchors: np.ndarray, rows: int, length: int) -> np.ndarray:
    """The mask of the public code in loops, but that padded blocks see themselves."""
    batch, blocks = anchors.shape
    mask = np.zeros((batch, blocks * rows, length + blocks * rows), bool)
    for b, a, q in np.ndindex(batch, blocks, rows):
        mask[b, a * rows + q, : anchors[b, a]] = True
        mask[b, a * rows + q, length + a * rows : length + (a + 1) * rows] = True
    return mask
