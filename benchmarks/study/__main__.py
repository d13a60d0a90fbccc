"""`python -m benchmarks.study`: trains every arm, measures it, and writes docs/study; start it again where it stopped.

Trains one arm after the other (`train`), each kept as soon as it is done. The work folder may be deleted afterwards;
everything that tables and plots are made of lies in the output folder.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.study.arms import STEPS, Arm, choose, num_steps
from benchmarks.study.train import ARM_FILE, train_arm
from lilicorr_jax import flags
from lilicorr_jax.config import setting

PROGRAM = "benchmarks.study"
EXAMPLES = """
python -m benchmarks.study
python -m benchmarks.study --arms=dflash,lilicorr-s0
"""


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Trains and measures every method on the demo target at equal budget, and writes tables and plots."""

    output: str = setting("docs/study", "Folder of results; what is whole there is not made again.")
    work: str = setting("runs/study", "Folder of training runs.")
    arms: tuple[str, ...] = setting((), "Arms, or variants with all their seeds; none takes all.")
    steps: int = setting(STEPS, "Optimizer steps of an arm.")


def step_times(keep: Path) -> dict[str, float]:
    """CPU seconds of a step by variant, over its kept arms."""
    records = [json.loads(path.read_text()) for path in sorted(keep.glob(f"*/{ARM_FILE}"))]
    return {
        name: mean(record["step_cpu_s"] for record in records if record["variant"] == name)
        for name in {record["variant"] for record in records}
    }


def train_all(chosen: Sequence[Arm], config: StudyConfig) -> None:
    keep = Path(config.output) / "arms"
    for arm in chosen:
        steps = num_steps(arm, config.steps, step_times(keep))
        record = train_arm(arm, steps, Path(config.work), keep)
        print(f"{arm.name}: {record['steps']} steps, {record['step_cpu_s']:.3f} CPU s a step", flush=True)


def run(config: StudyConfig) -> None:
    train_all(choose(config.arms), config)


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(StudyConfig, run, program=PROGRAM, examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
