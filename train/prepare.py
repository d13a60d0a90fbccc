"""`python -m train.prepare`: conversations, tokenised once for one target, into a folder for `train.main --data`.

A folder that was prepared from the same conversations, with the same tokenizer, template, length, mask rule, thinking
and target is used as it is; one that differs in any of them is made anew. Owns what becomes a text and what is left
out; how a conversation is written as tokens is `train.chat`'s affair.
"""

import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from itertools import batched, islice
from pathlib import Path

from lilicorr_jax.config import setting
from lilicorr_jax.conversion.config_json import CONFIG_FILE, GENERATION_FILE, target_from_json
from lilicorr_jax.conversion.folder import exists, read_json
from lilicorr_jax.conversion.tokenizer import load_tokenizer
from lilicorr_jax.flags import run_main
from train.chat import Rendered, show
from train.conversations import Conversation, Problem, strict
from train.records import MadeWith, RecordFolder, make_room, stale, write_records
from train.revision import of_target
from train.sources import evaluation_prompts, find_splits, read_conversations
from train.tokeniser import Dropped, Text, Tokeniser, start_worker, work

EXAMPLES = """
python -m train.prepare --target=models/Qwen3-8B --conversations=replies.jsonl --output=data/qwen3_8b
python -m train.prepare --target=models/Qwen3-8B --conversations=chats/ --output=data/chats --workers=16
python -m train.prepare --target=models/Qwen3-8B --conversations=replies.jsonl --output=data/qwen3_8b --show_mask=3
"""

CONVERSATIONS_AT_ONCE = 4096
"""Handed to the workers before the next are read."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Tokenises conversations for a target, once, for training with `--data`."""

    target: str = setting(MISSING, "Folder of the target; its tokenizer and chat template are used.")
    conversations: tuple[str, ...] = setting(
        MISSING, "Files (.jsonl, .json, .parquet), folders or hub ids, with commas."
    )
    output: str = setting(MISSING, "Folder to fill; what was prepared there with other settings is replaced.")
    splits: tuple[str, ...] = setting((), "Splits to read; by default all but multilingual ones.")
    limit: int | None = setting(None, "Conversations to read, shared out evenly over splits; none reads all.")
    evaluation: tuple[str, ...] = setting((), "Files of evaluation prompts; conversations that ask them are dropped.")
    sequence_length: int = setting(3072, "Longest text; what is behind is cut off.")
    thinking: bool = setting(False, "Write assistant turns as the target does when it thinks first.")
    workers: int = setting(1, "Processes that tokenise.")
    strict: bool = setting(False, "Stop at the first conversation that can't be used.")
    show_mask: int = setting(0, "Only print so many texts, what is learned between marks, and write nothing.")

    def __post_init__(self):
        for name in ("sequence_length", "workers", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1; got {value}.")
        if self.show_mask < 0:
            raise ValueError(f"--show_mask must not be negative; got {self.show_mask}.")


def prepare(config: PrepareConfig) -> int:
    """Fills the folder, or finds it filled; returns the exit code."""
    if config.show_mask:
        return show_texts(config)
    made, folder = made_with(config), Path(config.output)
    reasons = stale(folder, made)
    if reasons == []:
        say(f"{folder} is as asked: {len(RecordFolder(folder)):,} texts; nothing to do.")
        return 0
    make_room(folder)  # before hours of work
    if reasons:
        say(f"{folder} is made anew: {'; '.join(reasons)}.")
    summary = write_records(folder, texts(config), made)
    say(
        f"{summary['texts']:,} texts of {summary['tokens']:,} tokens, {summary['learned_tokens']:,} of them learned; "
        f"{summary['dropped']:,} dropped, see {folder / 'dropped.jsonl'}."
    )
    return 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def made_with(config: PrepareConfig) -> MadeWith:
    """What the folder that `config` asks for is made with; reads every file once."""
    selection = {"splits": config.splits, "limit": config.limit, "evaluation": digest_sources(config.evaluation)}
    return MadeWith(
        **of_target(config.target),
        sequence_length=config.sequence_length,
        thinking=config.thinking,
        conversations=digest_sources(config.conversations, config.splits),
        selection=json.dumps(selection),
    )


def digest_sources(sources: Iterable[str], splits: Iterable[str] = ()) -> str:
    """SHA-256 of the names of the splits and the bytes of their files, in order."""
    found = hashlib.sha256()
    for source in sources:
        for split in find_splits([source], tuple(splits)):
            found.update(split.name.encode() + b"\0")
            for path in split.files:
                with path.open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def conversations_of(config: PrepareConfig, problems: list[Problem]) -> Iterator[Conversation]:
    """The conversations that the flags name; rows that can't be used go into the list, or stop a strict run."""
    return read_conversations(
        config.conversations,
        report=strict if config.strict else problems.append,
        splits=config.splits,
        limit=config.limit,
        refused=evaluation_prompts(config.evaluation),
    )


def texts(config: PrepareConfig) -> Iterator[Text | Dropped]:
    """Every text, in an order that no number of workers changes, and every conversation that gave none."""
    problems: list[Problem] = []
    for group in _tokenised(config, conversations_of(config, problems)):
        yield from (Dropped(f"{problem.source} row {problem.index}", problem.reason) for problem in problems)
        problems.clear()
        for text in group:
            if config.strict and isinstance(text, Dropped):
                raise ValueError(f"Conversation {text.id}: {text.reason}. Leave out --strict to go on without it.")
            yield text
    yield from (Dropped(f"{problem.source} row {problem.index}", problem.reason) for problem in problems)


def _tokenised(config: PrepareConfig, conversations: Iterator[Conversation]) -> Iterator[list[Text | Dropped]]:
    folder = Path(config.target)
    generation = read_json(folder, GENERATION_FILE) if exists(folder, GENERATION_FILE) else None
    model = target_from_json(read_json(folder, CONFIG_FILE), generation)
    arguments = (config.target, model.vocab_size, model.eos_ids, config.thinking, config.sequence_length)
    if config.workers == 1:
        yield from map(Tokeniser(*arguments), conversations)
        return
    # Forked workers could inherit a locked tokenizer; and each of them is one thread, or they would fight for cores.
    with multiprocessing.get_context("spawn").Pool(config.workers, start_worker, arguments) as pool:
        for group in batched(conversations, CONVERSATIONS_AT_ONCE):
            yield from pool.imap(work, group, chunksize=16)


def show_texts(config: PrepareConfig) -> int:
    """Prints the first texts with marks around what is learned."""
    tokenizer = load_tokenizer(config.target)
    for text in islice((text for text in texts(config) if isinstance(text, Text)), config.show_mask):
        row = Rendered(token_ids=text.token_ids, loss_mask=text.loss_mask)
        print(f"--- {text.id}\n{show(tokenizer, row)}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_main(PrepareConfig, prepare, program="train.prepare", examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
