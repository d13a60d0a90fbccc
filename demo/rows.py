"""Pretraining rows: conversations of one or two turns, tokenized, weighted, padded to a few widths, grouped into steps.

Every step holds the same number of rows of each width, so that one compiled program serves them all and every step sees
every category.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from flax import struct
from tokenizers import Tokenizer

from demo import corpus
from demo.draw import Draw
from demo.tokenizer import TURN_END, render

ROWS_OF_WIDTH = {80: 7, 104: 12, 128: 15, 256: 4}  # rows of a step; proportions follow the corpus
TWO_TURNS = 0.09  # share of conversations with a second question
PROMPT_WEIGHT = 0.3  # of a prompt's token in the loss, against 1 of a reply's


@struct.dataclass
class Rows:
    """Conversations of one width.

    Attributes:
        token_ids: int32 [B, T], padded to the right.
        weights: float32 [B, T], weight of predicting that token from those before it; 0 on padding and on the first.
    """

    token_ids: np.ndarray
    weights: np.ndarray


def turn(tokenizer: Tokenizer, prompt: str, reply: str) -> tuple[list[int], list[int]]:
    """Ids of a templated prompt, and of its reply with the end of turn."""
    return tokenizer.encode(render(prompt)).ids, tokenizer.encode(reply + TURN_END).ids


def conversations(tokenizer: Tokenizer, *, seed: int) -> Iterator[tuple[list[int], list[float]]]:
    """Endless (token ids, weights) of the pretraining split."""
    stream = corpus.records("pretrain", seed=seed)
    newline = tokenizer.encode("\n").ids
    for index in itertools.count():
        record = next(stream)
        prompt, reply = turn(tokenizer, record.prompt, record.reply)
        ids, weights = prompt + reply, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(reply)
        if Draw(f"turns/{seed}/{index}").number(1, 100) <= 100 * TWO_TURNS:
            record = next(stream)
            prompt, reply = turn(tokenizer, record.prompt, record.reply)
            ids += newline + prompt + reply
            weights += [0.0] * len(newline) + [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(reply)
        yield ids, [0.0] + weights[1:]


def steps(tokenizer: Tokenizer, *, seed: int) -> Iterator[tuple[Rows, ...]]:
    """Endless steps, one `Rows` for each width; conversations longer than the widest are left out."""
    waiting = {width: [] for width in ROWS_OF_WIDTH}
    for ids, weights in conversations(tokenizer, seed=seed):
        width = next((width for width in ROWS_OF_WIDTH if len(ids) <= width), None)
        if width is None or len(waiting[width]) >= 8 * ROWS_OF_WIDTH[width]:
            continue
        waiting[width].append((ids, weights))
        if all(len(waiting[width]) >= count for width, count in ROWS_OF_WIDTH.items()):
            yield tuple(_pad(waiting[width], width, count) for width, count in ROWS_OF_WIDTH.items())


def _pad(waiting: list, width: int, count: int) -> Rows:
    """Take the first `count` conversations out of `waiting`."""
    token_ids, weights = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    for row in range(count):
        ids, row_weights = waiting.pop(0)
        token_ids[row, : len(ids)], weights[row, : len(ids)] = ids, row_weights
    return Rows(token_ids=token_ids, weights=weights)
