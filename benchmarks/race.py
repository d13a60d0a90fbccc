"""Contestants that take turns: programs that stay alive, each in a process of its own, and run when they are told to.

A machine that other work slows down slows all of them alike, round by round, so ratios of one run can be trusted where
single numbers can't. Owns processes and turns; what is measured is the programs' affair.
"""

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

ROOT = Path(__file__).resolve().parent.parent
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"


class Program:
    """A program that reads a task as a JSON line and answers with a JSON line, once it has said what it is."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any], num_threads: int):
        limits = {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            ["taskset", "--cpu-list", f"0-{num_threads - 1}", *command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | limits | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
        # Popen's stubs can't tell that pipes which were asked for are there.
        self._tasks, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        self._command = command
        self.about = self._read()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, task: str) -> dict:
        self._tasks.write(json.dumps(task) + "\n")
        self._tasks.flush()
        return self._read()

    def _read(self) -> dict:
        for line in self._answers:
            if line.startswith("{"):
                return json.loads(line)
        self.__exit__()
        raise ValueError(f"The program `{' '.join(self._command)}` ended without an answer; run it alone to see why.")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a contestant answered to one task, round by round."""

    rounds: tuple[dict, ...]

    def best(self, key: str) -> float:
        return min(row[key] for row in self.rounds)

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rounds)


def race(
    commands: Mapping[str, Sequence[str]], settings: Mapping[str, Any], tasks: Sequence[tuple[str, str]], *,
    rounds: int, num_threads: int,
) -> tuple[dict[str, dict], dict[tuple[str, str], Result]]:  # fmt: skip
    """Runs (contestant, task) in this order, `rounds` times, each time once for nothing and once that counts.

    A program that stood idle while others ran finds caches cold, and its pages taken back by a virtual machine that
    reclaims what is not used: waking up may take longer than a short task.

    Returns:
        What each contestant says of itself, and the answers.
    """
    with ExitStack() as stack:
        programs = {
            name: stack.enter_context(Program(command, settings, num_threads)) for name, command in commands.items()
        }
        answers = [{key: awake(programs[key[0]], key[1]) for key in tasks} for _ in range(rounds)]
    about = {name: program.about for name, program in programs.items()}
    return about, {key: Result(rounds=tuple(row[key] for row in answers)) for key in tasks}


def awake(program: Program, task: str) -> dict:
    """The second of two runs, one right behind the other."""
    program.run(task)
    return program.run(task)


def peer_command(script: str) -> list[str]:
    """A program of benchmarks/peers in the peers' own environment."""
    if not PEER_PYTHON.exists():
        raise ValueError(f"{PEER_PYTHON} is not there; make it with `make peers`, which installs PyTorch into it.")
    return [str(PEER_PYTHON), str(ROOT / "benchmarks" / "peers" / script)]
