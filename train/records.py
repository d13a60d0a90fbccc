"""Prepared data on disk: tokenised texts in ArrayRecord files, beside what they were made with.

<folder>/prepared.json          what the texts were made with, and counts
<folder>/lengths.npy            tokens of every text
<folder>/dropped.jsonl          conversations that were left out, and why
<folder>/texts-00000.array_record ...

`MadeWith` names everything that decides a token or a mask; a folder that was made with anything else is stale, and is
neither reused nor trained on. Knows nothing of tokenizers: `train.prepare` fills these folders.
"""

import dataclasses
import itertools
import json
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter

from train.data import Example
from train.tokeniser import Dropped, Text

SUMMARY, LENGTHS, DROPPED = "prepared.json", "lengths.npy", "dropped.jsonl"
FORMAT = "lilicorr-jax prepared texts 1"
TEXTS_PER_FILE = 50_000
COUNT = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class MadeWith:
    """Everything that decides the tokens and the masks of prepared texts; digests are SHA-256."""

    sequence_length: int
    thinking: bool
    mask_rule: int  # version of the rule by which tokens are learned
    tokenizer: str  # digest of the tokenizer's files
    template: str  # digest of the chat template
    target: str  # `train.revision.target_revision`
    conversations: str  # digest of the files that were read
    selection: str  # which of their rows were asked for

    def differences(self, other: "MadeWith") -> list[str]:
        """One phrase for each field in which `other` is another."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name} was {_short(mine[name])}, is now {_short(theirs[name])}"
            for name in mine
            if mine[name] != theirs[name]
        ]


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else repr(value)


class RecordFolder:
    """Texts of a prepared folder, read as they are asked for; `train.data.Examples`."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.summary = read_summary(self.folder)
        self.made_with = MadeWith(**self.summary["made_with"])
        self._lengths = np.load(self.folder / LENGTHS, allow_pickle=False)
        self._source = ArrayRecordDataSource([str(self.folder / name) for name in self.summary["files"]])
        found = {len(self._lengths), len(self._source), self.summary["texts"]}
        if len(found) > 1:
            raise ValueError(
                f"{self.folder} is damaged: it should hold {self.summary['texts']} texts, has {len(self._source)} "
                f"records and {len(self._lengths)} lengths; prepare it again."
            )

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Example:
        text = decode(self._source[index])
        return Example(text.token_ids, text.loss_mask)

    def id_of(self, index: int) -> str:
        """The conversation that a text was made of."""
        return decode(self._source[index]).id

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    def teaching(self, sequence_length: int) -> np.ndarray:
        """All of them: what teaches nothing at the length that they were prepared for was left out."""
        if sequence_length != self.made_with.sequence_length:
            raise ValueError(
                f"{self.folder} was prepared for --sequence_length={self.made_with.sequence_length}; got "
                f"{sequence_length}. Prepare it anew for that length."
            )
        return np.arange(len(self))

    def fingerprint(self) -> str:
        return f"{json.dumps(self.summary['made_with'], sort_keys=True)} {len(self)}"


def read_summary(folder: Path) -> dict[str, Any]:
    """prepared.json. Raises ValueError if the folder has none that is whole and of this format."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        names = {"format", "made_with", "files", "texts"}
        if summary["format"] != FORMAT or not names <= summary.keys():
            raise ValueError(f"its format is {summary['format']!r}, {FORMAT!r} is read")
        if summary["made_with"].keys() != {field.name for field in dataclasses.fields(MadeWith)}:
            raise ValueError(f"it was made with {sorted(summary['made_with'])}")
        if any(Path(name).name != name for name in summary["files"]):
            raise ValueError(f"a file lies outside of it: {summary['files']}")
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {SUMMARY}: it is no folder that train.prepare has filled.") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder / SUMMARY} can't be read: {error!r:.200}; prepare it again.") from None
    return summary


def stale(folder: Path, made_with: MadeWith) -> list[str] | None:
    """Why a folder can't be used as it is, phrase by phrase; empty if it can, None if nothing is prepared there."""
    if not (folder / SUMMARY).exists():
        return None
    try:
        return RecordFolder(folder).made_with.differences(made_with)
    except (ValueError, OSError) as error:
        return [str(error)]


def make_room(folder: Path) -> Path:
    """An empty folder beside `folder`, to be filled and renamed.

    Raises:
        ValueError: nothing can be written there, or `folder` holds something that train.prepare did not make.
    """
    if folder.exists() and not (folder / SUMMARY).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is no prepared data: give another --output, or remove it yourself.")
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"Nothing can be written at {folder}: {error}; give another --output.") from None
    return unfinished


def write_records(folder: Path, texts: Iterable[Text | Dropped], made_with: MadeWith) -> dict[str, Any]:
    """Fills a folder, which gets its name when the last byte is written; one of that name is replaced."""
    unfinished, dropped = make_room(folder), []
    lengths, learned, files = [], 0, []
    for file_number, group in enumerate(_groups(_kept(texts, dropped))):
        name = f"texts-{file_number:05}.array_record"
        writer = ArrayRecordWriter(str(unfinished / name), "group_size:1")
        for text in group:
            writer.write(encode(text))
            lengths.append(len(text.token_ids))
            learned += int(text.loss_mask.sum())
        writer.close()
        files.append(name)
    lines = [json.dumps(row._asdict(), ensure_ascii=False) for row in dropped]
    (unfinished / DROPPED).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    np.save(unfinished / LENGTHS, np.array(lengths, np.int32))
    summary = {
        "format": FORMAT, "texts": len(lengths), "tokens": sum(lengths), "learned_tokens": learned,
        "dropped": len(dropped), "made_with": dataclasses.asdict(made_with), "files": files,
    }  # fmt: skip
    if not lengths:
        raise ValueError(f"None of {len(dropped)} conversations became a text; {unfinished / DROPPED} says why.")
    (unfinished / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return summary


def _kept(texts: Iterable[Text | Dropped], dropped: list[Dropped]) -> Iterator[Text]:
    """The texts; what was dropped goes into the list."""
    for text in texts:
        if isinstance(text, Dropped):
            dropped.append(text)
        else:
            yield text


def _groups(texts: Iterator[Text]) -> Iterator[Iterator[Text]]:
    """Runs of at most TEXTS_PER_FILE texts, each to be used up before the next; none is empty."""
    for first in texts:
        yield itertools.chain([first], itertools.islice(texts, TEXTS_PER_FILE - 1))


def encode(text: Text) -> bytes:
    """Number of tokens, their ids as 32-bit numbers, the mask as bits, then the name."""
    mask = np.packbits(np.asarray(text.loss_mask, bool)).tobytes()
    return COUNT.pack(len(text.token_ids)) + np.asarray(text.token_ids, "<u4").tobytes() + mask + text.id.encode()


def decode(record: bytes) -> Text:
    (count,) = COUNT.unpack_from(record)
    mask_start = COUNT.size + 4 * count
    mask_end = mask_start + -(-count // 8)
    mask = np.unpackbits(np.frombuffer(record[mask_start:mask_end], np.uint8), count=count).astype(bool)
    return Text(record[mask_end:].decode(), np.frombuffer(record, "<u4", count, COUNT.size).astype(np.int32), mask)
