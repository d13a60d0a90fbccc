"""An Orbax export gives back everything it was given, under any sharding, or says what is wrong."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.conversion.checkpoint import load_drafter, save_drafter
from lilicorr_jax.conversion.export import load_any, load_export, save_export
from lilicorr_jax.conversion.rules import flat
from lilicorr_jax.sharding import make_mesh
from tests import baselines
from tests.conversion.folders import edit_json


@pytest.fixture(scope="module")
def checkpoint(request):
    """The golden LiLiCorr drafter with settings that the public layout has no word for, and mixed dtypes."""
    golden = request.getfixturevalue("golden")
    ours = load_drafter(golden / "lilicorr")
    params = dict(ours.params) | {
        "reranker": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ours.params["reranker"])
    }
    return dataclasses.replace(ours, corrector=dataclasses.replace(ours.corrector, init="fan_in"), params=params)


@pytest.fixture
def folder(tmp_path, checkpoint):
    save_export(tmp_path / "export", checkpoint)
    return tmp_path / "export"


def assert_same(one, other):
    assert (one.drafter, one.corrector) == (other.drafter, other.corrector)
    ours, theirs = flat(one.params), flat(other.params)
    assert ours.keys() == theirs.keys()
    for path, leaf in theirs.items():
        assert ours[path].dtype == leaf.dtype
        np.testing.assert_array_equal(ours[path], leaf, err_msg=path)


def test_an_export_gives_back_everything(folder, checkpoint):
    assert_same(load_export(folder), checkpoint)
    assert_same(load_any(folder), checkpoint)


def test_an_export_restores_under_a_sharding(folder, checkpoint):
    mesh = make_mesh(fsdp=4, tensor=2)
    restored = load_any(folder, mesh=mesh)
    assert_same(restored, checkpoint)
    assert restored.params["drafter"]["fc"]["kernel"].sharding.mesh == mesh
    assert not restored.params["drafter"]["fc"]["kernel"].is_fully_replicated


@pytest.mark.parametrize("name", ["domino", "rnn"])
def test_a_baselines_export_gives_back_everything(tmp_path, name):
    checkpoint = load_drafter(baselines.write_folder(name, tmp_path / "in"))
    save_export(tmp_path / "out", checkpoint)
    described = json.loads((tmp_path / "out/export.json").read_text())["corrector"]
    assert described["name"] == ("domino" if name == "domino" else "dspark")
    assert_same(load_any(tmp_path / "out"), checkpoint)


def test_a_plain_drafter_is_exported_without_a_reranker(tmp_path, golden):
    plain = load_drafter(golden / "dflash/tied/drafter")
    save_export(tmp_path, plain)
    assert load_export(tmp_path).corrector is None
    assert_same(load_export(tmp_path), plain)


def test_a_second_export_replaces_the_first(folder, checkpoint, golden):
    plain = load_drafter(golden / "dflash/tied/drafter")
    save_export(folder, plain)
    assert_same(load_export(folder), plain)


def test_either_kind_of_folder_is_recognised(tmp_path, golden):
    assert_same(load_any(golden / "lilicorr"), load_drafter(golden / "lilicorr"))
    with pytest.raises(ValueError, match="neither of export.json and config.json"):
        load_any(tmp_path)
    save_drafter(tmp_path, load_drafter(golden / "lilicorr"))
    save_export(tmp_path, load_drafter(golden / "lilicorr"))
    with pytest.raises(ValueError, match="both of export.json and config.json"):
        load_any(tmp_path)


@pytest.mark.parametrize(
    "changes, value",
    [
        ({"format": "other 2"}, "'other 2'"),
        ({"drafter": [1]}, r"\[1\]"),
        ({"drafter__colour": 3}, "colour"),
        ({"drafter__width": None}, "width"),
        ({"drafter__width": "x"}, "DrafterConfig"),
        ({"drafter__mask_id": 1000}, "1000"),
        ({"corrector__num_candidates": 5}, r"rank_embedding has \(4, 32\) for \(5, 32\)"),
        ({"corrector__name": "medusa"}, "'medusa'"),
        ({"corrector": [1]}, r"\[1\]"),
        ({"extra": 1}, "format"),
    ],
)
def test_a_wrong_description_is_refused(folder, changes, value):
    edit_json(folder, "export.json", **changes)
    with pytest.raises(ValueError, match=value):
        load_export(folder)


def test_a_description_of_other_parameters_is_refused(folder):
    description = json.loads((folder / "export.json").read_text()) | {"corrector": None}
    (folder / "export.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match="46 unexpected"):
        load_export(folder)


def test_an_export_without_its_parameters_is_refused(folder):
    (folder / "params" / "_METADATA").unlink()
    with pytest.raises(ValueError, match="not a whole Orbax checkpoint"):
        load_export(folder)
    shutil.rmtree(folder / "params")
    with pytest.raises(ValueError, match="params is missing"):
        load_export(folder)
