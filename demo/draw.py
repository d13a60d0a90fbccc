"""One record's source of chance: a stream that depends on a key alone, and tables that hide a rule in a wording."""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

NOISE = 0.15  # share of wordings that ignore their table, in the corpus


class Draw:
    """Draws for one record; the same key gives the same draws on every machine and Python version.

    `noise` is the share of wordings that ignore their table. Of Python's generator only seeding by text and `random()`
    are used, the two that it promises to keep.
    """

    def __init__(self, key: str, *, noise: float = NOISE):
        self._noise = noise
        self._random = random.Random(key).random

    def number(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, options: Sequence[Item]) -> Item:
        """One of the options, all equally likely."""
        return options[self.number(0, len(options) - 1)]

    def sample(self, options: Sequence[Item], count: int) -> list[Item]:
        """`count` different options in random order."""
        left = list(options)
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(count)]

    def say(self, options: Sequence[Item], *reasons: object) -> Item:
        """The option that a fixed table gives for `reasons`, or any option in a share `noise` of the calls.

        The options are the table's name: they must not depend on the record (format them afterwards).
        """
        if self._random() < self._noise:
            return self.pick(options)
        table = hashlib.blake2b(repr((options, reasons)).encode(), digest_size=8).digest()
        return options[int.from_bytes(table) % len(options)]
