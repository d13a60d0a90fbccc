"""The files of one benchmark run: run.json, requests.jsonl, summary.json and summary.md in a folder of their own."""

import json
from collections.abc import Sequence
from pathlib import Path

from serve.report import Request

RUN_FILE, REQUESTS_FILE, SUMMARY_FILE, TEXT_FILE = "run.json", "requests.jsonl", "summary.json", "summary.md"


def claim_folder(folder: str | Path) -> Path:
    """Makes the folder, before anything is measured.

    Raises:
        ValueError: it holds the results of another run.
    """
    folder = Path(folder)
    if taken := [name for name in (RUN_FILE, REQUESTS_FILE, SUMMARY_FILE, TEXT_FILE) if (folder / name).exists()]:
        raise ValueError(f"{folder} holds {taken[0]} of another run, which is not overwritten; name a new output_dir.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(folder: Path, *, run: dict, requests: Sequence[Request], summary: dict, text: str) -> None:
    """Writes all four files; the requests are enough to work out every number of the summary again."""
    (folder / RUN_FILE).write_text(json.dumps(run, indent=2) + "\n")
    rows = (json.dumps(request.to_row(), allow_nan=False) for request in requests)
    (folder / REQUESTS_FILE).write_text("".join(f"{row}\n" for row in rows))
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    (folder / TEXT_FILE).write_text(text + "\n")


def read_requests(folder: str | Path) -> list[Request]:
    """The requests of a run, as they were measured."""
    return [Request.from_row(json.loads(line)) for line in (Path(folder) / REQUESTS_FILE).read_text().splitlines()]
