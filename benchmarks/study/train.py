"""Training one arm in a process of its own, with the CPU time that it took, and what is kept of it.

A kept arm is a folder: arm.json (how it was made), metrics.jsonl (its training) and export/ (public layout, weights
rounded to float16). An arm whose folder is whole is not trained again; one that was stopped goes on, for `train.main`
does. Wall time is noted and means nothing on a shared machine.
"""

import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.study.arms import Arm, train_flags
from serve import provenance

ARM_FILE, METRICS_FILE, EXPORT = "arm.json", "metrics.jsonl", "export"
CPU_LOG = "cpu.jsonl"
WEIGHTS = "model.safetensors"
SECONDS_BETWEEN_LOOKS = 1.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def train_arm(arm: Arm, steps: int, work: Path, keep: Path, program: Sequence[str] = ("-m", "train.main")) -> dict:
    """Trains an arm, unless it is kept already, and returns its record.

    Args:
        work: folder of runs; the arm's own is below it.
        keep: folder of kept arms; likewise.
        program: what Python runs; a test puts a stub there.

    Raises:
        ValueError: the kept arm was made with other flags, or training failed.
    """
    output, kept = work / arm.name, keep / arm.name
    flags = train_flags(arm, steps, str(output))
    settings = [flag for flag in flags if not flag.startswith("--output=")]
    if (kept / ARM_FILE).exists():
        record = json.loads((kept / ARM_FILE).read_text())
        if record["flags"] != settings:
            raise ValueError(f"{kept} was trained with {record['flags']}, asked for is {settings}; move it away.")
        return record
    output.mkdir(parents=True, exist_ok=True)
    wall_s, cpu_s = run_watched([sys.executable, *program, *flags], output)
    record = {
        "arm": arm.name,
        "variant": arm.variant.name,
        "seed": arm.seed,
        "flags": settings,
        "steps": steps,
        "step_cpu_s": step_cpu_seconds(read_log(output / CPU_LOG)),
        "last_process_cpu_s": cpu_s,
        "last_process_wall_s": wall_s,
        "revision": provenance.revision(),
        "versions": provenance.versions(),
        "device": provenance.device(),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    keep_arm(output, kept, record)
    return record


def time_steps(arm: Arm, steps: int, work: Path, program: Sequence[str] = ("-m", "train.main")) -> float:
    """CPU seconds of a step of this arm, from a short run of its own that nothing is kept of."""
    output = work / f"cost-{arm.name}"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    often = ["--log_every=10", "--eval_every=0"]
    run_watched([sys.executable, *program, *train_flags(arm, steps, str(output)), *often], output)
    return step_cpu_seconds(read_log(output / CPU_LOG))


def run_watched(command: Sequence[str], output: Path) -> tuple[float, float]:
    """Runs a training process to its end and writes (step, CPU seconds so far) beside its metrics as they grow.

    Returns:
        Wall and CPU seconds of the process, compilation included.

    Raises:
        ValueError: it did not exit with 0.
    """
    start, seen = time.monotonic(), None
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with (output / "stderr.txt").open("a") as errors, (output / CPU_LOG).open("a") as log:
        process = subprocess.Popen(command, stderr=errors, env=environment)
        before = os.times()
        while process.poll() is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            step, cpu_s = last_step(output / METRICS_FILE), process_cpu_seconds(process.pid)
            if step != seen and cpu_s is not None:
                seen = step
                log.write(json.dumps({"pid": process.pid, "step": step, "cpu_s": cpu_s}) + "\n")
                log.flush()
    after = os.times()
    if process.returncode:
        tail = (output / "stderr.txt").read_text().splitlines()[-1:]
        raise ValueError(f"{' '.join(command)} ended with {process.returncode}: {' '.join(tail)}")
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - start, cpu_s


def process_cpu_seconds(pid: int) -> float | None:
    """User and system time of a process and all its threads so far; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def last_step(metrics: Path) -> int:
    """The step of the last whole line of training metrics; 0 before there is one."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(steps, default=0)


def read_log(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def step_cpu_seconds(log: Sequence[dict]) -> float:
    """CPU seconds of a step: the median over what was seen between two looks, so compilation does not count.

    Raises:
        ValueError: fewer than two looks at one process.
    """
    rates = [
        (after["cpu_s"] - before["cpu_s"]) / (after["step"] - before["step"])
        for before, after in zip(log, log[1:], strict=False)
        if before["pid"] == after["pid"] and after["step"] > before["step"] > 0
    ]
    if not rates:
        raise ValueError(f"CPU time per step needs two looks at one process; got {len(log)} looks.")
    return statistics.median(rates)


def keep_arm(output: Path, kept: Path, record: dict) -> None:
    """Copies what is kept of a run; the record comes last, so that a half-kept arm is not taken for a whole one."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(output / EXPORT / "hf", kept / EXPORT)
    round_weights(kept / EXPORT / WEIGHTS)
    shutil.copy(output / METRICS_FILE, kept / METRICS_FILE)
    (kept / ARM_FILE).write_text(json.dumps(record, indent=2) + "\n")


def round_weights(path: Path) -> None:
    """Stores every tensor of a file as float16.

    Raises:
        ValueError: a number is beyond float16.
    """
    tensors = {name: tensor.astype(np.float16) for name, tensor in load_file(path).items()}
    if wrong := [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]:
        raise ValueError(f"{path}: {wrong[0]} does not fit float16.")
    save_file(tensors, path, metadata={"format": "pt"})
