"""From a conversation to training rows: the tokens that serving will see, and which of them the target wrote itself.

Each assistant turn is rendered as it is served: its prompt is the tokenizer's own template over all that came before,
and what is learned is what the target answers to just that prompt, its end of turn included. Templates rewrite history
(Qwen3 drops think blocks from earlier turns and puts an empty one before the reply, where thinking is off), so a later
turn's prompt need not begin with the earlier turn. Where it does, both share a row; where it doesn't, each has its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from lilicorr_jax.chat import flat_ids, knows_thinking, prompt_ids, rendered
from train.conversations import Conversation, Message

RULE = 1
"""Raised whenever other tokens of the same conversation are learned: prepared texts are known by it."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """One training row.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], True on what the target wrote.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray


def render(
    tokenizer, conversation: Conversation, *, thinking: bool, stop_ids: Iterable[int] | None = None
) -> tuple[Rendered, ...]:
    """The rows of a conversation, as few as the template allows; every assistant turn is learned in exactly one.

    Args:
        thinking: whether the target is served with thinking on; matters to templates that know it.
        stop_ids: tokens that end a turn; None takes the tokenizer's end of text. Give the target's own `eos_ids`.

    Raises:
        ValueError: there is no assistant turn, or one that the target would not have written in this form.
    """
    stops = frozenset([tokenizer.eos_token_id] if stop_ids is None else stop_ids)
    rows: list[tuple[list[int], list[bool]]] = []
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        prompt, answer = _turn(tokenizer, conversation, number, thinking, stops)
        if not (rows and prompt[: len(rows[-1][0])] == rows[-1][0]):
            rows.append(([], []))
        ids, mask = rows[-1]
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids += prompt[len(ids) :] + answer
    if not rows:
        raise ValueError("it has no assistant turn; regenerate it first")
    return tuple(Rendered(token_ids=np.array(ids, np.int32), loss_mask=np.array(mask, bool)) for ids, mask in rows)


def show(tokenizer, row: Rendered, marks: tuple[str, str] = ("⟦", "⟧")) -> str:
    """The text of a row, its trained parts between marks."""
    pieces = []
    for is_trained, run in groupby(zip(row.loss_mask, row.token_ids, strict=True), key=lambda pair: bool(pair[0])):
        text = tokenizer.decode([int(token) for _, token in run], skip_special_tokens=False)
        pieces.append(f"{marks[0]}{text}{marks[1]}" if is_trained else text)
    return "".join(pieces)


def _turn(
    tokenizer, conversation: Conversation, number: int, thinking: bool, stops: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Ids of the prompt of an assistant turn, and of what the target answers to it."""
    before, message = conversation.messages[:number], conversation.messages[number]
    if knows_thinking(tokenizer):
        _check_thinking(number, message, thinking)
    prompt = list(prompt_ids(tokenizer, before, thinking=thinking, tools=conversation.tools))
    if "token_ids" in message:
        return prompt, _own_ids(tokenizer, number, message)
    options = dict(thinking=thinking, tools=conversation.tools)
    start = rendered(tokenizer, before, is_prompt=True, **options)
    whole = rendered(tokenizer, conversation.messages[: number + 1], is_prompt=False, **options)
    if not whole.startswith(start):
        raise ValueError(f"message {number}: the template writes it otherwise than behind the prompt that it answers")
    answer = list(flat_ids(tokenizer(whole[len(start) :], add_special_tokens=False)))
    return prompt, _without_boilerplate(tokenizer, number, answer, stops, message.get("finish_reason") == "length")


def _check_thinking(number: int, message: Message, thinking: bool) -> None:
    has_thought = bool(message.get("reasoning_content")) or "</think>" in message["content"]
    if has_thought != thinking:
        held = "holds reasoning, but thinking is off" if has_thought else "holds no reasoning, but thinking is on"
        raise ValueError(f"message {number} {held}: regenerate it, or set thinking as it was")


def _own_ids(tokenizer, number: int, message: Message) -> list[int]:
    """The very tokens that the target wrote, which encoding its text need not give back."""
    ids = message["token_ids"]
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"message {number}: its token_ids must be a list of whole numbers")
    if message["content"] not in answer_text(tokenizer, ids):  # a server keeps thoughts and calls apart from it
        raise ValueError(f"message {number}: its token_ids don't spell its content; were they another tokenizer's?")
    return ids


def answer_text(tokenizer, token_ids: Iterable[int]) -> str:
    """The text of an answer's tokens, without the special ones."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _without_boilerplate(
    tokenizer, number: int, answer: list[int], stops: frozenset[int], is_truncated: bool
) -> list[int]:
    """An answer up to its end of turn, or without it if it was cut off; what a template writes behind is dropped."""
    end = next(_positions(answer, stops), None)
    if end is None:
        raise ValueError(f"message {number}: the template ends it with none of the stop ids {sorted(stops)}")
    if tokenizer.decode(answer[end + 1 :]).strip():
        raise ValueError(f"message {number} holds the end-of-turn token in its text")
    return answer[:end] if is_truncated else answer[: end + 1]


def _positions(ids: list[int], wanted: frozenset[int]) -> Iterator[int]:
    return (position for position, token in enumerate(ids) if token in wanted)
