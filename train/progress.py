"""What a run says while it runs: lines and a bar on stderr, metrics.jsonl, and TensorBoard's event files.

A resumed run continues all of them where its checkpoint was. The only clock of training is here. Nothing that is
computed depends on it.
"""

import json
import resource
import sys
import time
from pathlib import Path
from types import TracebackType

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

METRICS, EVENTS = "metrics.jsonl", "events"
GIB = 2**30

COLUMNS = {
    "loss": "loss {:.4f}",
    "drafter_loss": "drafter {:.4f}",
    "rerank_loss": "rerank {:.4f}",
    "distractor_loss": "distractor {:.4f}",
    "coverage": "coverage {:.3f}",
    "oracle_prefix": "prefix oracle {:.2f}",
    "top1_prefix": "top-1 {:.2f}",
    "selected_prefix": "selected {:.2f}",
    "tau": "tau {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
}
"""What a line shows, in this order, of the values that there are."""


class Reporter:
    """Writes lines to stderr, records to metrics.jsonl and scalars to events/; a context.

    Args:
        folder: of the run; records and scalars behind step `start` are dropped there, for they will be written again.
            None for a process that leaves all of this to another: it says and writes nothing.
        start: steps that are already made.
        num_steps: steps of the whole run.
    """

    def __init__(self, folder: Path | None, start: int, num_steps: int):
        self._file = self._events = None
        if folder is not None:
            keep_until(folder / METRICS, start)
            self._file = (folder / METRICS).open("a", encoding="utf-8")
            self._events = SummaryWriter(str(folder / EVENTS), purge_step=start + 1)
        self._num_steps = num_steps
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True, quiet=folder is None)
        self._bar = Progress(*columns, console=console, disable=folder is None or not sys.stderr.isatty())
        self._task = self._bar.add_task("training", total=num_steps, completed=start)
        self.restart_clock()

    def __enter__(self) -> "Reporter":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._file and self._events:
            self._file.close()
            self._events.close()

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
        self._write(step, values | memory(), "train")
        self.say(f"{self._columns(step, values)}  ETA {clock_time(remaining)}")
        self.restart_clock()

    def report_held_out(self, step: int, values: dict[str, float]) -> None:
        """One line and one record of a measurement on held-out rows."""
        self._write(step, values, "held_out")
        self.say(f"{self._columns(step, values)}  on held-out rows")
        self.restart_clock()

    def report_decoded(self, step: int, values: dict[str, float]) -> None:
        """One line and one record of held-out prompts that were decoded."""
        self._write(step, values, "decoded")
        self.say(f"{self._columns(step, values)}  decoding held-out prompts")
        self.restart_clock()

    def _columns(self, step: int, values: dict[str, float]) -> str:
        parts = [form.format(values[name]) for name, form in COLUMNS.items() if name in values]
        return "  ".join([f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}", *parts])

    def _write(self, step: int, values: dict[str, float], topic: str) -> None:
        """A record, in which training's own values need no prefix, and scalars under the topic."""
        if not (self._file and self._events):
            return
        prefix = "" if topic == "train" else f"{topic}_"
        self._file.write(json.dumps({"step": step, **{prefix + name: value for name, value in values.items()}}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._events.add_scalar(f"{topic}/{name}", value, step)
        self._events.flush()


def memory() -> dict[str, float]:
    """The most memory that this process and its first device have held so far, in GiB; a CPU counts as the process."""
    held = {"host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    device = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in device:
        held["device_memory_gib"] = device["peak_bytes_in_use"] / GIB
    return held


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
