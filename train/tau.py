"""Tau while training: held-out prompts decoded with the drafter as it is, by the block loop that serving runs.

Greedy, so that it moves with the weights alone. The text is the target's own, whatever the drafter: only the number of
blocks that it takes changes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lilicorr_jax.config import DominoConfig, DSparkConfig, RerankerConfig, corrector_name
from lilicorr_jax.decoding import propose
from lilicorr_jax.decoding.pair import Pair, drafter_calls, target_calls, unembed_with
from lilicorr_jax.decoding.prefill import empty_state, prefill
from lilicorr_jax.decoding.propose import Proposer
from lilicorr_jax.decoding.speculate import run_blocks
from lilicorr_jax.models.fold import fold_for_serving
from lilicorr_jax.sharding import batch_sharding, replicated
from train.data import Rows
from train.objective import Objective, Params, embed


class Tau:
    """Tokens per block (committed by blocks / blocks, the bonus token counted), over fixed held-out prompts.

    Args:
        rows: held-out; a prompt is what stands before the first learned token of a row.
        num_prompts: the first so many rows.
        num_tokens: decoded behind each prompt, unless a stop id comes first.
    """

    def __init__(self, objective: Objective, rows: Rows, num_prompts: int, num_tokens: int):
        self.objective, self.num_tokens = objective, num_tokens
        self.pair = pair_of(objective)
        self.prompts = prompts_of(rows, num_prompts)
        limit = min(objective.target.max_positions, objective.drafter.max_positions)
        longest = max(map(len, self.prompts))
        if longest + num_tokens + self.pair.verify_rows > limit:
            raise ValueError(
                f"--tau_tokens={num_tokens} behind a held-out prompt of {longest} tokens, and the "
                f"{self.pair.verify_rows} rows of a block, exceed the models' {limit} positions; give fewer."
            )
        self._decode = jax.jit(self._blocks, out_shardings=replicated(objective.mesh))

    def measure(self, params: Params, target_params: Params) -> dict[str, float]:
        """`tau`, and `accepted`, the drafts that the target kept per block."""
        shards = self.objective.mesh.shape["data"] * self.objective.mesh.shape["fsdp"]
        ids, lengths, max_tokens = padded(self.prompts, self.num_tokens, shards)
        committed, accepted, blocks = map(float, self._decode(params, target_params, ids, lengths, max_tokens))
        return {"tau": committed / max(blocks, 1.0), "accepted": accepted / max(blocks, 1.0)}

    def _blocks(self, params: Params, target_params: Params, ids, lengths, max_tokens):
        """Tokens committed, drafts accepted and blocks run, over all prompts."""
        objective, pair = self.objective, self.pair
        own_rows = batch_sharding(objective.mesh)
        trees = served(objective, params, target_params)
        stops = jnp.array(objective.target.eos_ids, jnp.int32)
        capacity = ids.shape[1] + self.num_tokens + pair.verify_rows
        state = empty_state(pair, ids.shape[0], capacity, len(stops))
        state = state.replace(max_tokens=max_tokens, stop_ids=jnp.broadcast_to(stops, (ids.shape[0], len(stops))))
        state = jax.lax.with_sharding_constraint(state, own_rows)
        state = prefill(pair, trees, state, ids, lengths, mode="greedy")
        most = self.num_tokens - 1  # the prefill's token is the first; a block commits at least one
        _, record = run_blocks(pair, trees, state, num_blocks=most, mode="greedy", skip_idle=True)
        return record.num_committed.sum(), record.num_accepted.sum(), (record.num_committed > 0).sum()


def prompts_of(rows: Rows, count: int) -> list[np.ndarray]:
    """What the target read before the first token that it wrote; at least one token."""
    texts = (rows[i] for i in range(min(count, len(rows))))
    return [np.asarray(text.token_ids)[: max(int(np.argmax(text.loss_mask)), 1)] for text in texts]


def padded(prompts: list[np.ndarray], num_tokens: int, shards: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prompts as rows of one array, their lengths, and max_tokens; rows that fill up to `shards` decode nothing."""
    rows = len(prompts) + -len(prompts) % shards
    ids = np.zeros((rows, max(map(len, prompts))), np.int32)
    lengths, max_tokens = np.ones(rows, np.int32), np.ones(rows, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], lengths[row], max_tokens[row] = prompt, len(prompt), num_tokens
    return ids, lengths, max_tokens


def served(objective: Objective, params: Params, target_params: Params) -> dict[str, Any]:
    """The trees of a pair as serving has them: in the models' dtype, the corrector folded."""
    cast = jax.tree.map(lambda leaf: leaf.astype(objective.drafter.dtype), params)
    trees = {"target": target_params, **cast}
    if objective.corrector is not None:
        name = corrector_name(objective.corrector)
        every_id = jnp.arange(objective.target.vocab_size)
        trees[name] = fold_for_serving(objective.corrector, cast[name], embed(objective, target_params, every_id))
    return trees


def pair_of(objective: Objective) -> Pair:
    """Target and drafter of an objective with the method's greedy proposal."""
    target, drafter = objective.target, objective.drafter
    return Pair(
        target=target_calls(target, drafter.target_layer_ids),
        drafter=drafter_calls(target, drafter, proposer_of(objective)),
    )


def proposer_of(objective: Objective) -> Proposer:
    drafter, unembed = objective.drafter, unembed_with(objective.target)
    match objective.corrector:
        case RerankerConfig() as reranker:
            # Kernels are custom calls, which several devices can't share.
            kernels = "auto" if objective.mesh.size == 1 else "reference"
            return propose.lilicorr(drafter, reranker, unembed, "greedy", kernels)
        case DominoConfig() as domino:
            return propose.domino(drafter, domino, unembed)
        case DSparkConfig() as dspark:
            return propose.dspark(drafter, dspark, unembed, "greedy")
    return propose.dflash(drafter, unembed)
