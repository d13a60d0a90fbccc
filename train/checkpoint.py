"""Checkpoints of a run: saved whole or not at all, found again after any kind of death, refused for another run.

The only file that knows how training state lies on disk (Orbax). A save returns as soon as the state has left the
devices; the folder gets its name when the last byte is written, so a process that is killed leaves nothing that
looks like a checkpoint.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orbax.checkpoint as ocp

from train.cluster import is_first, wait_for_all

logger = logging.getLogger(__name__)

BROKEN_SUFFIX = ".broken"


class Checkpoints:
    """The checkpoints of one run; a context that waits for unfinished saves when it is left.

    Args:
        folder: made if missing.
        kept: how many of the latest stay.
        identity: what makes this run itself (plain JSON values); saved with each checkpoint, compared when one is
            restored.
    """

    def __init__(self, folder: Path, kept: int, identity: dict[str, Any]):
        self.folder = folder.resolve()
        self.identity = json.loads(json.dumps(identity))  # tuples become lists, as they will be when read back
        options = ocp.CheckpointManagerOptions(max_to_keep=kept)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "identity"))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def save(self, step: int, state: Any) -> None:
        """Starts to save a pytree of arrays, which may be donated as soon as this returns."""
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), identity=ocp.args.JsonSave(self.identity))
        if not self._manager.save(step, args=items):
            raise RuntimeError(f"Orbax declined to save step {step} under {self.folder}.")

    def restore_latest(self, abstract_state: Any) -> Any | None:
        """The state of the latest checkpoint that can be read, or None where there is no checkpoint.

        A checkpoint that can't be read is set aside under another name, with a warning, and the one before is tried.

        Args:
            abstract_state: shapes, dtypes and shardings to restore to; the devices need not be those of the save.

        Raises:
            ValueError: the checkpoint belongs to a run of another identity, or none of them can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        reason: Exception | None = None
        for step in steps:
            try:
                saved = self._read(step, identity=ocp.args.JsonRestore())
                if not isinstance(saved, dict):
                    raise ValueError(f"its identity is {saved!r}")
            except Exception as error:  # Orbax has no type of its own for damage
                reason = self._set_aside(step, error)
                continue
            refuse_other(saved, self.identity, self.folder / str(step))
            try:
                return self._read(step, state=ocp.args.StandardRestore(abstract_state))
            except Exception as error:
                reason = self._set_aside(step, error)
        if steps:
            raise ValueError(
                f"None of the checkpoints {steps} under {self.folder} can be read; give another --output to start anew."
            ) from reason
        return None

    def _read(self, step: int, **item: Any) -> Any:
        (name,) = item
        return self._manager.restore(step, args=ocp.args.Composite(**item))[name]

    def _set_aside(self, step: int, error: Exception) -> Exception:
        folder = self.folder / str(step)
        logger.warning("Checkpoint %s can't be read and is set aside as *%s: %s", folder, BROKEN_SUFFIX, error)
        if is_first() and folder.exists():
            folder.rename(_free_name(folder))
        wait_for_all("a broken checkpoint is set aside")
        self._manager.reload()
        return error


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}{BROKEN_SUFFIX}{again or ''}") for again in range(1000))
    return next(name for name in names if not name.exists())


def refuse_other(saved: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raises ValueError, naming each field in which two identities differ."""
    before, now = dict(_flatten(saved)), dict(_flatten(wanted))
    different = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    if different:
        changes = "; ".join(f"{name} was {before.get(name)!r}, is now {now.get(name)!r}" for name in different)
        raise ValueError(
            f"The checkpoint {where} belongs to another run: {changes}. Give the old values to go on with it, or "
            "another --output to start anew."
        )


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flatten(part, f"{name}.{key}" if name else key)
    else:
        yield name, value
