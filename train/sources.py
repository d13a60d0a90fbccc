"""Where conversations come from: files, folders, data sets of the Hugging Face hub, each with its splits.

Owns which files are read and in what order; what a row means is the affair of `train.conversations`. A split is named
by its files, as the hub names them (`code-00000-of-00003.parquet` belongs to `code`). Splits take turns, row by row, so
that a limit takes as much of each as it can.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.conversations import Conversation, Problem, Report, conversation_of

SUFFIXES = (".jsonl", ".json", ".parquet")
LEFT_OUT = "multilingual*"
"""Splits of a folder or hub data set that are read only when they are named: Nemotron v2's translations."""
SHARD = re.compile(r"[-_.]\d+-of-\d+$")
ROWS_AT_ONCE = 256  # of a parquet file


@dataclass(frozen=True, kw_only=True)
class Split:
    """Files that belong together, in order."""

    name: str
    files: tuple[Path, ...]


def read_conversations(
    sources: Sequence[str],
    *,
    report: Report,
    splits: Sequence[str] = (),
    limit: int | None = None,
    refused: Callable[[Conversation], str | None] = lambda conversation: None,
) -> Iterator[Conversation]:
    """Every usable conversation, as it is read.

    Args:
        sources: files (.jsonl, .json, .parquet), folders of them, or hub ids `owner/name[@revision]`.
        report: called for each row that can't be used; the others go on.
        splits: names of the splits to read; by default all of a folder or data set but the multilingual ones.
        limit: conversations to read at most, shared out evenly over splits as far as they reach.
        refused: why a conversation must not be used, or None; see `evaluation_prompts`.

    Raises:
        ValueError: a source holds nothing to read, or has no such split.
    """
    streams = [_conversations(split, report, refused) for split in find_splits(sources, splits)]
    count = 0
    while streams:
        for stream in list(streams):
            if count == limit:
                return
            conversation = next(stream, None)
            if conversation is None:
                streams.remove(stream)
            else:
                count += 1
                yield conversation


def evaluation_prompts(sources: Sequence[str]) -> Callable[[Conversation], str | None]:
    """A `refused` for conversations in which a user asks what an evaluation file asks, spaces and case aside."""
    held: dict[str, str] = {}
    for source in sources:
        for conversation in read_conversations([source], report=_no_problem):
            held |= {plain(text): source for text in _user_texts(conversation)}

    def refused(conversation: Conversation) -> str | None:
        source = next((held[plain(text)] for text in _user_texts(conversation) if plain(text) in held), None)
        return source and f"it asks what {source} asks, which is kept for evaluation"

    return refused


def plain(text: str) -> str:
    """A text without case and with single spaces."""
    return " ".join(text.casefold().split())


def find_splits(sources: Sequence[str], names: Sequence[str] = ()) -> list[Split]:
    """The splits of all sources that are to be read; equal names of different sources stay apart."""
    found = []
    for source in sources:
        path = Path(source)
        if path.is_file():
            found.append(_split_of_file(path))
        else:
            found += _choose(source, _splits_of_folder(path if path.is_dir() else fetch(source, names)), names)
    missing = [name for name in names if name not in {split.name for split in found}]
    if missing:
        raise ValueError(f"There is no split {missing[0]!r} in {', '.join(sources)}; give names that --splits finds.")
    return found


def count_rows(split: Split) -> int:
    """Rows of all files, bad ones included; a parquet file says it, others are counted by lines."""
    return sum(_count(path) for path in split.files)


def fetch(source: str, names: Sequence[str]) -> Path:
    """Downloads a data set of the hub, the splits that are to be read, and gives its folder."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source):
        raise ValueError(f"{source!r} is no file, no folder and no hub id such as owner/name; give one of these.")
    from huggingface_hub import snapshot_download  # comes with transformers

    repository, _, revision = source.partition("@")
    patterns = [f"*{name}*{suffix}" for name in names or ("",) for suffix in SUFFIXES]
    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=None if names else [f"*{LEFT_OUT}"],
        )
    except Exception as error:  # no network, no such data set, not logged in: the hub's own words say which
        raise ValueError(
            f"{source!r} is no local path, and the hub gives no such data set here ({type(error).__name__}: {error}). "
            "Download it where there is a network and give its folder."
        ) from error
    return Path(folder)


def _splits_of_folder(folder: Path) -> list[Split]:
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES and path.is_file() and not path.name.startswith("."):
            groups.setdefault(_split_of_file(path).name, []).append(path)
    return [Split(name=name, files=tuple(files)) for name, files in groups.items()]


def _split_of_file(path: Path) -> Split:
    return Split(name=SHARD.sub("", path.stem), files=(path,))


def _choose(source: str, splits: list[Split], names: Sequence[str]) -> list[Split]:
    if not splits:
        raise ValueError(f"{source} holds no {', '.join(SUFFIXES)} file; give a folder or data set that does.")
    if names:
        return [split for split in splits if split.name in names]
    chosen = [split for split in splits if not fnmatch.fnmatch(split.name, LEFT_OUT)]
    if not chosen:
        raise ValueError(f"{source} has only the splits {', '.join(s.name for s in splits)}; name them in --splits.")
    return chosen


def _conversations(
    split: Split, report: Report, refused: Callable[[Conversation], str | None]
) -> Iterator[Conversation]:
    for path in split.files:
        for index, row in _rows(path):
            try:
                if isinstance(row, ValueError):
                    raise row
                conversation = conversation_of(row, default_category=split.name)
                if reason := refused(conversation):
                    raise ValueError(reason)
            except ValueError as error:
                report(Problem(source=str(path), index=index, reason=str(error)))
            else:
                yield conversation


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Numbered rows; in the place of a line that can't be parsed, the error."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path))
    elif path.suffix == ".json":
        yield from enumerate(_json_rows(path))
    else:
        with path.open("rb") as lines:
            for index, line in enumerate(lines):
                if line.strip():
                    yield index, _parse(line)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return ValueError(f"it is not JSON: {line[:40]!r}")


def _json_rows(path: Path) -> list:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); give a list of conversations, or .jsonl.") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a {type(rows).__name__}; a .json file must be a list of conversations.")
    return rows


def _parquet_rows(path: Path) -> Iterator[dict]:
    with _parquet(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _parquet(path: Path):
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path} needs pyarrow; run pip install 'lilicorr-jax[data]'.") from None
    try:
        return ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is no readable parquet file ({error}).") from None


def _count(path: Path) -> int:
    if path.suffix == ".parquet":
        with _parquet(path) as file:
            return file.metadata.num_rows
    if path.suffix == ".json":
        return len(_json_rows(path))
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _user_texts(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == "user"]


def _no_problem(problem: Problem) -> None:
    raise ValueError(f"{problem}: an evaluation file must be read whole.")
