"""The reranker's losses on the gold path of a lattice, one entry per slot (Eq. 3, 4 and 13).

Every function also computes slots that do not count; `losses.prefix` says which do, `losses.terms` adds them up.
"""

import jax
import jax.numpy as jnp

from lilicorr_jax.shapes import Array, Float, Int
from pallas_kernels.match_walk import Scores


def gold_path_scores(scores: Scores, rank: Int[Array, "*b S"]) -> Float[Array, "*b S K"]:
    """Logits z_s[k] = phi(s-1, g_{s-1}, k) of every candidate given the gold predecessor (Eq. 2, teacher-forced).

    Args:
        scores: the lattice's matching scores, float32.
        rank: of the gold tokens; a predecessor outside the pool yields a row that must not be counted.
    """
    predecessor = rank[..., :-1, None, None]  # [*b, S-1, 1, 1]
    following = jnp.take_along_axis(scores.pair, predecessor, axis=-2)[..., 0, :]  # [*b, S-1, K]
    return jnp.concatenate([scores.start[..., None, :], following], axis=-2)  # [*b, S, K]


def gold_gaps(gold_logits: Float[Array, "*b S"], candidate_logits: Float[Array, "*b S K"]) -> Float[Array, "*b S K"]:
    """ReLU(log q_g - log q_k), how much less the target likes a candidate than the gold token (Eq. 4); no gradient.

    The target's raw logits serve, since its log-partition cancels.
    """
    return jax.lax.stop_gradient(jax.nn.relu(gold_logits[..., None] - candidate_logits))  # [*b, S, K]


def cross_entropy(scores: Float[Array, "*b S K"], rank: Int[Array, "*b S"]) -> Float[Array, "*b S"]:
    """-log P(g_s given g_{s-1}), P = softmax of the gold-path scores (Eq. 3).

    Its gradient on the gold logit is P(g) - 1 (Eq. 10): strong exactly where the gold token is badly ranked.
    """
    return -_at(jax.nn.log_softmax(scores, axis=-1), rank)


def distractor_cost(scores: Float[Array, "*b S K"], gaps: Float[Array, "*b S K"]) -> Float[Array, "*b S"]:
    """Omega_s = sum_k P(k given g_{s-1}) ReLU(log q_g - log q_k), the expected target-relative cost (Eq. 4).

    Linear in P, so it is minimised by committing to one candidate: it is not distribution matching, although its
    gradient is that of H(P, q) where the target prefers the gold token (Eq. 9, Appendix D). On the gold logit that
    gradient is -P(g) E_P[gap] (Eq. 11), which vanishes where cross-entropy's is strong.

    Args:
        scores: gold-path scores; the gradient goes through their softmax only.
        gaps: `gold_gaps`, constants.
    """
    return jnp.sum(jax.nn.softmax(scores, axis=-1) * gaps, axis=-1)


def margin_hinge(scores: Float[Array, "*b S K"], rank: Int[Array, "*b S"], margin: float) -> Float[Array, "*b S"]:
    """ReLU(rho - D_s), D_s the gold candidate's score minus the best other's (Eq. 13); 0 when K is 1."""
    is_gold = jax.nn.one_hot(rank, scores.shape[-1], dtype=bool)  # [*b, S, K]
    best_other = jnp.max(jnp.where(is_gold, -jnp.inf, scores), axis=-1)
    return jax.nn.relu(margin - (_at(scores, rank) - best_other))


def _at(values: Float[Array, "*b S K"], rank: Int[Array, "*b S"]) -> Float[Array, "*b S"]:
    return jnp.take_along_axis(values, rank[..., None], axis=-1)[..., 0]  # [*b, S]
