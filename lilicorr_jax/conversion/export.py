"""A trained drafter as one Orbax folder: parameters in the dtype that they have, and the whole configuration.

The Hugging Face layout (`checkpoint`) is for other software; this one loses nothing and restores to any mesh.
"""

import dataclasses
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, SingleDeviceSharding

from lilicorr_jax.config import CORRECTORS, CorrectorConfig, DrafterConfig, RopeConfig, corrector_name
from lilicorr_jax.conversion.checkpoint import DrafterCheckpoint, abstract_drafter, load_drafter
from lilicorr_jax.conversion.config_json import CONFIG_FILE
from lilicorr_jax.conversion.folder import exists, read_json, write_json
from lilicorr_jax.conversion.rules import check_cover, flat

EXPORT_FILE = "export.json"
FORMAT = "lilicorr-jax drafter 2"
PARAMETERS = "params"


def save_export(folder: Path | str, checkpoint: DrafterCheckpoint) -> None:
    """Writes `export.json` and the parameters; those of an earlier export in this folder are replaced."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / PARAMETERS, checkpoint.params, force=True)
    if jax.process_index() == 0:
        records = {"drafter": dataclasses.asdict(checkpoint.drafter), "corrector": _to_json(checkpoint.corrector)}
        write_json(folder, EXPORT_FILE, {"format": FORMAT} | records)


def load_export(folder: Path | str, *, mesh: Mesh | None = None) -> DrafterCheckpoint:
    """Reads what `save_export` wrote, under the shardings of `mesh` or onto the default device."""
    folder = Path(folder).resolve()
    records = read_json(folder, EXPORT_FILE)
    if records.get("format") != FORMAT or records.keys() != {"format", "drafter", "corrector"}:
        raise ValueError(f"{folder / EXPORT_FILE} has format {records.get('format')!r}; {FORMAT!r} is read.")
    drafter = _from_json(DrafterConfig, records["drafter"])
    corrector = _corrector_from_json(records["corrector"])
    params = _restore(folder / PARAMETERS, abstract_drafter(drafter, corrector, mesh))
    return DrafterCheckpoint(drafter=drafter, corrector=corrector, params=params)


def load_any(folder: Path | str, *, mesh: Mesh | None = None) -> DrafterCheckpoint:
    """Reads a drafter from an export of ours or from a Hugging Face folder, whichever it is."""
    folder = Path(folder)
    ours, theirs = exists(folder, EXPORT_FILE), exists(folder, CONFIG_FILE)
    if ours == theirs:
        count = "both" if ours else "neither"
        raise ValueError(f"{folder} has {count} of {EXPORT_FILE} and {CONFIG_FILE}; give a folder with one of them.")
    return load_export(folder, mesh=mesh) if ours else load_drafter(folder, mesh=mesh)


def _restore(folder: Path, abstract: dict) -> dict:
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing; an export is {EXPORT_FILE} and {PARAMETERS} together.")
    device = SingleDeviceSharding(jax.local_devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder).item_metadata
        if metadata is None:
            raise ValueError(f"{folder} is not a whole Orbax checkpoint; export it again.")
        stored = metadata.tree
        shapes = [{path: leaf.shape for path, leaf in flat(t).items()} for t in (abstract, stored)]
        check_cover(str(folder), *shapes)

        def place(leaf, kept):
            return jax.ShapeDtypeStruct(leaf.shape, kept.dtype, sharding=leaf.sharding or device)

        return checkpointer.restore(folder, jax.tree.map(place, abstract, stored))


def _to_json(corrector: CorrectorConfig | None) -> dict | None:
    return None if corrector is None else {"name": corrector_name(corrector)} | dataclasses.asdict(corrector)


def _corrector_from_json(values: object) -> CorrectorConfig | None:
    if values is None:
        return None
    name = values.get("name") if isinstance(values, dict) else values
    if not isinstance(name, str) or name not in CORRECTORS:
        raise ValueError(f"{EXPORT_FILE}'s corrector must be named one of {', '.join(CORRECTORS)}; got {name!r:.200}.")
    return _from_json(CORRECTORS[name], {key: value for key, value in values.items() if key != "name"})


def _from_json(kind: type, values: object):
    """A record from its fields; a field that is newer than the file has its default."""
    if not isinstance(values, dict):
        raise ValueError(f"{EXPORT_FILE} must describe a {kind.__name__} by an object; got {values!r:.200}.")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if isinstance(values.get("rope"), dict):
        values["rope"] = _from_json(RopeConfig, values["rope"])
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{EXPORT_FILE} does not describe a {kind.__name__}: {error}.") from error
