"""Whole runs of the tiny preset: they learn, die in every way, go on, and end with the same parameters bit for bit."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.loop as loop
from lilicorr_jax.conversion.checkpoint import load_target, save_target
from lilicorr_jax.conversion.export import load_any
from lilicorr_jax.flags import flags_from_record
from lilicorr_jax.presets import PRESETS
from tests.tolerance import assert_close, without_keys_biases
from tests.train.texts import counting_texts
from train.checkpoint import Checkpoints
from train.config import ClusterConfig, MeshConfig, TrainConfig
from train.main import main

STEPS, BREAK, WARM_UP = 28, 10, 14
MEASURED = ("tokens_per_second", "host_memory_gib")
PATIENCE_S = 900  # for processes of their own, should the machine be busy; only what hangs takes so long


def start(config: TrainConfig) -> int:
    """The command line in this process."""
    return main(flags_from_record(config))


def trained_on(config: TrainConfig) -> list[list[int]]:
    """The example ids of every batch that a run in this process trains on, to its end."""
    place, batches = loop.place, []

    def note(batch, mesh):
        if len(batch.example_id) == config.batch_rows:  # a batch to measure on is shorter
            batches.append(batch.example_id.tolist())
        return place(batch, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "place", note)
        assert start(config) == 0
    return batches


def exported(output: Path):
    return load_any(output / "export" / "orbax").params


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(one: TrainConfig, other: TrainConfig):
    """The same parameters, moments, counters and story, learning rates in it, but for clock and memory."""
    folders = Path(one.output), Path(other.output)
    jax.tree.map(np.testing.assert_array_equal, *map(exported, folders))
    jax.tree.map(np.testing.assert_array_equal, *map(last_state, (one, other)))
    strip = lambda record: {name: value for name, value in record.items() if name not in MEASURED}
    stories = [list(map(strip, metrics(folder))) for folder in folders]
    assert stories[0] == stories[1] and "drafter_learning_rate" in stories[0][0]


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Runs of this module differ in nothing that their programs know of, so that they share them."""
    init_state, make_train_step = loop.init_state, loop.make_train_step
    states, steps = {}, {}

    def init_state_once(config, optimizer, mesh):
        kind = config.seed, config.method
        if kind not in states:
            states[kind] = init_state(config, optimizer, mesh)
        return jax.tree.map(jnp.copy, states[kind])  # a step takes over its state's memory

    def make_train_step_once(objective, *arguments):
        return steps.setdefault(objective, make_train_step(objective, *arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "init_state", init_state_once)
        patch.setattr(loop, "make_train_step", make_train_step_once)
        yield


@pytest.fixture(scope="module")
def whole(config_for, tmp_path_factory) -> Path:
    """A run that nobody interrupted."""
    output = tmp_path_factory.mktemp("whole")
    batches = trained_on(config_for(output))
    (output / "batches.json").write_text(json.dumps(batches))
    return output


def test_run_learns(whole):
    story = [record for record in metrics(whole) if "loss" in record]
    assert [record["step"] for record in story] == list(range(2, STEPS + 1, 2))
    first, last = story[0], story[-1]
    for falling in ("loss", "drafter_loss"):
        assert last[falling] < 0.5 * first[falling], falling
    for rising, gain in dict(coverage=0.6, oracle_prefix=2.0, top1_prefix=0.6, selected_prefix=0.6).items():
        assert last[rising] > first[rising] + gain, rising
    for record in story:
        lattice = 0.25 * (record["rerank_loss"] + record["distractor_loss"])
        np.testing.assert_allclose(record["loss"], record["drafter_loss"] + lattice, rtol=1e-5)
        assert record["top1_prefix"] <= record["oracle_prefix"] and record["selected_prefix"] <= record["oracle_prefix"]


@pytest.mark.parametrize(
    ("method", "own", "left", "gain"),
    [
        ("domino", {"selected_prefix", "base_weight"}, dict(corrected_loss=0.4), 0.4),
        ("dspark", {"selected_prefix"}, dict(corrected_loss=0.8, distance=0.6, confidence_loss=0.9), 0.12),
    ],
    ids=["domino", "dspark"],
)
def test_run_of_a_baseline_learns_and_exports(config_for, tmp_path, method, own, left, gain):
    """Of each loss this share is left at the end, coverage gains, and the corrected logits are the better ones."""
    assert start(config_for(tmp_path, method=method, eval_every=0, checkpoint_every=STEPS)) == 0
    first, *_, last = (record for record in metrics(tmp_path))
    assert own | left.keys() <= last.keys() and not {"rerank_loss", "reranker_learning_rate"} & last.keys()
    assert all(last[loss] < share * first[loss] for loss, share in left.items())
    assert last["coverage"] > first["coverage"] + gain and last["corrected_loss"] < 0.96 * last["drafter_loss"]
    if method == "domino":
        blend = last["base_weight"] * last["drafter_loss"] + (1 - last["base_weight"]) * last["corrected_loss"]
        assert (first["base_weight"], last["base_weight"]) == (pytest.approx(27 / 28), pytest.approx(1 / 28))
    else:
        blend = 0.1 * last["corrected_loss"] + 0.9 * last["distance"] + last["confidence_loss"]
    np.testing.assert_allclose(last["loss"], blend, rtol=1e-5)
    ours, theirs = load_any(tmp_path / "export" / "orbax"), load_any(tmp_path / "export" / "hf")
    assert (ours.drafter, ours.corrector) == PRESETS["tiny"]().for_method(method)
    assert ours.params.keys() == {"drafter", method}
    assert_close(theirs.params, ours.params)


def test_run_learns_what_holds_for_rows_it_never_saw(whole):
    middle, end = (record for record in metrics(whole) if "held_out_loss" in record)
    assert (middle["step"], end["step"]) == (STEPS // 2, STEPS)
    assert end["held_out_loss"] < 0.85 * middle["held_out_loss"]
    assert end["held_out_coverage"] > middle["held_out_coverage"] + 0.2
    assert end["held_out_selected_prefix"] <= end["held_out_oracle_prefix"]


def test_run_folder_holds_the_flags_the_checkpoints_and_both_exports(whole, config_for):
    assert (whole / "config.flags").read_text().splitlines() == flags_from_record(config_for(whole))
    assert sorted(int(path.name) for path in (whole / "checkpoints").iterdir()) == [24, 28]
    ours, theirs = load_any(whole / "export" / "orbax"), load_any(whole / "export" / "hf")
    assert (ours.drafter, ours.corrector) == (PRESETS["tiny"]().drafter, PRESETS["tiny"]().reranker)
    assert_close(theirs.params, ours.params)
    assert ours.params.keys() == {"drafter", "reranker"}


@pytest.fixture
def stop_before(monkeypatch):
    """SIGTERM while the n-th step of the process's next run is prepared: that step is made and saved."""

    def stop(step: int) -> None:
        place, calls = loop.place, []

        def place_and_stop(batch, mesh):
            calls.append(batch)
            if len(calls) == step:
                monkeypatch.setattr(loop, "place", place)
                os.kill(os.getpid(), signal.SIGTERM)
            return place(batch, mesh)

        monkeypatch.setattr(loop, "place", place_and_stop)

    return stop


def test_run_stopped_by_sigterm_saves_and_goes_on_as_if_nothing_had_been(whole, config_for, tmp_path, stop_before):
    stop_before(BREAK)
    assert start(config_for(tmp_path)) == 128 + signal.SIGTERM
    assert (tmp_path / "checkpoints" / "10").is_dir() and not (tmp_path / "export").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert start(config_for(tmp_path)) == 0
    assert_same_run(config_for(tmp_path), config_for(whole))


def last_state(config: TrainConfig):
    """Parameters, moments and counters of the last checkpoint, on one device."""
    run = loop.prepare(replace(config, mesh=MeshConfig()))
    state = loop.init_state(run.config, loop.make_optimizer(run.config, run.num_steps), run.objective.mesh)
    with Checkpoints(run.output / "checkpoints", 100, run.identity) as checkpoints:
        return checkpoints.restore_latest(loop.abstract_state(state))


def gradient(before, after):
    """The clipped gradient of the step between two states: Adam's first moments moved a tenth of the way to it."""
    moments = [
        [x for p, x in jax.tree_util.tree_leaves_with_path(s.opt_state) if ".mu" in str(p)] for s in (before, after)
    ]
    return [
        10 * np.asarray(new, np.float64) - 9 * np.asarray(old, np.float64) for old, new in zip(*moments, strict=True)
    ]


def test_run_goes_from_one_device_to_eight_of_two_processes_and_back(whole, config_for, tmp_path, stop_before):
    """The second process alone gets the signal; both end behind the same step, and its checkpoint is whole."""
    one, two = tmp_path / "one", tmp_path / "two"
    stop_before(10)
    start(config_for(one))
    shutil.copytree(one, two)
    shared = config_for(
        two, mesh=MeshConfig(data=2, fsdp=2, tensor=2), checkpoint_every=1, checkpoints_kept=100, eval_every=12
    )
    tenth = last_state(config_for(one))
    stop_before(1)
    start(config_for(one))
    ours = gradient(tenth, last_state(config_for(one)))

    ended = run_together(shared, until=7, signalled=1)  # lines: two of them at step 12
    assert ended == [128 + signal.SIGTERM] * 2
    saved = sorted(int(path.name) for path in (two / "checkpoints").iterdir())
    assert saved == [8, *range(10, saved[-1] + 1)] and 12 <= saved[-1] < STEPS  # one device left steps 8 and 10
    last = saved[-1]
    for step in saved:
        if step > 11:
            shutil.rmtree(two / "checkpoints" / str(step))
    theirs = gradient(tenth, last_state(config_for(two)))
    off = np.sqrt(sum(np.sum(np.square(x - y)) for x, y in zip(ours, theirs, strict=True)))
    assert off <= 1e-5 * np.sqrt(sum(np.sum(np.square(x)) for x in ours))

    story, shared_story = (
        [record for record in metrics(folder) if "loss" in record and record["step"] <= last] for folder in (whole, two)
    )
    assert [record["step"] for record in shared_story] == list(range(2, last + 1, 2))
    for name, value in story[5].items():  # steps 11 and 12
        if name not in MEASURED:
            kind = "devices_gradient" if "gradient" in name else "devices_metric"
            assert_close({name: np.asarray(shared_story[5][name])}, {name: np.asarray(value)}, kind)
    assert all(0 <= record[rate] <= 1 for record in shared_story for rate in ("coverage", "accuracy", "factor_spread"))
    assert start(config_for(two)) == 0  # and back to one device, from step 11
    for one_leaf, two_leaf in zip(
        *(jax.tree.leaves(without_keys_biases(exported(f))) for f in (whole, two)), strict=True
    ):
        assert np.linalg.norm(one_leaf - two_leaf) <= 1e-4 * np.linalg.norm(one_leaf)


def run_together(config: TrainConfig, until: int, signalled: int) -> list[int]:
    """Two processes of four devices; a signal to one of them once so many lines are written. Their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "train.main"),
                *flags_from_record(
                    replace(config, cluster=ClusterConfig(coordinator=address, processes=2, process=number))
                ),
            ],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        for number in range(2)
    ]
    try:
        wait_for_lines(Path(config.output) / "metrics.jsonl", until, processes[0])
        processes[signalled].terminate()
        return [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


KILLED = f"""
import os, signal, sys, time
import train.loop as loop
from train.main import main

place, placed = loop.place, []

def place_or_die(batch, mesh):
    placed.append(batch)
    while len(placed) > {BREAK}:
        if os.path.isdir(os.environ["CHECKPOINT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    return place(batch, mesh)

loop.place = place_or_die
main(sys.argv[1:])
"""
"""A run that SIGKILL ends while it prepares the step behind the break, as soon as the one before is on the disk."""


def test_run_killed_in_its_warm_up_goes_on_in_another_process_bit_for_bit(whole, config_for, tmp_path):
    """Two micro-batches a step, and rates that rise before and behind the break."""
    config = config_for(tmp_path, checkpoint_every=BREAK)
    assert config.accumulation == 2 and int(config.warmup_share * STEPS) == WARM_UP > BREAK
    environment = os.environ | {
        "CHECKPOINT": str(tmp_path / "checkpoints" / str(BREAK)),
        "JAX_NUM_CPU_DEVICES": str(len(jax.devices())),  # as here, to share compiled programs
    }
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *flags_from_record(config)],
        env=environment,
        stderr=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(BREAK)]
    assert trained_on(config) == json.loads((whole / "batches.json").read_text())[BREAK:]
    assert_same_run(config, config_for(whole))


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, "training ended before it could be killed"
        assert time.monotonic() < deadline, "training wrote nothing"
        time.sleep(0.005)


def test_run_goes_on_from_trained_weights_and_decodes_with_them(whole, config_for, tmp_path, stop_before, capsys):
    stop_before(2)
    config = config_for(tmp_path, init_from=str(whole / "export" / "hf"), tau_every=2, tau_prompts=2, tau_tokens=8)
    assert start(config) == 128 + signal.SIGTERM
    learned, decoded = metrics(tmp_path)
    assert learned["loss"] < 0.7 * metrics(whole)[0]["loss"]
    assert decoded["step"] == 2 and 1 <= decoded["decoded_tau"] <= 6
    said = capsys.readouterr().err
    assert "Weights from" in said and "nothing starts fresh" in said and "tau" in said


def test_run_whose_reranker_collapses_says_so(whole, config_for, tmp_path, stop_before, capsys, monkeypatch):
    monkeypatch.setattr(loop, "COLLAPSE", 1.0)
    stop_before(2)
    start(config_for(tmp_path))
    assert "Warning: the reranker has collapsed: its vectors' spread is" in capsys.readouterr().err


def test_finished_run_is_only_exported_again(whole, config_for, monkeypatch):
    before = exported(whole)
    monkeypatch.setattr(loop, "place", lambda *_: pytest.fail("a step was made"))
    assert start(config_for(whole)) == 0
    jax.tree.map(np.testing.assert_array_equal, exported(whole), before)


def test_resuming_with_other_mathematics_is_refused_by_the_flag(whole, config_for, capsys):
    before = (whole / "config.flags").read_text()
    assert start(config_for(whole, seed=43)) == 2
    assert "config.seed was 42, is now 43" in capsys.readouterr().err
    assert (whole / "config.flags").read_text() == before


def test_loss_that_is_no_number_ends_the_run_and_names_the_batch(config_for, target_folder, tmp_path, capsys):
    """One example holds a token whose embedding is broken."""
    config, params = load_target(target_folder)
    poison = params["embed"]["embedding"].at[40].set(np.nan)
    save_target(tmp_path / "target", config, params | {"embed": {"embedding": poison}})
    arrays = counting_texts()
    arrays["tokens"][arrays["offsets"][33]] = 40
    np.savez(tmp_path / "replies.npz", **arrays)
    output = tmp_path / "run"
    assert start(config_for(output, target=str(tmp_path / "target"), data=str(tmp_path / "replies.npz"))) == 2
    record = json.loads((output / "nonfinite.json").read_text())
    assert 33 in record["example_ids"]
    error = capsys.readouterr().err
    assert f"At step {record['step']} the loss is nan" in error and str(output / "nonfinite.json") in error
    assert all(int(path.name) < record["step"] for path in (output / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(preset="demo"), "width: target has 40, drafter expects 128"),
        (dict(data="nowhere.npz"), "No token file at nowhere.npz"),
        (dict(target="nowhere"), "nowhere"),
        (dict(sequence_length=1, anchors=0), "--anchors must be at least 1; got 0"),
        (dict(eval_rows=60), "--eval_rows=60 leaves nothing"),
    ],
)
def test_bad_run_is_refused_in_one_sentence_before_anything_is_written(config_for, tmp_path, capsys, changes, sentence):
    lines = dict(line.removeprefix("--").split("=", 1) for line in flags_from_record(config_for(tmp_path / "run")))
    lines |= {name: str(value) for name, value in changes.items()}
    assert main([f"--{name}={value}" for name, value in lines.items()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
