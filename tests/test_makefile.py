"""The Makefile finds an interpreter that runs, and does nothing twice; stand-ins play the interpreters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIM = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"
WORKS = f'#!/bin/sh\ncase "$1" in -m) echo "$0 $@" ;; *) exec {sys.executable} "$@" ;; esac\n'


@pytest.fixture
def make(tmp_path):
    """Runs make where PATH begins with the given stand-ins and pyenv keeps its versions in an empty home."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(*arguments: str, **stand_ins: str) -> subprocess.CompletedProcess:
        for name, script in stand_ins.items():
            place(programs / name.replace("_", "."), script)
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)}
        command = ["make", "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


def place(path: Path, script: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)


def test_a_shim_that_cannot_run_is_passed_over(make, tmp_path):
    done = make(f"{tmp_path}/venv/bin/python", python3_12=SHIM, python3_13=WORKS)
    assert f"python3.13 -m venv {tmp_path}/venv" in done.stdout


def test_pyenvs_versions_are_found_though_none_is_on_the_path(make, tmp_path):
    version = tmp_path / ".pyenv/versions/3.12.9/bin/python"
    place(version, WORKS)
    done = make(f"{tmp_path}/venv/bin/python", python3_12=SHIM, python3_13=SHIM)
    assert f"{version} -m venv {tmp_path}/venv" in done.stdout


def test_a_named_interpreter_that_cannot_run_is_an_error_and_no_other_is_taken(make, tmp_path):
    done = make(f"{tmp_path}/venv/bin/python", "PYTHON=/nowhere/python", python3_12=WORKS)
    assert done.returncode == 2
    assert "/nowhere/python is not a Python 3.12 or newer with venv; install one" in done.stderr
    assert "-m venv" not in done.stdout


def test_an_installed_environment_is_left_alone_until_pyproject_changes(make, tmp_path):
    place(tmp_path / "venv/bin/python", WORKS)
    stamp = tmp_path / "venv/.installed"
    stamp.touch()
    changed = (ROOT / "pyproject.toml").stat().st_mtime
    os.utime(stamp, (changed + 1, changed + 1))
    assert "Nothing to be done for 'install'" in make("install").stdout
    os.utime(stamp, (changed - 1, changed - 1))
    assert "-m pip install" in make("install").stdout
    assert "Nothing to be done for 'install'" in make("install").stdout
