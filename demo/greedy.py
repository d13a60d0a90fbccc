"""Plain greedy replies of the target, many prompts at once in one device loop: the demo's reference decoding."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from lilicorr_jax.cache import init_cache
from lilicorr_jax.models.target import Target
from lilicorr_jax.shapes import Array, Int


@partial(jax.jit, static_argnames=("target", "max_new"))
def greedy_ids(
    target: Target, params, token_ids: Int[Array, "B T"], length: Int[Array, "B"], *, max_new: int
) -> tuple[Int[Array, "B new"], Int[Array, "B"]]:
    """Continues right-padded prompts of `length` tokens with the target's best token each time.

    Returns:
      The new ids, at most `max_new` a row and 0 after its end, and how many count: up to and with the first of the
      config's eos_ids, or all.
    """
    batch, width = token_ids.shape
    rows = jnp.arange(batch)
    stops = jnp.array(target.config.eos_ids)

    def best(hidden: Array) -> Array:
        return jnp.argmax(target.apply({"params": params}, hidden, method="unembed"), axis=-1).astype(jnp.int32)

    def step(state):
        count, token, ended, new, cache = state
        new = new.at[:, count].set(jnp.where(ended, 0, token))
        ended = ended | jnp.isin(token, stops)
        out = target.apply({"params": params}, token[:, None], cache=cache, length=length + count)
        return count + 1, best(out.hidden[:, 0]), ended, new, out.cache

    cache = init_cache(target.config, batch, width + max_new + 1)
    out = target.apply({"params": params}, token_ids, cache=cache, length=jnp.zeros_like(length))
    first = best(out.hidden[rows, length - 1])
    start = (jnp.int32(0), first, jnp.zeros(batch, bool), jnp.zeros((batch, max_new), jnp.int32), out.cache)
    count, _, _, new, _ = jax.lax.while_loop(lambda s: (s[0] < max_new) & ~jnp.all(s[2]), step, start)
    stopped = jnp.isin(new, stops) & (jnp.arange(max_new)[None, :] < count)
    return new, jnp.where(jnp.any(stopped, axis=1), jnp.argmax(stopped, axis=1) + 1, max_new)


def replies(
    target: Target, params, prompts: Sequence[Sequence[int]], *, max_new: int, batch: int = 128
) -> list[list[int]]:
    """Greedy reply ids of templated prompts, each with the stop that ended it (none if `max_new` came first)."""
    width = max(map(len, prompts))
    answers = []
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        token_ids, length = np.zeros((batch, width), np.int32), np.ones(batch, np.int32)
        for row, ids in enumerate(group):
            token_ids[row, : len(ids)], length[row] = ids, len(ids)
        new, count = jax.device_get(greedy_ids(target, params, token_ids, length, max_new=max_new))
        answers += [new[row, : count[row]].tolist() for row in range(len(group))]
    return answers
