"""`python -m benchmarks.random_drafter`: a drafter and reranker that know nothing, for a given target.

Its drafts are nearly all rejected, so what it serves for is identity and the cost of a block: text must equal plain
decoding's whatever is drafted.
"""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from lilicorr_jax import flags
from lilicorr_jax.config import DrafterConfig, RerankerConfig, TargetConfig, setting
from lilicorr_jax.conversion.checkpoint import DrafterCheckpoint, load_target, save_drafter
from lilicorr_jax.models.dflash import Drafter, drafter_shapes
from lilicorr_jax.models.lilicorr import Reranker, reranker_shapes
from lilicorr_jax.presets import drafter_of
from lilicorr_jax.sharding import init_parameters

PROGRAM = "benchmarks.random_drafter"


@dataclass(frozen=True, kw_only=True)
class RandomDrafterConfig:
    """Writes a randomly initialised LiLiCorr drafter for a target."""

    target: str = setting(MISSING, "Folder of the target.")
    output: str = setting(MISSING, "Folder to write, in the Hugging Face layout.")
    layers: int = setting(2, "Layers of the drafter.")
    num_slots: int = setting(15, "Drafted slots per block.")
    mask_id: int = setting(16, "Token that stands for what is to be drafted; one that no text holds.")
    width: int = setting(256, "Width of the reranker, and of its vectors.")
    seed: int = setting(0, "Of the parameters.")


def drafter_for(
    target: TargetConfig, *, layers: int, num_slots: int, mask_id: int, width: int
) -> tuple[DrafterConfig, RerankerConfig]:
    """A drafter of the target's own shapes, and a reranker that goes with it."""
    drafter = drafter_of(target, num_layers=layers, mask_id=mask_id, num_slots=num_slots)
    reranker = RerankerConfig(
        drafter_width=target.width,
        num_slots=num_slots,
        width=width,
        ffn_width=2 * width,
        factor_width=width,
        norm_eps=target.norm_eps,
        init="fan_in",
        dtype=target.dtype,
    )
    return drafter, reranker


def random_checkpoint(drafter: DrafterConfig, reranker: RerankerConfig, seed: int) -> DrafterCheckpoint:
    """Both with parameters of the given seed."""
    first, second = jax.random.split(jax.random.key(seed))
    inputs, rows = (jax.tree.map(_zeros, shapes) for shapes in (drafter_shapes(drafter), reranker_shapes(reranker)))
    params = {
        "drafter": init_parameters(Drafter(drafter), first, *inputs, method="from_features"),
        "reranker": init_parameters(Reranker(reranker), second, *rows),
    }
    return DrafterCheckpoint(drafter=drafter, corrector=reranker, params=params)


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype)


def run(config: RandomDrafterConfig) -> None:
    target, _ = load_target(Path(config.target))
    records = drafter_for(
        target, layers=config.layers, num_slots=config.num_slots, mask_id=config.mask_id, width=config.width
    )
    save_drafter(Path(config.output), random_checkpoint(*records, config.seed))
    print(config.output)


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(RandomDrafterConfig, run, program=PROGRAM, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
