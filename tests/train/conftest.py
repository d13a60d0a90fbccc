"""A random tiny target and a token file on disk, and run configurations over them."""

from pathlib import Path

import numpy as np
import pytest

from lilicorr_jax.conversion.checkpoint import abstract_target, save_target
from lilicorr_jax.presets import tiny
from tests.train.texts import counting_texts, random_parameters
from train.config import TrainConfig


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = tiny().target
    save_target(folder, config, random_parameters(abstract_target(config), seed=1))
    return folder


@pytest.fixture(scope="session")
def token_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "replies.npz"
    np.savez(path, **counting_texts())
    return path


@pytest.fixture(scope="session")
def config_for(target_folder, token_file):
    """TrainConfig with small numbers; keyword arguments override them."""

    def make(output: Path | str = "unused", **changes) -> TrainConfig:
        small = dict(
            target=str(target_folder), data=str(token_file), preset="tiny", steps=28, batch_rows=8, accumulation=2,
            anchors=4, sequence_length=24, vocabulary_chunk=16, drafter_learning_rate=1e-2,
            reranker_learning_rate=1e-2, warmup_share=0.5, checkpoint_every=8, log_every=2,
            eval_every=14, eval_rows=8,
        )  # fmt: skip
        return TrainConfig(output=str(output), **(small | changes))

    return make
