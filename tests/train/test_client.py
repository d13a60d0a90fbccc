"""What counts as an answer of a server, and how messages are sent to it."""

import json

import pytest

from train.client import ServerConfig, read_answer, wire
from train.dialogue import NoAnswer

ADD = {"name": "add", "arguments": {"a": 2}}


def completion(message, reason="stop", **more) -> bytes:
    body = {"choices": [{"message": message, "finish_reason": reason} | more], "usage": {"completion_tokens": 7}}
    return json.dumps(body).encode()


def test_a_text_its_end_and_its_tokens_are_taken():
    answer = read_answer(completion({"content": "five"}), thinking=False)
    assert (
        answer.message == {"role": "assistant", "content": "five", "finish_reason": "stop"} and answer.num_tokens == 7
    )
    cut = read_answer(completion({"content": "fi"}, "length", token_ids=[5, 6]), thinking=False)
    assert cut.message["finish_reason"] == "length" and cut.message["token_ids"] == [5, 6] and cut.num_tokens == 2


def test_calls_come_as_text_and_are_kept_as_objects():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    answer = read_answer(completion({"content": None, "tool_calls": [call]}, "tool_calls"), thinking=False)
    assert answer.message["tool_calls"] == [{"id": "c", "type": "function", "function": ADD}]
    assert answer.message["finish_reason"] == "stop"
    assert wire(answer.message)["tool_calls"] == [call]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_where_thinking_is_on_and_refused_where_it_is_off(field):
    body = completion({"content": "five", field: "hm"})
    assert read_answer(body, thinking=True).message["reasoning_content"] == "hm"
    with pytest.raises(NoAnswer, match="thinking is off"):
        read_answer(body, thinking=False)
    with pytest.raises(NoAnswer, match="thinking is off"):
        read_answer(completion({"content": "<think>hm</think>five"}), thinking=False)
    read_answer(completion({"content": "<think>\n\n</think>\n\nfive"}), thinking=False)


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"<html>", "malformed reply .*<html>"),
        (b"[" * 100_000, "malformed reply"),
        (b"\xff\xfe{", "malformed reply"),
        (b"[]", "malformed reply"),
        (b'{"choices": []}', "malformed reply .IndexError"),
        (b'{"choices": [{"message": "five", "finish_reason": "stop"}]}', "malformed reply"),
        (b'{"choices": [{"message": {"content": "five"}}]}', "malformed reply .KeyError: 'finish_reason'"),
        (completion({"content": ["five"]}), "content is no text"),
        (completion({"content": "five", "tool_calls": [{}]}), "malformed reply"),
        (completion({"content": "five"}, "content_filter"), "ended by 'content_filter'"),
        (completion({"content": "five"}, None), "ended by None"),
        (completion({"content": " "}), "empty"),
        (completion({"content": None}, "length"), "empty .ended by 'length'"),
    ],
    ids=range(13),
)
def test_anything_else_is_no_answer(body, reason):
    with pytest.raises(NoAnswer, match=reason):
        read_answer(body, thinking=False)


def test_what_only_we_note_is_not_sent():
    message = {"role": "assistant", "content": "five", "finish_reason": "stop", "token_ids": [5]}
    assert wire(message) == {"role": "assistant", "content": "five"}


@pytest.mark.parametrize("bad", [{"extra_body": "[1]"}, {"extra_body": "{"}, {"concurrency": 0}, {"retries": -1}])
def test_settings_that_make_no_sense_are_refused_by_value(bad):
    (value,) = bad.values()
    with pytest.raises(ValueError) as error:
        ServerConfig(**bad)
    assert str(value) in str(error.value)
