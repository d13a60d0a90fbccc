"""Conversations become prepared texts of the demo target, whatever the workers; a stale folder is a miss."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import train.prepare
from lilicorr_jax.conversion.tokenizer import load_tokenizer
from train.chat import render
from train.config import TrainConfig
from train.conversations import conversation_of
from train.loop import read_examples
from train.prepare import PrepareConfig, made_with, main, prepare
from train.records import RecordFolder
from train.revision import target_revision

DEMO = Path(__file__).parents[2] / "demo" / "target"


def row(number: int, answer: str = "A fox ran over the hill.", turns: int = 1) -> dict:
    messages = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"Tell story {number}, part {turn}."},
            {"role": "assistant", "content": answer},
        ]
    return {"id": f"story-{number}", "messages": messages}


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A copy of the demo target, whose files a test may change."""
    return Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("prepare") / "target"))


@pytest.fixture
def config(target, tmp_path) -> PrepareConfig:
    rows = [row(i, turns=1 + i % 2) for i in range(12)]
    source = write(tmp_path / "replies.jsonl", rows)
    return PrepareConfig(
        target=str(target), conversations=(str(source),), output=str(tmp_path / "data"), sequence_length=120
    )


def read_all(folder: str) -> list[tuple[str, list[int], list[bool]]]:
    prepared = RecordFolder(folder)
    return [
        (prepared.id_of(i), prepared[i].token_ids.tolist(), prepared[i].loss_mask.tolist())
        for i in range(len(prepared))
    ]


def test_texts_are_the_rendered_conversations_cut_to_length(config):
    assert prepare(config) == 0
    tokenizer, wanted = load_tokenizer(DEMO), []
    for number in range(12):
        conversation = conversation_of(row(number, turns=1 + number % 2), default_category="")
        for part, rendered in enumerate(render(tokenizer, conversation, thinking=False, stop_ids=(2, 0))):
            name = f"story-{number}" + (f"#{part + 1}" if part else "")
            wanted.append((name, rendered.token_ids[:120].tolist(), rendered.loss_mask[:120].tolist()))
    assert read_all(config.output) == wanted


@pytest.fixture
def two_minutes():
    """What hangs is an error."""

    def end(*_):
        raise TimeoutError("it is not done after two minutes")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("count", "words", "workers"),
    [(8, 4000, 2), pytest.param(200, 40_000, 4, marks=pytest.mark.slow)],  # slow: eight million tokens, twice
)
def test_workers_that_tokenise_long_texts_end_and_change_nothing(
    config, tmp_path, monkeypatch, two_minutes, count, words, workers
):
    """Several rounds of work behind a pass in this process, whose tokenizer threads once hung workers forked of it."""
    rows = [row(i, "word " * words) for i in range(count)] + [{"messages": []}] + [row(i) for i in range(count, 16)]
    many = replace(config, conversations=(str(write(tmp_path / "long.jsonl", rows)),))
    monkeypatch.setattr(train.prepare, "CONVERSATIONS_AT_ONCE", 6)
    prepare(many)
    prepare(replace(many, output=str(tmp_path / "parallel"), workers=workers))
    assert read_all(many.output) == read_all(str(tmp_path / "parallel"))
    dropped = [Path(folder, "dropped.jsonl").read_text() for folder in (many.output, tmp_path / "parallel")]
    assert sorted(dropped[0].splitlines()) == sorted(dropped[1].splitlines())
    assert f"long.jsonl row {count}" in dropped[0]


def test_texts_with_nothing_to_learn_within_the_length_are_dropped_and_counted(config, tmp_path):
    long_prompt = row(99)
    long_prompt["messages"][0]["content"] = "why " * 200
    source = write(tmp_path / "mixed.jsonl", [row(1), long_prompt, row(2)])
    assert (
        main(
            [
                f"--target={config.target}",
                f"--conversations={source}",
                f"--output={config.output}",
                "--sequence_length=120",
            ]
        )
        == 0
    )
    assert [name for name, *_ in read_all(config.output)] == ["story-1", "story-2"]
    (line,) = (Path(config.output) / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line) == {"id": "story-99", "reason": "it has no two learned tokens in a row within 120 tokens"}
    with pytest.raises(ValueError, match="story-99: it has no two learned tokens"):
        prepare(replace(config, conversations=(str(source),), output=str(tmp_path / "strict"), strict=True))
    assert not (tmp_path / "strict").exists()


def test_second_call_finds_the_folder_as_asked_and_writes_nothing(config, capsys):
    prepare(config)
    before = (Path(config.output) / "prepared.json").stat().st_mtime_ns
    capsys.readouterr()
    assert prepare(replace(config, workers=2)) == 0  # how it is made is not what it is made with
    assert "nothing to do" in capsys.readouterr().err
    assert (Path(config.output) / "prepared.json").stat().st_mtime_ns == before


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


STALE = {
    "sequence_length": lambda config: dict(sequence_length=60),
    "selection": lambda config: dict(limit=3),
    "conversations": lambda config: write(Path(config.conversations[0]), [row(5)]) and {},
    "template": lambda config: (Path(config.target) / "chat_template.jinja").write_text("{{ messages }}") and {},
    "tokenizer": lambda config: (Path(config.target) / "special_tokens_map.json").write_text("{}") and {},
    "target": lambda config: edit(Path(config.target) / "generation_config.json", eos_token_id=[2]) or {},
    "thinking": lambda config: dict(thinking=True),
}


@pytest.mark.parametrize("field", STALE)
def test_folder_made_with_something_else_is_stale_by_that_field_alone(config, tmp_path, field):
    config = replace(config, target=str(shutil.copytree(config.target, tmp_path / "target")))
    before = made_with(config)
    (difference,) = before.differences(made_with(replace(config, **STALE[field](config))))
    assert difference.startswith(f"{field} was ")
    assert made_with(replace(config, workers=5, output="elsewhere", strict=True)) == made_with(config)


def test_stale_folder_is_made_anew_and_says_why(config, capsys):
    prepare(config)
    capsys.readouterr()
    prepare(replace(config, sequence_length=60))
    assert f"{config.output} is made anew: sequence_length was 120, is now 60." in capsys.readouterr().err
    assert max(RecordFolder(config.output).lengths) <= 60


def run_over(config: PrepareConfig, **changes) -> TrainConfig:
    return TrainConfig(
        **(dict(target=config.target, data=config.output, output="unused", preset="demo", steps=4) | changes)
    )


def test_prepared_texts_serve_runs_of_any_batch_rate_and_layers(config):
    """They hold no features of the target: which of its layers are read is no affair of theirs."""
    prepare(config)
    runs = [{}, dict(batch_rows=8), dict(drafter_learning_rate=1e-2), dict(preset="tiny"), dict(accumulation=2)]
    found = {read_examples(run_over(config, **changes), 512).fingerprint() for changes in runs}
    assert found == {RecordFolder(config.output).fingerprint()}


@pytest.mark.parametrize("field", ["template", "tokenizer", "target"])
def test_run_is_refused_texts_that_were_prepared_for_another_target(config, tmp_path, field):
    config = replace(config, target=str(shutil.copytree(config.target, tmp_path / "target")))
    prepare(config)
    STALE[field](config)
    with pytest.raises(ValueError, match=f"was not prepared for .*: {field} was .*Prepare it"):
        read_examples(run_over(config), 512)


def test_another_target_has_another_revision(target, tmp_path):
    other = Path(shutil.copytree(target, tmp_path / "other"))
    assert target_revision(other) == target_revision(target)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = np.nextafter(weights["model.norm.weight"], np.float32(9))
    save_file(weights, other / "model.safetensors")
    assert target_revision(other) != target_revision(target)


def test_output_that_can_not_be_written_ends_before_anything_is_tokenised(config, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("train.prepare.texts", lambda config: pytest.fail("it was tokenised"))
    with pytest.raises(ValueError, match="Nothing can be written at"):
        prepare(replace(config, output=str(tmp_path / "file" / "data")))


def test_show_mask_prints_what_is_learned_and_writes_nothing(config, capsys):
    assert prepare(replace(config, show_mask=2)) == 0
    shown = capsys.readouterr().out
    assert shown.count("--- story-") == 2 and "⟦A fox ran over the hill." in shown
    assert not Path(config.output).exists()


def test_texts_fill_the_rows_of_a_run(config):
    from train.data import Rows, trainable_examples

    prepare(config)
    folder = RecordFolder(config.output)
    rows = Rows(folder, trainable_examples(folder, 120), 120)
    assert len(rows) == len(folder) >= 12
    assert np.all([rows[i].loss_mask.any() for i in range(len(rows))])
