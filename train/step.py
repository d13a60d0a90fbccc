"""One optimizer step as one program: gradients over micro-batches, one clip, two groups, under the mesh's shardings.

Owns the optimizer, its schedule and the state that a checkpoint holds. The frozen target is an argument, so that no
program keeps a copy of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from lilicorr_jax.config import corrector_name
from lilicorr_jax.losses.terms import Terms, loss_counts
from lilicorr_jax.models.corrector import corrector_shapes, make_corrector
from lilicorr_jax.models.dflash import Drafter, drafter_shapes
from lilicorr_jax.shapes import Array, Float, Int32
from lilicorr_jax.sharding import batch_sharding, init_parameters, replicated
from train.config import TrainConfig
from train.data import Batch
from train.objective import Objective, Params


@struct.dataclass
class TrainState:
    """Everything that a run carries from step to step, float32 but for the counters.

    Attributes:
        step: optimizer steps made.
        params: `drafter` and, where the method has one, its corrector's under its name.
        opt_state: moments and counters of both groups.
    """

    step: Int32[Array, ""]
    params: Params
    opt_state: Any


@struct.dataclass
class StepReport:
    """What one step says of itself, computed before its update."""

    terms: Terms
    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]  # of both groups together, before the clip
    group_norms: dict[str, Float[Array, ""]]  # of each parameter tree's gradient, by its name
    num_tokens: Int32[Array, ""]  # read by the target, padding not counted


def learning_rate(peak: float, num_steps: int, warmup_share: float) -> Callable[[Any], Any]:
    """The rate of each step, counted from 0: linear from 0 over int(share * steps), then a cosine that ends at 0."""
    warmup = int(warmup_share * num_steps)

    def rate(step):
        rising = step / max(warmup, 1)
        falling = 0.5 * (1 + jnp.cos(jnp.pi * (step - warmup) / (num_steps - warmup)))
        return peak * jnp.where(step < warmup, rising, falling)

    return rate


def is_matrix(params: Params) -> Any:
    """True for the kernels of dense layers: what weight decay reaches. Biases, norms and tables are left alone."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)


def group_of(tree: str) -> str:
    """The optimizer group of one of the parameter trees."""
    return "reranker" if tree == "reranker" else "drafter"


def make_optimizer(config: TrainConfig, num_steps: int) -> optax.GradientTransformation:
    """One clip over all gradients, then AdamW (0.9, 0.999, 1e-8) with a rate and a decay of its own for each group.

    The reranker is a group of its own; Domino's and DSpark's correctors belong to the drafter's, as published.
    """

    def group(peak: float, weight_decay: float) -> optax.GradientTransformation:
        rate = learning_rate(peak, num_steps, config.warmup_share)
        return optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=weight_decay, mask=is_matrix)

    groups = {
        "drafter": group(config.drafter_learning_rate, config.drafter_weight_decay),
        "reranker": group(config.reranker_learning_rate, config.reranker_weight_decay),
    }
    by_group = optax.partition(groups, lambda params: {name: group_of(name) for name in params})
    return optax.chain(optax.clip_by_global_norm(config.clip), by_group)


def init_state(config: TrainConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Fresh parameters and moments, made under their shardings; decided by the seed."""
    drafter, corrector = config.models()
    parts = {"drafter": (Drafter(drafter), drafter_shapes(drafter), "from_features")}
    if corrector is not None:
        parts[corrector_name(corrector)] = (make_corrector(corrector), corrector_shapes(corrector), None)
    params = {}
    for part, (name, (module, shapes, method)) in enumerate(parts.items()):
        key = jax.random.fold_in(jax.random.key(config.seed), part)
        zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        params[name] = init_parameters(module, key, *zeros, mesh=mesh, method=method)
    opt_state = optimizer.init(params)  # zeros like a committed array lie where it does
    state = TrainState(step=jnp.int32(0), params=params, opt_state=opt_state)
    return jax.tree.map(lambda leaf: leaf if leaf.ndim else jax.device_put(leaf, replicated(mesh)), state)


def abstract_state(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a state, to restore one like it."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def gradients(
    objective: Objective, params: Params, target_params: Params, batch: Batch, step: Int32[Array, ""], accumulation: int
) -> tuple[Params, Terms]:
    """Gradients of the loss over the whole batch, and its terms; the number of micro-batches does not show.

    The joint loss is a sum of two quotients whose denominators are known only when the last micro-batch has been seen,
    so accumulation adds up one gradient tree for each numerator; a single micro-batch needs one.
    """

    def terms_of(params: Params, rows: Batch) -> Terms:
        return objective(params, target_params, rows, step)

    if accumulation == 1:

        def loss(params: Params) -> tuple[Float[Array, ""], Terms]:
            terms = terms_of(params, batch)
            return objective.loss(terms, step), terms

        return jax.grad(loss, has_aux=True)(params)

    def numerators(params: Params, rows: Batch) -> tuple[dict[str, Any], Terms]:
        terms = terms_of(params, rows)
        return objective.numerators(terms, step), terms

    names = objective.numerators(Terms.zero(), step).keys()

    def add_micro_batch(carry, rows: Batch):
        trees, terms = carry
        _, pull, own_terms = jax.vjp(lambda params: numerators(params, rows), params, has_aux=True)
        own = {name: pull({other: float(other == name) for other in names})[0] for name in names}
        return (jax.tree.map(jnp.add, trees, own), terms + own_terms), None

    nothing = jax.tree.map(jnp.zeros_like, params)
    start = ({name: nothing for name in names}, Terms.zero())
    (trees, terms), _ = jax.lax.scan(add_micro_batch, start, micro_batches(batch, accumulation))
    counts = loss_counts(terms)
    divided = (jax.tree.map(lambda x, name=name: x / getattr(counts, name), tree) for name, tree in trees.items())
    return jax.tree.map(lambda *parts: sum(parts), *divided), terms


def micro_batches(batch: Batch, accumulation: int) -> Batch:
    """[rows, ...] -> [accumulation, rows / accumulation, ...]; each takes every n-th row: rows keep their devices."""

    def split(x):
        return jnp.swapaxes(x.reshape(-1, accumulation, *x.shape[1:]), 0, 1)

    return jax.tree.map(split, batch)


TrainStep = jax.stages.Wrapped
"""(state, target parameters, batch) -> (state, report), jitted; it can also be lowered and compiled ahead."""


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, accumulation: int, state: TrainState
) -> TrainStep:
    """The jitted step (state, target parameters, batch) -> (state, report); it takes over the state's memory.

    Args:
        state: an example, for its shardings.
    """

    def train_step(state: TrainState, target_params: Params, batch: Batch) -> tuple[TrainState, StepReport]:
        grads, terms = gradients(objective, state.params, target_params, batch, state.step, accumulation)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        report = StepReport(
            terms=terms,
            loss=objective.loss(terms, state.step),
            gradient_norm=optax.tree.norm(grads),
            group_norms={name: optax.tree.norm(tree) for name, tree in grads.items()},
            num_tokens=jnp.sum(batch.length),
        )
        params = optax.apply_updates(state.params, updates)
        return TrainState(step=state.step + 1, params=params, opt_state=opt_state), report

    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(placed, replicated(objective.mesh)))


def place(batch: Batch, mesh: Mesh) -> Batch:
    """Puts a batch, whole on every host, on the devices that own its rows."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), batch)
