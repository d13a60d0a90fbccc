"""Regeneration through a server that fails as told, and in this process against plain greedy decoding."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from demo import greedy
from lilicorr_jax.conversion.checkpoint import abstract_target, load_target, save_target
from lilicorr_jax.conversion.tokenizer import load_tokenizer
from lilicorr_jax.models.target import Target
from lilicorr_jax.presets import tiny
from tests.train.server import choice, fake_server, says, silence, status
from tests.train.templates import write_tokenizer
from tests.train.texts import random_parameters
from train import chat, regenerate
from train.conversations import strict
from train.journal import Journal
from train.sources import read_conversations

ROOT = Path(__file__).parents[2]
USER = {"role": "user", "content": "A?"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.fixture
def fake():
    with fake_server() as server:
        yield server


@pytest.fixture
def questions(tmp_path):
    """Writes conversations to a file."""

    def write(rows, name="questions.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture
def run(fake, tmp_path, capsys):
    """Runs the command on a source; its exit code, records and what it said."""

    def run(source: str, **options):
        flags = {"base_url": fake.url, "server.concurrency": 4, "server.backoff_s": 0.01, "server.retries": 2} | options
        code = regenerate.main(
            [f"--conversations={source}", f"--output={tmp_path / 'out.jsonl'}"]
            + [f"--{name}={value}" for name, value in flags.items()]
        )
        lines = (tmp_path / "out.jsonl").read_text().splitlines() if (tmp_path / "out.jsonl").exists() else []
        return code, [json.loads(line) for line in lines], capsys.readouterr().err

    return run


def single(count: int) -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(count)]


def test_every_assistant_turn_is_rewritten_with_the_new_answers_as_history(fake, questions, run):
    old = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "old"}, USER | {"content": "B?"}]
    code, (record,), said = run(questions([{"id": "x", "category": "chat", "messages": old}]))
    assert code == 0
    assert [body["messages"] for body in fake.asked] == [
        [old[0], USER],
        [old[0], USER, {"role": "assistant", "content": "answer to A?"}, old[3]],
    ]
    assert [m["content"] for m in record["messages"]] == ["S", "A?", "answer to A?", "B?", "answer to B?"]
    assert (record["id"], record["category"], record["end"], record["tokens"]) == ("x", "chat", "whole", 6)
    assert "1 conversations done (0 truncated" in said and "6 tokens" in said


def test_the_target_is_asked_greedily_with_thinking_off_and_a_cap_of_4096(fake, questions, run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    run(
        questions([{"turns": ["A?"], "tools": [{"name": "add"}]}]),
        **{"server.extra_body": '{"return_token_ids": true}'},
    )
    (body,) = fake.asked
    assert body == {
        "model": "fake", "max_tokens": 4096, "temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False},
        "messages": [USER], "tools": [{"type": "function", "function": {"name": "add"}}], "return_token_ids": True,
    }  # fmt: skip
    assert fake.keys == {"Bearer sesame"}


def test_a_run_killed_after_7_of_20_asks_for_the_other_13(fake, questions, run, tmp_path):
    fake.gate = threading.Semaphore(7)
    rows = single(20)
    output = tmp_path / "out.jsonl"
    command = [
        sys.executable, "-m", "train.regenerate", f"--conversations={questions(rows)}", f"--output={output}",
        f"--base_url={fake.url}", "--server.concurrency=3", "--limit=12",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") == 7)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with output.open("ab") as file:
        file.write(b'{"key": "0123456789", "end": "whole", "tok')  # as a kill in the middle of a write leaves it

    fake.gate = threading.Semaphore(10**6)
    fake.asked.clear()
    fake.faults = {"question 19": [status(500)]}
    random.Random(1).shuffle(rows)
    code, records, said = run(questions(rows))
    assert code == 0 and len(fake.asked) == 13 + 1  # one of them twice
    answers = [record["messages"][-1]["content"] for record in records]
    assert sorted(answers) == sorted(f"answer to question {i}" for i in range(20))
    assert "13 conversations done" in said and "holds 20 conversations" in said
    assert run(questions(rows))[0] == 0 and len(fake.asked) == 14  # nothing is left to ask


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.05)


def test_failures_that_pass_are_tried_again(fake, questions, run):
    fake.faults = {
        "question 0": [status(500), status(503)], "question 1": [silence], "question 2": [status(429)],
    }  # fmt: skip
    code, records, _ = run(questions(single(4)), **{"server.timeout_s": 0.5})
    assert code == 0 and len(records) == 4 and len(fake.asked) == 4 + 4


def test_a_row_that_keeps_failing_is_reported_and_asked_again_by_the_next_run(fake, questions, run, tmp_path):
    fake.faults = {"question 1": [status(500)] * 3, "question 2": [status(400)]}
    code, records, said = run(questions(single(4)))
    assert code == 0 and len(records) == 2 and "2 failed" in said
    assert "status 500" in said and "after 3 tries" in said
    failed = [json.loads(line) for line in (tmp_path / "out.jsonl.failed.jsonl").read_text().splitlines()]
    assert sorted(row["reason"][:10] for row in failed) == ["status 400", "status 500"]
    assert fake.questions.count("question 2") == 1  # a refusal is not tried again
    assert len(run(questions(single(4)))[1]) == 4
    assert (tmp_path / "out.jsonl.failed.jsonl").read_text() == ""


@pytest.mark.parametrize("body", [b"<html>", b'{"choices": []}', b'{"choices": [{"message": {"content": 5}}]}'])
def test_a_malformed_reply_is_reported_with_its_row(fake, questions, run, body):
    rows = [row | {"id": f"row-{i}"} for i, row in enumerate(single(3))]
    fake.faults = {"question 1": [says(body)]}
    code, records, said = run(questions(rows))
    assert code == 0 and sorted(record["id"] for record in records) == ["row-0", "row-2"]
    assert "conversation row-1: malformed reply" in said and "1 failed" in said


def test_strict_stops_at_the_first_failure_and_at_the_first_bad_row(fake, questions, run):
    fake.faults = {"question 0": [says(b"")]}
    code, _, said = run(questions(single(3)), strict="true")
    assert code == 2 and "malformed reply" in said
    code, _, said = run(questions([{"messages": []}]), strict="true")
    assert code == 2 and "questions.jsonl row 0" in said


def test_bad_rows_are_counted_and_the_others_answered(questions, run):
    code, records, said = run(questions([*single(2), {"messages": [{"role": "assistant", "content": "A"}]}]))
    assert code == 0 and len(records) == 2
    assert "questions.jsonl row 2: it must begin with the user's turn" in said and "1 bad rows" in said


def test_a_server_that_is_gone_stops_the_run(fake, questions, run):
    fake.faults = {f"question {i}": [status(401)] for i in range(20)}
    code, records, said = run(questions(single(20)), give_up_after=5)
    assert code == 2 and records == [] and "5 conversations failed in a row" in said and "401" in said
    assert len(fake.asked) < 12


def test_a_truncated_answer_is_marked_counted_and_ends_its_conversation(fake, questions, run):
    fake.answer = lambda body: choice("It is", "length")
    code, (record,), said = run(questions([{"turns": ["A?", "B?"]}]))
    assert record["end"] == "length" and record["messages"][-1]["finish_reason"] == "length"
    assert len(fake.asked) == 1 and "(1 truncated" in said
    assert (
        "0 conversations done" in (again := run(questions([{"turns": ["A?", "B?"]}]))[2]) and "1 truncated, 3" in again
    )


def test_a_question_that_stands_twice_is_asked_once(fake, questions, run):
    code, records, said = run(questions([*single(2), *single(2)]))
    assert len(records) == len(fake.asked) == 2 and "2 repeated" in said


def test_parts_share_the_work_without_overlap(fake, questions, run, tmp_path):
    for part in range(3):
        run(questions(single(20)), shard=f"{part}/3", output=tmp_path / f"part{part}.jsonl")
    assert sorted(fake.questions) == sorted(f"question {i}" for i in range(20))


def test_answers_of_two_kinds_do_not_mix_in_one_output(fake, questions, run):
    run(questions(single(2)))
    code, records, said = run(questions(single(4)), temperature=0.7)
    assert code == 2 and "--temperature=0.0" in said and "0.7" in said and len(records) == 2
    assert len(run(questions(single(4)), max_tokens=4096)[1]) == 4  # the same, spelled out


def test_an_output_that_holds_something_else_is_left_alone(questions, run, tmp_path):
    (tmp_path / "out.jsonl").write_text('{"turns": ["A?"]}\n')
    code, records, said = run(questions(single(2)))
    assert code == 2 and records == [{"turns": ["A?"]}] and "Line 1 of" in said


def test_a_missing_folder_is_made_and_an_impossible_one_stops_before_the_first_question(fake, questions, run, tmp_path):
    assert run(questions(single(1)), output=tmp_path / "new" / "folder" / "out.jsonl")[0] == 0
    assert (tmp_path / "new" / "folder" / "out.jsonl").read_text().count("\n") == 1
    (tmp_path / "file").write_text("")
    code, _, said = run(questions(single(2)), output=tmp_path / "file" / "out.jsonl")
    assert code == 2 and "file" in said and len(fake.asked) == 1


def test_two_processes_do_not_write_to_one_output(questions, run, tmp_path):
    with Journal(tmp_path / "out.jsonl", [], ()):
        code, _, said = run(questions(single(1)))
    assert code == 2 and "Another process writes to" in said


def test_calls_that_the_data_answers_go_on_and_others_end_the_conversation(fake, questions, run):
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "old"} | ADD]}
    result = {"role": "tool", "content": "5", "tool_call_id": "old"}
    rows = [{"messages": [USER, call, result, {"role": "assistant", "content": "five"}], "tools": [{"name": "add"}]}]
    calls = lambda a: choice(
        None, "tool_calls", tool_calls=[{"id": "new", "function": {"name": "add", "arguments": a}}]
    )
    fake.answer = lambda body: choice("5!") if body["messages"][-1]["role"] == "tool" else calls('{"a": 2}')
    _, (record,), _ = run(questions(rows))
    assert record["end"] == "whole" and [m["content"] for m in record["messages"]] == ["A?", "", "5", "5!"]
    assert record["messages"][1]["tool_calls"][0]["id"] == "old"
    assert fake.asked[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a": 2}'

    fake.answer = lambda body: calls('{"a": 3}')
    _, records, said = run(questions([{"id": 2, **rows[0], "tools": []}]))
    assert records[1]["end"] == "tools" and len(records[1]["messages"]) == 2 and "1 ended at other tool calls" in said


def test_several_models_on_a_server_need_a_choice(fake, questions, run):
    fake.models = ("small", "large")
    code, _, said = run(questions(single(1)))
    assert code == 2 and "small" in said and "--model" in said
    run(questions(single(1)), model="large")
    assert fake.asked[0]["model"] == "large"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": "x"}, "one of the two"),
        ({"shard": "3/3"}, "'3/3'"),
        ({"top_p": "0"}, "0.0"),
        ({"max_tokens": "0"}, "--max_tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_value(questions, run, options, message):
    code, _, said = run(questions(single(1)), **options)
    assert code == 2 and message in said


MAX_TOKENS = 12
CHATS = [
    {"id": "one", "turns": ["What is two?"]},
    {"id": "two", "turns": ["What is it?", "Thank you!"]},
    {"id": "three", "messages": [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "old"}]},
    {"id": "four", "turns": ["five?", "six?"]},
]


@pytest.fixture(scope="module")
def own_target(tmp_path_factory) -> Path:
    """A random target of one layer with a tokenizer; one token in eight ends its answers: some end, some don't."""
    folder = write_tokenizer(tmp_path_factory.mktemp("target"))
    vocab_size = len(load_tokenizer(folder))
    config = replace(tiny().target, vocab_size=vocab_size, num_layers=1, eos_ids=tuple(range(2, vocab_size, 8)))
    save_target(folder, config, random_parameters(abstract_target(config), seed=1))
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory, own_target) -> Path:
    """It answers in this process, in fewer rows than there are conversations."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    paths = [f"--conversations={folder / 'chats.jsonl'}", f"--output={folder / 'out.jsonl'}", f"--target={own_target}"]
    assert regenerate.main([*paths, f"--max_tokens={MAX_TOKENS}", "--rows=3", "--context_limit=128"]) == 0
    return folder / "out.jsonl"


def test_own_answers_are_the_greedy_ids_of_the_plain_loop(own, own_target):
    tokenizer = load_tokenizer(own_target)
    records = {record["id"]: record for record in map(json.loads, own.read_text().splitlines())}
    assert set(records) == {chat["id"] for chat in CHATS}
    asked, answered = [], []
    for record in records.values():
        for number, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                history = [{"role": m["role"], "content": m["content"]} for m in record["messages"][:number]]
                asked.append(tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False))
                answered.append(message["token_ids"])
    config, params = load_target(own_target)
    assert answered == greedy.replies(Target(config), params, asked, max_new=MAX_TOKENS, batch=len(asked))
    assert {record["end"] for record in records.values()} == {"whole", "length"} and len(asked) > 4


def test_own_answers_are_learned_token_by_token(own, own_target):
    """What regeneration writes, the next step reads: exactly the target's tokens are trained."""
    tokenizer = load_tokenizer(own_target)
    for conversation in read_conversations([str(own)], report=strict):
        rows = chat.render(tokenizer, conversation, thinking=False)
        trained = [token for row in rows for token in row.token_ids[row.loss_mask].tolist()]
        wrote = [message["token_ids"] for message in conversation.messages if message["role"] == "assistant"]
        assert trained == [token for ids in wrote for token in ids]


def test_a_prompt_that_fills_the_context_is_a_failed_row(own_target, tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"id": "long", "turns": ["a b c d " * 60]}) + "\n")
    paths = [
        f"--conversations={tmp_path / 'chats.jsonl'}",
        f"--output={tmp_path / 'out.jsonl'}",
        f"--target={own_target}",
    ]
    assert regenerate.main([*paths, "--context_limit=64", "--rows=1"]) == 0
    said = capsys.readouterr().err
    assert "conversation long: a prompt of" in said and "context of 64" in said and "1 failed" in said
