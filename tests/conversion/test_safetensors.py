"""Whatever a folder holds, the reader reads it right or refuses it by name before it reads a tensor."""

import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lilicorr_jax.conversion import safetensors
from lilicorr_jax.conversion.safetensors import read_folder, read_header, write_file
from tests.conversion.folders import copied, split_in_shards, write_index, write_raw


def line(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALFORMED = {
    "header longer than the file": (dict(header=b"{}", num_bytes=0, length=500), "500"),
    "header of 2 GB": (dict(header=b"{}", num_bytes=64, length=2**31), "2147483648"),
    "no header": (dict(header=b"", num_bytes=0), "header of 0 bytes"),
    "not JSON": (dict(header=b'{"a":', num_bytes=0), "not the JSON"),
    "not text": (dict(header=b"\xff\xfe\x00{}", num_bytes=0), "not the JSON"),
    "a list": (dict(header=[1], num_bytes=0), "list"),
    "nested without end": (dict(header=b"[" * 100_000, num_bytes=0), "not the JSON"),
    "one name twice": (dict(header=b'{"a": 1, "a": 2}', num_bytes=0), "'a'"),
    "offsets overlap": (dict(header={"a": line(), "b": line(offsets=(4, 12))}, num_bytes=12), "'b'"),
    "offsets reversed": (dict(header={"a": line(offsets=(8, 0))}, num_bytes=8), r"\[8, 0\]"),
    "offsets past the end": (dict(header={"a": line()}, num_bytes=7), "'a'.*cut off"),
    "offsets negative": (dict(header={"a": line(offsets=(-8, 0))}, num_bytes=8), r"\[-8, 0\]"),
    "offsets too many": (dict(header={"a": line(offsets=(0, 8, 8))}, num_bytes=8), r"\[0, 8, 8\]"),
    "a gap": (dict(header={"a": line(offsets=(4, 12))}, num_bytes=12), "no tensor"),
    "bytes behind": (dict(header={"a": line()}, num_bytes=9), "1 bytes behind"),
    "bytes and no tensor": (dict(header={}, num_bytes=9), "9 bytes behind"),
    "shape too large for its bytes": (dict(header={"a": line(shape=(3,))}, num_bytes=8), "12 bytes"),
    "shape of astronomic size": (dict(header={"a": line(shape=(2**62, 2**62))}, num_bytes=8), "span 8"),
    "shape negative": (dict(header={"a": line(shape=(-1, -2))}, num_bytes=8), r"\[-1, -2\]"),
    "shape fractional": (dict(header={"a": line(shape=(2.0,))}, num_bytes=8), r"\[2.0\]"),
    "shape of many axes": (dict(header={"a": line(shape=(1,) * 9, offsets=(0, 4))}, num_bytes=4), "1, 1, 1"),
    "dtype unread": (dict(header={"a": line(dtype="I64", shape=(1,))}, num_bytes=8), "'I64'"),
    "dtype no string": (dict(header={"a": line(dtype=["F32"])}, num_bytes=8), r"\['F32'\]"),
    "fields missing": (dict(header={"a": {"dtype": "F32"}}, num_bytes=0), "data_offsets"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_file_is_refused(tmp_path, what):
    content, value = MALFORMED[what]
    write_raw(tmp_path / "model.safetensors", **content)
    with pytest.raises(ValueError, match=value):
        read_folder(tmp_path)


def test_a_file_without_eight_bytes_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x02\x00")
    with pytest.raises(ValueError, match="2 bytes"):
        read_folder(tmp_path)


def test_a_claimed_header_is_not_allocated(tmp_path):
    path = write_raw(tmp_path / "model.safetensors", b"{}", 0, length=2**31)
    os.truncate(path, 2**32)  # sparse: the claim fits the file
    tracemalloc.start()
    with pytest.raises(ValueError, match="2147483648"):
        read_folder(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_are_those_written(tmp_path, rng, dtype):
    tensors = {"b": rng.normal(size=(3, 5)).astype(dtype), "a": rng.normal(size=7).astype(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = read_folder(tmp_path)
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        view = entries[name].open()
        assert view.dtype == dtype and not view.flags.writeable
        np.testing.assert_array_equal(view, tensor)


def test_what_we_write_the_public_reader_reads(tmp_path, rng):
    tensors = {"a": rng.normal(size=(2, 3)).astype(np.float32), "b": np.ones(4, np.float16)}
    write_file(tmp_path / "model.safetensors", tensors)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor)


def test_reading_one_by_one_holds_one_tensor_in_memory(tmp_path):
    save_file({f"t{i}": np.full((256, 1024), i, np.float32) for i in range(12)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    for name, entry in read_folder(tmp_path).items():
        assert np.array(entry.open().T, order="C")[5, 5] == int(name[1:])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20  # twice the largest


def test_shards_give_what_the_single_file_gave(tmp_path, golden):
    folder = copied(golden / "dflash/tied/drafter", tmp_path / "whole")
    whole = {name: entry.open().copy() for name, entry in read_folder(folder).items()}
    split_in_shards(folder)
    parts = read_folder(folder)
    assert parts.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(parts[name].open(), tensor)


BAD_SHARD_NAMES = (
    "../x.safetensors", "/etc/x.safetensors", "sub/../../x", "sub/x.safetensors", "x.bin", "", "..", ".safetensors",
    "x.safetensors\n", "..\\x.safetensors", 7, None,
)  # fmt: skip


@pytest.mark.parametrize("shard", BAD_SHARD_NAMES)
def test_a_shard_name_that_is_no_plain_name_is_refused_before_a_file_is_opened(tmp_path, monkeypatch, shard):
    write_raw(tmp_path / "good.safetensors", {"a": line()}, 8)
    write_index(tmp_path, {"a": "good.safetensors", "b": shard})
    monkeypatch.setattr(safetensors, "read_header", None)
    with pytest.raises(ValueError, match="'b' into"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "shard.safetensors"])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    secret = write_raw(tmp_path / "secret.safetensors", {"a": line()}, 8)
    (folder / name).symlink_to(secret)
    if name != "model.safetensors":
        write_index(folder, {"a": name})
    with pytest.raises(ValueError, match=f"'{name}'.*outside the folder"):
        read_folder(folder)


def test_a_link_inside_the_folder_and_the_hubs_cache_are_read(tmp_path):
    cache = tmp_path / "models--x"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    write_raw(cache / "blobs" / "123", {"a": line()}, 8)
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert read_folder(snapshot)["a"].shape == (2,)
    inside = tmp_path / "inside"
    inside.mkdir()
    write_raw(inside / "weights", {"a": line()}, 8)
    (inside / "model.safetensors").symlink_to("weights")
    assert read_folder(inside)["a"].shape == (2,)


@pytest.mark.parametrize("weight_map", [{}, [], None, "x"])
def test_an_index_without_tensors_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match="weight_map"):
        read_folder(tmp_path)


def test_shards_and_index_that_disagree_are_refused(tmp_path, golden):
    folder = copied(golden / "dflash/tied/drafter", tmp_path)
    weight_map = split_in_shards(folder)
    name = "fc.weight"
    other = next(shard for shard in weight_map.values() if shard != weight_map[name])
    write_index(folder, weight_map | {name: other})
    with pytest.raises(ValueError, match=name):
        read_folder(folder)
    write_index(folder, weight_map | {"extra.weight": other})
    with pytest.raises(ValueError, match="extra.weight"):
        read_folder(folder)
    write_index(folder, {n: shard for n, shard in weight_map.items() if n != name})
    with pytest.raises(ValueError, match=name):
        read_folder(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    for shard in ("one.safetensors", "two.safetensors"):
        write_raw(tmp_path / shard, {"a": line()}, 8)
    write_raw(tmp_path / "two.safetensors", {"a": line(), "b": line(offsets=(8, 16))}, 16)
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(ValueError, match="'a' stands in two shards"):
        read_folder(tmp_path)


def test_a_truncated_last_shard_is_refused(tmp_path, golden):
    folder = copied(golden / "dflash/tied/drafter", tmp_path)
    last = folder / max(split_in_shards(folder).values())
    os.truncate(last, last.stat().st_size - 4)
    with pytest.raises(ValueError, match=f"{last.name}.*cut off"):
        read_folder(folder)


def test_a_missing_shard_is_refused(tmp_path):
    write_index(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(ValueError, match="gone.safetensors"):
        read_folder(tmp_path)


def test_a_folder_that_is_none_or_has_no_safetensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickled"):
        read_folder(tmp_path)


def test_a_single_file_beside_an_index_is_refused(tmp_path):
    write_raw(tmp_path / "model.safetensors", {"a": line()}, 8)
    write_index(tmp_path, {"a": "model.safetensors"})
    with pytest.raises(ValueError, match="stale"):
        read_folder(tmp_path)


def test_metadata_is_no_tensor(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, "a": line()}, 8)
    assert list(read_header(path)) == ["a"]


def test_written_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    write_file(tmp_path / "model.safetensors", {"x": np.zeros(2, np.float32)})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
