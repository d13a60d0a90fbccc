"""Rows of every form against conversations written out; bad rows against the sentence that names them."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from train import sources
from train.conversations import Conversation, conversation_of, strict

USER, ANSWER = {"role": "user", "content": "A?"}, {"role": "assistant", "content": "one"}
ADD = {"name": "add", "arguments": {"a": 2}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}
TOOL = {"type": "function", "function": {"name": "add"}}


def read(row) -> Conversation:
    return conversation_of(row, default_category="split")


def test_openai_messages_are_taken_as_they_are():
    row = {"id": "x", "category": "chat", "messages": [{"role": "system", "content": "S"}, USER, ANSWER]}
    assert read(row) == Conversation(
        id="x", category="chat", messages=({"role": "system", "content": "S"}, USER, ANSWER)
    )


def test_sharegpt_turns_become_messages():
    row = {
        "system": "S",
        "conversations": [
            {"from": "human", "value": "A?"},
            {"from": "function_call", "value": json.dumps(ADD)},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "one"},
        ],
        "tools": json.dumps([{"name": "add"}]),
    }
    conversation = read(row)
    assert conversation.messages == (
        {"role": "system", "content": "S"}, USER, CALL, {"role": "tool", "content": "5"}, ANSWER,
    )  # fmt: skip
    assert conversation.tools == (TOOL,) and conversation.category == "split"


def test_bare_prompts_are_users_turns_without_answers():
    assert read({"turns": ["A?", "B?"]}).messages == (USER, {"role": "user", "content": "B?"})


def test_nemotron_rows_keep_uuid_and_category_and_lose_an_empty_system_message():
    row = {
        "uuid": "u-1", "license": "cc", "generator": "g", "version": "v2", "category": "math", "reasoning": "off",
        "messages": [{"role": "system", "content": ""}, USER, ANSWER],
    }  # fmt: skip
    assert read(row) == Conversation(id="u-1", category="math", messages=(USER, ANSWER))


def test_arguments_of_calls_are_objects_whichever_way_they_are_written():
    as_text = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 2}'}}]}
    (call,) = read({"messages": [USER, as_text]}).messages[1]["tool_calls"]
    assert call == {"id": "c1", "type": "function", "function": ADD}


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "?"}]
    assert read({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages[0] == USER


def test_the_key_follows_from_what_is_asked_alone():
    key = read({"id": 1, "messages": [USER, ANSWER]}).key
    assert read({"messages": [USER, {"role": "assistant", "content": "two"}]}).key == key
    assert read({"messages": [USER, ANSWER]}).id == key
    others = [
        {"turns": ["B?"]}, {"turns": ["A?"], "tools": [TOOL]}, {"messages": [{"role": "system", "content": "S"}, USER]}
    ]  # fmt: skip
    assert len({key} | {read(row).key for row in others}) == 4


BAD = {
    "it is a list": [USER],
    "none of `messages`": {"text": "A?"},
    "a list of at least one turn": {"messages": "A?"},
    "list of at least one": {"turns": []},
    "begin with the user's turn, but begins with assistant": {"messages": [ANSWER, USER]},
    "begins with nothing": {"messages": [{"role": "system", "content": "S"}]},
    "message 1 is the user's, which can't follow the user's": {"messages": [USER, USER, ANSWER]},
    "message 2 is the assistant's, which can't follow the assistant's": {"messages": [USER, ANSWER, ANSWER]},
    "message 1 is the system's": {"messages": [USER, {"role": "system", "content": "S"}]},
    "message 2 is the tool's": {"messages": [USER, ANSWER, {"role": "tool", "content": "5"}]},
    "message 1, the assistant's, is empty": {"messages": [USER, {"role": "assistant", "content": " \n"}]},
    "message 0, the user's, is empty": {"turns": [""]},
    "the role 'function'": {"messages": [USER, {"role": "function", "content": "5"}]},
    "the role 'alien'": {"conversations": [{"from": "alien", "value": "A?"}]},
    "message 0 is a str": {"messages": ["A?"]},
    "content must be text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "must be text, but is 7": {"messages": [{"role": "user", "content": 7}]},
    "reasoning must be a text": {"messages": [USER, ANSWER | {"reasoning_content": 7}]},
    "calls a tool without a name": {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
    "are not JSON: '{a'": {"messages": [USER, {"role": "assistant", "tool_calls": [ADD | {"arguments": "{a"}]}]},
    "must be an object, but are '[1]'": {"messages": [USER, CALL | {"tool_calls": [ADD | {"arguments": "[1]"}]}]},
    "`tools` is a text that is not JSON": {"turns": ["A?"], "tools": "add()"},
    "tool 0 has no name": {"turns": ["A?"], "tools": [{"type": "function"}]},
    "its id must be": {"turns": ["A?"], "id": 1.5},
    "a `system` field and a system message": {"system": "S", "messages": [{"role": "system", "content": "T"}, USER]},
}


@pytest.mark.parametrize("reason, row", BAD.items(), ids=list(BAD))
def test_a_bad_row_is_refused_by_what_is_wrong_with_it(reason, row):
    with pytest.raises(ValueError) as error:
        read(row)
    assert reason.replace("'[1]'", "[1]") in str(error.value)


@pytest.fixture
def problems() -> list:
    return []


@pytest.fixture
def write(tmp_path):
    """Writes rows to a file in the form that its name asks for."""

    def write(name: str, rows) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(list(rows)))
        else:
            path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


def questions(name: str, count: int) -> list[dict]:
    return [
        {"uuid": f"{name}-{i}", "messages": [{"role": "user", "content": f"{name} {i}?"}, ANSWER]} for i in range(count)
    ]


def ids(paths, problems, **options) -> list[str]:
    return [c.id for c in sources.read_conversations(paths, report=problems.append, **options)]


def test_good_rows_go_on_and_each_bad_one_is_reported_with_index_and_reason(write, problems):
    good = questions("q", 6)
    good[1]["tools"], good[2]["tools"] = [TOOL], json.dumps([TOOL])
    rows = [
        good[0], {"messages": [ANSWER, USER]}, good[1], {"messages": [USER, USER]}, good[2], "{not json", good[3],
        {"messages": [USER, ANSWER | {"content": ""}]}, good[4],
        {"messages": [USER, {"role": "function"}]}, "", good[5],
    ]  # fmt: skip
    path = write("rows.jsonl", rows)
    assert ids([path], problems) == [row["uuid"] for row in good]
    assert [problem.index for problem in problems] == [1, 3, 5, 7, 9]
    reasons = ("begins with assistant", "follow the user's", "not JSON", "is empty", "'function'")
    assert all(reason in str(problem) for reason, problem in zip(reasons, problems, strict=True))
    assert str(problems[0]).startswith(f"{path} row 1: ")


def test_strict_stops_at_the_first_bad_row(write):
    path = write("rows.jsonl", [*questions("q", 2), {"messages": []}, *questions("r", 2)])
    rows = sources.read_conversations([path], report=strict)
    assert [next(rows).id, next(rows).id] == ["q-0", "q-1"]
    with pytest.raises(ValueError, match=r"rows\.jsonl row 2"):
        next(rows)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_every_file_form_gives_the_same_conversations(write, problems, suffix):
    rows = [row | {"category": "math"} for row in questions("q", 300)]
    path = write(f"math.{suffix}", rows)
    expected = [Conversation(id=row["uuid"], category="math", messages=tuple(row["messages"])) for row in rows]
    assert list(sources.read_conversations([path], report=problems.append)) == expected
    (split,) = sources.find_splits([path])
    assert sources.count_rows(split) == 300 and not problems


@pytest.fixture
def nemotron(write, tmp_path) -> str:
    """A folder with the names that the hub gives: two shards of code, one of math, a translation."""
    for name in ("code-00000-of-00002", "code-00001-of-00002", "math-00000-of-00001", "multilingual_de-00000-of-00001"):
        write(f"data/{name}.parquet", questions(name[:6] + name[9:10] if name[:4] == "code" else name[:4], 3))
    return str(tmp_path)


def test_splits_are_known_by_the_names_of_their_files_and_translations_are_left_out(nemotron, problems):
    rows = list(sources.read_conversations([nemotron], report=problems.append))
    assert {row.category for row in rows} == {"code", "math"} and len(rows) == 9
    assert {row.category for row in sources.read_conversations([nemotron], report=strict, splits=["math"])} == {"math"}
    german = sources.read_conversations([nemotron], report=strict, splits=["multilingual_de"])
    assert {row.category for row in german} == {"multilingual_de"}


def test_a_limit_takes_evenly_from_splits_and_the_same_rows_each_time(write, problems):
    paths = [write("a.jsonl", questions("a", 100)), write("b.jsonl", questions("b", 100))]
    first, again = (ids(paths, problems, limit=100) for _ in range(2))
    assert first == again and len(set(first)) == 100
    assert sum(name.startswith("a") for name in first) == 50


def test_a_limit_is_filled_by_other_splits_where_one_ends(write, problems):
    paths = [write("a.jsonl", questions("a", 2)), write("b.jsonl", questions("b", 9))]
    assert sorted(ids(paths, problems, limit=7)) == ["a-0", "a-1", "b-0", "b-1", "b-2", "b-3", "b-4"]


def test_questions_of_an_evaluation_file_are_kept_out_of_training(write, problems):
    held = write("held.jsonl", [{"turns": ["Q  1?\n"]}])
    path = write("rows.jsonl", questions("q", 3))
    assert ids([path], problems, refused=sources.evaluation_prompts([held])) == ["q-0", "q-2"]
    (problem,) = problems
    assert problem.index == 1 and "held.jsonl" in problem.reason


def test_a_hub_id_is_downloaded_once_per_split_and_read_as_a_folder(nemotron, monkeypatch):
    asked = {}

    def snapshot_download(repository, **options):
        asked.update(options, repository=repository)
        return nemotron

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    rows = list(sources.read_conversations(["nvidia/Nemotron@abc"], report=strict, splits=["code"]))
    assert len(rows) == 6
    assert (asked["repository"], asked["revision"], asked["repo_type"]) == ("nvidia/Nemotron", "abc", "dataset")
    assert "*code*.parquet" in asked["allow_patterns"]


def test_a_hub_id_without_a_network_is_refused_by_name(monkeypatch):
    def offline(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match="'owner/name' is no local path.*no route.*give its folder"):
        sources.find_splits(["owner/name"])


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.parquet", "PAR0", "x.parquet is no readable parquet"),
        ("x.json", "{}", "x.json holds a dict"),
        ("x.json", "[1", "x.json is not JSON"),
    ],
)
def test_an_unreadable_file_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(sources.read_conversations([str(tmp_path / name)], report=strict))


def test_a_source_that_holds_nothing_is_refused(tmp_path, write):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no .jsonl"):
        sources.find_splits([str(tmp_path / "empty")])
    with pytest.raises(ValueError, match="'no such place' is no file"):
        sources.find_splits(["no such place"])
    write("only/multilingual_de.jsonl", questions("q", 1))
    with pytest.raises(ValueError, match="only the splits multilingual_de"):
        sources.find_splits([str(tmp_path / "only")])
    with pytest.raises(ValueError, match="no split 'chat'"):
        sources.find_splits([str(tmp_path / "only")], ["chat"])
