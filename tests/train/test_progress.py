"""What a run says: speed and time left by a clock that is set by hand, and records cut at the step resumed from."""

import json

import pytest

import train.progress as progress
from train.progress import Reporter, clock_time, keep_until


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until the test moves it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress, "memory", dict)
    return now


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_speed_and_remaining_time_are_those_of_the_steps_since_the_last_line(tmp_path, clock, capsys):
    path = tmp_path / "metrics.jsonl"
    with Reporter(tmp_path, 10, 40) as reporter:
        reporter.advance(11, 500)
        clock[0] += 60  # compilation
        reporter.restart_clock()
        for step in (12, 13, 14, 15):
            clock[0] += 2
            reporter.advance(step, 300)
        reporter.report(15, {"loss": 3.5, "drafter_loss": 3.0, "coverage": 0.25})
        clock[0] += 1
        reporter.advance(16, 50)
        reporter.report(16, {"loss": 3.25})
    assert records(path)[0] == {
        "step": 15, "loss": 3.5, "drafter_loss": 3.0, "coverage": 0.25, "tokens_per_second": 150.0
    }  # fmt: skip
    assert records(path)[1]["tokens_per_second"] == 50.0
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step 15/40  loss 3.5000  drafter 3.0000  coverage 0.250  150 tok/s  ETA 0:50"
    assert second == "step 16/40  loss 3.2500  50 tok/s  ETA 0:24"


def test_line_before_anything_was_timed_claims_no_speed(tmp_path, clock, capsys):
    with Reporter(tmp_path, 0, 10) as reporter:
        reporter.advance(1, 500)
        reporter.restart_clock()
        reporter.report(1, {"loss": 2.0})
    assert capsys.readouterr().err == "step  1/10  loss 2.0000  ETA unknown\n"
    assert records(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


def test_measurement_on_held_out_rows_is_named_so_and_takes_no_training_time(tmp_path, clock, capsys):
    path = tmp_path / "metrics.jsonl"
    with Reporter(tmp_path, 0, 10) as reporter:
        clock[0] += 30
        reporter.report_held_out(4, {"loss": 2.0, "oracle_prefix": 1.5})
        clock[0] += 1
        reporter.advance(5, 70)
        reporter.report(5, {"loss": 2.5})
    assert records(path)[0] == {"step": 4, "held_out_loss": 2.0, "held_out_oracle_prefix": 1.5}
    assert records(path)[1]["tokens_per_second"] == 70.0
    assert "prefix oracle 1.50  on held-out rows" in capsys.readouterr().err


def test_records_behind_the_step_resumed_from_are_dropped_and_so_is_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    keep_until(path, 3)
    assert not path.exists()
    path.write_text('{"step": 2}\n{"step": 4}\n{"step": 4, "held_out_loss": 1.0}\n{"step": 6}\n{"st')
    keep_until(path, 4)
    assert records(path) == [{"step": 2}, {"step": 4}, {"step": 4, "held_out_loss": 1.0}]
    keep_until(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3671.0, "1:01:11"), (None, "unknown")])
def test_time_is_written_as_on_a_clock(seconds, text):
    assert clock_time(seconds) == text
