"""Prepared folders: what was written comes back, and a folder that isn't whole or isn't ours is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

import train.records as records
from train.data import Examples, Rows
from train.records import MadeWith, RecordFolder, decode, encode, make_room, stale, write_records
from train.tokeniser import Dropped, Text

MADE_WITH = MadeWith(
    sequence_length=24, thinking=False, mask_rule=1, tokenizer="a" * 64, template="b" * 64, target="c" * 64,
    conversations="d" * 64, selection="all",
)  # fmt: skip


def texts(count: int = 7, seed: int = 0) -> list[Text]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 25, count)
    return [Text(f"no {i} ü", rng.integers(0, 150_000, n), rng.random(n) < 0.6) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 300])
def test_text_survives_its_record(length):
    rng = np.random.default_rng(length)
    text = Text("naïve/7", rng.integers(0, 2**31 - 1, length), rng.random(length) < 0.5)
    back = decode(encode(text))
    assert back.id == text.id and back.token_ids.dtype == np.int32
    np.testing.assert_array_equal(back.token_ids, text.token_ids)
    np.testing.assert_array_equal(back.loss_mask, text.loss_mask)


def test_folder_gives_back_every_text_over_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "TEXTS_PER_FILE", 3)
    written = texts()
    mixed = [*written[:2], Dropped("bad", "empty"), *written[2:], Dropped("worse", "no user")]
    summary = write_records(tmp_path / "new" / "data", iter(mixed), MADE_WITH)  # the folder above is made, too
    folder = RecordFolder(tmp_path / "new" / "data")
    assert len(summary["files"]) == 3 and len(folder) == 7 and isinstance(folder, Examples)
    assert (summary["texts"], summary["dropped"]) == (7, 2)
    assert summary["tokens"] == sum(len(text.token_ids) for text in written)
    assert summary["learned_tokens"] == sum(int(text.loss_mask.sum()) for text in written)
    for index in (6, 0, 3, 2, 5, 1, 4):
        np.testing.assert_array_equal(folder[index].token_ids, written[index].token_ids)
        np.testing.assert_array_equal(folder[index].loss_mask, written[index].loss_mask)
        assert folder.id_of(index) == written[index].id
        assert folder.lengths[index] == len(written[index].token_ids)
    lines = (folder.folder / "dropped.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "bad", "reason": "empty"},
        {"id": "worse", "reason": "no user"},
    ]


def test_row_of_a_folder_keeps_a_mask_with_gaps(tmp_path):
    """A conversation of several turns is learned in several places."""
    mask = np.array([False, True, True, False, False, True, True])
    write_records(tmp_path / "data", [Text("two turns", np.arange(7) + 5, mask)], MADE_WITH)
    row = Rows(RecordFolder(tmp_path / "data"), np.array([0]), 10)[0]
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 0, 0, 0]
    assert row.loss_mask.tolist() == [*mask.tolist(), False, False, False]
    assert int(row.length) == 7


@pytest.mark.parametrize(
    "change",
    [
        dict(sequence_length=25), dict(thinking=True), dict(mask_rule=2), dict(tokenizer="e" * 64),
        dict(template="f" * 64), dict(target="0" * 64), dict(conversations="1" * 64), dict(selection="10 by seed 1"),
    ],
)  # fmt: skip
def test_folder_made_with_anything_else_is_stale_and_the_difference_is_named(tmp_path, change):
    write_records(tmp_path / "data", texts(), MADE_WITH)
    assert stale(tmp_path / "data", MADE_WITH) == []
    (reason,) = stale(tmp_path / "data", replace(MADE_WITH, **change))
    assert reason.startswith(f"{next(iter(change))} was ")


def test_fingerprints_tell_folders_apart(tmp_path):
    for name, made_with, count in [
        ("a", MADE_WITH, 7),
        ("b", replace(MADE_WITH, thinking=True), 7),
        ("c", MADE_WITH, 6),
    ]:
        write_records(tmp_path / name, texts(count), made_with)
    assert len({RecordFolder(tmp_path / name).fingerprint() for name in "abc"}) == 3
    write_records(tmp_path / "again", texts(), MADE_WITH)
    assert RecordFolder(tmp_path / "again").fingerprint() == RecordFolder(tmp_path / "a").fingerprint()


def test_folder_is_replaced_only_when_the_new_one_is_whole(tmp_path):
    write_records(tmp_path / "data", texts(), MADE_WITH)

    def breaks():
        yield texts()[0]
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        write_records(tmp_path / "data", breaks(), MADE_WITH)
    assert len(RecordFolder(tmp_path / "data")) == 7
    write_records(tmp_path / "data", texts(2), MADE_WITH)
    assert len(RecordFolder(tmp_path / "data")) == 2


def test_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="data exists and is no prepared data"):
        write_records(tmp_path / "data", texts(), MADE_WITH)
    assert (tmp_path / "data" / "thesis.tex").exists()


def test_place_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Nothing can be written at .*file/data"):
        make_room(tmp_path / "file" / "data")


def test_conversations_that_all_fall_out_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="None of 1 conversations became a text"):
        write_records(tmp_path / "data", [Dropped("bad", "empty")], MADE_WITH)


def test_damaged_folder_is_refused(tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(ValueError, match="no folder that train.prepare has filled"):
        RecordFolder(folder)
    summary = write_records(folder, texts(), MADE_WITH)
    with pytest.raises(ValueError, match="was prepared for --sequence_length=24; got 30"):
        RecordFolder(folder).teaching(30)

    def rewrite(**changes):
        (folder / "prepared.json").write_text(json.dumps(summary | changes))

    rewrite(texts=8)
    with pytest.raises(ValueError, match="should hold 8 texts, has 7 records and 7 lengths"):
        RecordFolder(folder)
    for changes in (dict(format="other"), dict(files=["../elsewhere"]), dict(made_with={"thinking": True})):
        rewrite(**changes)
        with pytest.raises(ValueError, match="can't be read"):
            RecordFolder(folder)
    assert stale(folder, MADE_WITH)[0].endswith("prepare it again.")
