"""The plain implementation and the objective are one function: by it, each is the other's oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.plain import PlainObjective, dense_block_attention
from benchmarks.training import TrainingConfig, growth, run
from pallas_kernels.block_attention import block_attention
from tests.tolerance import assert_close, assert_gradients_close
from tests.train.texts import few_layers_parameters, make_objective, random_batch


@pytest.fixture(scope="module")
def answers():
    """Terms and gradients of the joint loss, by both."""
    ours = make_objective()
    batch = jax.tree.map(jnp.asarray, random_batch())
    params, frozen = jax.tree.map(jnp.asarray, few_layers_parameters())

    def answer(objective):
        def loss(params):
            terms = objective(params, frozen, batch, jnp.int32(3))
            return objective.loss(terms, 3), terms

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    return answer(ours), answer(PlainObjective(**vars(ours)))


def test_terms_are_those_of_dense_masks_and_all_logits(answers):
    (_, ours), (_, plain) = answers
    shared = {
        name: value for name, value in vars(ours).items() if name != "spread_sum"
    }  # a gauge of the objective alone
    assert_close(shared, {name: getattr(plain, name) for name in shared}, "forward")
    assert float(plain.num_lattice_slots) > 0 and float(plain.distractor_sum) > 0


def test_gradients_are_those_of_autodiff_through_all_logits(answers):
    (ours, _), (plain, _) = answers
    assert_gradients_close(ours, plain)


def test_block_attention_is_that_of_one_dense_mask():
    rng = np.random.default_rng(0)
    shapes = [(2, 3, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2, 3, 2, 5, 8), (2, 3, 2, 5, 8)]
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    anchors = jnp.array([[0, 4, 9], [1, 1, 8]])
    ours = block_attention(*arrays, anchors, anchor_chunk=2)
    assert_close(ours, dense_block_attention(*arrays, anchors))


@pytest.mark.slow  # compiles eight steps
def test_benchmark_says_sizes_shares_and_growth(capsys):
    small = TrainingConfig(
        width=64, vocab_size=160, layers=3, drafter_layers=1, reranker_width=16, anchors=(2, 4), lengths=(24,), rounds=1
    )
    assert run(small) == 0
    out = capsys.readouterr().out
    assert out.count("speed-up") == 2 and "over anchors 2 to 4: x" in out
    lines = [line.split() for line in out.splitlines() if line.split()[:2] in (["2", "24"], ["4", "24"])]
    assert len(lines) == 4 and all(float(line[5]) > 0 and float(line[6]) > 0 for line in lines)


def test_growth_is_the_ratio_of_the_ends_meant_over_the_other_axis():
    seconds = {(64, 512): 1.0, (256, 512): 2.0, (64, 1024): 1.0, (256, 1024): 4.0}
    assert growth(seconds, 0) == "64 to 256: x 3.00"
    assert growth(seconds, 1) == "512 to 1024: x 1.50"
