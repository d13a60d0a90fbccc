"""Prompts for a benchmark: read from a file, sampled evenly over categories, written in the target's chat template.

Owns the prompt file's format, the choice of prompts and its hash. It knows no model and no clock. Of a
conversation with several turns only the first is used, for now.
"""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lilicorr_jax.chat import prompt_ids
from lilicorr_jax.conversion.tokenizer import load_tokenizer as load_tokenizer

SHOWN_PROBLEMS = 10


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The first turn of one conversation."""

    id: str
    category: str
    text: str
    num_turns: int = 1  # of the conversation in the file

    def __post_init__(self):
        if not self.text.strip():
            raise ValueError(f"The prompt {self.id!r} is empty; give it at least one visible character.")


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """Reads a jsonl file: one object a line with `turns`, a list of texts, and optionally `id` and `category`.

    A missing id becomes the line's number, a missing category the file's name without its ending, so that the public
    files of the form {"turns": [...]} work as they are.

    Raises:
      ValueError: the file has no prompts, or has malformed rows; the sentence lists them by line number.
    """
    path = Path(path)
    prompts, problems = [], []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            prompt = _parse(line, default_id=str(number), default_category=path.stem)
            if prompt.id in seen:
                raise ValueError(f"id {prompt.id!r} stands on line {seen[prompt.id]} already")
        except ValueError as error:
            problems.append(f"line {number}: {error}")
        else:
            seen[prompt.id] = number
            prompts.append(prompt)
    if problems:
        raise ValueError(_report(path, problems))
    if not prompts:
        raise ValueError(f'{path} holds no prompts; write one {{"turns": ["..."]}} a line.')
    return tuple(prompts)


def choose(prompts: Sequence[Prompt], count: int | None, seed: int) -> tuple[Prompt, ...]:
    """A seeded sample without replacement, as even over categories as it can be; categories take turns in its order.

    Raises:
      ValueError: `count` is not between 1 and the number of prompts (None means all).
    """
    count = len(prompts) if count is None else count
    if not 1 <= count <= len(prompts):
        raise ValueError(f"num_prompts must lie between 1 and the {len(prompts)} prompts of the file; got {count}.")
    draw = random.Random(seed)
    pools = defaultdict(list)
    for prompt in prompts:
        pools[prompt.category].append(prompt)
    for pool in pools.values():
        draw.shuffle(pool)
    order = sorted(pools)
    draw.shuffle(order)
    deepest = max(map(len, pools.values()))
    rounds = [pools[name][i] for i in range(deepest) for name in order if i < len(pools[name])]
    return tuple(rounds[:count])


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over ids, categories and texts in their order: equal digests mean the same workload."""
    rows = [[prompt.id, prompt.category, prompt.text] for prompt in prompts]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()


def templated(tokenizer, text: str) -> tuple[int, ...]:
    """Ids of a user's text in the tokenizer's chat template, up to where the reply begins; thinking is off.

    Raises:
      ValueError: the tokenizer has no chat template.
    """
    return prompt_ids(tokenizer, [{"role": "user", "content": text}])


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that aren't blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The prompt file {str(path)!r} can't be read ({error}); give a UTF-8 jsonl file.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse(line: str, *, default_id: str, default_category: str) -> Prompt:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(row, dict):
        raise ValueError(f"it is a JSON {type(row).__name__}, not an object")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"`turns` must be a list of at least one text, but is {str(turns)[:40]}")
    if not turns[0].strip():
        raise ValueError("its first turn is empty")
    for name in ("id", "category"):
        if name in row and (isinstance(row[name], bool) or not isinstance(row[name], str | int) or row[name] == ""):
            raise ValueError(f"`{name}` must be a text or a whole number, but is {str(row[name])[:40]!r}")
    return Prompt(
        id=str(row.get("id", default_id)),
        category=str(row.get("category", default_category)),
        text=turns[0],
        num_turns=len(turns),
    )


def _report(path: Path, problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:SHOWN_PROBLEMS])
    more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
    return f"{path} has {len(problems)} malformed rows: {shown}{more}. Mend or remove them; none is skipped silently."
