"""What a long job over conversations says while it runs and at its end; the only clock of regeneration."""

import sys
import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SHOWN_PROBLEMS = 100
SECONDS_BETWEEN_LINES = 60.0


class Tally:
    """Counts, and a bar on stderr; where that is no terminal, a line a minute. A context.

    Args:
        total: conversations, as far as is known beforehand.
        done: how many of them an earlier run has done.
    """

    def __init__(self, total: int | None, done: int):
        self.counts: Counter[str] = Counter()
        columns = (
            TextColumn("regenerating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("regenerating", total=total, completed=done, said="")
        self._started = self._said = time.perf_counter()

    def __enter__(self) -> "Tally":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def problem(self, kind: str, line: str) -> None:
        """Counts something that went wrong, and says it, the first hundred times."""
        self.counts[kind] += 1
        shown = sum(self.counts[kind] for kind in ("bad rows", "failed"))
        if shown <= SHOWN_PROBLEMS:
            self.say(line)
        if shown == SHOWN_PROBLEMS:
            self.say("Further problems are counted, not shown.")

    def advance(self, end: str, num_tokens: int) -> None:
        """One more conversation is done."""
        self.counts += Counter({"done": 1, end: 1, "tokens": num_tokens})
        self._bar.update(self._task, advance=1, said=self._speed())
        now = time.perf_counter()
        if self._bar.disable and now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            self.say(self.line())

    def skip(self) -> None:
        """A row that an earlier one stands for: the same question."""
        self.counts["repeated"] += 1

    def line(self) -> str:
        """This run's numbers."""
        c = self.counts
        return (
            f"{c['done']:,} conversations done ({c['length']:,} truncated, {c['tools']:,} ended at other tool calls), "
            f"{c['failed']:,} failed, {c['bad rows']:,} bad rows, {c['repeated']:,} repeated, {c['tokens']:,} tokens, "
            f"{self._speed()}"
        )

    def _speed(self) -> str:
        return f"{self.counts['tokens'] / (time.perf_counter() - self._started):,.0f} tokens/s"
