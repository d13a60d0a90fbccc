"""Domino's causal correction (arXiv 2605.29707): the tokens drafted so far move the logits of the slots behind them.

A GRU reads the target's embeddings of the anchor and of the drafts, one state per token; state and drafter state of a
slot pass a bottleneck, whose product with `out` is added to the slot's own logits. Owns the network and its
initialisation; the rollout is in `decoding.rollout`, what serving multiplies out at load in `models.fold`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lilicorr_jax.config import DominoConfig
from lilicorr_jax.models.linear import Linear
from lilicorr_jax.shapes import Array, Float


def gru_step(
    of_input: Float[Array, "*batch gates"], of_state: Float[Array, "*batch gates"], state: Float[Array, "*batch state"]
) -> Float[Array, "*batch state"]:
    """s' = (1 - z) n + z s, with r, z = sigmoid(a + b) and n = tanh(a_n + r b_n): the form of PyTorch and cuDNN.

    Args:
        of_input: a = W_ih x, gates side by side in the order reset, update, candidate; three times the state's width.
        of_state: b = W_hh s, likewise. The reset gate multiplies this product, not the state.
    """
    reset_in, update_in, candidate_in = jnp.split(of_input, 3, axis=-1)
    reset_state, update_state, candidate_state = jnp.split(of_state, 3, axis=-1)
    reset, update = nn.sigmoid(reset_in + reset_state), nn.sigmoid(update_in + update_state)
    candidate = jnp.tanh(candidate_in + reset * candidate_state)
    return (1 - update) * candidate + update * state


def _torch_uniform(bound: float) -> nn.initializers.Initializer:
    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Domino(nn.Module):
    """Realised tokens and drafter states -> the correction of every slot's logits.

    Slot s (from 0) is corrected by the tokens up to and including the one before it, of which the anchor is the first:
    row s of `states` and of `bottleneck`, whichever row of the block speaks for the slot.

    Parameters: `gru_input/kernel` [D, 3 state], `gru_state/kernel` [state, 3 state], `joint/kernel` [D + state, rank],
    `out/kernel` [rank, V]; no biases.
    """

    config: DominoConfig

    def setup(self):
        c = self.config
        recurrent = dict(dtype=c.dtype, kernel_init=_torch_uniform(c.state_width**-0.5))
        make = dict(dtype=c.dtype, kernel_init=nn.initializers.normal(c.init_std))
        self.gru_input = Linear(3 * c.state_width, ("width", "state"), **recurrent)
        self.gru_state = Linear(3 * c.state_width, ("table", "state"), **recurrent)
        self.joint = Linear(c.bottleneck_width, ("features", "rank"), **make)
        self.out = Linear(c.vocab_size, ("rank", "vocab"), **make)

    def states(self, prev_embeddings: Float[Array, "*batch S D"]) -> Float[Array, "*batch S state"]:
        """The GRU's state behind each token, from zero before the anchor.

        Args:
            prev_embeddings: the target's embedding of the token before each slot, the anchor's first; frozen, so the
                caller stops the gradient.
        """
        inputs = self.gru_input(prev_embeddings)
        state = jnp.zeros((*inputs.shape[:-2], self.config.state_width), inputs.dtype)
        states = []
        for slot in range(inputs.shape[-2]):
            state = gru_step(inputs[..., slot, :], self.gru_state(state), state)
            states.append(state)
        return jnp.stack(states, axis=-2)

    def bottleneck(
        self, states: Float[Array, "*batch S D"], gru_states: Float[Array, "*batch S state"]
    ) -> Float[Array, "*batch S rank"]:
        """silu(W_1 [h; s]), what `out` multiplies; zero in the leading slots that keep their own logits."""
        hidden = nn.silu(self.joint(jnp.concatenate([states, gru_states], axis=-1)))
        slot = jax.lax.broadcasted_iota(jnp.int32, hidden.shape, hidden.ndim - 2)
        return jnp.where(slot >= self.config.plain_slots, hidden, jnp.zeros_like(hidden))

    def features(
        self, prev_embeddings: Float[Array, "*batch S D"], states: Float[Array, "*batch S D"]
    ) -> Float[Array, "*batch S rank"]:
        """`bottleneck` from tokens and drafter states; a caller multiplies it with `out/kernel` in chunks."""
        return self.bottleneck(states, self.states(prev_embeddings))

    def __call__(
        self, prev_embeddings: Float[Array, "*batch S D"], states: Float[Array, "*batch S D"]
    ) -> Float[Array, "*batch S V"]:
        """c = W_2 silu(W_1 [h; s]), to be added to the logits of the slots.

        Args:
            prev_embeddings: as of `states`.
            states: the drafter's states of the slots, those that were unembedded.
        """
        return self.out(self.features(prev_embeddings, states))


def domino_shapes(config: DominoConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The smallest arguments of a `Domino`, to make parameters from shapes alone."""
    row = jax.ShapeDtypeStruct((1, 1, config.drafter_width), config.dtype)
    return row, row
