"""The golden Domino and DSpark drafters as the folders in which they are published, and their numbers."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from lilicorr_jax.conversion.checkpoint import DrafterCheckpoint, load_drafter
from tests.conftest import GOLDEN

KINDS = ("vanilla", "gated", "rnn")


def write_folder(name: str, folder: Path) -> Path:
    """`name` is domino, or the kind of a DSpark, in DeepSpec's layout with its copies of the target's matrices."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "domino":
        description = json.loads((GOLDEN / "domino/config.json").read_text())
        tensors = load_file(GOLDEN / "domino/draft_model.safetensors")
    else:
        description = json.loads((GOLDEN / "dspark/config.json").read_text()) | {"markov_head_type": name}
        tensors = load_file(GOLDEN / "dspark/model_vanilla.safetensors")
        if name != "vanilla":
            tensors |= load_file(GOLDEN / f"dspark/markov_head_{name}.safetensors")
    (folder / "config.json").write_text(json.dumps(description | {"torch_dtype": "float32"}))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Golden(NamedTuple):
    """A golden drafter as it is loaded, and the reference's arrays of one drafting round and of one training step."""

    checkpoint: DrafterCheckpoint
    inference: dict[str, np.ndarray]
    train: dict[str, np.ndarray]


def golden_drafter(name: str, folder: Path) -> Golden:
    source = GOLDEN / ("domino" if name == "domino" else "dspark")
    arrays = (dict(np.load(source / f"{part}.npz")) for part in ("inference", "train"))
    return Golden(load_drafter(write_folder(name, folder)), *arrays)


def golden_target(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The target's embedding and unembedding."""
    if name == "domino":
        tensors = load_file(GOLDEN / "domino/target_embed_head.safetensors")
        return tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    tensors = load_file(GOLDEN / "dspark/model_vanilla.safetensors")
    return tensors["embed_tokens.weight"], tensors["lm_head.weight"]


def before(anchor_id: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """The token before each slot: the anchor, then all drafts but the last."""
    return np.concatenate([anchor_id[..., None], drafts[..., :-1]], axis=-1)
