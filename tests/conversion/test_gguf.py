"""Whatever a GGUF file holds, it is read right or refused by what is wrong, before memory is spent on its claims."""

import tracemalloc

import numpy as np
import pytest

from lilicorr_jax.conversion import gguf
from lilicorr_jax.conversion.gguf import read_file
from tests.conversion.gguf_bytes import F32, Q8_0, file_bytes, tensor_line, text, value, write_f32

HUGE = 2**61
ONE = tensor_line("a", (8,), F32, 0)
MALFORMED = {
    "empty": (b"", "claims 4 bytes"),
    "another format": (b"PK\3\4" + bytes(60), r"begins with b'PK"),
    "version 2": (file_bytes(version=2), "version 2"),
    "cut off in the head": (file_bytes({"a": "word"})[:40], "cut off"),
    "many tensors": (file_bytes(num_tensors=HUGE), f"{HUGE} tensors"),
    "many entries": (file_bytes(num_entries=HUGE), f"{HUGE} metadata"),
    "a long key": (file_bytes(text("k" * 70_000) + value(1), num_entries=1), "70000 bytes"),
    "a key that is not text": (file_bytes(text(b"\xff\xfe") + value(1), num_entries=1), "not UTF-8"),
    "a key twice": (file_bytes((text("key") + value(1)) * 2, num_entries=2), "'key' twice"),
    "an unknown value type": (file_bytes(text("key") + (13).to_bytes(4, "little"), num_entries=1), "value type 13"),
    "a list of lists": (file_bytes({"key": [[1]]}), "value type 9"),
    "a list that claims much": (
        file_bytes(text("key") + value([1])[:8] + HUGE.to_bytes(8, "little"), num_entries=1),
        f"{HUGE} numbers of 'key'",
    ),
    "strings that claim much": (
        file_bytes(text("key") + value(["a"])[:8] + HUGE.to_bytes(8, "little"), num_entries=1),
        f"{HUGE} strings of 'key'",
    ),
    "a truth value of 2": (
        file_bytes(text("key") + value(True)[:4] + b"\2", num_entries=1),
        "'key' with a truth value",
    ),
    "an alignment of 12": (file_bytes({"general.alignment": 12}), "general.alignment 12"),
    "an alignment of 0": (file_bytes({"general.alignment": 0}), "general.alignment 0"),
    "a tensor twice": (file_bytes(lines=ONE * 2, data=bytes(64), num_tensors=2), "'a' twice"),
    "a long tensor name": (file_bytes(lines=tensor_line("t" * 65, (8,), F32, 0), num_tensors=1), "65 bytes"),
    "no axes": (file_bytes(lines=tensor_line("a", (), F32, 0), num_tensors=1), "0 axes"),
    "five axes": (file_bytes(lines=tensor_line("a", (1,) * 5, F32, 0), num_tensors=1), "5 axes"),
    "an axis of 0": (file_bytes(lines=tensor_line("a", (8, 0), F32, 0), num_tensors=1), r"\(8, 0\)"),
    "an unknown format": (file_bytes(lines=tensor_line("a", (8,), 30, 0), num_tensors=1), "format 30"),
    "a row of half a block": (file_bytes(lines=tensor_line("a", (4, 16), Q8_0, 0), num_tensors=1), r"\(4, 16\)"),
    "data past the end": (file_bytes(lines=ONE, data=bytes(31), num_tensors=1), "'a' up to byte"),
    "astronomic shape": (file_bytes(lines=tensor_line("a", (HUGE, HUGE), F32, 0), num_tensors=1), "cut off"),
    "a gap": (file_bytes(lines=tensor_line("a", (8,), F32, 32), data=bytes(64), num_tensors=1), "'a' at byte"),
    "an overlap": (
        file_bytes(lines=ONE + tensor_line("b", (8,), F32, 0), data=bytes(64), num_tensors=2),
        "'b' at byte|'a' at byte",
    ),
    "an offset past everything": (file_bytes(lines=tensor_line("a", (8,), F32, 2**63), num_tensors=1), str(2**63)[:6]),
    "bytes behind": (file_bytes(lines=ONE, data=bytes(64), num_tensors=1), "32 bytes behind"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_file_is_refused(tmp_path, what):
    raw, problem = MALFORMED[what]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=problem):
        read_file(path)


def test_every_cut_of_a_good_file_is_refused(tmp_path):
    path = write_f32(tmp_path / "whole.gguf", {"name": "x", "list": ["a", "b"]}, {"t": np.ones((2, 3))})
    raw = path.read_bytes()
    assert read_file(path).tensors
    for length in range(len(raw) - 8):  # the last 8 bytes are padding
        path.write_bytes(raw[:length])
        with pytest.raises(ValueError, match="cut off|claims"):
            read_file(path)


def test_claims_are_not_allocated(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "MAX_HEAD_BYTES", 2**16)
    path = tmp_path / "model.gguf"
    path.write_bytes(file_bytes(text("key") + value([1])[:8] + HUGE.to_bytes(8, "little"), num_entries=1))
    tracemalloc.start()
    with pytest.raises(ValueError, match=str(HUGE)):
        read_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_metadata_are_those_written(tmp_path):
    written = {"whole": 7, "part": 0.25, "yes": True, "text": "Ġé", "words": ["a", "", "b c"], "numbers": [3, 1, 2]}
    path = tmp_path / "model.gguf"
    path.write_bytes(file_bytes(written))
    read = read_file(path).metadata
    assert {key: read[key] for key in ("whole", "part", "yes", "text")} == dict(list(written.items())[:4])
    assert read["words"] == ("a", "", "b c")
    assert read["numbers"].tolist() == [3, 1, 2]


def test_tensors_are_those_written_outermost_axis_first(tmp_path, rng):
    tensors = {"matrix": rng.normal(size=(3, 5)).astype(np.float32), "row": rng.normal(size=7).astype(np.float32)}
    read = read_file(write_f32(tmp_path / "model.gguf", {}, tensors)).tensors
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name].read(), tensor)


def test_an_alignment_of_its_own_is_kept(tmp_path):
    lines = tensor_line("a", (2,), F32, 0) + tensor_line("b", (1,), F32, 64)
    data = np.array([1, 2], "<f4").tobytes() + bytes(56) + np.array([3], "<f4").tobytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(file_bytes({"general.alignment": 64}, lines, data, num_tensors=2, alignment=64))
    tensors = read_file(path).tensors
    assert [tensors[name].read().tolist() for name in "ab"] == [[1, 2], [3]]
