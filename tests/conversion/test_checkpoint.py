"""Folders load whole and bit for bit, or not at all."""

import dataclasses
import functools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lilicorr_jax import presets
from lilicorr_jax.conversion.checkpoint import (
    DrafterCheckpoint,
    abstract_target,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
)
from lilicorr_jax.conversion.rules import flat
from lilicorr_jax.models.lilicorr import Reranker
from lilicorr_jax.sharding import make_mesh
from tests import baselines
from tests.conftest import GOLDEN
from tests.conversion.folders import copied, edit_json, edit_tensors, split_in_shards
from tests.tolerance import assert_close

DRAFTERS = ["dflash/tied/drafter", "dflash/untied/drafter", "lilicorr"]
TARGETS = ["dflash/tied/target", "dflash/untied/target"]


@functools.cache
def public_drafter(source):
    return load_drafter(GOLDEN / source)


@functools.cache
def public_target(source):
    return load_target(GOLDEN / source)


def assert_same_tensors(folder, other):
    ours, theirs = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def assert_same_trees(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)
    assert flat(tree).keys() == flat(other).keys()


@pytest.mark.parametrize("source", DRAFTERS)
def test_a_drafter_survives_a_round_trip_bit_for_bit(tmp_path, golden, source):
    checkpoint = public_drafter(source)
    save_drafter(tmp_path / "out", checkpoint)
    assert_same_tensors(tmp_path / "out", golden / source)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    again = load_drafter(tmp_path / "out")
    assert (again.drafter, again.corrector) == (checkpoint.drafter, checkpoint.corrector)
    assert_same_trees(again.params, checkpoint.params)


@pytest.mark.parametrize("name", ["domino", *baselines.KINDS])
def test_a_baselines_drafter_survives_a_round_trip_bit_for_bit(tmp_path, name):
    """All tensors of the public file, but the copies of the target's matrices that DeepSpec stores."""
    folder = baselines.write_folder(name, tmp_path / "in")
    checkpoint = load_drafter(folder)
    save_drafter(tmp_path / "out", checkpoint)
    stored, written = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    borrowed = {"embed_tokens.weight", "lm_head.weight"} & stored.keys()
    assert (len(borrowed) == 2) == (name != "domino") and written.keys() == stored.keys() - borrowed
    for tensor in written:
        np.testing.assert_array_equal(written[tensor], stored[tensor], err_msg=tensor)
    again = load_drafter(tmp_path / "out")
    assert (again.drafter, again.corrector) == (checkpoint.drafter, checkpoint.corrector)
    assert_same_trees(again.params, checkpoint.params)


def test_early_names_of_domino_are_read(tmp_path):
    folder = baselines.write_folder("domino", tmp_path)
    want = load_drafter(folder).params
    early = ("prefix_gru", "embed_proj")
    edit_tensors(
        folder, lambda tensors: {f"logit_head.{n}" if n.startswith(early) else n: t for n, t in tensors.items()}
    )
    assert "logit_head.prefix_gru.weight_ih_l0" in load_file(folder / "model.safetensors")
    assert_same_trees(load_drafter(folder).params, want)


BASELINE_DISAGREEMENTS = [  # of config.json with a drafter's weights: what the report names
    ("domino", {"dflash_config__gru_hidden_dim": 16}, r"prefix_gru.weight_hh_l0 has \(96, 32\) for \(48, 16\)"),
    ("domino", {"vocab_size": 200}, r"embed_proj.2.weight has \(199, 16\) for \(200, 16\)"),
    ("gated", {"markov_head_type": "vanilla"}, r"2 unexpected \(markov_head.gate_proj.bias"),
    ("gated", {"markov_head_type": "rnn"}, r"2 missing \(markov_head.joint_proj.bias"),
    ("gated", {"enable_confidence_head": False}, r"2 unexpected \(confidence_head.proj.bias"),
    ("gated", {"confidence_head_with_markov": False}, r"confidence_head.proj.weight has \(1, 80\) for \(1, 64\)"),
    ("gated", {"vocab_size": 200}, r"embed_tokens.weight has \(199, 64\) for \(200, 64\)"),
]


@pytest.mark.parametrize("name, changes, report", BASELINE_DISAGREEMENTS)
def test_a_baselines_config_that_disagrees_with_the_weights_is_refused(tmp_path, name, changes, report):
    folder = baselines.write_folder(name, tmp_path)
    edit_json(folder, "config.json", **changes)
    with pytest.raises(ValueError, match=report):
        load_drafter(folder)


@pytest.mark.parametrize("source", TARGETS)
def test_a_target_survives_a_round_trip_bit_for_bit(tmp_path, golden, source):
    ours, params = public_target(source)
    save_target(tmp_path / "out", ours, params)
    assert_same_tensors(tmp_path / "out", golden / source)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    again, same = load_target(tmp_path / "out")
    assert again == ours
    assert_same_trees(same, params)


def test_a_loaded_reranker_gives_the_public_codes_vectors(golden):
    checkpoint = public_drafter("lilicorr")
    inputs, want = (load_file(golden / f"lilicorr/{name}.safetensors") for name in ("inputs", "forward"))
    vectors = jax.jit(
        functools.partial(Reranker(checkpoint.corrector).apply, {"params": checkpoint.params["reranker"]})
    )(
        jnp.array(inputs["embed_tokens"][want["candidate_token_ids"]]),
        jnp.array(want["draft_hidden"][:, :, 1:]),
        jnp.array(want["candidate_log_probs"]),
        jnp.array(want["anchor_hidden"]),
        jnp.array(want["anchor_valid"] > 0),
    )
    assert_close(vectors.out, want["out_vec"])
    assert_close(vectors.in_, want["in_vec"])
    assert_close(vectors.anchor_out, want["anchor_out"])


def test_an_exported_drafter_holds_nothing_of_the_target_and_the_configs_dtype(tmp_path, golden):
    checkpoint = load_drafter(golden / "lilicorr", dtype="bfloat16")
    save_drafter(tmp_path, checkpoint)
    tensors = load_file(golden / "lilicorr/model.safetensors")
    header = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header.keys() == tensors.keys()
    assert not [name for name in header if "embed_tokens" in name or "lm_head" in name]
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    params = flat(load_drafter(tmp_path).params)
    kernel = tensors["fc.weight"].T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(params["drafter/fc/kernel"], kernel)


def test_master_weights_are_written_in_the_configs_dtype(tmp_path, golden):
    checkpoint = public_drafter("lilicorr")
    half = {"dtype": "bfloat16"}
    save_drafter(
        tmp_path,
        DrafterCheckpoint(
            drafter=dataclasses.replace(checkpoint.drafter, **half),
            corrector=dataclasses.replace(checkpoint.corrector, **half),
            params=checkpoint.params,
        ),
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(load_drafter(tmp_path).params)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_are_read(tmp_path, golden, dtype):
    folder = copied(golden / TARGETS[0], tmp_path)
    edit_tensors(folder, lambda tensors: {name: t.astype(dtype) for name, t in tensors.items()})
    _, params = load_target(folder)
    want = load_file(golden / TARGETS[0] / "model.safetensors")["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(params["embed"]["embedding"], want.astype(np.float32))
    assert params["embed"]["embedding"].dtype == jnp.float32


def test_shards_load_like_the_single_file(tmp_path, golden):
    folder = copied(golden / TARGETS[1], tmp_path)
    split_in_shards(folder)
    assert_same_trees(load_target(folder)[1], public_target(TARGETS[1])[1])


@pytest.mark.parametrize("axes", [dict(fsdp=4, tensor=2), dict(data=8)], ids=str)
def test_parameters_land_under_their_sharding(golden, axes):
    mesh = make_mesh(**axes)
    ours, params = load_target(golden / TARGETS[1], mesh=mesh)
    for path, leaf in flat(abstract_target(ours, mesh)).items():
        assert flat(params)[path].sharding == leaf.sharding
    assert_same_trees(params, public_target(TARGETS[1])[1])
    assert_same_trees(load_drafter(golden / "lilicorr", mesh=mesh).params, public_drafter("lilicorr").params)


def test_loading_holds_a_few_tensors_on_the_host_and_never_the_model(tmp_path):
    """Host arrays are traced, device buffers are not. The reader's own bound, two tensors, has a test of its own; JAX
    lets go of a copied array a little after the copy, and on a starved machine seven at a time have been seen."""
    ours = dataclasses.replace(presets.tiny().target, ffn_width=2**14)
    save_target(tmp_path, ours, jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_target(ours)))
    tracemalloc.start()
    load_target(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest, everything_else = 2**14 * ours.width * 4, 2**21
    assert peak < 10 * largest + everything_else < 18 * largest


def test_parameters_outlive_their_file(tmp_path, golden):
    folder = copied(golden / DRAFTERS[0], tmp_path)
    checkpoint = load_drafter(folder)
    edit_tensors(folder, lambda tensors: {name: 0 * t for name, t in tensors.items()})
    assert_same_trees(checkpoint.params, public_drafter(DRAFTERS[0]).params)


def test_a_drafter_may_carry_a_leading_model(tmp_path, golden):
    folder = copied(golden / "lilicorr", tmp_path)
    edit_tensors(folder, lambda tensors: {f"model.{name}": t for name, t in tensors.items()})
    assert_same_trees(load_drafter(folder).params, public_drafter("lilicorr").params)
    edit_tensors(folder, lambda tensors: tensors | {"fc.weight": tensors["model.fc.weight"]})
    with pytest.raises(ValueError, match="model.fc.weight"):
        load_drafter(folder)


def test_stored_rotary_frequencies_are_read_over(tmp_path, golden):
    folder = copied(golden / TARGETS[0], tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    edit_tensors(folder, lambda tensors: tensors | buffer)
    assert_same_trees(load_target(folder)[1], public_target(TARGETS[0])[1])


def test_a_foreign_prefix_a_surplus_and_a_lack_come_in_one_report(tmp_path, golden):
    folder = copied(golden / TARGETS[1], tmp_path)

    def change(tensors):
        tensors = {f"language_model.{name}": t for name, t in tensors.items() if name != "model.norm.weight"}
        return tensors | {"extra.weight": np.zeros(3, np.float32)}

    edit_tensors(folder, change)
    with pytest.raises(ValueError) as caught:
        load_target(folder)
    count = len(load_file(golden / TARGETS[1] / "model.safetensors"))
    for part in (f"{count} missing (lm_head.weight", f"{count} unexpected (extra.weight, language_model.lm_head"):
        assert part in str(caught.value)


def test_a_tied_target_with_an_equal_copy_loads_and_with_another_is_refused(tmp_path, golden):
    folder = copied(golden / TARGETS[0], tmp_path)
    edit_tensors(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    assert_same_trees(load_target(folder)[1], public_target(TARGETS[0])[1])
    edit_tensors(folder, lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        load_target(folder)


@pytest.mark.parametrize("tied, names", [(True, "lm_head.weight differs"), (False, r"1 missing \(lm_head.weight\)")])
def test_a_wrong_word_on_tying_is_refused(tmp_path, golden, tied, names):
    folder = copied(golden / (TARGETS[1] if tied else TARGETS[0]), tmp_path)
    edit_json(folder, "config.json", tie_word_embeddings=tied)
    with pytest.raises(ValueError, match=names):
        load_target(folder)


DISAGREEMENTS = {  # of config.json with the weights of the golden LiLiCorr checkpoint: what the report names
    "block size": ({"block_size": 7}, r"slot_embedding has \(1, 1, 5, 1, 32\) for \(1, 1, 6, 1, 32\)"),
    "candidates": ({"dflash_config__lilicorr_candidate_topk": 5}, r"rank_embedding has \(1, 1, 1, 4, 32\)"),
    "target layers": ({"dflash_config__target_layer_ids": [1, 2, 3]}, r"fc.weight has \(64, 320\) for \(64, 192\)"),
    "drafter layers": ({"num_hidden_layers": 3, "layer_types": None}, "11 missing"),
    "reranker layers": ({"dflash_config__lilicorr_num_layers": 1}, "10 unexpected"),
    "reranker width": ({"dflash_config__lilicorr_hidden_size": 0}, "2 unexpected"),
    "heads": ({"num_key_value_heads": 4}, r"k_proj.weight has \(32, 64\) for \(64, 64\)"),
    "head width": ({"head_dim": 32}, r"q_norm.weight has \(16,\) for \(32,\)"),
    "no reranker": ({"dflash_config__lilicorr_enabled": False}, "46 unexpected"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_config_that_disagrees_with_the_weights_is_refused(tmp_path, golden, what):
    changes, names = DISAGREEMENTS[what]
    folder = copied(golden / "lilicorr", tmp_path)
    edit_json(folder, "config.json", **changes)
    with pytest.raises(ValueError, match=names):
        load_drafter(folder)


def test_a_plain_drafter_with_reranker_tensors_is_refused(tmp_path, golden):
    folder = copied(golden / DRAFTERS[0], tmp_path)
    edit_tensors(folder, lambda tensors: tensors | {"lilicorr.same_slot_bias": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"1 unexpected \(lilicorr.same_slot_bias\)"):
        load_drafter(folder)


def test_parameters_that_do_not_fit_the_config_are_not_written(tmp_path, golden):
    checkpoint = public_drafter("lilicorr")
    params = {"drafter": checkpoint.params["drafter"]}
    with pytest.raises(ValueError, match="46 missing"):
        save_drafter(tmp_path, dataclasses.replace(checkpoint, params=params))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_without_a_file_is_refused_by_its_name(tmp_path, golden, name):
    folder = copied(golden / "lilicorr", tmp_path)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name):
        load_drafter(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, golden, text):
    folder = copied(golden / "lilicorr", tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load_drafter(folder)


def test_a_config_of_many_bytes_and_a_link_outside_are_refused(tmp_path, golden):
    folder = copied(golden / "lilicorr", tmp_path / "folder")
    (folder / "config.json").write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(ValueError, match="16777217 bytes"):
        load_drafter(folder)
    (folder / "config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(ValueError, match="outside the folder"):
        load_drafter(folder)


def test_end_ids_come_from_the_generation_config(tmp_path, golden):
    folder = copied(golden / TARGETS[0], tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [11, 7], "temperature": 0.6}')
    assert load_target(folder)[0].eos_ids == (11, 7)


def test_biases_are_loaded_by_name(tmp_path):
    """A Qwen2-shaped target: no norms of queries and keys, biases on three projections."""
    ours = dataclasses.replace(presets.tiny().target, qk_norm=False, attention_bias=True, num_layers=1)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), abstract_target(ours))
    save_target(tmp_path, ours, params)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = params["layers_0"]["attention"]["v_proj"]["bias"]
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.v_proj.bias"], bias)
    assert "model.layers.0.self_attn.o_proj.bias" not in tensors
    assert_same_trees(load_target(tmp_path)[1], params)
    save_file(tensors | {"model.layers.0.self_attn.o_proj.bias": bias}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="1 unexpected .*o_proj.bias"):
        load_target(tmp_path)
