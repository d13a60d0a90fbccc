"""Training arms in processes: kept once, never made twice, gone on with after a stop. A stub stands for the trainer."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.study import arms, train

STUB = """
import json, pathlib, sys, time
import numpy as np
from safetensors.numpy import save_file
flags = dict(flag[2:].split("=", 1) for flag in sys.argv[1:])
output, last = pathlib.Path(flags["output"]), int(flags["steps"])
with (output / "calls").open("a") as calls: calls.write("x")
if (output / "stumble").exists():
    (output / "stumble").unlink()
    sys.exit("no such luck")
with (output / "metrics.jsonl").open("a") as metrics:
    for step in range(10, last + 1, 10):
        end = time.process_time() + 0.1
        while time.process_time() < end: pass
        print(json.dumps({"step": step}), file=metrics, flush=True)
        time.sleep(0.1)
hf = output / "export" / "hf"
hf.mkdir(parents=True)
save_file({"w": np.array([1.0, 1 / 3], np.float32)}, hf / "model.safetensors")
(hf / "config.json").write_text("{}")
"""
PROGRAM = ("-c", STUB)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SECONDS_BETWEEN_LOOKS", 0.05)
    return tmp_path / "work", tmp_path / "keep"


def an_arm(name: str = "dflash-s1") -> arms.Arm:
    return arms.choose([name])[0]


def test_an_arm_is_trained_once_and_kept_with_rounded_weights(folders):
    work, keep = folders
    record = train.train_arm(an_arm(), 60, work, keep, PROGRAM)
    again = train.train_arm(an_arm(), 60, work, keep, ("-c", "raise SystemExit(9)"))
    assert again == record == json.loads((keep / "dflash-s1" / "arm.json").read_text())
    assert (record["variant"], record["seed"], record["steps"]) == ("dflash", 1, 60)
    assert not any("output" in flag for flag in record["flags"]) and "--seed=1" in record["flags"]
    weights = load_file(keep / "dflash-s1" / "export" / "model.safetensors")["w"]
    assert weights.dtype == np.float16 and weights.tolist() == [1.0, float(np.float16(1 / 3))]
    assert (keep / "dflash-s1" / "metrics.jsonl").read_text().count("step") == 6


def test_cpu_time_of_a_step_is_what_the_process_spent_between_steps(folders):
    record = train.train_arm(an_arm(), 60, *folders, PROGRAM)
    assert 0.005 < record["step_cpu_s"] < 0.02  # a tenth of a second each ten steps
    assert record["last_process_cpu_s"] > 0.6 and record["last_process_wall_s"] > 1.0
    assert 0.005 < train.time_steps(an_arm(), 60, folders[0], PROGRAM) < 0.02


def test_a_failed_arm_is_not_kept_and_the_same_call_goes_on(folders):
    work, keep = folders
    (work / "dflash-s1").mkdir(parents=True)
    (work / "dflash-s1" / "stumble").touch()
    with pytest.raises(ValueError, match="no such luck"):
        train.train_arm(an_arm(), 40, work, keep, PROGRAM)
    assert not keep.exists()
    train.train_arm(an_arm(), 40, work, keep, PROGRAM)
    assert (work / "dflash-s1" / "calls").read_text() == "xx"


def test_a_half_kept_arm_is_kept_anew(folders):
    work, keep = folders
    train.train_arm(an_arm(), 40, work, keep, PROGRAM)
    (keep / "dflash-s1" / "arm.json").unlink()
    with pytest.raises(ValueError, match="ended with 9"):
        train.train_arm(an_arm(), 40, work, keep, ("-c", "raise SystemExit(9)"))


def test_an_arm_that_was_kept_with_other_flags_is_refused(folders):
    train.train_arm(an_arm(), 40, *folders, PROGRAM)
    with pytest.raises(ValueError, match="--steps=40.*--steps=50.*move it away"):
        train.train_arm(an_arm(), 50, *folders, PROGRAM)


def test_time_per_step_leaves_out_the_first_look_and_other_processes():
    looks = [(1, 0, 5.0), (1, 50, 30.0), (1, 100, 35.0), (2, 100, 9.0), (2, 150, 16.0), (2, 200, 22.0)]
    log = [dict(zip(("pid", "step", "cpu_s"), look, strict=True)) for look in looks]
    assert train.step_cpu_seconds(log) == pytest.approx(0.12)  # of 0.1, 0.14 and 0.12
    with pytest.raises(ValueError, match="got 1 looks"):
        train.step_cpu_seconds(log[:1])


def test_the_last_step_survives_a_half_written_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert train.last_step(path) == 0
    path.write_text('{"step": 10}\n{"step": 20, "loss": 3')
    assert train.last_step(path) == 10


def test_a_process_that_is_gone_has_no_time():
    assert train.process_cpu_seconds(2**22 + 1) is None
    assert train.process_cpu_seconds(__import__("os").getpid()) > 0
