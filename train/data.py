"""The rows that can teach something, padded, and the batch of each step, whatever the examples are kept in.

Examples come from a token file (`train.tokens`) or from a folder of prepared records (`train.records`). Which rows a
step has is a function of (seed, step) alone, so a run goes on with the same rows on any number of hosts. The only file
that imports grain.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, SupportsIndex, runtime_checkable

import grain
import numpy as np
from flax import struct

from lilicorr_jax.shapes import Array, Bool, Int32


class Example(NamedTuple):
    """One text: its token ids, and for each whether it is learned."""

    token_ids: np.ndarray
    loss_mask: np.ndarray


@runtime_checkable
class Examples(Protocol):
    """Texts with random access, and what tells one set of them from another."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every text, [N]."""
        ...

    def teaching(self, sequence_length: int) -> np.ndarray:
        """Ids of the texts with two learned tokens in a row within `sequence_length`: an anchor, and a slot."""
        ...

    def fingerprint(self) -> int | str: ...


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


def trainable_examples(examples: Examples, sequence_length: int) -> np.ndarray:
    """Ids of the examples with two reply tokens in a row within `sequence_length`: an anchor, and a slot to learn.

    Raises ValueError if there is none.
    """
    ids = examples.teaching(sequence_length)
    if len(ids) == 0:
        raise ValueError(
            f"None of {len(examples)} examples has two reply tokens in a row within {sequence_length} tokens, so there "
            "is nothing to learn; give a larger --sequence_length or other data."
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

    def __init__(self, examples: Examples, example_ids: np.ndarray, sequence_length: int):
        self.examples, self.example_ids, self.sequence_length = examples, example_ids, sequence_length

    def __len__(self) -> int:
        return len(self.example_ids)

    def __getitem__(self, index: SupportsIndex) -> Batch:
        """One row: a batch without its batch axis."""
        example = int(self.example_ids[index])
        text = self.examples[example]
        length = min(len(text.token_ids), self.sequence_length)
        token_ids, loss_mask = np.zeros(self.sequence_length, np.int32), np.zeros(self.sequence_length, bool)
        token_ids[:length], loss_mask[:length] = text.token_ids[:length], text.loss_mask[:length]
        return Batch(
            token_ids=token_ids, loss_mask=loss_mask, length=np.int32(length), example_id=np.int32(example)
        )  # fmt: skip


def batches(rows: Rows, batch_rows: int, seed: int, buckets: Sequence[int] = ()) -> grain.MapDataset:
    """The endless sequence of batches: `[step]` depends on seed and step alone; each pass has an order of its own.

    Args:
        buckets: lengths to pad to, below the rows' own. Then every batch has rows of one bucket, padded to its length,
            and buckets take turns by how many rows they have; each passes over its rows in epochs of its own.
    """
    groups = by_length(rows, batch_rows, buckets)

    def endless(group: Rows, seed: int) -> grain.MapDataset:
        return grain.MapDataset.source(group).seed(seed).shuffle().repeat().batch(batch_rows, drop_remainder=True)

    if len(groups) == 1:
        return endless(groups[0], seed)
    parts = [endless(group, seed + number) for number, group in enumerate(groups)]
    return grain.MapDataset.mix(parts, weights=[len(group) for group in groups])


def by_length(rows: Rows, batch_rows: int, buckets: Sequence[int]) -> list[Rows]:
    """The rows of every bucket, the shortest bucket that holds them; a bucket without a whole batch joins the next."""
    bounds = [*sorted(bucket for bucket in set(buckets) if bucket < rows.sequence_length), rows.sequence_length]
    lengths = np.minimum(rows.examples.lengths[rows.example_ids], rows.sequence_length)
    bucket_of = np.searchsorted(bounds, lengths)
    groups, waiting = [], np.zeros(0, rows.example_ids.dtype)
    for number, bound in enumerate(bounds):
        waiting = np.sort(np.concatenate([waiting, rows.example_ids[bucket_of == number]]))
        if len(waiting) >= batch_rows or (bound == rows.sequence_length and len(waiting)):
            groups.append(Rows(rows.examples, waiting, bound))
            waiting = waiting[:0]
    return groups


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
