"""The blocks of every measured reply, a line of JSON each, short enough to be committed.

`emitted` has one digit for every block, base 32: tokens that it added. `causes` has one letter: why it died (s
sampling, c coverage, r ranking), at the slot that `emitted` says, or - where it did not.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from serve.attribution import CAUSES
from serve.report import Request

DIGITS = "0123456789abcdefghijklmnopqrstuv"
LETTERS = {None: "-"} | {cause: cause[0] for cause in CAUSES}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One reply of one way of drafting; a way is a kind of `serve.bench`, or another walk of the study's."""

    way: str
    temperature: float
    seed: int  # of sampling
    id: str
    category: str
    emitted: str
    causes: str

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens emitted, and blocks."""
        return sum(map(DIGITS.index, self.emitted)), len(self.emitted)


def short(request: Request) -> Reply:
    """What is kept of a request.

    Raises:
        ValueError: it was served without a trace.
    """
    if request.causes is None:
        raise ValueError(f"Request {request.id!r} was served without a trace, so why its blocks died is not known.")
    return Reply(
        way=request.arm,
        temperature=request.temperature,
        seed=request.seed,
        id=request.id,
        category=request.category,
        emitted="".join(DIGITS[count] for count in request.emitted),
        causes="".join(LETTERS[cause] for cause in request.causes),
    )


def write(path: Path, replies: Sequence[Reply]) -> None:
    """All replies; a file that is there is replaced when the new one is whole."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text("".join(json.dumps(asdict(reply), separators=(",", ":")) + "\n" for reply in replies))
    unfinished.replace(path)


def read(path: Path) -> list[Reply]:
    return [Reply(**json.loads(line)) for line in path.read_text().splitlines()]


def deaths(replies: Sequence[Reply], num_slots: int) -> dict:
    """As `serve.attribution.summarize`: blocks, those that died by cause and slot, those kept whole and ended."""
    slots = {cause: [0] * num_slots for cause in CAUSES}
    of_letter = {letter: cause for cause, letter in LETTERS.items()}
    blocks = whole = 0
    for reply in replies:
        for emitted, letter in zip(map(DIGITS.index, reply.emitted), reply.causes, strict=True):
            blocks += 1
            whole += emitted == num_slots + 1
            if cause := of_letter[letter]:
                slots[cause][emitted - 1] += 1
    died = {cause: sum(counts) for cause, counts in slots.items()}
    return {"blocks": blocks, **died, "whole": whole, "ended": blocks - whole - sum(died.values()), "slots": slots}
