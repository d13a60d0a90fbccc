"""The arms of a benchmark: every export in every way of drafting that its method has, and plain decoding.

Owns their names and labels, and with which of them an arm's tau is compared. All share one target's weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lilicorr_jax.config import Dtype, corrector_name
from serve.models import NEEDS, PROPOSALS, Models, load_models
from serve.table import Arm

Kind = Literal["ar", "argmax", "greedy", "exact", "sampled"]
METHOD_OF = {corrector: method for method, corrector in NEEDS.items()}
LABELS = {
    ("ar", "ar"): "AR",
    ("dflash", "argmax"): "DFlash",
    ("lilicorr", "argmax"): "jointly trained drafter's own argmax",
    ("lilicorr", "greedy"): "LiLiCorr (greedy walk)",
    ("lilicorr", "exact"): "LiLiCorr (exact walk)",
    ("lilicorr", "sampled"): "LiLiCorr (sampled walk)",
    ("domino", "greedy"): "Domino",
    ("dspark", "greedy"): "DSpark",
    ("dspark", "sampled"): "DSpark (sampled)",
}
PARTS_OF_A_RUN = ("orbax", "hf", "export")  # folders below a run's own, which say nothing of it


def trained_method(models: Models) -> str:
    """The method that the weights were trained for."""
    if models.drafter is None:
        return "ar"
    return "dflash" if models.corrector is None else METHOD_OF[corrector_name(models.corrector)]


def ways(models: Models) -> dict[Kind, Models]:
    """Every way in which these weights can decode."""
    method = trained_method(models)
    found: dict[Kind, Models] = {"ar": replace(models, method="ar", proposal="greedy")}
    if method in ("dflash", "lilicorr"):
        found["argmax"] = replace(models, method="dflash", proposal="greedy")
    return found | {kind: replace(models, method=method, proposal=kind) for kind in PROPOSALS.get(method, ())}


def label_of(folder: str | Path) -> str:
    """What an export is called: its folder, or its run's where it lies in one."""
    parts = [part for part in Path(folder).resolve().parts if part not in PARTS_OF_A_RUN]
    return parts[-1]


def load(target: str, drafters: Sequence[str], dtype: Dtype) -> dict[str, Models]:
    """The target with each drafter, by label; the target alone, as "", without any.

    Raises:
        ValueError: two exports have one label; and whatever loading refuses.
    """
    labels = [label_of(folder) for folder in drafters]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"Two exports of --drafter would both be called {twice[0]!r}; rename the folder of one.")
    found: dict[str, Models] = {}
    for label, folder in zip(labels, drafters, strict=True):
        models = load_models(target, folder, dtype=dtype)
        shared = {"target": next(iter(found.values()), models).params["target"]}
        found[label] = replace(models, params=models.params | shared)
    return found or {"": load_models(target, dtype=dtype)}


def choose(exports: Mapping[str, Models], kinds: Sequence[Kind]) -> dict[str, tuple[Arm, Models]]:
    """Arms by name: plain decoding once, and every export in every asked way that it has.

    The name is the kind; with several exports it is label/kind.

    Raises:
        ValueError: no export has a kind that is asked for.
    """
    everything = {label: ways(models) for label, models in exports.items()}
    found = {}
    for kind in kinds:
        able = {label: models[kind] for label, models in everything.items() if kind in models}
        if not able:
            methods = ", ".join(sorted({trained_method(models) for models in exports.values()}))
            raise ValueError(f"--arms asks for {kind!r}, which no export of --drafter can do; they are of {methods}.")
        if kind == "ar":
            able = {"": next(iter(able.values()))}
        for label, models in able.items():
            export = label if len(exports) > 1 else ""
            base = base_of(label, exports, kinds) if kind != "ar" else None
            arm = _describe(export, kind, models, None if base is None else _name(export and base, "argmax"))
            found[arm.name] = arm, models
    return found


def base_of(label: str, exports: Mapping[str, Models], kinds: Sequence[Kind]) -> str | None:
    """The export whose argmax an export's tau is compared with: the first drafter trained alone, else its own."""
    if "argmax" not in kinds:
        return None
    alone = [name for name, models in exports.items() if trained_method(models) == "dflash"]
    return next((name for name in (*alone, label) if "argmax" in ways(exports[name])), None)


def _name(export: str, kind: str) -> str:
    return f"{export}/{kind}" if export else kind


def _describe(export: str, kind: Kind, models: Models, base: str | None) -> Arm:
    """What an arm is called; the drafter's argmax is only DFlash where it was trained as DFlash."""
    label = LABELS["ar" if kind == "ar" else trained_method(models), kind]
    name = _name(export, kind)
    return Arm(
        name=name,
        label=f"{export}: {label}" if export else label,
        num_slots=models.pair().num_slots,
        draws_drafts=kind == "sampled",
        base=None if base == name else base,
    )
