"""The reranker against the public code's numbers, and what must hold for any weights."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from lilicorr_jax import presets, sharding
from lilicorr_jax.config import RerankerConfig
from lilicorr_jax.conversion.config_json import drafter_from_json
from lilicorr_jax.conversion.rules import reranker_rules
from lilicorr_jax.decoding.candidates import confidence_features
from lilicorr_jax.models.lilicorr import Reranker, reranker_shapes, unit
from pallas_kernels.match_walk import match_scores
from tests.models.reranker import random_arguments, random_parameters
from tests.tolerance import assert_close

pytestmark = pytest.mark.usefixtures("strict_dtypes")

TINY = presets.tiny().reranker


@partial(jax.jit, static_argnums=0)
def run(ours: RerankerConfig, params: dict, *arguments):
    return Reranker(ours).apply({"params": params}, *arguments)


def golden_parameters(ours: RerankerConfig, tensors: dict) -> dict:
    """Stored tensors -> our parameters, by the table that conversion reads checkpoints with."""
    rules = reranker_rules(ours)
    return unflatten_dict({rule.path: jnp.asarray(rule.layout.read(tensors[rule.name])) for rule in rules}, sep="/")


@pytest.fixture(scope="module")
def reference(golden):
    """(config, parameters, arguments, expected arrays) of the golden head."""
    folder = golden / "lilicorr"
    _, ours = drafter_from_json(json.loads((folder / "config.json").read_text()))
    params = golden_parameters(ours, load_file(folder / "model.safetensors"))
    embedding = load_file(folder / "inputs.safetensors")["embed_tokens"]
    expected = load_file(folder / "forward.safetensors")
    arguments = (
        embedding[expected["candidate_token_ids"]],
        expected["draft_hidden"][:, :, 1:],
        expected["candidate_log_probs"],
        expected["anchor_hidden"],
        expected["anchor_valid"].astype(bool),
    )
    return ours, params, arguments, expected


@pytest.fixture(scope="module")
def inside(reference):
    """The golden head's vectors and every intermediate result, by (module, method)."""
    ours, params, arguments, _ = reference
    everything = partial(Reranker(ours).apply, capture_intermediates=lambda module, method: True)
    vectors, state = jax.jit(everything)({"params": params}, *arguments)
    return vectors, state["intermediates"]


def test_every_stage_equals_the_public_code(reference, inside):
    ours, _, (_, _, logprobs, _, _), expected = reference
    vectors, seen = inside
    actual = {
        "features": confidence_features(jnp.asarray(logprobs)),
        "token_states": seen["token_rows"][0],
        "pass_states": seen["pass_hidden_proj"]["__call__"][0][..., None, :],
        "feature_states": seen["feature_out"]["__call__"][0],
        "nodes_in": seen["node_states"][0],
        "attention_bias": seen["attention_bias"][0],
        "nodes_after_layer0": seen["layers_0"]["__call__"][0].reshape(expected["nodes_in"].shape),
        "nodes_after_layer1": seen["layers_1"]["__call__"][0].reshape(expected["nodes_in"].shape),
        "nodes_out": seen["lattice"][0],
        "anchor_projected": jnp.where(
            expected["anchor_valid"].astype(bool)[..., None], seen["context_proj"]["__call__"][0], 0.0
        ),
        "anchor_state": seen["anchor_state"][0],
        "factor_hidden": seen["factor_input_proj"]["__call__"][0],
        "anchor_out": vectors.anchor_out,
        "out_vec": vectors.out,
        "in_vec": vectors.in_,
    }
    for name, array in actual.items():
        assert_close({name: array}, {name: expected[name]})
    assert not expected["anchor_valid"].all()  # one block has no row before its anchor


@pytest.mark.parametrize("scale, start, pair", [(1.0, "start_scores", "pair_scores"), (8.0, "log_start", "log_pair")])
def test_matching_scores_equal_the_public_code(reference, inside, scale, start, pair):
    expected = reference[-1]
    scores = match_scores(*inside[0], scale)
    assert_close((scores.start, scores.pair), (expected[start], expected[pair]))


def test_bfloat16_scores_follow_the_public_code(reference):
    ours, params, arguments, expected = reference
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    vectors = run(dataclasses.replace(ours, dtype="bfloat16"), low, *arguments)
    scores = match_scores(*vectors, 1.0)
    assert vectors.out.dtype == jnp.bfloat16 and scores.pair.dtype == jnp.float32
    assert_close(tuple(scores), (expected["bf16_start_scores"], expected["bf16_pair_scores"]), "bfloat16")


def test_scores_equal_the_numbers_that_another_engine_published(golden):
    case = load_file(golden / "lilicorr" / "trtllm_unit_case.safetensors")
    ours = RerankerConfig(
        drafter_width=32,
        width=8,
        num_heads=2,
        num_slots=3,
        num_candidates=3,
        factor_width=8,
        ffn_width=16,
        norm_eps=1e-5,
    )
    lattice = (case["@embed_tokens"][case["@candidate_ids"]], case["@pass_hidden"], case["@log_probs"])
    vectors = run(ours, golden_parameters(ours, case), *lattice, case["@anchor_hidden"], np.ones(1, bool))
    scores = match_scores(*vectors, ours.cosine_scale)
    assert_close(tuple(scores), (case["@published_log_start"], case["@published_log_pair"]))


@pytest.mark.parametrize("preset, expected", [("qwen3_8b", 36_758_794), ("qwen3_4b", 32_040_202)])
def test_parameters_number_what_the_paper_says(preset, expected):
    ours = presets.PRESETS[preset]().reranker
    assert sharding.count_parameters(sharding.abstract_parameters(Reranker(ours), *reranker_shapes(ours))) == expected


@pytest.fixture(scope="module")
def tiny():
    return random_parameters(TINY, np.random.default_rng(1))


def test_every_vector_has_unit_norm(tiny, rng):
    for vectors in run(TINY, tiny, *random_arguments(TINY, rng, 2)):
        assert_close(jnp.linalg.norm(vectors, axis=-1), jnp.ones(vectors.shape[:-1]))


def test_a_vector_below_the_floor_is_divided_by_the_floor_and_has_a_finite_gradient():
    short = jnp.array([[3e-6, 4e-6], [0.0, 0.0], [3.0, 4.0]])
    assert_close(unit(short, 1e-4), jnp.array([[0.03, 0.04], [0.0, 0.0], [0.6, 0.8]]))
    gradient = jax.grad(lambda x: unit(x, 1e-4).sum())(short)
    assert_close(gradient[:2], jnp.full((2, 2), 1e4))
    assert np.isfinite(gradient).all()


def test_any_leading_axes_give_the_same_vectors(tiny, rng):
    arguments = random_arguments(TINY, rng, 2, 1)
    apart = run(TINY, tiny, *(x[:, 0] for x in arguments))
    assert_close(run(TINY, tiny, *arguments), jax.tree.map(lambda x: x[:, None], apart))


def test_only_tables_and_scalars_tell_the_candidates_of_a_slot_apart(tiny, rng):
    """Without them a candidate that moves to another rank takes its vectors along; with them, it does not."""
    flat = tiny | {"rank_embedding": jnp.zeros_like(tiny["rank_embedding"])}
    flat |= {"feature_out": jax.tree.map(jnp.zeros_like, tiny["feature_out"])}
    arguments, moved = random_arguments(TINY, rng, 2), jnp.array([2, 0, 1])
    moved_arguments = [arguments[0][:, :, moved], *arguments[1:]]

    def change(params):
        before, after = run(TINY, params, *arguments), run(TINY, params, *moved_arguments)
        return jnp.stack([after.out - before.out[:, :, moved], after.in_ - before.in_[:, :, moved]])

    assert_close(change(flat), np.zeros_like(change(flat)))
    for name in ("rank_embedding", "feature_out"):
        assert np.abs(change(flat | {name: tiny[name]})).max() > 1e-2, name


def test_a_blocks_vectors_do_not_depend_on_its_neighbours_in_the_batch(tiny, rng):
    arguments = random_arguments(TINY, rng, 2)
    others = [x.at[1].set(y[1]) for x, y in zip(arguments, random_arguments(TINY, rng, 2), strict=True)]
    actual, expected = run(TINY, tiny, *others), run(TINY, tiny, *arguments)
    assert_close([x[0] for x in actual], [x[0] for x in expected])


def test_attention_bias_is_query_slot_minus_key_slot(tiny):
    slots, ranks, heads = TINY.num_slots, TINY.num_candidates, TINY.num_heads
    bias = np.asarray(Reranker(TINY).apply({"params": tiny}, slots, ranks, method="attention_bias"))
    bias = bias.reshape(heads, slots, ranks, slots, ranks)
    relative, same = np.asarray(tiny["relative_slot_bias"]), np.asarray(tiny["same_slot_bias"])
    for query in range(slots):
        for key in range(slots):
            expected = relative[:, query - key + slots] + (same if query == key else 0)
            assert_close(bias[:, query, :, key, :], np.broadcast_to(expected[:, None, None], (heads, ranks, ranks)))


def test_an_invalid_anchor_row_is_not_read(tiny, rng):
    arguments = random_arguments(TINY, rng, 2)
    poisoned = [*arguments[:3], arguments[3].at[0].set(jnp.nan), jnp.array([False, True])]
    valid, vectors = run(TINY, tiny, *arguments), run(TINY, tiny, *poisoned)
    bias = tiny["anchor_out_head"]["bias"]
    assert_close(vectors.anchor_out[0], bias / jnp.linalg.norm(bias))
    assert np.isfinite(vectors.out).all() and np.abs(vectors.out[0] - valid.out[0]).max() > 1e-2
    assert_close(vectors.out[1], valid.out[1])


def test_a_narrower_lattice_uses_the_first_rows_of_the_tables(tiny, rng):
    """It equals the network of that size whose tables are cut by hand, distances from their middle."""
    narrow = dataclasses.replace(TINY, num_slots=3, num_candidates=2)
    cut = tiny | {"slot_embedding": tiny["slot_embedding"][:3], "rank_embedding": tiny["rank_embedding"][:2]}
    cut |= {"relative_slot_bias": tiny["relative_slot_bias"][:, 2:-2]}
    arguments = random_arguments(narrow, rng, 2)
    assert_close(run(TINY, tiny, *arguments), run(narrow, cut, *arguments))


def test_a_wider_lattice_is_refused(tiny, rng):
    wide = dataclasses.replace(TINY, num_candidates=4)
    with pytest.raises(ValueError, match="5 slots x 3 candidates; got 5 x 4"):
        run(TINY, tiny, *random_arguments(wide, rng, 2))


def test_equal_widths_need_no_token_projection(rng):
    equal = dataclasses.replace(TINY, drafter_width=TINY.width)
    params = random_parameters(equal, rng)
    assert "token_proj" not in params
    embeddings = random_arguments(equal, rng, 2)[0]
    assert_close(Reranker(equal).apply({"params": params}, embeddings, method="token_rows"), embeddings)


@pytest.mark.parametrize("init", ["normal", "fan_in"])
def test_initial_weights_have_the_spread_that_the_config_names(key, init):
    ours = dataclasses.replace(presets.demo().reranker, init=init, num_layers=1)
    nothing = [jnp.zeros(s.shape, s.dtype) for s in reranker_shapes(ours)]
    params = sharding.init_parameters(Reranker(ours), key, *nothing)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.endswith("kernel"):
            assert (np.asarray(leaf) == (1 if "norm/weight" in name else 0)).all(), name
        elif leaf.size > 1000:
            xavier, fan_in = (2 / sum(leaf.shape)) ** 0.5, leaf.shape[0] ** -0.5
            expected = fan_in if init == "fan_in" else xavier if "qkv_proj" in name else ours.init_std
            assert np.std(leaf) == pytest.approx(expected, rel=0.1), name


def test_every_parameter_receives_a_gradient(tiny, rng):
    arguments = random_arguments(TINY, rng, 2)

    def loss(params):
        scores = match_scores(*run(TINY, params, *arguments), TINY.cosine_scale)
        return jax.nn.logsumexp(scores.start) + jax.nn.logsumexp(scores.pair)

    gradients = jax.jit(jax.grad(loss))(tiny)
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        assert np.linalg.norm(gradient) > 0, jax.tree_util.keystr(path)


def test_every_matrix_is_split_over_the_mesh():
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    boxed = jax.eval_shape(Reranker(TINY).init, jax.random.key(0), *reranker_shapes(TINY))["params"]
    placed = jax.tree_util.tree_flatten_with_path(sharding.parameter_shardings(boxed, mesh))[0]
    for path, leaf in placed:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("kernel"):
            assert any(leaf.spec), name
