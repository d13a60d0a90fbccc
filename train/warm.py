"""A run that starts from a drafter that somebody has trained: a public DFlash or LiLiCorr folder, or our own export."""

from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from lilicorr_jax.config import CorrectorConfig, DrafterConfig, corrector_name
from lilicorr_jax.conversion.export import load_any
from train.objective import Params

HARMLESS = frozenset({"dtype", "init", "init_std", "max_positions"})
"""Fields that may differ between the run's models and those of the folder: none of them shapes what was learned."""


def warm_params(
    folder: str, drafter: DrafterConfig, corrector: CorrectorConfig | None, fresh: Params
) -> tuple[Params, list[str]]:
    """The parameters of `fresh` with those that the folder has in their place, and the names of the others.

    A corrector that the folder lacks, or that is of another method, starts fresh; one that it has and the run does not
    is left aside.

    Raises:
        ValueError: the folder's models have another geometry than the run's; every field is named.
    """
    checkpoint = load_any(folder)
    problems = differences("drafter", drafter, checkpoint.drafter)
    if type(checkpoint.corrector) is type(corrector) and corrector is not None:
        problems += differences(corrector_name(corrector), corrector, checkpoint.corrector)
    if problems:
        raise ValueError(
            f"--init_from={folder} is another drafter than --preset describes: {'; '.join(problems)}. Give a folder of "
            "this geometry."
        )
    names = {"drafter"}
    if corrector is not None and type(checkpoint.corrector) is type(corrector):
        names.add(corrector_name(corrector))

    def place(like: jax.Array, leaf: jax.Array) -> jax.Array:
        array = jax.device_get(leaf.astype(jnp.float32))
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])

    params = {
        name: jax.tree.map(place, fresh[name], checkpoint.params[name]) if name in names else fresh[name]
        for name in fresh
    }
    return params, [name for name in fresh if name not in names]


def differences(part: str, wanted: Any, found: Any) -> list[str]:
    """One phrase for each field that shapes what was learned and has another value."""
    mine, theirs = asdict(wanted), asdict(found)
    names = [name for name in mine if name not in HARMLESS and mine[name] != theirs.get(name)]
    return [f"{part} {name} is {theirs.get(name)!r} there, {mine[name]!r} here" for name in names]
