"""What a stored result says about its origin."""

import hashlib
import subprocess

import jax
import pytest

from serve import provenance


def test_a_folder_digest_is_that_of_names_and_contents(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two").write_bytes(b"2")
    (tmp_path / "a").write_bytes(b"1")
    lines = [f"{name}\0{hashlib.sha256(content).hexdigest()}\n" for name, content in (("a", b"1"), ("b/two", b"2"))]
    before = provenance.folder_digest(tmp_path)
    assert before == hashlib.sha256("".join(lines).encode()).hexdigest()
    (tmp_path / "a").rename(tmp_path / "c")
    renamed = provenance.folder_digest(tmp_path)
    (tmp_path / "c").write_bytes(b"3")
    assert len({before, renamed, provenance.folder_digest(tmp_path)}) == 3


def test_the_revision_is_git_s(monkeypatch, tmp_path):
    git = ["git", "-C", str(provenance.ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the project is no git checkout here")
    assert provenance.revision().removesuffix("+changes") == done.stdout.strip()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.revision() is None


def test_device_and_versions_are_those_in_use():
    assert provenance.versions()["jax"] == jax.__version__
    assert provenance.device()["platform"] == jax.devices()[0].platform
    assert provenance.device()["kind"]
