"""Token files: a target's own replies to prompts, in memory.

A token file is an .npz of `tokens` (integers, every example's prompt then its reply, one after the other), `offsets`
[N + 1] (where each example begins; the last entry is the total), `prompt_lengths` [N] (tokens that are read but not
learned); other arrays are left alone. A reply ends with its end-of-turn token, which is learned. For what a laptop
trains on; conversations of many turns, and more than memory holds, go through `train.records`.
"""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.data import Example

FINGERPRINTED_TOKENS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """Examples of a token file, in memory."""

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> Example:
        token_ids = self.tokens[int(self.offsets[index]) : int(self.offsets[index + 1])]
        return Example(token_ids, np.arange(len(token_ids)) >= self.prompt_lengths[index])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets.astype(np.int64))

    def teaching(self, sequence_length: int) -> np.ndarray:
        """See `train.data.Examples`."""
        return np.flatnonzero(np.minimum(self.lengths, sequence_length) - self.prompt_lengths >= 2)

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
        raise ValueError(f"{path} is no token file: {error.args[0]}; see train/tokens.py for what it holds.") from None
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
