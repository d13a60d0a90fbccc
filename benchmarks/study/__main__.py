"""`python -m benchmarks.study`: trains every arm, measures it, and writes docs/study; start it again where it stopped.

One arm after the other is trained (`train`) and measured (`measure`), and kept in the output folder as soon as it is
done. A few steps of every method are timed, one method after the other; from that follow the steps of the arm at equal
CPU time. Then everything is gathered into results.json and a page. The work folder may be deleted afterwards.
"""

import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.study.arms import STEPS, Arm, choose, num_steps
from benchmarks.study.gather import gather
from benchmarks.study.measure import Workload, measure_arm, read_workload
from benchmarks.study.page import figures, page
from benchmarks.study.train import ARM_FILE, time_steps, train_arm
from lilicorr_jax import flags
from lilicorr_jax.config import setting
from serve import provenance

PROGRAM = "benchmarks.study"
EXAMPLES = """
python -m benchmarks.study
python -m benchmarks.study --arms=dflash,lilicorr-s0 --stages=train
python -m benchmarks.study --stages=write
"""
ARMS_FOLDER, COSTS_FILE, RESULTS_FILE, PAGE_FILE = "arms", "costs.json", "results.json", "README.md"
Stage = Literal["train", "measure", "cost", "write"]
TIMED_METHODS = ("dflash-s0", "lilicorr-s0", "domino-s0", "dspark-s0")
TIMED_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Trains and measures every method on the demo target at equal budget, and writes tables and plots."""

    target: str = setting("demo/target", "Folder of the target, with its tokenizer.")
    data: str = setting("demo/replies.npz", "Training replies, for counts of pairs; training reads its flagfile's.")
    prompts: str = setting("demo/heldout.jsonl", "Held-out prompts.")
    output: str = setting("docs/study", "Folder of results; what is whole there is not made again.")
    work: str = setting("runs/study", "Folder of training runs.")
    arms: tuple[str, ...] = setting((), "Arms, or variants with all their seeds; none takes all.")
    stages: tuple[Stage, ...] = setting(get_args(Stage), "What to do.")
    steps: int = setting(STEPS, "Optimizer steps of an arm.")
    num_prompts: int | None = setting(None, "Held-out prompts to measure on; none takes all.")
    seed: tuple[int, ...] = setting((42, 43, 44), "Of sampling at temperature 1.")

    @property
    def keep(self) -> Path:
        return Path(self.output) / ARMS_FOLDER


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train_all(chosen: Sequence[Arm], config: StudyConfig) -> None:
    for arm in chosen:
        if arm.variant.equal_time:
            time_all(config)
        steps = num_steps(arm, config.steps, read_costs(config))
        record = train_arm(arm, steps, Path(config.work), config.keep)
        say(f"{arm.name}: {record['steps']} steps, {record['step_cpu_s']:.3f} CPU s a step")


def measure_all(chosen: Sequence[Arm], config: StudyConfig, workload: Workload) -> None:
    for arm in chosen:
        if (config.keep / arm.name / ARM_FILE).exists():
            record = measure_arm(arm, workload, Path(config.work), config.keep)
            say(f"{arm.name}: the engine's blocks against the predicted ones: {record['engine']}")


def read_costs(config: StudyConfig) -> dict[str, float]:
    """What was timed side by side, by variant; nothing if that was not done."""
    path = Path(config.output) / COSTS_FILE
    return json.loads(path.read_text())["step_cpu_s"] if path.exists() else {}


def time_all(config: StudyConfig) -> None:
    """Times a few steps of every method, one after the other at one commit, unless that is done."""
    path = Path(config.output) / COSTS_FILE
    if not path.exists():
        chosen = choose(TIMED_METHODS)
        seconds = {arm.variant.name: time_steps(arm, TIMED_STEPS, Path(config.work)) for arm in chosen}
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"step_cpu_s": seconds, "steps": TIMED_STEPS, "revision": provenance.revision()}
        path.write_text(json.dumps(record, indent=2) + "\n")


def write(config: StudyConfig) -> None:
    """results.json, the page and its figures."""
    output = Path(config.output)
    results = gather(config.keep, read_costs(config)) | {
        "run": {
            "command": shlex.join(["python", "-m", PROGRAM]),
            "steps": config.steps,
            "revision": provenance.revision(),
            "versions": provenance.versions(),
            "device": provenance.device(),
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        }
    }
    (output / RESULTS_FILE).write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads((output / RESULTS_FILE).read_text())
    (output / PAGE_FILE).write_text(page(results))
    figures(results, output)


def run(config: StudyConfig) -> None:
    chosen = choose(config.arms)
    if "train" in config.stages:
        train_all(chosen, config)
    if "cost" in config.stages:
        time_all(config)
    if "measure" in config.stages:
        workload = read_workload(config.target, config.prompts, config.data, config.seed, config.num_prompts)
        measure_all(chosen, config, workload)
    if "write" in config.stages:
        write(config)


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(StudyConfig, run, program=PROGRAM, examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
