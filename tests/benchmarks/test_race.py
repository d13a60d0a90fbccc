"""Contestants take turns as told and answer for themselves; one that dies is named. Toy programs play them."""

import sys

import pytest

from benchmarks import race

ECHO = """
import json, sys
settings = json.loads(sys.argv[1])
print("noise before the first answer")
print(json.dumps({"name": settings["name"]}), flush=True)
for count, line in enumerate(sys.stdin):
    with open(settings["log"], "a") as log: log.write(json.loads(line) + "\\n")
    print(json.dumps({"seconds": 10.0 - count}), flush=True)
"""


def test_contestants_take_turns_and_of_two_runs_in_a_row_the_second_counts(tmp_path):
    log = tmp_path / "log"
    commands = {name: [sys.executable, "-c", ECHO] for name in ("one", "two")}
    tasks = [("one", "a"), ("two", "b"), ("one", "c")]
    about, results = race.race(commands, {"name": "toy", "log": str(log)}, tasks, rounds=2, num_threads=1)
    assert log.read_text().split() == ["a", "a", "b", "b", "c", "c"] * 2
    assert about == {"one": {"name": "toy"}, "two": {"name": "toy"}}
    assert [row["seconds"] for row in results["two", "b"].rounds] == [9.0, 7.0]
    assert [row["seconds"] for row in results["one", "c"].rounds] == [7.0, 3.0]
    assert (results["one", "c"].best("seconds"), results["one", "c"].median("seconds")) == (3.0, 5.0)


def test_a_program_that_ends_is_named():
    with pytest.raises(ValueError, match="pass` ended without an answer"):
        race.race({"one": [sys.executable, "-c", "pass"]}, {}, [("one", "a")], rounds=1, num_threads=1)


def test_a_missing_peer_environment_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "PEER_PYTHON", tmp_path / "python")
    with pytest.raises(ValueError, match="make it with `make peers`"):
        race.peer_command("transformers_generate.py")
