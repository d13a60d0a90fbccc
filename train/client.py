"""Answers from any server that speaks OpenAI's chat completions: vLLM, SGLang, others.

Owns requests, retries and what counts as an answer. The only file that opens a connection.
"""

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from lilicorr_jax.config import setting
from train.conversations import Message, tool_calls
from train.dialogue import Answer, NoAnswer, Prompt

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LONGEST_PAUSE_S = 60.0
API_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server is asked; the environment variable OPENAI_API_KEY is sent where it is set."""

    concurrency: int = setting(64, "Conversations in flight at once, over all servers.")
    timeout_s: float = setting(600.0, "Longest wait for one answer.")
    retries: int = setting(
        5, "Further tries after a time-out, a lost connection, or a status that may pass (429, 5xx)."
    )
    backoff_s: float = setting(1.0, "Pause before the first retry; it doubles, up to a minute.")
    send_thinking: bool = setting(True, "Send chat_template_kwargs.enable_thinking, which vLLM and SGLang read.")
    extra_body: str = setting("{}", 'More fields of each request as JSON, such as {"return_token_ids": true}.')

    def __post_init__(self):
        for name in ("concurrency", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--server.{name} must be positive; got {getattr(self, name)}.")
        for name in ("retries", "backoff_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"--server.{name} must not be negative; got {getattr(self, name)}.")
        self.extra()

    def extra(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.extra_body)
        except json.JSONDecodeError as error:
            raise ValueError(f"--server.extra_body must be a JSON object; got {self.extra_body!r} ({error}).") from None
        if not isinstance(fields, dict):
            raise ValueError(f"--server.extra_body must be a JSON object; got {self.extra_body!r}.")
        return fields


class Client:
    """Asks servers in turn; an async context.

    Args:
        base_urls: such as http://host:8000/v1.
        body: fields of every request: model, max_tokens, temperature and the like.
        thinking: whether answers may hold reasoning.
    """

    def __init__(self, base_urls: Sequence[str], config: ServerConfig, body: Mapping[str, Any], *, thinking: bool):
        self.base_urls = [url.rstrip("/") for url in base_urls]
        self.config, self.thinking = config, thinking
        switch = {"chat_template_kwargs": {"enable_thinking": thinking}} if config.send_thinking else {}
        self.body = {**body, **switch, **config.extra()}
        self._number = 0
        key = os.environ.get(API_KEY)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(config.timeout_s, pool=None),
            limits=httpx2.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(self, prompt: Prompt, tools: Sequence[dict], seed: int | None = None) -> Answer:
        """The assistant's next turn.

        Raises:
            NoAnswer: the server refuses, fails too often, or what it says is no answer.
        """
        fields = {"messages": [wire(message) for message in prompt]}
        fields |= ({"tools": list(tools)} if tools else {}) | ({} if seed is None else {"seed": seed})
        self._number += 1
        url = f"{self.base_urls[self._number % len(self.base_urls)]}/chat/completions"
        return read_answer(await self._post(url, {**self.body, **fields}), thinking=self.thinking)

    async def only_model(self) -> str:
        """The name of the one model that the first server has.

        Raises:
            ValueError: it can't be asked, or has none or several.
        """
        url = f"{self.base_urls[0]}/models"
        try:
            names = [model["id"] for model in (await self._http.get(url)).raise_for_status().json()["data"]]
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{url} names no model ({type(error).__name__}: {error}); give --model.") from None
        if len(names) != 1:
            raise ValueError(f"{url} names {len(names)} models {names[:5]}; choose one by --model.")
        return names[0]

    async def _post(self, url: str, body: dict) -> bytes:
        """What the server sends back with status 200, tried again after failures that may pass."""
        problem = ""
        for number in range(self.config.retries + 1):
            if number:
                await asyncio.sleep(self._pause(number))
            try:
                reply = await self._http.post(url, json=body)
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__} {error}".strip()
                continue
            if reply.status_code == 200:
                return reply.content
            problem = f"status {reply.status_code}: {reply.text[:200]}"
            if reply.status_code not in TRANSIENT:
                raise NoAnswer(problem)
        raise NoAnswer(f"{problem}, after {self.config.retries + 1} tries")

    def _pause(self, number: int) -> float:
        """Seconds before retry `number`, spread so that many requests do not come back at once."""
        return min(self.config.backoff_s * 2 ** (number - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


def wire(message: Message) -> dict[str, Any]:
    """A message as servers take it: arguments of calls as text, and nothing that only we note."""
    sent = {name: value for name, value in message.items() if name not in ("finish_reason", "token_ids")}
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def read_answer(body: bytes, *, thinking: bool) -> Answer:
    """The answer in a chat completion.

    Raises:
        NoAnswer: it is malformed, empty, ended otherwise than by itself or the limit, or holds reasoning although
            thinking is off.
    """
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        turn: Message = {"role": "assistant", "content": content} | (
            {"tool_calls": tool_calls(calls, "it")} if calls else {}
        )
        ids = choice.get("token_ids")
        num_tokens = len(ids) if ids else int((reply.get("usage") or {}).get("completion_tokens", 0))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise NoAnswer(f"malformed reply ({type(error).__name__}: {error}): {body[:120]!r}") from None
    if not isinstance(content, str) or not isinstance(reasoning, str):
        raise NoAnswer(f"malformed reply (its content is no text): {body[:120]!r}")
    if reason not in ("stop", "length", "tool_calls"):
        raise NoAnswer(f"the answer was ended by {reason!r}")
    if not content.strip() and not calls:
        raise NoAnswer(f"the answer is empty (ended by {reason!r})")
    thought = reasoning or content.partition("</think>")[0].partition("<think>")[2]
    if thought.strip() and not thinking:
        raise NoAnswer("the server thought although thinking is off; does it read chat_template_kwargs?")
    if reasoning:
        turn["reasoning_content"] = reasoning
    if ids:
        turn["token_ids"] = ids
    turn["finish_reason"] = "length" if reason == "length" else "stop"
    return Answer(message=turn, num_tokens=num_tokens)
