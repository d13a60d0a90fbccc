"""The reranker for serving: what depends on weights alone is multiplied out once, at load.

Four things: the token's part of a node becomes a table over the vocabulary, the attention bias an array, the fusion
layer's kernel is split so that the anchor's part acts once per block, and the out and in projections are one product.
The network itself stays in `models.lilicorr`, whose methods are composed here.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from lilicorr_jax.config import RerankerConfig
from lilicorr_jax.models.lilicorr import Fusion, Reranker, Vectors, fuse, split_fusion, unit
from lilicorr_jax.shapes import Array, Bool, Float, Int

REPLACED = ("token_proj", "factor_input_proj", "out_head", "in_head")


@struct.dataclass
class FoldedReranker:
    """Everything that `folded_vectors` reads.

    Attributes:
        token_table: E W_tok^T + b, a row per vocabulary id.
        attention_bias: additive bias of the slot-major nodes, M = S*K.
        fusion: the fusion layer, its kernel split.
        factor_kernel: out and in projection side by side, 2E columns.
        factor_bias: likewise.
        params: the reranker's other parameters.
    """

    token_table: Float[Array, "V W"]
    attention_bias: Float[Array, "N M M"]
    fusion: Fusion
    factor_kernel: Float[Array, "W out_in"]
    factor_bias: Float[Array, "out_in"]
    params: dict


def fold_for_serving(config: RerankerConfig, params: dict, embedding: Float[Array, "V D"]) -> FoldedReranker:
    """Multiplies out a `Reranker`'s parameters with the target's embedding table; jit it to fold on the device."""

    def multiply(reranker: Reranker):
        return reranker.token_rows(embedding), reranker.attention_bias(config.num_slots, config.num_candidates)

    token_table, attention_bias = nn.apply(multiply, Reranker(config))({"params": params})

    def side_by_side(leaf: str) -> Array:
        return jnp.concatenate([params["out_head"][leaf], params["in_head"][leaf]], axis=-1).astype(config.dtype)

    return FoldedReranker(
        token_table=token_table,
        attention_bias=attention_bias,
        fusion=split_fusion(**params["factor_input_proj"], dtype=config.dtype),
        factor_kernel=side_by_side("kernel"),
        factor_bias=side_by_side("bias"),
        params={name: leaf for name, leaf in params.items() if name not in REPLACED},
    )


class Factors(NamedTuple):
    """What `Vectors` has, before the division by the norms."""

    anchor_out: Float[Array, "*batch E"]
    out: Float[Array, "*batch S K E"]
    in_: Float[Array, "*batch S K E"]


def folded_vectors(config: RerankerConfig, *arguments) -> Vectors:
    """`Reranker` from candidate ids instead of embeddings, within 1e-5 in float32; arguments as of `folded_factors`."""
    return Vectors(*(unit(x, config.vector_floor) for x in folded_factors(config, *arguments)))


def folded_factors(
    config: RerankerConfig,
    folded: FoldedReranker,
    candidate_ids: Int[Array, "*batch S K"],
    states: Float[Array, "*batch S D"],
    logprobs: Float[Array, "*batch S K"],
    anchor: Float[Array, "*batch D"],
    anchor_valid: Bool[Array, "*batch"],
) -> Factors:
    """The vectors of `Reranker` before their norms are divided out, from candidate ids; other arguments are its own.

    The lattice must be the trained one, S slots x K candidates; another size is a ValueError.
    """
    trained = (config.num_slots, config.num_candidates)
    if candidate_ids.shape[-2:] != trained:
        raise ValueError(
            f"A folded reranker takes its trained lattice of {trained[0]} slots x {trained[1]} candidates; got "
            f"{candidate_ids.shape[-2]} x {candidate_ids.shape[-1]}. Use Reranker for a narrower one."
        )

    def run(reranker: Reranker) -> Factors:
        nodes = reranker.lattice(folded.token_table[candidate_ids], states, logprobs, folded.attention_bias)
        anchor_state = reranker.anchor_state(anchor, anchor_valid)
        factors = jnp.einsum("...w,we->...e", fuse(folded.fusion, nodes, anchor_state), folded.factor_kernel)
        factors = factors + jnp.broadcast_to(folded.factor_bias, factors.shape)
        return Factors(reranker.anchor_out_head(anchor_state), *jnp.split(factors, 2, axis=-1))

    return nn.apply(run, Reranker(config))({"params": folded.params})
