"""The reranker for serving: what depends on weights alone is multiplied out once, at load.

The token's part of a node becomes a table over the vocabulary, and the attention bias an array. The fusion layer's
kernel is split, so that the anchor's part acts once per block, beside the anchor's own projection; its other two parts,
and the out and in projections, are one product each. Every product less is a launch less on a GPU.
The network itself stays in `models.lilicorr`, whose methods are composed here.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from lilicorr_jax.config import RerankerConfig
from lilicorr_jax.models.lilicorr import Reranker, Vectors, split_fusion, unit
from lilicorr_jax.shapes import Array, Bool, Float, Int

REPLACED = ("token_proj", "factor_input_proj", "anchor_out_head", "out_head", "in_head")

ANCHOR_ROWS = 8
"""Copies of the anchor's row that are multiplied: a product of one row is not given to a GPU's tensor cores."""


@struct.dataclass
class FoldedReranker:
    """Everything that `folded_vectors` reads.

    Attributes:
        token_table: E W_tok^T + b, a row per vocabulary id.
        attention_bias: additive bias of the slot-major nodes, M = S*K.
        fusion_kernel: the fusion layer's rows of the node x, then those of x * a.
        anchor_kernel: what acts on the anchor's state a: its out projection, then the fusion layer's rows of a.
        anchor_bias: likewise.
        factor_kernel: out and in projection side by side, 2E columns.
        factor_bias: likewise.
        params: the reranker's other parameters.
    """

    token_table: Float[Array, "V W"]
    attention_bias: Float[Array, "N M M"]
    fusion_kernel: Float[Array, "two_W W"]
    anchor_kernel: Float[Array, "W out_fusion"]
    anchor_bias: Float[Array, "out_fusion"]
    factor_kernel: Float[Array, "W out_in"]
    factor_bias: Float[Array, "out_in"]
    params: dict


def fold_for_serving(config: RerankerConfig, params: dict, embedding: Float[Array, "V D"]) -> FoldedReranker:
    """Multiplies out a `Reranker`'s parameters with the target's embedding table; jit it to fold on the device."""

    def multiply(reranker: Reranker):
        return reranker.token_rows(embedding), reranker.attention_bias(config.num_slots, config.num_candidates)

    token_table, attention_bias = nn.apply(multiply, Reranker(config))({"params": params})

    def side_by_side(*parts: Array) -> Array:
        return jnp.concatenate([part.astype(config.dtype) for part in parts], axis=-1)

    fusion = split_fusion(**params["factor_input_proj"], dtype=config.dtype)
    anchor, out, in_ = (params[name] for name in ("anchor_out_head", "out_head", "in_head"))
    return FoldedReranker(
        token_table=token_table,
        attention_bias=attention_bias,
        fusion_kernel=jnp.concatenate([fusion.node, fusion.product]),
        anchor_kernel=side_by_side(anchor["kernel"], fusion.anchor),
        anchor_bias=side_by_side(anchor["bias"], fusion.bias),
        factor_kernel=side_by_side(out["kernel"], in_["kernel"]),
        factor_bias=side_by_side(out["bias"], in_["bias"]),
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
        rows = jnp.broadcast_to(anchor[..., None, :], (*anchor.shape[:-1], ANCHOR_ROWS, anchor.shape[-1]))
        state = reranker.anchor_state(rows, jnp.broadcast_to(anchor_valid[..., None], rows.shape[:-1]))
        anchor_out, shared = jnp.split(
            _linear(state, folded.anchor_kernel, folded.anchor_bias)[..., 0, :], [config.factor_width], axis=-1
        )
        both = jnp.concatenate([nodes, nodes * state[..., :1, None, :]], axis=-1)  # [x; x * a]
        hidden = nn.silu(jnp.einsum("...w,wu->...u", both, folded.fusion_kernel) + shared[..., None, None, :])
        return Factors(anchor_out, *jnp.split(_linear(hidden, folded.factor_kernel, folded.factor_bias), 2, axis=-1))

    return nn.apply(run, Reranker(config))({"params": folded.params})


def _linear(x: Float[Array, "*batch W"], kernel: Float[Array, "W U"], bias: Float[Array, "U"]) -> Array:
    product = jnp.einsum("...w,wu->...u", x, kernel)
    return product + jnp.broadcast_to(bias, product.shape)
