"""Rows, batches and the refusal of bad token files, against plain Python over the arrays."""

import numpy as np
import pytest

from tests.train.texts import VOCAB, counting_texts
from train.data import Rows, batches, by_length, hold_out, in_order, trainable_examples
from train.tokens import TokenFile, read_token_file


@pytest.fixture(scope="module")
def file() -> TokenFile:
    return TokenFile(**counting_texts())


def write(path, **changes):
    arrays = {name: value for name, value in (counting_texts() | changes).items() if value is not None}
    np.savez(path, **arrays)
    return path


def test_reading_gives_back_what_was_written(tmp_path, file):
    read = read_token_file(write(tmp_path / "x.npz", category=np.array(["story"] * 60)), VOCAB)
    for name in ("tokens", "offsets", "prompt_lengths"):
        np.testing.assert_array_equal(getattr(read, name), getattr(file, name))


@pytest.mark.parametrize("length", [12, 40])
def test_row_is_the_example_cut_or_padded_and_only_its_reply_is_learned(file, length):
    rows = Rows(file, np.arange(len(file)), length)
    for example in range(len(rows)):
        row = rows[example]
        text = file.tokens[file.offsets[example] : file.offsets[example + 1]].tolist()[:length]
        padding = length - len(text)
        prompt = min(int(file.prompt_lengths[example]), len(text))
        assert row.token_ids.tolist() == text + [0] * padding
        assert row.loss_mask.tolist() == [False] * prompt + [True] * (len(text) - prompt) + [False] * padding
        assert (int(row.length), int(row.example_id)) == (len(text), example)


def test_batch_is_a_function_of_seed_and_step_alone(file):
    def ids(step, seed=7):
        return batches(Rows(file, np.arange(60), 24), 8, seed)[step].example_id.tolist()

    forwards = [ids(step) for step in range(12)]
    backwards = [ids(step) for step in reversed(range(12))][::-1]
    assert forwards == backwards
    assert ids(0) != ids(0, seed=8)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(file):
    data = batches(Rows(file, np.arange(60), 24), 12, 0)
    epochs = [[i for step in range(5) for i in data[5 * epoch + step].example_id.tolist()] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(60)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_batch_that_ends_an_epoch_goes_on_with_the_next(file):
    data = batches(Rows(file, np.arange(60), 24), 8, 0)  # 7.5 batches an epoch
    assert len(data[7].example_id) == 8
    assert sorted(i for step in range(15) for i in data[step].example_id.tolist()) == sorted([*range(60)] * 2)


BUCKETS = (10, 16)


def bucketed(file, batch_rows=4, seed=3):
    return batches(Rows(file, np.arange(60), 24), batch_rows, seed, BUCKETS)


def test_batch_of_a_bucket_is_padded_to_the_shortest_length_that_holds_its_rows(file):
    data, padded = bucketed(file), Rows(file, np.arange(60), 24)
    widths = set()
    for step in range(30):
        batch = data[step]
        width = batch.token_ids.shape[1]
        widths.add(width)
        below = max((bucket for bucket in (0, *BUCKETS) if bucket < width), default=0)
        for row, example in enumerate(batch.example_id.tolist()):
            length = min(int(file.offsets[example + 1] - file.offsets[example]), 24)
            assert below < length <= width
            np.testing.assert_array_equal(batch.token_ids[row], padded[example].token_ids[:width])
            np.testing.assert_array_equal(batch.loss_mask[row], padded[example].loss_mask[:width])
    assert widths == {10, 16, 24}


def test_bucketed_batches_are_a_function_of_seed_and_step_and_use_all_rows_alike(file):
    steps, backwards = range(150), range(149, -1, -1)
    ids, again, others = (
        [data[step].example_id.tolist() for step in order]
        for data, order in ((bucketed(file), steps), (bucketed(file), backwards), (bucketed(file, seed=4), steps))
    )
    assert ids == again[::-1] and ids != others
    counts = np.bincount(np.concatenate(ids), minlength=60)  # ten passes
    assert counts.min() >= 9 and counts.max() <= 11


def test_bucket_with_too_few_rows_for_a_batch_joins_the_next(file):
    groups = by_length(Rows(file, np.arange(60), 24), 40, BUCKETS)
    assert sorted(i for group in groups for i in group.example_ids.tolist()) == list(range(60))
    assert [group.sequence_length for group in groups] == [24] or len(groups[0]) >= 40
    assert [len(group) for group in by_length(Rows(file, np.arange(60), 24), 4, (24, 30))] == [60]


def test_hosts_hold_every_row_of_an_epoch_once_between_them():
    """Ten rows, four hosts, two epochs; every host reads the batch of a step and keeps its own rows."""
    file = TokenFile(**counting_texts(10))
    host_data = [batches(Rows(file, np.arange(10), 24), 4, 0) for _ in range(4)]
    seen = [int(host_data[host][step].example_id[host]) for step in range(5) for host in range(4)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_examples_without_two_reply_tokens_in_a_row_are_dropped(file):
    for length in (4, 8, 30):
        wanted = [
            i
            for i in range(len(file))
            if min(int(file.offsets[i + 1] - file.offsets[i]), length) - int(file.prompt_lengths[i]) >= 2
        ]
        assert trainable_examples(file, length).tolist() == wanted
    assert len(trainable_examples(file, 4)) < len(file)


@pytest.mark.parametrize("buckets", [(), (3,)])
def test_no_batch_has_a_row_that_truncation_left_with_nothing_to_learn(file, buckets):
    length = 4
    ids = trainable_examples(file, length)
    assert 8 < len(ids) < len(file)
    data = batches(Rows(file, ids, length), 4, 0, buckets)
    for step in range(40):
        learned = data[step].loss_mask
        assert (learned[:, :-1] & learned[:, 1:]).any(axis=1).all()


def test_held_out_examples_are_spread_and_never_trained_on():
    ids = np.arange(100, 200)
    train, held = hold_out(ids, 10)
    assert held.tolist() == list(range(100, 200, 10))
    assert sorted([*train, *held]) == ids.tolist()
    assert hold_out(ids, 0)[0].tolist() == ids.tolist()


def test_rows_in_order_come_once_each_and_empty_rows_fill_the_last_batch(file):
    groups = in_order(Rows(file, np.arange(5, 16), 24), 4)
    assert [len(group.example_id) for group in groups] == [4, 4, 4]
    assert [i for group in groups for i in group.example_id.tolist()] == [*range(5, 16), -1]
    assert not groups[-1].loss_mask[-1].any() and groups[-1].length[-1] == 0


def test_fingerprint_tells_files_apart(file):
    other = counting_texts(seed=1)
    same_lengths = counting_texts() | {"tokens": (counting_texts()["tokens"] + 1) % VOCAB}
    prints = {TokenFile(**arrays).fingerprint() for arrays in (counting_texts(), other, same_lengths)}
    assert len(prints) == 3 and file.fingerprint() in prints


BAD_FILES = {
    "holds 0 examples": dict(
        tokens=np.zeros(0, np.uint16), offsets=np.zeros(1, np.int64), prompt_lengths=np.zeros(0, np.int32)
    ),
    r"\[0, 96\); token 1 is 96": dict(tokens=np.array([1, 96]), offsets=np.array([0, 2]), prompt_lengths=np.array([0])),
    "token 0 is -1": dict(tokens=np.array([-1, 5]), offsets=np.array([0, 2]), prompt_lengths=np.array([0])),
    "60 prompt lengths need 61 offsets; got 60": dict(offsets=counting_texts()["offsets"][:-1]),
    "the smallest step is -3": dict(
        tokens=np.arange(6), offsets=np.array([0, 5, 2, 6]), prompt_lengths=np.zeros(3, int)
    ),
    "example 1 of 2 tokens has 3": dict(
        tokens=np.arange(6), offsets=np.array([0, 4, 6]), prompt_lengths=np.array([0, 3])
    ),
    "tokens must be a vector of integers; got float64": dict(tokens=np.zeros(5)),
    "no token file: offsets": dict(offsets=None),
    "can't be read as an .npz of plain arrays": dict(tokens=np.array([{}], dtype=object)),
}


@pytest.mark.parametrize("sentence", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_token_file_is_refused_by_what_is_wrong_with_it(tmp_path, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_token_file(write(tmp_path / "bad.npz", **BAD_FILES[sentence]), VOCAB)


def test_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.npz"):
        read_token_file(tmp_path / "nowhere.npz", VOCAB)
    (tmp_path / "text.npz").write_text("not a zip archive")
    with pytest.raises(ValueError, match="text.npz can't be read"):
        read_token_file(tmp_path / "text.npz", VOCAB)
    whole = write(tmp_path / "half.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="half.npz can't be read"):
        read_token_file(tmp_path / "half.npz", VOCAB)


def test_data_without_a_supervised_pair_is_refused(file):
    with pytest.raises(ValueError, match="None of 60 examples .* within 1 tokens"):
        trainable_examples(file, 1)
    with pytest.raises(ValueError, match="--eval_rows=60 leaves nothing"):
        hold_out(np.arange(60), 60)
