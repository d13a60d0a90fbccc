"""The output of a long job: one JSON object a line, only ever appended to, by which a restart knows what is done.

<output>                the records
<output>.flags          the settings they were made with; a job with others is refused
<output>.failed.jsonl   what the last run could not do, and why
"""

import fcntl
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEAD = re.compile(rb'\{"key": "(\w+)", "end": "(\w+)", "tokens": (\d+),')
"""How every record begins, so that millions of them are read back without parsing."""


class Journal:
    """Appends records; a context. `ends` holds how each finished record ended, by key; `num_tokens` their sum.

    Args:
        path: its folder is made if it is not there.
        settings: lines of a flagfile.
        fixed: names of the flags that decide what a record says.

    Raises:
        ValueError: another process writes here, the settings that decide are not those of the file, or it holds
            something else.
    """

    def __init__(self, path: Path, settings: Sequence[str], fixed: Sequence[str]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"Another process writes to {path}; wait for it, or give another --output.") from None
        try:
            self.num_tokens, self.ends = 0, {}
            self._read(path)
            _check_settings(path.with_name(path.name + ".flags"), settings, fixed, has_records=bool(self.ends))
        except BaseException:
            self._file.close()
            raise
        self._failed = path.with_name(path.name + ".failed.jsonl").open("w", encoding="utf-8")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._failed.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record, which begins with key, end and tokens; it is on its way to the disk when this returns."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.ends[record["key"]] = record["end"]
        self.num_tokens += record["tokens"]

    def write_failure(self, id: str, key: str, reason: str) -> None:
        self._failed.write(json.dumps({"id": id, "key": key, "reason": reason}, ensure_ascii=False) + "\n")
        self._failed.flush()

    def summary(self) -> str:
        """What the file holds, over all runs."""
        truncated = sum(end == "length" for end in self.ends.values())
        return f"{len(self.ends):,} conversations, {truncated:,} truncated, {self.num_tokens:,} tokens"

    def _read(self, path: Path) -> None:
        """Notes what is done, and cuts off a last line that a killed process left half written."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            head = HEAD.match(line)
            if head is None:
                raise ValueError(f"Line {number} of {path} is no regenerated conversation; give another --output.")
            self.ends[head[1].decode()] = head[2].decode()
            self.num_tokens += int(head[3])
            whole += len(line)
        self._file.truncate(whole)


def _check_settings(path: Path, settings: Sequence[str], fixed: Sequence[str], *, has_records: bool) -> None:
    now = _by_name(settings)
    before = _by_name(path.read_text(encoding="utf-8").splitlines()) if has_records and path.is_file() else now
    changed = [name for name in fixed if now[name] != before.get(name)]
    if changed:
        name = changed[0]
        raise ValueError(
            f"{path.name[:-6]} was begun with --{name}={before.get(name)}, but --{name} is {now[name]}: answers of two "
            "kinds would mix. Give the old value, or another --output."
        )
    path.write_text("\n".join(settings) + "\n", encoding="utf-8")


def _by_name(lines: Sequence[str]) -> dict[str, str]:
    return {line.partition("=")[0].removeprefix("--"): line.partition("=")[2] for line in lines if line.strip()}
