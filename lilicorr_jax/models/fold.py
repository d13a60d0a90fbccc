"""The correctors for serving: what depends on weights alone is multiplied out once, at load.

The reranker: the token's part of a node becomes a table over the vocabulary, and the attention bias an array. The
fusion layer's kernel is split, so that the anchor's part acts once per block, beside the anchor's own projection; its
other two parts, and the out and in projections, are one product each. Every product less is a launch less on a GPU;
the product of the five confidence scalars is a sum there.
The network itself stays in `models.lilicorr`, whose methods are composed here.

Domino and DSpark: their layers on [drafter state; ...] are split, so that the drafter's states of all slots are
multiplied at once, before the rollout (`decoding.rollout`); Domino's GRU finds its input products in a table.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from lilicorr_jax.config import CorrectorConfig, DominoConfig, DSparkConfig, RerankerConfig
from lilicorr_jax.models.lilicorr import Reranker, Vectors, split_fusion, unit
from lilicorr_jax.shapes import Array, Bool, Float, Int
from pallas_kernels.dispatch import Implementation

REPLACED = ("token_proj", "feature_up", "factor_input_proj", "anchor_out_head", "out_head", "in_head")

ANCHOR_ROWS = 8
"""Rows of anchors that are multiplied at least: a product of one row is not given to a GPU's tensor cores."""


def anchor_copies(texts: int) -> int:
    """How often each text's anchor is multiplied: once where there are texts enough."""
    return 1 if texts >= ANCHOR_ROWS else ANCHOR_ROWS


@struct.dataclass
class FoldedReranker:
    """Everything that `folded_vectors` reads.

    Attributes:
        token_table: E W_tok^T + b, a row per vocabulary id.
        feature_kernel: what acts on the confidence scalars, a row for each of them.
        feature_bias: added to it.
        attention_bias: additive bias of the slot-major nodes, M = S*K.
        fusion_kernel: the fusion layer's rows of the node x, then those of x * a.
        anchor_kernel: what acts on the anchor's state a: its out projection, then the fusion layer's rows of a.
        anchor_bias: likewise.
        factor_kernel: out and in projection side by side, 2E columns.
        factor_bias: likewise.
        params: the reranker's other parameters.
    """

    token_table: Float[Array, "V W"]
    feature_kernel: Float[Array, "features W"]
    feature_bias: Float[Array, "W"]
    attention_bias: Float[Array, "N M M"]
    fusion_kernel: Float[Array, "two_W W"]
    anchor_kernel: Float[Array, "W out_fusion"]
    anchor_bias: Float[Array, "out_fusion"]
    factor_kernel: Float[Array, "W out_in"]
    factor_bias: Float[Array, "out_in"]
    params: dict


@struct.dataclass
class FoldedDomino:
    """Everything that Domino's rollout reads.

    Attributes:
        input_table: E W_ih^T, the GRU's input product of every vocabulary id.
        state_kernel: what acts on the GRU's state: W_hh, then the bottleneck's rows of it.
        hidden_kernel: the bottleneck's rows of the drafter's state.
        out_rows: from the bottleneck to the logits, a row per vocabulary id, as `models.linear` decodes.
    """

    input_table: Float[Array, "V gates"]
    state_kernel: Float[Array, "state gates_rank"]
    hidden_kernel: Float[Array, "D rank"]
    out_rows: Float[Array, "V rank"]


@struct.dataclass
class FoldedDSpark:
    """Everything that DSpark's rollout reads; the columns of what it mixes are those of the gate or the recurrence,
    none for vanilla, then one of the confidence where there is one.

    Attributes:
        token_in: the row of every vocabulary id.
        hidden_kernel: what acts on the drafter's state.
        hidden_bias: added to it.
        token_kernel: what acts on the row of the token before; zero where the confidence does not read it.
        state_kernel: what acts on the recurrent state; None without one.
        out_rows: to the logits, a row per vocabulary id.
    """

    token_in: Float[Array, "V rank"]
    hidden_kernel: Float[Array, "D mixed"]
    hidden_bias: Float[Array, "mixed"]
    token_kernel: Float[Array, "rank mixed"]
    state_kernel: Float[Array, "rank gates"] | None
    out_rows: Float[Array, "V rank"]


Folded = FoldedReranker | FoldedDomino | FoldedDSpark


def fold_for_serving(config: CorrectorConfig, params: dict, embedding: Float[Array, "V D"]) -> Folded:
    """Multiplies out a corrector's parameters with the target's embedding table; jit it to fold on the device."""
    if isinstance(config, RerankerConfig):
        return _fold_reranker(config, params, embedding)
    if isinstance(config, DominoConfig):
        return _fold_domino(config, params, embedding)
    return _fold_dspark(config, params)


def _fold_domino(config: DominoConfig, params: dict, embedding: Float[Array, "V D"]) -> FoldedDomino:
    gru_input, gru_state, joint, out = (
        params[name]["kernel"].astype(config.dtype) for name in ("gru_input", "gru_state", "joint", "out")
    )
    of_hidden, of_state = jnp.split(joint, [config.drafter_width])
    return FoldedDomino(
        input_table=jnp.einsum("vd,dg->vg", embedding.astype(config.dtype), gru_input),
        state_kernel=jnp.concatenate([gru_state, of_state], axis=-1),
        hidden_kernel=of_hidden,
        out_rows=out.T,
    )


def _fold_dspark(config: DSparkConfig, params: dict) -> FoldedDSpark:
    params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
    width, rank = config.drafter_width, config.rank
    of_hidden, of_token = jnp.zeros((width, 0), config.dtype), jnp.zeros((rank, 0), config.dtype)
    bias, of_state = jnp.zeros((0,), config.dtype), None
    if config.kind == "gated":
        (of_hidden, of_token), bias = jnp.split(params["gate"]["kernel"], [width]), params["gate"]["bias"]
    if config.kind == "rnn":
        of_state, of_token, of_hidden = jnp.split(params["joint"]["kernel"], [rank, 2 * rank])
        bias = params["joint"]["bias"]
    if config.has_confidence:
        kernel = params["confidence_proj"]["kernel"]
        if not config.confidence_reads_token:
            kernel = jnp.concatenate([kernel, jnp.zeros((rank, 1), kernel.dtype)])
        of_hidden = jnp.concatenate([of_hidden, kernel[:width]], axis=-1)
        of_token = jnp.concatenate([of_token, kernel[width:]], axis=-1)
        bias = jnp.concatenate([bias, params["confidence_proj"]["bias"]])
    return FoldedDSpark(
        token_in=params["token_in"]["embedding"],
        hidden_kernel=of_hidden,
        hidden_bias=bias,
        token_kernel=of_token,
        state_kernel=of_state,
        out_rows=params["out"]["kernel"].T,
    )


def _fold_reranker(config: RerankerConfig, params: dict, embedding: Float[Array, "V D"]) -> FoldedReranker:

    def multiply(reranker: Reranker):
        return reranker.token_rows(embedding), reranker.attention_bias(config.num_slots, config.num_candidates)

    token_table, attention_bias = nn.apply(multiply, Reranker(config))({"params": params})

    def side_by_side(*parts: Array) -> Array:
        return jnp.concatenate([part.astype(config.dtype) for part in parts], axis=-1)

    fusion = split_fusion(**params["factor_input_proj"], dtype=config.dtype)
    anchor, out, in_ = (params[name] for name in ("anchor_out_head", "out_head", "in_head"))
    return FoldedReranker(
        token_table=token_table,
        feature_kernel=params["feature_up"]["kernel"].astype(config.dtype),
        feature_bias=params["feature_up"]["bias"].astype(config.dtype),
        attention_bias=attention_bias,
        fusion_kernel=jnp.concatenate([fusion.node, fusion.product]),
        anchor_kernel=side_by_side(anchor["kernel"], fusion.anchor),
        anchor_bias=side_by_side(anchor["bias"], fusion.bias),
        factor_kernel=side_by_side(out["kernel"], in_["kernel"]),
        factor_bias=side_by_side(out["bias"], in_["bias"]),
        params={name: leaf for name, leaf in params.items() if name not in REPLACED},
    )


class Factors(NamedTuple):
    """What `Vectors` has, before the division by the norms; out and in vector of a candidate side by side."""

    anchor_out: Float[Array, "*batch E"]
    candidates: Float[Array, "*batch S K out_in"]


def folded_vectors(config: RerankerConfig, *arguments) -> Vectors:
    """`Reranker` from candidate ids instead of embeddings, within 1e-5 in float32; arguments as of `folded_factors`."""
    anchor_out, candidates = folded_factors(config, *arguments)
    vectors = (anchor_out, *jnp.split(candidates, 2, axis=-1))
    return Vectors(*(unit(x, config.vector_floor) for x in vectors))


def folded_factors(
    config: RerankerConfig,
    folded: FoldedReranker,
    candidate_ids: Int[Array, "*batch S K"],
    states: Float[Array, "*batch S D"],
    logprobs: Float[Array, "*batch S K"],
    anchor: Float[Array, "*batch D"],
    anchor_valid: Bool[Array, "*batch"],
    kernels: Implementation = "auto",
) -> Factors:
    """The vectors of `Reranker` before their norms are divided out, from candidate ids; other arguments are its own.

    The lattice must be the trained one, S slots x K candidates; another size is a ValueError. `kernels` chooses the
    implementation of its attention.
    """
    trained = (config.num_slots, config.num_candidates)
    if candidate_ids.shape[-2:] != trained:
        raise ValueError(
            f"A folded reranker takes its trained lattice of {trained[0]} slots x {trained[1]} candidates; got "
            f"{candidate_ids.shape[-2]} x {candidate_ids.shape[-1]}. Use Reranker for a narrower one."
        )

    def run(reranker: Reranker) -> Factors:
        confidence = _written_out(reranker.features(logprobs), folded.feature_kernel, folded.feature_bias)
        nodes = reranker.lattice(folded.token_table[candidate_ids], states, confidence, folded.attention_bias)
        copies = anchor_copies(math.prod(anchor.shape[:-1]))
        rows = jnp.broadcast_to(anchor[..., None, :], (*anchor.shape[:-1], copies, anchor.shape[-1]))
        state = reranker.anchor_state(rows, jnp.broadcast_to(anchor_valid[..., None], rows.shape[:-1]))
        anchor_out, shared = jnp.split(
            _linear(state, folded.anchor_kernel, folded.anchor_bias)[..., 0, :], [config.factor_width], axis=-1
        )
        both = jnp.concatenate([nodes, nodes * state[..., :1, None, :]], axis=-1)  # [x; x * a]
        hidden = nn.silu(jnp.einsum("...w,wu->...u", both, folded.fusion_kernel) + shared[..., None, None, :])
        return Factors(anchor_out, _linear(hidden, folded.factor_kernel, folded.factor_bias))

    return nn.apply(run, Reranker(config, kernels))({"params": folded.params})


def _linear(x: Float[Array, "*batch W"], kernel: Float[Array, "W U"], bias: Float[Array, "U"]) -> Array:
    product = jnp.einsum("...w,wu->...u", x, kernel)
    return product + jnp.broadcast_to(bias, product.shape)


def _written_out(x: Float[Array, "*batch F"], kernel: Float[Array, "F U"], bias: Float[Array, "U"]) -> Array:
    """`_linear` of few inputs as a sum: XLA fuses that with what stands around it, where it would launch a product."""
    wide, kernel, total = x.astype(jnp.float32), kernel.astype(jnp.float32), bias.astype(jnp.float32)
    shape = (*x.shape[:-1], kernel.shape[-1])
    total = jnp.broadcast_to(total, shape)
    for i, row in enumerate(kernel):
        total = total + wide[..., i : i + 1] * jnp.broadcast_to(row, shape)
    return total.astype(x.dtype)
