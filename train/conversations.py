"""Conversations, whatever form they are written in: OpenAI messages, ShareGPT turns, bare prompts.

One row of a data set becomes one `Conversation`, or a sentence that says why it can't. Nothing is mended silently; what
is left out on purpose: an empty system message, which is how data sets write that there is none. It opens no file.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
ID_FIELDS = ("id", "uuid", "conversation_id", "prompt_id", "question_id")
KEPT_FIELDS = ("name", "tool_call_id", "finish_reason", "token_ids")
"""Of a message, beside role, content, reasoning_content and tool_calls."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in OpenAI's form, checked.

    Attributes:
        id: the data set's own, or else the key.
        category: the data set's own, or else the name of its split.
        messages: `role` and `content`, a text; where they are given `reasoning_content`, `tool_calls` (arguments as
            objects), `tool_call_id`, `name`; of a regenerated turn `finish_reason` and perhaps `token_ids`.
        tools: descriptions of functions, in OpenAI's form.
    """

    id: str
    category: str
    messages: tuple[Message, ...]
    tools: tuple[dict, ...] = ()

    @property
    def key(self) -> str:
        """A digest of all that the target is asked: two conversations with one key are the same work."""
        return question_digest(self.messages, self.tools)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A row that can't be used: where it stands, counted from 0, and why."""

    source: str
    index: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source} row {self.index}: {self.reason}"


Report = Callable[[Problem], None]


def strict(problem: Problem) -> None:
    """A report that stops at the first problem, by ValueError."""
    raise ValueError(f"{problem}. Mend or remove it, or leave out --strict to go on without it.")


def question_digest(messages: Sequence[Message], tools: Sequence[dict]) -> str:
    """24 hexadecimal digits of all messages but the assistant's, and the tools."""
    asked = [[message["role"], message["content"]] for message in messages if message["role"] != "assistant"]
    text = json.dumps([asked, list(tools)], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def conversation_of(row: Any, *, default_category: str) -> Conversation:
    """The conversation that a row holds.

    Args:
        row: an object with `messages` (OpenAI), `conversations` (ShareGPT) or `turns` (the texts of a user alone);
            perhaps one of `ID_FIELDS`, `category`, `tools` and, as ShareGPT has it, `system`.

    Raises:
        ValueError: in a few words, what is wrong with it.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"it is a {type(row).__name__}, not an object")
    tools, messages = _tools(row.get("tools")), _messages(row)
    if row.get("turns") is None:
        check_order(messages)
    category = row.get("category")
    own_id = next((row[name] for name in ID_FIELDS if row.get(name) not in (None, "")), None)
    if not isinstance(own_id, str | int | None) or isinstance(own_id, bool):
        raise ValueError(f"its id must be a text or a whole number, but is {_short(own_id)}")
    return Conversation(
        id=question_digest(messages, tools) if own_id is None else str(own_id),
        category=category if isinstance(category, str) and category else default_category,
        messages=messages,
        tools=tools,
    )


def check_order(messages: Sequence[Message]) -> None:
    """Raises ValueError unless the roles follow each other as in a chat."""
    roles = [message["role"] for message in messages]
    start = 1 if roles[:1] == ["system"] else 0
    first = roles[start] if len(roles) > start else "nothing"
    if first != "user":
        raise ValueError(f"it must begin with the user's turn, but begins with {first}")
    for number in range(start + 1, len(messages)):
        before, role = messages[number - 1], roles[number]
        may_follow = {
            "system": False,
            "user": before["role"] == "assistant",
            "assistant": before["role"] in ("user", "tool"),
            "tool": before["role"] == "tool" or bool(before.get("tool_calls")),
        }[role]
        if not may_follow:
            raise ValueError(f"message {number} is the {role}'s, which can't follow the {before['role']}'s")


def _messages(row: Mapping) -> tuple[Message, ...]:
    if row.get("turns") is not None:
        return tuple(_message(number, "user", text, {}) for number, text in enumerate(_list(row, "turns")))
    name = next((name for name in ("messages", "conversations", "conversation") if row.get(name) is not None), None)
    if name is None:
        held = ", ".join(map(str, list(row)[:8])) or "nothing"
        raise ValueError(f"it has none of `messages`, `conversations` and `turns`, but {held}")
    read = [_read(number, turn) for number, turn in enumerate(_list(row, name))]
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        if read and read[0] and read[0]["role"] == "system":
            raise ValueError("it has a `system` field and a system message")
        read.insert(0, {"role": "system", "content": system})
    return tuple(message for message in read if message is not None)


def _list(row: Mapping, name: str) -> list:
    if not isinstance(row[name], list) or not row[name]:
        raise ValueError(f"`{name}` must be a list of at least one turn, but is {_short(row[name])}")
    return row[name]


def _read(number: int, turn: Any) -> Message | None:
    """One message from either form; None for an empty system message."""
    if not isinstance(turn, Mapping):
        raise ValueError(f"message {number} is a {type(turn).__name__}, not an object")
    if "from" in turn:
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        fields, content = dict(turn), turn.get("value")
        if turn["from"] == "function_call":
            fields, content = {"tool_calls": [_json(content, f"the call of message {number}")]}, ""
    else:
        role, fields, content = turn.get("role"), dict(turn), turn.get("content")
    if role not in ROLES:
        raise ValueError(
            f"message {number} has the role {_short(turn.get('from', turn.get('role')))}; known are {', '.join(ROLES)}"
        )
    return _message(number, role, content, fields)


def _message(number: int, role: str, content: Any, fields: Mapping) -> Message | None:
    text = _text(number, content)
    message: Message = {"role": role, "content": text}
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ValueError(f"message {number}'s reasoning must be a text, but is {_short(reasoning)}")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls := fields.get("tool_calls"):
        message["tool_calls"] = tool_calls(calls, f"message {number}")
    message |= {name: fields[name] for name in KEPT_FIELDS if fields.get(name) is not None}
    if role == "system" and not text.strip():
        return None
    if role in ("user", "assistant") and not text.strip() and "tool_calls" not in message:
        raise ValueError(f"message {number}, the {role}'s, is empty")
    return message


def _text(number: int, content: Any) -> str:
    """A text, or the texts of a list of parts one after the other."""
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part["text"] for part in parts if _is_text(part)]
    if len(texts) < len(parts):
        raise ValueError(f"message {number}'s content must be text, but is {_short(content)}")
    return "".join(texts)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def tool_calls(calls: Any, whose: str) -> list[dict]:
    """Calls in OpenAI's form, their arguments as objects, which templates expect.

    Raises:
        ValueError: a call has no name, or arguments that are no JSON object; `whose` begins the sentence.
    """
    if not isinstance(calls, list):
        raise ValueError(f"{whose}'s tool_calls must be a list, but are {_short(calls)}")
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{whose} calls a tool without a name: {_short(call)}")
        arguments = _json(function.get("arguments") or {}, f"the arguments of {whose}'s call of {function['name']}")
        own = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        read.append(own | {"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def _tools(tools: Any) -> tuple[dict, ...]:
    """A list of descriptions, or its JSON; a description without its envelope gets one."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"`tools` is a text that is not JSON: {_short(tools)}") from None
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise ValueError(f"`tools` must be a list of objects or its JSON, but is {_short(tools)}")
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {number} has no name: {_short(tool)}")
    return tuple(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools)


def _json(value: Any, what: str) -> dict:
    """An object, or the object that a text writes."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"{what} are not JSON: {_short(value)}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, but are {_short(value)}")
    return dict(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 48 else text[:45] + "..."
