"""What a finished run leaves: the trained pair as an Orbax export, and beside it a folder that SGLang and vLLM load."""

import shutil
from pathlib import Path

from lilicorr_jax.conversion.checkpoint import DrafterCheckpoint, save_drafter
from lilicorr_jax.conversion.export import save_export
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
    shutil.rmtree(unfinished, ignore_errors=True)
    save_export(unfinished / ORBAX, checkpoint)
    save_drafter(unfinished / HUGGING_FACE, checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    return unfinished.rename(folder)
