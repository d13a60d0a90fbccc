"""Where a measurement comes from: versions, source revision, device, and digests of the folders that it read."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax

PACKAGES = ("lilicorr-jax", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")
ROOT = Path(__file__).resolve().parent.parent


def versions() -> dict[str, str]:
    """Python's version and those of the packages that decide a result."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}


def revision() -> str | None:
    """The source's commit, with `+changes` where tracked files differ from it; None outside a git checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit or _git("rev-parse", "--show-toplevel") != str(ROOT):
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def device() -> dict[str, str | int]:
    """The accelerator as JAX names it, or the processor as the system does."""
    first = jax.devices()[0]
    kind = _processor() if first.platform == "cpu" else first.device_kind
    return {"platform": first.platform, "kind": kind, "count": jax.device_count(), "cpus": os.cpu_count() or 0}


def surroundings(load_before: Sequence[float]) -> str:
    """Where a run took place, in a line: processor, commit, versions, and the load before and after it."""
    where, what = device(), versions()
    before, after = (", ".join(f"{value:.1f}" for value in load) for load in (load_before, os.getloadavg()))
    return (
        f"{where['kind']}, {where['cpus']} CPUs; commit {revision()}; jax {what['jax']}, Python "
        f"{what['python']}; load average (1, 5, 15 min) {before} before, {after} after"
    )


def folder_digest(folder: str | Path) -> str:
    """SHA-256 over the names and contents of a folder's files, in alphabetical order."""
    folder, whole = Path(folder), hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return whole.hexdigest()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    """The processor's model name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
