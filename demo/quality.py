"""How good replies are: do they end, do they loop, are they what the corpus's tables would say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from demo import greedy
from demo.corpus import CATEGORIES, Record
from demo.rows import turn
from lilicorr_jax.models.target import Target
from serve.report import is_degenerate

LONGEST_REPLY = 160  # tokens; the corpus stays below 115


# What stands around the ordered items of a sort reply: opening, list marks, closing.
SORT_FRAME = re.compile(
    r"^(?:Here are the|Done\.|The \d).*\n|\n(?:The first is|From|That makes).*$|^\(?\d+[.)] |"
    r"\b(?:First|then|and|at|the|end|finally|is|last|comes|we|take)\b",
    re.MULTILINE,
)


def answer(category: str, reply: str) -> list[str]:
    """What a reply says as words, without the wording that only a table decides; of a story, all of it."""
    if category == "sort":
        reply = SORT_FRAME.sub("", reply)
    elif category == "code":
        reply = reply.rpartition("\n")[2]
    said = re.findall(r"\w+", reply.lower())
    if category == "math":
        return [word for word in said if word.isdigit()][-1:]
    return [word for word in said if word != "is"] if category == "record" else said


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Shares of the replies of one category.

    Attributes:
        count: replies.
        tokens: mean length, the end of turn counted.
        ended: the model ended them itself.
        degenerate: they repeat themselves (`serve.report.is_degenerate`).
        right: they say the right thing, in whatever wording (`answer`).
        exact: they equal the noiseless reply of the corpus, character for character.
    """

    category: str
    count: int
    tokens: float
    ended: float
    degenerate: float
    right: float
    exact: float

    def __str__(self) -> str:
        return (
            f"{self.category:7} {self.count:5} replies, {self.tokens:5.1f} tokens, ended {self.ended:7.2%}, "
            f"degenerate {self.degenerate:6.2%}, "
            f"right {self.right:6.1%}, exact {self.exact:6.1%}"
        )


def measure(
    target: Target, params, tokenizer: Tokenizer, records: Sequence[Record]
) -> tuple[list[Quality], list[list[int]]]:
    """Greedy replies to the records' prompts: their quality by category, and the reply ids in the records' order."""
    prompts = [turn(tokenizer, record.prompt, record.reply)[0] for record in records]
    answers = greedy.replies(target, params, prompts, max_new=LONGEST_REPLY)
    present = [category for category in CATEGORIES if any(record.category == category for record in records)]
    return [assess(category, tokenizer, target, records, answers) for category in present], answers


def assess(
    category: str, tokenizer: Tokenizer, target: Target, records: Sequence[Record], answers: Sequence[list[int]]
) -> Quality:
    """The quality of one category among replies already made, which must hold some of it."""
    mine = [(record, ids) for record, ids in zip(records, answers, strict=True) if record.category == category]
    texts = [(record.reply, tokenizer.decode(ids)) for record, ids in mine]

    def share(claims) -> float:
        return sum(claims) / len(mine)

    return Quality(
        category=category,
        count=len(mine),
        tokens=share(len(ids) for _, ids in mine),
        ended=share(ids[-1] in target.config.eos_ids for _, ids in mine),
        degenerate=share(is_degenerate(ids) for _, ids in mine),
        right=share(answer(category, text) == answer(category, wanted) for wanted, text in texts),
        exact=share(text == wanted for wanted, text in texts),
    )
