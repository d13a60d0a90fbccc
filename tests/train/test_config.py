"""Run configurations that can't be meant, each refused in one sentence with the value in it."""

import pytest

from lilicorr_jax.config import ObjectiveConfig
from train.config import MeshConfig, TrainConfig

REQUIRED = dict(target="t", data="d", output="o", preset="tiny", steps=10)

REFUSED = {
    "got None and None": dict(steps=None),
    "got 10 and 2": dict(epochs=2),
    "--batch_rows must be at least 1; got 0": dict(batch_rows=0),
    "--steps must be at least 1; got 0": dict(steps=0),
    "2 x 4 x 1; got 20": dict(batch_rows=20, accumulation=2, mesh=MeshConfig(data=4)),
    "1 x 2 x 3; got 8": dict(batch_rows=8, mesh=MeshConfig(data=2, fsdp=3)),
    "at most 15 anchors; --anchors asks for 16": dict(sequence_length=16, anchors=16),
    "--eval_every=5 needs rows": dict(eval_every=5),
    "--eval_rows must not be negative; got -1": dict(eval_rows=-1),
    "--drafter_learning_rate must be positive and finite; got inf": dict(drafter_learning_rate=float("inf")),
    "--clip must be positive and finite; got 0": dict(clip=0.0),
    r"--warmup_share must lie in \[0, 1\); got 1.0": dict(warmup_share=1.0),
    "--seed must lie in .* got -1": dict(seed=-1),
    "drafter_weighting=dpace is for dflash and lilicorr; --method=domino": dict(
        method="domino", objective=ObjectiveConfig(drafter_weighting="dpace")
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_contradictory_run_is_refused(sentence):
    with pytest.raises(ValueError, match=sentence):
        TrainConfig(**(REQUIRED | REFUSED[sentence]))


def test_mesh_axis_of_no_devices_is_refused():
    with pytest.raises(ValueError, match="--mesh.fsdp must be at least 1; got 0"):
        MeshConfig(fsdp=0)


def test_epochs_become_steps_of_whole_batches():
    config = TrainConfig(**(REQUIRED | dict(steps=None, epochs=6, batch_rows=64)))
    assert config.num_steps(1_400_000) == 131_250
    assert config.num_steps(100) == 9  # 600 rows
    with pytest.raises(ValueError, match="--epochs=6 over 10 examples do not fill one batch of 64"):
        config.num_steps(10)


def test_reranker_init_overrides_the_presets():
    assert TrainConfig(**REQUIRED).models()[1].init == "normal"
    assert TrainConfig(**(REQUIRED | dict(reranker_init="fan_in"))).models()[1].init == "fan_in"
    assert TrainConfig(**(REQUIRED | dict(preset="demo"))).models()[1].init == "fan_in"


def test_what_changes_the_mathematics_is_fixed_for_a_resumed_run():
    fixed = TrainConfig(**REQUIRED).fixed()
    for name in ("seed", "steps", "batch_rows", "anchors", "sequence_length", "objective", "method", "preset", "clip"):
        assert name in fixed
    for name in ("output", "log_every", "checkpoint_every", "mesh", "accumulation"):
        assert name not in fixed
