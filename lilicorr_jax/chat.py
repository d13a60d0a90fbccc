"""A conversation in a tokenizer's own chat template: one way of calling it, for training and serving alike.

Messages are in OpenAI's form (`role`, `content`, and what a template knows besides). It reads no file: tokenizers come
from `conversion.tokenizer`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

Messages = Sequence[Mapping[str, Any]]


def prompt_ids(tokenizer, messages: Messages, *, thinking: bool = False, tools: Sequence = ()) -> tuple[int, ...]:
    """Token ids of a conversation up to where the next reply begins: what a server reads before it writes.

    Args:
        thinking: for templates that know `enable_thinking`; others are left alone.
        tools: JSON descriptions of functions.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses the conversation, or gives no row of ids.
    """
    options = template_options(tokenizer, thinking=thinking, tools=tools)
    return flat_ids(_apply(tokenizer, messages, add_generation_prompt=True, tokenize=True, **options))


def rendered(tokenizer, messages: Messages, *, is_prompt: bool, thinking: bool = False, tools: Sequence = ()) -> str:
    """The text of a conversation: up to where the next reply begins (`is_prompt`), or ended behind its last message."""
    options = template_options(tokenizer, thinking=thinking, tools=tools)
    return _apply(tokenizer, messages, add_generation_prompt=is_prompt, tokenize=False, **options)


def template_options(tokenizer, *, thinking: bool, tools: Sequence) -> dict[str, Any]:
    """Keyword arguments of the template: only those that it knows or that the conversation needs."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ValueError("The target's tokenizer has no chat template; add `chat_template` to tokenizer_config.json.")
    switches: dict[str, Any] = {"enable_thinking": thinking} if knows_thinking(tokenizer) else {}
    return switches | ({"tools": list(tools)} if tools else {})


def knows_thinking(tokenizer) -> bool:
    """Whether the tokenizer's template can turn thinking on and off."""
    return "enable_thinking" in str(getattr(tokenizer, "chat_template", None))


def flat_ids(encoded) -> tuple[int, ...]:
    """One row of ids, whatever the tokenizer's version returns: ids, a batch of one row, an array, or a mapping."""
    if isinstance(encoded, Mapping):
        encoded = encoded.get("input_ids", ())
    ids = encoded.tolist() if hasattr(encoded, "tolist") else list(encoded)
    if len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if not ids or not all(isinstance(token, int) for token in ids):
        raise ValueError(f"The chat template gave {type(encoded).__name__} {str(ids)[:60]}; a row of ids is needed.")
    return tuple(ids)


def _apply(tokenizer, messages: Messages, **options):
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except (TemplateError, TypeError) as error:  # a template's own rules, and what it can't write
        raise ValueError(f"The chat template refuses the conversation: {error}.") from error
