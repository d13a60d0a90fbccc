"""Token files, the rows that can teach something, and the batch of each step.

A token file is an .npz of a target's own replies: `tokens` (integers, every example's prompt then its reply, one
after the other), `offsets` [N + 1] (where each example begins; the last entry is the total), `prompt_lengths` [N]
(tokens that are read but not learned); other arrays are left alone. A reply ends with its end-of-turn token, which
is learned. The only file that imports grain.
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import grain
import numpy as np
from flax import struct

from lilicorr_jax.shapes import Array, Bool, Int32

FINGERPRINTED_TOKENS = 1_000_000


@struct.dataclass
class Batch:
    """Rows of one step, padded on the right with id 0.

    Attributes:
        token_ids: prompt, then reply.
        loss_mask: True on reply tokens.
        length: tokens of the row that are not padding.
        example_id: which example of the token file it is.
    """

    token_ids: Int32[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    length: Int32[Array, "B"]
    example_id: Int32[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Examples of a token file, in memory."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def fingerprint(self) -> int:
        """A checksum of all lengths and of the first million tokens."""
        parts = (self.offsets, self.prompt_lengths, self.tokens[:FINGERPRINTED_TOKENS])
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(np.ascontiguousarray(part, np.int64), checksum)
        return checksum


def read_token_file(path: str | Path, vocab_size: int) -> TokenFile:
    """Reads a token file whole.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no token file, holds no example, its lengths disagree, or an id is outside the vocabulary.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"No token file at {path}: give --data a .npz of the target's replies.")
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive, or not a whole one")
        with np.load(path, allow_pickle=False) as arrays:
            file = TokenFile(**{name: np.asarray(arrays[name]) for name in TokenFile.__dataclass_fields__})
    except KeyError as error:
        raise ValueError(f"{path} is no token file: {error.args[0]}; see train/data.py for what it holds.") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} can't be read as an .npz of plain arrays: {error}.") from None
    _check(file, path, vocab_size)
    return file


def _check(file: TokenFile, path: str | Path, vocab_size: int) -> None:
    for name in TokenFile.__dataclass_fields__:
        array = getattr(file, name)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{path}: {name} must be a vector of integers; got {array.dtype} of shape {array.shape}.")
    if len(file) == 0:
        raise ValueError(f"{path} holds 0 examples; at least one is needed.")
    lengths = np.diff(file.offsets.astype(np.int64))
    if len(lengths) != len(file):
        raise ValueError(f"{path}: {len(file)} prompt lengths need {len(file) + 1} offsets; got {len(file.offsets)}.")
    if file.offsets[0] != 0 or file.offsets[-1] != len(file.tokens) or lengths.min() < 0:
        raise ValueError(
            f"{path}: offsets must rise from 0 to the number of tokens, {len(file.tokens)}; they run from "
            f"{file.offsets[0]} to {file.offsets[-1]}, the smallest step is {lengths.min()}."
        )
    wrong = np.flatnonzero((file.prompt_lengths < 0) | (file.prompt_lengths > lengths))
    if len(wrong):
        raise ValueError(
            f"{path}: prompt_lengths must lie between 0 and the example's length; example {wrong[0]} of "
            f"{lengths[wrong[0]]} tokens has {file.prompt_lengths[wrong[0]]}."
        )
    if len(file.tokens) and not 0 <= file.tokens.min() <= file.tokens.max() < vocab_size:
        outside = np.flatnonzero((file.tokens < 0) | (file.tokens >= vocab_size))[0]
        raise ValueError(
            f"{path}: token ids must lie in the target's vocabulary [0, {vocab_size}); token {outside} is "
            f"{file.tokens[outside]}. Was it made with another target?"
        )


def trainable_examples(file: TokenFile, sequence_length: int) -> np.ndarray:
    """Ids of the examples with two reply tokens in a row within `sequence_length`: an anchor, and a slot to learn.

    Raises ValueError if there is none.
    """
    visible = np.minimum(np.diff(file.offsets.astype(np.int64)), sequence_length)
    ids = np.flatnonzero(visible - file.prompt_lengths >= 2)
    if len(ids) == 0:
        raise ValueError(
            f"None of {len(file)} examples has two reply tokens in a row within {sequence_length} tokens, so there is "
            "nothing to learn; give a larger --sequence_length or other data."
        )
    return ids


def hold_out(ids: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits example ids into those to train on and `num_rows` evenly spaced ones that are kept from training."""
    if num_rows >= len(ids):
        raise ValueError(f"--eval_rows={num_rows} leaves nothing to train on: only {len(ids)} examples are usable.")
    held = np.linspace(0, len(ids), num_rows, endpoint=False).astype(int)
    return np.delete(ids, held), ids[held]


class Rows:
    """Random access to padded rows; the source that grain shuffles."""

    def __init__(self, file: TokenFile, example_ids: np.ndarray, sequence_length: int):
        self.file, self.example_ids, self.sequence_length = file, example_ids, sequence_length

    def __len__(self) -> int:
        return len(self.example_ids)

    def __getitem__(self, index: SupportsIndex) -> Batch:
        """One row: a batch without its batch axis."""
        example = int(self.example_ids[index])
        first, last = (int(edge) for edge in self.file.offsets[example : example + 2])
        length = min(last - first, self.sequence_length)
        token_ids = np.zeros(self.sequence_length, np.int32)
        token_ids[:length] = self.file.tokens[first : first + length]
        positions = np.arange(self.sequence_length)
        return Batch(
            token_ids=token_ids,
            loss_mask=(positions >= self.file.prompt_lengths[example]) & (positions < length),
            length=np.int32(length),
            example_id=np.int32(example),
        )


def batches(rows: Rows, batch_rows: int, seed: int) -> grain.MapDataset:
    """The endless sequence of batches: `[step]` depends on seed and step alone; each pass has an order of its own."""
    return grain.MapDataset.source(rows).seed(seed).shuffle().repeat().batch(batch_rows, drop_remainder=True)


def in_order(rows: Rows, batch_rows: int) -> list[Batch]:
    """Every row once, in batches of equal size; empty rows, which teach and measure nothing, fill the last one."""
    size = rows.sequence_length
    empty = Batch(
        token_ids=np.zeros(size, np.int32), loss_mask=np.zeros(size, bool), length=np.int32(0), example_id=np.int32(-1)
    )
    padded = [rows[i] for i in range(len(rows))] + [empty] * (-len(rows) % batch_rows)
    groups = (padded[i : i + batch_rows] for i in range(0, len(padded), batch_rows))
    stack = np.stack
    return [
        Batch(**{name: stack([getattr(row, name) for row in group]) for name in Batch.__dataclass_fields__})
        for group in groups
    ]
