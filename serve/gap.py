"""How close the target's choice was where two texts part: a teacher-forced pass over what stands before it.

Float32 sums are not associative, so a pass of P rows and one of a single row can round a choice apart, but only where
it hangs by a thread. This file measures the thread.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lilicorr_jax.config import TargetConfig
from lilicorr_jax.decoding.noise import Purpose, uniform
from lilicorr_jax.decoding.verify import target_distribution
from lilicorr_jax.models.target import Target
from serve.report import TEXT_GAP

BFLOAT16_BITS = 8  # of the significand
WIDTH = 128  # texts are padded to a multiple of it, so that few shapes are compiled


def choice_gap(
    config: TargetConfig,
    params: dict,
    text: tuple[int, ...],
    ids: tuple[int, int],
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> float:
    """How little would have turned the target's choice behind `text`.

    At temperature 0: the difference of its two largest logits. Else: by how much the position's uniform number misses
    the stretch of the cumulative distribution that belongs to the other token, the larger for the two tokens.

    Args:
        text: prompt and reply up to where the texts part.
        ids: the two tokens.
    """
    logits = next_logits(config, params, text)
    if temperature == 0:
        second, first = np.sort(logits)[-2:]
        return float(first - second)
    rows = jnp.asarray(logits, jnp.float32)[None, None]  # [1, 1, V]
    asked = jnp.array([temperature]), jnp.array([top_k]), jnp.array([top_p])
    probs = target_distribution(rows, *asked, "filtered")[0, 0]
    number = uniform(jnp.array([seed], jnp.uint32), jnp.array([[len(text)]], jnp.int32), Purpose.TARGET)
    return max(missed_by(np.asarray(probs, np.float64), token, float(number[0, 0])) for token in ids)


def tolerance(config: TargetConfig, params: dict, text: tuple[int, ...], temperature: float) -> float:
    """Gaps below it are rounding's work: `TEXT_GAP` in float32, in bfloat16 one step at the largest logit."""
    if config.dtype != "bfloat16":
        return TEXT_GAP
    largest = np.abs(next_logits(config, params, text)).max()
    step = 2.0 ** (np.floor(np.log2(largest)) + 1 - BFLOAT16_BITS)
    return float(step / temperature if temperature > 0 else step)


def missed_by(probs: np.ndarray, token: int, number: float) -> float:
    """Distance from `number` to the stretch of the cumulative distribution that belongs to `token`."""
    low = probs[:token].sum()
    return max(low - number, number - (low + probs[token]), 0.0)


def next_logits(config: TargetConfig, params: dict, text: tuple[int, ...]) -> np.ndarray:
    """The target's logits behind a text, float64 [V]."""
    padded = np.zeros((1, -(-len(text) // WIDTH) * WIDTH), np.int32)  # on the right, where causality hides it
    padded[0, : len(text)] = text
    return np.asarray(_logits_at(config, params, jnp.asarray(padded), jnp.int32(len(text) - 1)), np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _logits_at(config: TargetConfig, params: dict, token_ids, index):
    model, tree = Target(config), {"params": params}
    hidden = model.apply(tree, token_ids).hidden[0, index]
    return model.apply(tree, hidden, method="unembed")
