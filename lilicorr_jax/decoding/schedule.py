"""How many drafts are worth verifying, from the drafter's confidence in each (arXiv 2607.05147, section 3.2).

Whether slot s is verified depends only on what was known before its token was drawn: a rule that looked further would
change the law of sampled text. Owns the two rules; the confidences are DSpark's.
"""

import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Float, Int32


def confident_prefix(confidence: Float[Array, "B S"], threshold: float) -> Int32[Array, "B"]:
    """Slots before the first whose probability of being kept lies below a fixed threshold; 0 keeps all."""
    return _leading(confidence >= threshold)


def load_aware_prefix(confidence: Float[Array, "R S"], steps_per_second: Float[Array, "tokens"]) -> Int32[Array, "R"]:
    """Slots to verify in each of R requests that share a step, by what verifying costs at this load.

    Every request verifies its anchor. Drafts join in descending order of the probability prod_{i<=s} c_i that they are
    kept, as long as each raises (expected tokens) x (steps per second at that many tokens); the first that does not
    ends it, although a later one might. Ties go to the earlier slot, then to the earlier request.

    Args:
        confidence: probability that each draft is kept, given that all before it are.
        steps_per_second: measured, element n - 1 with n tokens to verify; R * (S + 1) of them at least.
    """
    requests, slots = confidence.shape
    if steps_per_second.shape[0] < requests * (slots + 1):
        raise ValueError(
            f"{requests} requests of {slots} slots verify up to {requests * (slots + 1)} tokens; got "
            f"{steps_per_second.shape[0]} measured rates. Measure the others."
        )
    survival = jnp.cumprod(confidence, axis=1).T.reshape(-1)  # slot by slot, requests within
    order = jnp.argsort(survival, descending=True, stable=True)
    tokens = requests + jnp.pad(jnp.cumsum(survival[order]), (1, 0))  # expected, with the first n drafts
    rates = tokens * steps_per_second[requests - 1 : requests * (slots + 1)]
    num_admitted = _leading((rates[1:] > rates[:-1])[None])[0]
    rank = jnp.argsort(order).reshape(slots, requests)
    return (rank < num_admitted).sum(axis=0, dtype=jnp.int32)


def _leading(is_kept: Array) -> Int32[Array, "B"]:
    return jnp.cumprod(is_kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
