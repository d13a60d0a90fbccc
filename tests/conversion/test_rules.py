"""Each table covers its model exactly, under the public names and in the public shapes."""

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from lilicorr_jax import presets, sharding
from lilicorr_jax.conversion.checkpoint import abstract_drafter, abstract_target, checkpoint_rules
from lilicorr_jax.conversion.config_json import drafter_from_json, target_from_json
from lilicorr_jax.conversion.folder import read_json
from lilicorr_jax.conversion.rules import (
    check_cover,
    corrector_rules,
    drafter_rules,
    flat,
    reranker_rules,
    stored_shapes,
    target_rules,
)
from lilicorr_jax.models.corrector import corrector_shapes, make_corrector
from lilicorr_jax.models.lilicorr import Reranker, reranker_shapes

TINY = presets.tiny()


@pytest.mark.parametrize("tied, bias, norm", list(itertools.product([False, True], repeat=3)))
def test_the_targets_table_covers_its_parameters(tied, bias, norm):
    ours = dataclasses.replace(TINY.target, tie_embeddings=tied, attention_bias=bias, qk_norm=norm)
    rules = target_rules(ours)
    assert sorted(rule.path for rule in rules) == sorted(flat(abstract_target(ours)))
    assert len({rule.name for rule in rules}) == len(rules)


@pytest.mark.parametrize("width", [24, 40])
def test_the_drafters_table_covers_its_parameters(width):
    reranker = dataclasses.replace(TINY.reranker, width=width)
    rules = checkpoint_rules(TINY.drafter, reranker)
    assert sorted(rule.path for rule in rules) == sorted(flat(abstract_drafter(TINY.drafter, reranker)))
    assert len({rule.name for rule in rules}) == len(rules)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_reranker_has_26_tensors_and_10_a_layer(layers):
    reranker = dataclasses.replace(TINY.reranker, num_layers=layers)
    assert len(reranker_rules(reranker)) == 26 + 10 * layers
    same_width = dataclasses.replace(reranker, width=reranker.drafter_width)
    assert len(reranker_rules(same_width)) == 24 + 10 * layers


def test_public_drafters_have_58_tensors_and_46_more_with_the_reranker():
    preset = presets.qwen3_8b()
    assert len(drafter_rules(preset.drafter)) == 58
    assert len(checkpoint_rules(preset.drafter, preset.reranker)) == 104


@pytest.mark.parametrize("preset, count", [("qwen3_8b", 36_758_794), ("qwen3_4b", 32_040_202)])
def test_public_rerankers_have_the_papers_number_of_parameters(preset, count):
    ours = presets.PRESETS[preset]().reranker
    shapes = sharding.abstract_parameters(Reranker(ours), *reranker_shapes(ours))
    assert sharding.count_parameters(shapes) == count
    assert sum(np.prod(shape) for shape in stored_shapes(reranker_rules(ours), shapes).values()) == count


BASELINES = {  # of the presets' corrector: fields, and parameters of the 8B and the 4B
    "domino": ({}, 55_934_976, 50_823_168),
    "dspark": ({}, 77_795_585, 77_794_049),
    "gated": ({"kind": "gated"}, 77_795_585 + 1_114_368, 77_794_049 + 721_152),
    "rnn": ({"kind": "rnn"}, 77_795_585 + 3_539_712, 77_794_049 + 2_360_064),
    "without confidence": ({"has_confidence": False}, 2 * 38_895_616, 2 * 38_895_616),
}


@pytest.mark.parametrize("preset, column", [("qwen3_8b", 0), ("qwen3_4b", 1)])
@pytest.mark.parametrize("name", BASELINES)
def test_public_baselines_have_the_published_number_of_parameters(name, preset, column):
    fields, *counts = BASELINES[name]
    method = "domino" if name == "domino" else "dspark"
    ours = dataclasses.replace(presets.PRESETS[preset]().for_method(method)[1], **fields)
    shapes = sharding.abstract_parameters(make_corrector(ours), *corrector_shapes(ours))
    assert sharding.count_parameters(shapes) == counts[column]
    assert sum(np.prod(shape) for shape in stored_shapes(corrector_rules(ours), shapes).values()) == counts[column]


def test_published_tensors_of_the_baselines_have_their_shapes():
    (_, domino), (_, dspark) = (presets.qwen3_8b().for_method(method) for method in ("domino", "dspark"))
    rnn = dataclasses.replace(dspark, kind="rnn")
    found = {}
    for ours in (domino, rnn):
        shapes = sharding.abstract_parameters(make_corrector(ours), *corrector_shapes(ours))
        found |= stored_shapes(corrector_rules(ours), shapes)
    assert found == {
        "prefix_gru.weight_ih_l0": (3072, 4096),
        "prefix_gru.weight_hh_l0": (3072, 1024),
        "embed_proj.0.weight": (256, 5120),
        "embed_proj.2.weight": (151_936, 256),
        "markov_head.markov_w1.weight": (151_936, 256),
        "markov_head.markov_w2.weight": (151_936, 256),
        "markov_head.joint_proj.weight": (768, 512 + 4096),
        "markov_head.joint_proj.bias": (768,),
        "confidence_head.proj.weight": (1, 4352),
        "confidence_head.proj.bias": (1,),
    }


@pytest.mark.parametrize("folder", ["dflash/tied/drafter", "dflash/untied/drafter", "lilicorr"])
def test_a_drafters_stored_shapes_are_the_public_files(golden, folder):
    drafter, reranker = drafter_from_json(read_json(golden / folder, "config.json"))
    shapes = stored_shapes(checkpoint_rules(drafter, reranker), abstract_drafter(drafter, reranker))
    assert shapes == {name: t.shape for name, t in load_file(golden / folder / "model.safetensors").items()}


@pytest.mark.parametrize("folder", ["dflash/tied/target", "dflash/untied/target"])
def test_a_targets_stored_shapes_are_the_public_files(golden, folder):
    ours = target_from_json(read_json(golden / folder, "config.json"))
    shapes = stored_shapes(target_rules(ours), abstract_target(ours))
    assert shapes == {name: t.shape for name, t in load_file(golden / folder / "model.safetensors").items()}


def test_every_layout_writes_what_it_reads():
    rng = np.random.default_rng(0)
    shapes = flat(abstract_drafter(TINY.drafter, TINY.reranker))
    for rule in checkpoint_rules(TINY.drafter, TINY.reranker):
        leaf = rng.normal(size=shapes[rule.path].shape)
        np.testing.assert_array_equal(rule.layout.read(rule.layout.write(leaf)), leaf)


def test_every_difference_is_reported_at_once_with_counts():
    wanted = {"a": (2, 3), "b": (4,), "c": (1,), "d": (5, 6)}
    with pytest.raises(ValueError) as caught:
        check_cover("x", wanted, {"x.a": (2, 3), "b": (4,), "c": (2,), "e": (1,)})
    sentence = str(caught.value)
    for part in ("the 4 that", "2 missing (a, d)", "2 unexpected (e, x.a)", "1 of another shape (c has (2,) for (1,))"):
        assert part in sentence


def test_a_long_report_is_cut_and_says_so():
    with pytest.raises(ValueError, match=re.escape("100 missing (t000, t001")) as caught:
        check_cover("x", {f"t{i:03}": () for i in range(100)}, {})
    assert "and 88 more" in str(caught.value) and len(str(caught.value)) < 300


def test_equal_names_and_shapes_pass():
    check_cover("x", {"a": (2, 3)}, {"a": (2, 3)})
    assert jax.tree.leaves(flat({"a": {"b": 1}})) == [1]
