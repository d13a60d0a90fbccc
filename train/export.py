"""What a finished run leaves: the trained pair as an Orbax export, and beside it a folder that SGLang and vLLM load."""

import shutil
from dataclasses import replace
from pathlib import Path

from lilicorr_jax.conversion.checkpoint import DrafterCheckpoint, save_drafter
from lilicorr_jax.conversion.export import save_export
from train.cluster import is_first, wait_for_all, whole
from train.config import TrainConfig
from train.objective import Params

EXPORT, ORBAX, HUGGING_FACE = "export", "orbax", "hf"


def export(output: Path, config: TrainConfig, params: Params) -> Path:
    """Writes `export/orbax` (float32, exact) and `export/hf` (the models' dtype) under the run folder.

    An export that is there is replaced when the new one is complete. Returns the export's folder.
    """
    drafter, corrector = config.models()
    checkpoint = DrafterCheckpoint(drafter=drafter, corrector=corrector, params=params)
    folder, unfinished = output / EXPORT, output / f"{EXPORT}.unfinished"
    if is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
    wait_for_all("the place for an export is free")
    save_export(unfinished / ORBAX, checkpoint)
    gathered = replace(checkpoint, params=whole(params))
    if is_first():
        save_drafter(unfinished / HUGGING_FACE, gathered)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    wait_for_all("the export is written")
    return folder
