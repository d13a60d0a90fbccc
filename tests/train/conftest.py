"""A random tiny target, and texts in which every token is its predecessor's plus one: a drafter learns them at once."""

from pathlib import Path

import numpy as np
import pytest

from lilicorr_jax.config import PRESETS
from lilicorr_jax.conversion.checkpoint import abstract_target, save_target
from train.config import TrainConfig

VOCAB = 96
LENGTHS = (5, 30)
NUM_EXAMPLES = 60


def random_like(abstract, seed: int):
    """Parameters of the given shapes: norms 1, all else small."""
    import jax

    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        is_norm = leaf.ndim == 1
        return np.ones(leaf.shape, np.float32) if is_norm else rng.normal(0, 0.15, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def counting_texts(num_examples: int = NUM_EXAMPLES, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a token file: counting texts of random length, a prompt of up to four tokens each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(*LENGTHS, num_examples)
    starts = rng.integers(0, VOCAB, num_examples)
    tokens = [(start + np.arange(length)) % (VOCAB - 1) for start, length in zip(starts, lengths, strict=True)]
    return {
        "tokens": np.concatenate(tokens).astype(np.uint16),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "prompt_lengths": rng.integers(0, 4, num_examples).astype(np.int32),
    }


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    config = PRESETS["tiny"]().target
    save_target(folder, config, random_like(abstract_target(config), seed=1))
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
            preset="tiny", steps=8, batch_rows=8, accumulation=2, anchors=3, sequence_length=24, vocabulary_chunk=16,
            drafter_learning_rate=1e-2, reranker_learning_rate=1e-2, warmup_share=0.25, checkpoint_every=3, log_every=2,
        )  # fmt: skip
        return TrainConfig(target=str(target_folder), data=str(token_file), output=str(output), **(small | changes))

    return make
