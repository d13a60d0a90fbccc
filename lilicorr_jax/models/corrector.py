"""The modules of the correctors by their records, for what treats all methods alike: initialisation and loading."""

import flax.linen as nn
import jax

from lilicorr_jax.config import CorrectorConfig, DominoConfig, RerankerConfig
from lilicorr_jax.models.domino import Domino, domino_shapes
from lilicorr_jax.models.dspark import DSpark, dspark_shapes
from lilicorr_jax.models.lilicorr import Reranker, reranker_shapes


def make_corrector(config: CorrectorConfig) -> nn.Module:
    """The module that a record describes."""
    if isinstance(config, RerankerConfig):
        return Reranker(config)
    return Domino(config) if isinstance(config, DominoConfig) else DSpark(config)


def corrector_shapes(config: CorrectorConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The smallest arguments of its call, to make parameters from shapes alone."""
    if isinstance(config, RerankerConfig):
        return reranker_shapes(config)
    return domino_shapes(config) if isinstance(config, DominoConfig) else dspark_shapes(config)
