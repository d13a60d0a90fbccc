"""The demo corpus: an endless, seeded stream of (category, prompt, reply), in three splits that share no prompt.

A prompt's split is a function of its text (a hash), so no record of one split can appear in another, whatever the seed.
This file knows no tokens; `demo.templates` has the wording.
"""

import dataclasses
import hashlib
from collections.abc import Iterator

from demo import templates
from demo.draw import NOISE, Draw

WRITERS = {
    "story": templates.story,
    "sort": templates.sort,
    "code": templates.code,
    "record": templates.record,
    "math": templates.math,
}
CATEGORIES = tuple(WRITERS)
SHARES = ("story",) * 5 + ("sort",) * 5 + ("code",) * 4 + ("record",) * 3 + ("math",) * 3  # of 20
SPLITS = {"pretrain": range(0, 7), "replies": range(7, 9), "heldout": range(9, 10)}  # tenths of all prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One question and its written reply."""

    category: str
    prompt: str
    reply: str


def split_of(prompt: str) -> str:
    """The split that a prompt belongs to."""
    tenth = hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % 10
    return next(split for split, tenths in SPLITS.items() if tenth in tenths)


def records(split: str, *, seed: int, noise: float = NOISE) -> Iterator[Record]:
    """Endless records of one split, categories by SHARES; prompts may repeat (their noise then differs).

    `noise` is the share of wordings that ignore their table; the prompts do not depend on it.

    Raises:
      ValueError: the split is not one of SPLITS.
    """
    if split not in SPLITS:
        raise ValueError(f"No split is called {split!r}; choose one of {', '.join(SPLITS)}.")
    index = 0
    while True:
        draw = Draw(f"{seed}/{index}", noise=noise)
        index += 1
        category = draw.pick(SHARES)
        prompt, reply = WRITERS[category](draw)
        if split_of(prompt) == split:
            yield Record(category=category, prompt=prompt, reply=reply)


def distinct(split: str, *, seed: int, per_category: dict[str, int], noise: float = 0.0) -> list[Record]:
    """Records with different prompts, the given number of each category, in the order of the stream.

    Without noise the replies are the tables' own, the ones that a perfect model would give.
    """
    wanted, seen, chosen = dict(per_category), set(), []
    for record in records(split, seed=seed, noise=noise):
        if wanted.get(record.category, 0) and record.prompt not in seen:
            wanted[record.category] -= 1
            seen.add(record.prompt)
            chosen.append(record)
            if not any(wanted.values()):
                return chosen
    raise AssertionError("the stream is endless")
