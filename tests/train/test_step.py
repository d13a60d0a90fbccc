"""The optimizer against NumPy, and one step against itself under other meshes and other accumulations."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lilicorr_jax.config import METHODS, Method
from lilicorr_jax.conversion.checkpoint import abstract_drafter, abstract_target
from lilicorr_jax.losses.terms import Terms, metrics
from lilicorr_jax.sharding import make_mesh, replicated
from tests.tolerance import assert_close, assert_gradients_close
from tests.train.texts import few_layers, few_layers_parameters, make_objective, random_batch
from train.config import TrainConfig
from train.data import Batch
from train.objective import Objective
from train.step import (
    StepReport,
    TrainState,
    init_state,
    is_matrix,
    learning_rate,
    make_optimizer,
    make_train_step,
    micro_batches,
    place,
)

CLIP = 0.25  # below the gradient's norm, so that the clip acts


def make_config(**changes) -> TrainConfig:
    return TrainConfig(**(dict(target="", data="", output="", preset="tiny", steps=100) | changes))


class Step(NamedTuple):
    state: TrainState
    report: StepReport


@pytest.fixture(scope="module")
def run_step():
    """(batch, mesh sizes, accumulation, method) -> the state after one whole step from the same parameters.

    It is step 40 of 100: Domino's two cross-entropies both count.
    """
    preset = few_layers()
    optimizer = make_optimizer(make_config(clip=CLIP, warmup_share=0.0), 100)

    @functools.cache
    def compiled(sizes: tuple[int, int, int], accumulation: int, method: Method):
        mesh = make_mesh(*sizes)
        abstract = (abstract_drafter(*preset.for_method(method), mesh), abstract_target(preset.target, mesh))
        place_leaf = lambda x, like: jax.device_put(x, like.sharding)
        params, frozen = jax.tree.map(place_leaf, few_layers_parameters(method), abstract)
        state = TrainState(step=jnp.int32(40), params=params, opt_state=optimizer.init(params))
        state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated(mesh)), state)
        return state, frozen, mesh, make_train_step(make_objective(mesh, method), optimizer, accumulation, state)

    @functools.cache
    def run_random(sizes: tuple[int, int, int], accumulation: int, method: Method) -> Step:
        return run(random_batch(), sizes, accumulation, method)

    def run(batch: Batch | None = None, sizes=(1, 1, 1), accumulation: int = 1, method: Method = "lilicorr") -> Step:
        if batch is None:
            return run_random(sizes, accumulation, method)
        state, frozen, mesh, step = compiled(sizes, accumulation, method)
        return Step(*step(jax.tree.map(jnp.copy, state), frozen, place(batch, mesh)))

    return run


@pytest.fixture(scope="module")
def plain(run_step) -> Step:
    return run_step()


def first_moments(state: TrainState):
    """A tenth of the clipped gradient, after one step; one tree of both groups."""
    is_adam = lambda leaf: isinstance(leaf, optax.ScaleByAdamState)
    groups = [leaf.mu for leaf in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(leaf)]
    return {name: group[name] for group in groups for name in group if jax.tree.leaves(group[name])}


@pytest.mark.parametrize(
    ("method", "sizes", "accumulation"),
    [("lilicorr", (1, 1, 1), 4), *((method, (2, 2, 2), 2) for method in ("lilicorr", "domino", "dspark"))],
)
def test_step_is_the_same_for_any_mesh_and_accumulation(run_step, method, sizes, accumulation):
    plain, other = run_step(method=method), run_step(None, sizes, accumulation, method)
    assert_close(other.report.loss, plain.report.loss, "devices_loss")
    assert_close(other.report.gradient_norm, plain.report.gradient_norm, "devices_gradient")
    assert_close(vars(other.report.terms), vars(plain.report.terms), "forward")
    assert_gradients_close(first_moments(other.state), first_moments(plain.state), "devices_gradient")
    assert int(other.report.num_tokens) == int(random_batch().length.sum())
    kernel = other.state.params["drafter"]["layers_0"]["mlp"]["gate_proj"]["kernel"]
    axes = {axis for axis in kernel.sharding.spec if axis}
    assert sizes == (1, 1, 1) or axes == {"fsdp", "tensor"}, "the parameters were gathered"
    moments = jax.tree_util.tree_leaves_with_path(first_moments(plain.state))
    still = {jax.tree_util.keystr(path[:2]) for path, leaf in moments if not np.linalg.norm(leaf)}
    assert still <= {"['reranker']['out_head']"}, "nothing to compare"  # random text covers no second slot


@pytest.mark.parametrize(("sizes", "accumulation"), [((2, 1, 1), 1), ((1, 4, 1), 1), ((2, 2, 2), 2)])
def test_rows_of_very_different_lengths_weigh_alike_on_any_number_of_devices(run_step, sizes, accumulation):
    """On two, four and eight devices, some of which have hardly a token to learn."""
    batch = random_batch()
    first = np.array([22, 2, 21, 2, 20, 2, 12, 2])[:, None]  # two, three or twenty learned tokens in a row
    batch = batch.replace(loss_mask=batch.loss_mask & (np.arange(24)[None, :] >= first))
    one, many = run_step(batch).report, run_step(batch, sizes, accumulation).report
    assert_close(many.loss, one.loss, "devices_loss")
    ours, theirs = metrics(many.terms), metrics(one.terms)
    assert_close(ours, theirs, "devices_metric")
    assert_close(many.group_norms, one.group_norms, "devices_gradient")
    assert all(0 <= ours[rate] <= 1 for rate in ("coverage", "accuracy", "factor_spread"))
    assert float(ours["coverage"]) > 0 and float(one.terms.num_lattice_slots) > 0


def test_first_step_is_adamw_on_the_clipped_gradient(plain):
    """Oracle: Adam's first step in NumPy, lr g / (|g| + eps), from the gradient that the first moments hold."""
    clipped = jax.tree.map(lambda m: 10 * np.asarray(m, np.float64), first_moments(plain.state))
    assert float(plain.report.gradient_norm) > 2 * CLIP
    assert_close(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(clipped))), CLIP)
    rates = {"drafter": (6e-4, 0.0), "reranker": (1.5e-4, 0.01)}

    def stepped(path, weight, gradient):
        rate, decay = rates[path[0].key]
        decay = decay if path[-1].key == "kernel" else 0.0
        return weight - rate * (gradient / (np.abs(gradient) + 1e-8) + decay * weight)

    wanted = jax.tree_util.tree_map_with_path(stepped, few_layers_parameters()[0], clipped)
    assert_close(plain.state.params, wanted)


def test_dominos_and_dsparks_correctors_move_at_the_drafters_rate_and_decay():
    config = make_config(warmup_share=0.0, drafter_weight_decay=0.5)
    optimizer, weight = make_optimizer(config, 100), {"out": {"kernel": jnp.ones((2, 3))}}
    params = {"drafter": weight, "domino": weight, "dspark": weight, "reranker": weight}
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    for name, rate, decay in [("domino", 6e-4, 0.5), ("dspark", 6e-4, 0.5), ("reranker", 1.5e-4, 0.01)]:
        np.testing.assert_allclose(updates[name]["out"]["kernel"], -rate * (1 + decay), rtol=1e-5)


def test_one_seed_starts_every_methods_backbone_alike():
    starts = {}
    for method in METHODS:
        config = make_config(method=method)
        starts[method] = init_state(config, make_optimizer(config, 100), make_mesh()).params
    names = {"dflash": set(), "lilicorr": {"reranker"}, "domino": {"domino"}, "dspark": {"dspark"}}
    for method, params in starts.items():
        assert params.keys() == {"drafter"} | names[method]
        jax.tree.map(np.testing.assert_array_equal, params["drafter"], starts["dflash"]["drafter"])


def test_batch_with_nothing_to_train_has_no_loss_and_no_gradient(run_step):
    batch = random_batch()
    empty = run_step(batch.replace(loss_mask=np.zeros_like(batch.loss_mask)))
    assert all(float(value) == 0 for value in vars(empty.report.terms).values())
    assert float(empty.report.loss) == float(empty.report.gradient_norm) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(first_moments(empty.state)))


def test_rows_with_nothing_to_train_weigh_nothing(run_step):
    """All but one row's masks are empty: what those rows say changes neither loss nor gradient."""
    batch = random_batch()
    lonely = batch.loss_mask & (np.arange(8) == 3)[:, None]
    one = run_step(batch.replace(loss_mask=lonely))
    others = np.where(np.arange(8)[:, None] == 3, batch.token_ids, batch.token_ids[::-1])
    two = run_step(batch.replace(loss_mask=lonely, token_ids=others))
    assert np.isfinite(one.report.loss) and one.report.loss > 1 and one.report.gradient_norm > 0
    assert_close(two.report.loss, one.report.loss, "loss")
    assert_gradients_close(first_moments(two.state), first_moments(one.state))
    assert float(one.report.terms.num_supervised) < float(run_step().report.terms.num_supervised) / 4


def test_rate_rises_from_zero_over_the_warm_up_and_falls_to_zero_along_a_cosine():
    rate = learning_rate(6e-4, 1000, 0.04)
    for step, share in [(0, 0.0), (1, 1 / 40), (20, 0.5), (40, 1.0), (280, 0.853553), (520, 0.5), (1000, 0.0)]:
        np.testing.assert_allclose(rate(step), 6e-4 * share, rtol=1e-5, atol=1e-10)
    odd = learning_rate(1.0, 99, 0.04)  # int(3.96) = 3 steps of warm-up
    np.testing.assert_allclose([odd(2), odd(3)], [2 / 3, 1.0], rtol=1e-6)
    np.testing.assert_allclose(learning_rate(1.0, 10, 0.0)(0), 1.0)


def test_without_gradient_only_the_rerankers_matrices_move():
    names = {"fc": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "norm": {"weight": jnp.ones(3)}}
    params = {"drafter": names, "reranker": names | {"slot_embedding": jnp.ones((4, 3))}}
    optimizer = make_optimizer(make_config(warmup_share=0.0), 100)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = updates["reranker"]["fc"].pop("kernel")
    np.testing.assert_allclose(moved, -0.01 * 1.5e-4, rtol=1e-6)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))


def test_matrices_are_the_kernels_of_dense_layers():
    params = few_layers_parameters()[0]
    matrices = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, is_one in jax.tree_util.tree_leaves_with_path(is_matrix(params["reranker"]))
        if is_one
    }
    names = ("token_proj", "pass_hidden_proj", "context_proj", "feature_up", "feature_out", "factor_input_proj")
    layer = ("attention/qkv_proj", "attention/out_proj", "mlp_up", "mlp_down")
    heads = ("out_head", "in_head", "anchor_out_head")
    assert matrices == {f"{n}/kernel" for n in (*names, *heads, *(f"layers_0/{part}" for part in layer))}


@pytest.mark.parametrize("norm", [0.5, 3.0])
def test_clip_measures_both_groups_together(norm):
    """Gradients of norm 3 in the plane of both groups; Adam's second moment shows what was left of them."""
    direction = {
        "drafter": {"fc": {"kernel": np.array([[0.6]])}},
        "reranker": {"out_head": {"kernel": np.array([[0.8]])}},
    }
    params = jax.tree.map(jnp.float32, direction)
    optimizer = make_optimizer(make_config(clip=1.0, warmup_share=0.0), 100)
    grads = jax.tree.map(lambda x: jnp.float32(norm * x), direction)
    _, state = optimizer.update(grads, optimizer.init(params), params)
    left = sum(float(jnp.sum(m)) for m in jax.tree.leaves(first_moments(TrainState(0, params, state))))
    np.testing.assert_allclose(10 * left, min(norm, 1.0) * (0.6 + 0.8), rtol=1e-5)


class Slope(Objective):
    """A loss of 3 <direction, kernel>, as a mean over tokens: its gradient is three times a unit vector."""

    direction = np.eye(8, 4, dtype=np.float32) / 2

    def __call__(self, params, target_params, batch, step):
        tokens = jnp.sum(batch.loss_mask.astype(jnp.float32))
        slope = 3 * jnp.sum(self.direction * params["drafter"]["fc"]["kernel"])
        return Terms.zero().replace(drafter_sum=tokens * slope, slot_weight_sum=tokens)


@pytest.mark.parametrize(("devices", "accumulation"), [(1, 1), (4, 1), (4, 2)])
def test_gradient_of_norm_three_is_logged_as_three_and_clipped_once_on_any_number_of_devices(devices, accumulation):
    mesh = make_mesh(data=2, fsdp=2) if devices == 4 else make_mesh()
    objective = Slope(**vars(make_objective(mesh, "dflash")))
    kernel = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("fsdp")))
    params = {"drafter": {"fc": {"kernel": kernel}}}
    optimizer = make_optimizer(make_config(clip=1.0, warmup_share=0.0), 100)
    state = TrainState(step=jnp.int32(0), params=params, opt_state=optimizer.init(params))
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated(mesh)), state)
    step = make_train_step(objective, optimizer, accumulation, state)
    state, report = step(state, {}, place(random_batch(), mesh))
    np.testing.assert_allclose([report.gradient_norm, report.group_norms["drafter"]], 3, rtol=1e-6)
    clipped = 10 * first_moments(state)["drafter"]["fc"]["kernel"]
    np.testing.assert_allclose(clipped, Slope.direction, rtol=1e-6)


def test_micro_batches_take_every_nth_row():
    batch = random_batch()
    split = micro_batches(batch, 4)
    for part in range(4):
        np.testing.assert_array_equal(split.token_ids[part], batch.token_ids[part::4])
        np.testing.assert_array_equal(split.example_id[part], batch.example_id[part::4])
