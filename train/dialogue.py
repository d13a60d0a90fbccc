"""One conversation answered anew, turn by turn, whoever answers: which questions are asked, and where it must end.

Knows no model, no server and no file. Whoever drives a `dialogue` sends it one `Answer` for each prompt that it yields.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

from train.conversations import Conversation, Message

Prompt = tuple[Message, ...]
End = Literal["whole", "length", "tools"]


class NoAnswer(Exception):
    """Why a conversation could not be answered; it is asked again by the next run."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One assistant turn, its `finish_reason` ("stop" or "length") included, and how many tokens it took."""

    message: Message
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Regenerated:
    """A conversation in which the target wrote every assistant turn.

    Attributes:
        key: of the conversation that was asked.
        end: "whole", or what cut it: an answer that reached the limit ("length"), or calls of tools other than those
            whose results the data holds ("tools"). The turn that cut it is kept, what followed is not.
        num_tokens: of all answers.
    """

    key: str
    conversation: Conversation
    end: End
    num_tokens: int

    def record(self) -> dict[str, Any]:
        """One line of the output; what `train.journal` looks for comes first."""
        conversation = self.conversation
        return {
            "key": self.key,
            "end": self.end,
            "tokens": self.num_tokens,
            "id": conversation.id,
            "category": conversation.category,
            "messages": list(conversation.messages),
            "tools": list(conversation.tools),
        }


Dialogue = Generator[Prompt | Regenerated, Answer, None]


def dialogue(conversation: Conversation) -> Dialogue:
    """Yields each prompt, all that was said before an assistant turn, takes its answer; at last it yields the whole."""
    said, num_tokens, end = [], 0, "whole"
    for number, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            continue
        said.append(message)
        following = conversation.messages[number + 1 :]
        if message["role"] == "system" or (following and following[0]["role"] == "tool"):
            continue
        answer = yield tuple(said)
        num_tokens += answer.num_tokens
        turn, end = _judge(answer.message, following)
        said.append(turn)
        if end != "whole":
            break
    whole = replace(conversation, messages=tuple(said))
    yield Regenerated(key=conversation.key, conversation=whole, end=end, num_tokens=num_tokens)


def begin(talk: Dialogue) -> Prompt:
    """The first prompt; a conversation begins with a question, so there is one."""
    prompt = next(talk)
    assert not isinstance(prompt, Regenerated)
    return prompt


def _judge(turn: Message, following: Prompt) -> tuple[Message, End]:
    """The turn as it is kept, and whether what followed in the data can follow it."""
    recorded = following[0] if following and following[0]["role"] == "assistant" else {}
    has_more = len(following) > bool(recorded)
    if turn["finish_reason"] == "length":
        return turn, "length"
    if _calls(turn) != _calls(recorded):
        return turn, "tools" if has_more else "whole"
    ids = {"tool_calls": recorded["tool_calls"]} if _calls(recorded) else {}  # to which recorded results refer
    return turn | ids, "whole"


def _calls(message: Message) -> list:
    """Names and arguments of the calls; their ids are drawn anew by every server."""
    return [call["function"] for call in message.get("tool_calls", ())]
