"""DSpark's Markov head and confidence (arXiv 2607.05147, section 3): every slot's logits depend on the token before it.

The token before a slot has a learned row of low rank (not the target's embedding); a product with `out` turns it, or
what a gate or a recurrence makes of it, into a bias of the slot's logits. The confidence is the probability that a
draft is kept, given that all before it were. Owns the network and its initialisation; the rollout is in
`decoding.rollout`, what serving multiplies out at load in `models.fold`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.config import DSparkConfig
from lilicorr_jax.models.linear import Linear
from lilicorr_jax.shapes import Array, Float, Int


def markov_step(
    kind: str,
    row: Float[Array, "*batch rank"],
    mixed: Float[Array, "*batch mixed"],
    carry: Float[Array, "*batch rank"],
) -> tuple[Float[Array, "*batch rank"], Float[Array, "*batch rank"]]:
    """What `out` multiplies in one slot, and the recurrent state behind it.

    vanilla: the token's row e. gated: sigmoid(g) e. rnn: tanh(o), and s' = sigmoid(a) s + (1 - sigmoid(a)) tanh(c).

    Args:
        mixed: g of the gate [rank], or a, c, o of the recurrence side by side [3 rank]; not read for vanilla.
        carry: s, zero before the first slot; only a recurrence changes it.
    """
    if kind == "vanilla":
        return row, carry
    if kind == "gated":
        return nn.sigmoid(mixed) * row, carry
    keep, candidate, output = jnp.split(mixed, 3, axis=-1)
    keep = nn.sigmoid(keep)
    return jnp.tanh(output), keep * carry + (1 - keep) * jnp.tanh(candidate)


class DSpark(nn.Module):
    """The token before each slot and the drafter's states -> the bias of every slot's logits, and the confidences.

    Parameters: `token_in/embedding` [V, rank], `out/kernel` [rank, V]; where the kind has it `gate` [D + rank, rank] or
    `joint` [2 rank + D, 3 rank] (state, token, drafter state), and `confidence_proj` [D + rank, 1], these with biases.
    """

    config: DSparkConfig

    def setup(self):
        c = self.config
        init = nn.initializers.normal(c.init_std)
        make = dict(dtype=c.dtype, kernel_init=init)
        self.token_in = nn.Embed(
            c.vocab_size,
            c.rank,
            dtype=jnp.dtype(c.dtype),
            embedding_init=nn.with_logical_partitioning(init, ("vocab", "rank")),
        )
        self.out = Linear(c.vocab_size, ("rank", "vocab"), **make)
        if c.kind == "gated":
            self.gate = Linear(c.rank, ("features", "rank"), use_bias=True, **make)
        if c.kind == "rnn":
            self.joint = Linear(3 * c.rank, ("features", "rank"), use_bias=True, **make)
        if c.has_confidence:
            self.confidence_proj = Linear(1, ("features", "table"), use_bias=True, **make)

    def features(
        self, prev_ids: Int[Array, "*batch S"], states: Float[Array, "*batch S D"]
    ) -> Float[Array, "*batch S rank"]:
        """What `out` multiplies, given the realised tokens; a caller multiplies it with `out/kernel` in chunks.

        Args:
            prev_ids: the token before each slot, the anchor first.
            states: the drafter's states of the slots, those that were unembedded.
        """
        rows = self.token_in(prev_ids)
        if self.config.kind == "vanilla":
            return rows
        if self.config.kind == "gated":
            return markov_step("gated", rows, self.gate(jnp.concatenate([states, rows], axis=-1)), rows)[0]
        carry, features = jnp.zeros_like(rows[..., 0, :]), []
        for slot in range(rows.shape[-2]):
            row = rows[..., slot, :]
            mixed = self.joint(jnp.concatenate([carry, row, states[..., slot, :]], axis=-1))
            feature, carry = markov_step("rnn", row, mixed, carry)
            features.append(feature)
        return jnp.stack(features, axis=-2)

    def confidence(self, prev_ids: Int[Array, "*batch S"], states: Float[Array, "*batch S D"]) -> Array:
        """Logits [*batch, S] of the probability that each draft is kept, given that all before it were."""
        c = self.config
        if not c.has_confidence:
            raise ValueError("This DSpark has no confidence; has_confidence is False. Use a checkpoint that has one.")
        read = [states, self.token_in(prev_ids)] if c.confidence_reads_token else [states]
        return self.confidence_proj(jnp.concatenate(read, axis=-1))[..., 0]

    def __call__(
        self, prev_ids: Int[Array, "*batch S"], states: Float[Array, "*batch S D"]
    ) -> tuple[Float[Array, "*batch S V"], Float[Array, "*batch S"] | None]:
        """The bias of the slots' logits, and the confidence logits; arguments as of `features`."""
        bias = self.out(self.features(prev_ids, states))
        return bias, self.confidence(prev_ids, states) if self.config.has_confidence else None


def dspark_shapes(config: DSparkConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The smallest arguments of a `DSpark`, to make parameters from shapes alone."""
    return (
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
        jax.ShapeDtypeStruct((1, 1, config.drafter_width), config.dtype),
    )
