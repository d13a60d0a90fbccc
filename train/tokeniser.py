"""A conversation to texts for training: rendered, cut to length, or dropped with a reason; in any number of processes.

Imports no JAX, so that workers start quickly.
"""

import os
from typing import NamedTuple

import numpy as np

from lilicorr_jax.conversion.tokenizer import load_tokenizer
from train.chat import render
from train.conversations import Conversation


class Text(NamedTuple):
    """One tokenised conversation and its name."""

    id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray


class Dropped(NamedTuple):
    """A conversation that became no text."""

    id: str
    reason: str


class Tokeniser:
    """Turns a conversation into texts of at most `length` tokens, or a reason why it gives none."""

    def __init__(self, target: str, vocab_size: int, stop_ids: tuple[int, ...], thinking: bool, length: int):
        self.tokenizer = load_tokenizer(target)
        self.vocab_size, self.stop_ids = vocab_size, stop_ids
        self.thinking, self.length = thinking, length

    def __call__(self, conversation: Conversation) -> list[Text | Dropped]:
        try:
            rows = render(self.tokenizer, conversation, thinking=self.thinking, stop_ids=self.stop_ids)
        except ValueError as error:
            return [Dropped(conversation.id, str(error))]
        names = [conversation.id, *(f"{conversation.id}#{number}" for number in range(2, len(rows) + 1))]
        pairs = zip(names, rows, strict=True)
        return [self._cut(name, row.token_ids, row.loss_mask) for name, row in pairs]

    def _cut(self, name: str, token_ids: np.ndarray, loss_mask: np.ndarray) -> Text | Dropped:
        token_ids, loss_mask = token_ids[: self.length], loss_mask[: self.length]
        if not np.any(loss_mask[:-1] & loss_mask[1:]):  # an anchor, and a slot to learn
            return Dropped(name, f"it has no two learned tokens in a row within {self.length} tokens")
        if token_ids.max() >= self.vocab_size:
            return Dropped(name, f"token {token_ids.max()} lies outside of the target's {self.vocab_size}")
        return Text(name, token_ids, loss_mask)


_tokeniser: Tokeniser | None = None
"""Of a worker process."""


def start_worker(*arguments) -> None:
    """Prepares this process for `work`; arguments as of `Tokeniser`."""
    global _tokeniser
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokeniser = Tokeniser(*arguments)


def work(conversation: Conversation) -> list[Text | Dropped]:
    """A worker's share."""
    assert _tokeniser is not None  # start_worker saw to it
    return _tokeniser(conversation)
