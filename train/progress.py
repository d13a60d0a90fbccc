"""What a run says while it runs: lines and a bar on stderr, and metrics.jsonl, which a resumed run continues.

The only clock of training is here. Nothing that is computed depends on it.
"""

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

COLUMNS = {
    "loss": "loss {:.4f}",
    "drafter_loss": "drafter {:.4f}",
    "rerank_loss": "rerank {:.4f}",
    "distractor_loss": "distractor {:.4f}",
    "coverage": "coverage {:.3f}",
    "oracle_prefix": "prefix oracle {:.2f}",
    "top1_prefix": "top-1 {:.2f}",
    "selected_prefix": "selected {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
}
"""What a line shows, in this order, of the values that there are."""


class Reporter:
    """Writes lines to stderr and records to a jsonl file; a context.

    Args:
        path: metrics.jsonl; records behind step `start` are dropped from it, for they will be written again.
        start: steps that are already made.
        num_steps: steps of the whole run.
    """

    def __init__(self, path: Path, start: int, num_steps: int):
        keep_until(path, start)
        self._file = path.open("a", encoding="utf-8")
        self._num_steps = num_steps
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("training", total=num_steps, completed=start)
        self.restart_clock()

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._file.close()

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def restart_clock(self) -> None:
        """Speed is measured from here: what came before was compilation or evaluation."""
        self._timed_steps, self._num_tokens, self._clock = 0, 0, time.perf_counter()

    def advance(self, step: int, num_tokens: int) -> None:
        """One more step is made, of so many tokens; padding does not count."""
        self._timed_steps, self._num_tokens = self._timed_steps + 1, self._num_tokens + num_tokens
        self._bar.update(self._task, completed=step)

    def report(self, step: int, values: dict[str, float]) -> None:
        """One line and one record of the steps since the last ones; `values` are means over them."""
        seconds, remaining = time.perf_counter() - self._clock, None
        if self._timed_steps:
            values = values | {"tokens_per_second": self._num_tokens / seconds}
            remaining = (self._num_steps - step) * seconds / self._timed_steps
        self._write({"step": step, **values})
        self.say(f"{self._columns(step, values)}  ETA {clock_time(remaining)}")
        self.restart_clock()

    def report_held_out(self, step: int, values: dict[str, float]) -> None:
        """One line and one record of a measurement on held-out rows."""
        self._write({"step": step, **{f"held_out_{name}": value for name, value in values.items()}})
        self.say(f"{self._columns(step, values)}  on held-out rows")
        self.restart_clock()

    def _columns(self, step: int, values: dict[str, float]) -> str:
        parts = [form.format(values[name]) for name, form in COLUMNS.items() if name in values]
        return "  ".join([f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}", *parts])

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def keep_until(path: Path, step: int) -> None:
    """Drops records of later steps, and a last line that a killed process left half written."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = "".join(f"{line}\n" for line in lines if is_record_until(line, step))
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(kept, encoding="utf-8")
    unfinished.replace(path)


def is_record_until(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def clock_time(seconds: float | None) -> str:
    """
    >>> clock_time(3671.0)
    '1:01:11'
    """
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
