"""Token files of counting texts, tiny parameters without compiling an initialiser, and an objective over few layers."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lilicorr_jax.config import Method, ObjectiveConfig
from lilicorr_jax.conversion.checkpoint import abstract_drafter, abstract_target
from lilicorr_jax.presets import Preset, tiny
from lilicorr_jax.sharding import make_mesh
from train.data import Batch
from train.objective import Objective

VOCAB = 96
CYCLE = 12
MAX_LENGTH = 30


def counting_texts(num_examples: int = 60, seed: int = 0) -> dict[str, np.ndarray]:
    """A token file whose every token is its predecessor plus one, modulo 12; prompts of up to three tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, MAX_LENGTH + 1, num_examples)
    starts = rng.integers(0, CYCLE, num_examples)
    texts = [(start + np.arange(length)) % CYCLE for start, length in zip(starts, lengths, strict=True)]
    return {
        "tokens": np.concatenate(texts).astype(np.uint16),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "prompt_lengths": rng.integers(0, 4, num_examples).astype(np.int32),
    }


def random_parameters(abstract: Any, seed: int) -> Any:
    """Normal numbers of standard deviation 0.15 for the shapes of a tree; near 1 for its norms."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "weight" else 0.0
        return (centre + rng.normal(0, 0.15, leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def few_layers() -> Preset:
    """The tiny preset with three target layers, and one each of drafter and reranker: quick to compile."""
    preset = tiny()
    return replace(
        preset,
        target=replace(preset.target, num_layers=3),
        drafter=replace(preset.drafter, num_layers=1, num_target_layers=3, target_layer_ids=(0, 1)),
        reranker=replace(preset.reranker, num_layers=1),
    )


def make_objective(mesh=None, method: Method = "lilicorr", **changes) -> Objective:
    """An objective over `few_layers`, on one device unless a mesh is given."""
    preset = few_layers()
    drafter, corrector = preset.for_method(method)
    settings = dict(
        target=preset.target, drafter=drafter, corrector=corrector, weights=ObjectiveConfig(),
        mesh=mesh or make_mesh(), anchors=3, num_candidates=preset.reranker.num_candidates, num_steps=100, seed=0,
        vocabulary_chunk=16, anchor_chunk=2,
    )  # fmt: skip
    return Objective(**(settings | changes))


@functools.cache
def few_layers_parameters(method: Method = "lilicorr") -> tuple[Any, Any]:
    """Parameters of the trained pair and of its target."""
    preset = few_layers()
    trained = random_parameters(abstract_drafter(*preset.for_method(method)), seed=0)
    return trained, random_parameters(abstract_target(preset.target), seed=1)


def random_batch(rows: int = 8, length: int = 24, seed: int = 0) -> Batch:
    """Random tokens and lengths; of a row's tokens some in the middle are not supervised, and the first two never."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(length // 2, length + 1, rows).astype(np.int32)
    positions = np.arange(length)[None, :]
    is_inside = positions < lengths[:, None]
    return Batch(
        token_ids=np.where(is_inside, rng.integers(0, VOCAB - 1, (rows, length)), 0).astype(np.int32),
        loss_mask=is_inside & (positions >= 2) & (rng.random((rows, length)) < 0.9),
        length=lengths,
        example_id=rng.permutation(1000)[:rows].astype(np.int32),
    )
