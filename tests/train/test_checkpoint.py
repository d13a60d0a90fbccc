"""Checkpoints of a small state: whole or absent, found after damage, restored to other devices, refused to others."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lilicorr_jax.sharding import make_mesh
from train.checkpoint import Checkpoints

IDENTITY = {"config": {"seed": 1, "objective": {"rerank_weight": 0.25}, "eos": (1, 2)}, "data": 77}


def state_at(step: int, devices: int = 1):
    place = NamedSharding(make_mesh(fsdp=devices), PartitionSpec("fsdp"))
    table = jax.device_put(np.arange(16, dtype=np.float32).reshape(8, 2) * step, place)
    return {"table": table, "step": jax.device_put(jnp.int32(step), NamedSharding(place.mesh, PartitionSpec()))}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def save(folder, *steps, kept=3, identity=IDENTITY, devices=1):
    with Checkpoints(folder, kept, identity) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_at(step, devices))


def restore(folder, identity=IDENTITY, devices=1):
    with Checkpoints(folder, 3, identity) as checkpoints:
        return checkpoints.restore_latest(abstract(state_at(0, devices)))


def test_latest_state_comes_back_bit_for_bit_and_older_ones_go(tmp_path):
    assert restore(tmp_path) is None
    save(tmp_path, 1, 2, 3, 4)
    restored = restore(tmp_path)
    assert int(restored["step"]) == 4
    np.testing.assert_array_equal(restored["table"], state_at(4)["table"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3", "4"]


def test_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"table": jnp.zeros((500, 500)), "step": jnp.int32(0)}
    with Checkpoints(tmp_path, 3, IDENTITY) as checkpoints:
        for step in range(1, 4):
            state = add(state)
            checkpoints.save(step, state)
            for _ in range(20):
                state = add(state)
    with Checkpoints(tmp_path, 3, IDENTITY) as checkpoints:
        restored = checkpoints.restore_latest(abstract(state))
    assert int(restored["step"]) == 43 and float(restored["table"].min()) == float(restored["table"].max()) == 43


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_what_eight_devices_saved_any_number_restores(tmp_path, devices):
    save(tmp_path, 5, devices=8)
    restored = restore(tmp_path, devices=devices)
    np.testing.assert_array_equal(restored["table"], state_at(5)["table"])
    assert len(restored["table"].sharding.device_set) == devices


def damage_arrays(folder):
    for path in (folder / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:10])


def damage_identity(folder):
    shutil.rmtree(folder / "identity")


def damage_all(folder):
    shutil.rmtree(folder / "state")
    (folder / "state").mkdir()


@pytest.mark.parametrize("damage", [damage_arrays, damage_identity, damage_all])
def test_damaged_checkpoint_is_set_aside_with_a_warning_and_the_one_before_is_used(tmp_path, caplog, damage):
    save(tmp_path, 1, 2)
    damage(tmp_path / "2")
    with caplog.at_level(logging.WARNING, logger="train.checkpoint"):
        assert int(restore(tmp_path)["step"]) == 1
    assert str(tmp_path / "2") in caplog.text and "set aside" in caplog.text
    save(tmp_path, 2)
    assert int(restore(tmp_path)["step"]) == 2
    assert (tmp_path / "2.broken").is_dir()


def test_unfinished_save_is_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    assert int(restore(tmp_path)["step"]) == 1


def test_only_damaged_checkpoints_are_an_error_and_not_a_fresh_start(tmp_path):
    save(tmp_path, 3)
    damage_arrays(tmp_path / "3")
    with pytest.raises(ValueError, match=r"None of the checkpoints \[3\] .* can be read"):
        restore(tmp_path)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"data": 78}, "data was 77, is now 78"),
        (
            {"config": {**IDENTITY["config"], "objective": {"rerank_weight": 0.05}}},
            "rerank_weight was 0.25, is now 0.05",
        ),
        ({"config": {"seed": 1}}, "config.eos was .1, 2., is now None"),
    ],
)
def test_checkpoint_of_another_run_is_refused_by_the_field_that_differs(tmp_path, changed, sentence):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match=sentence):
        restore(tmp_path, identity=IDENTITY | changed)
    assert int(restore(tmp_path)["step"]) == 1, "a refusal must leave the checkpoint alone"
