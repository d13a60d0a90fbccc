"""A walk that needs no training: how far would pair counts alone make the drafter's candidates cohere?

score(b behind a) = log p(b) + beta (log P(b | a) - log P(b)), p the drafter's, P counted in the training replies. It
stands for nothing in the paper; it shows how much room coherence has on this corpus.
"""

import numpy as np

from train.tokens import TokenFile

SMOOTHING = 0.1  # added to every count


def pair_gains(file: TokenFile, vocab_size: int) -> np.ndarray:
    """log P(b | a) - log P(b) at [a, b], over all neighbours whose second is a reply's token; float32 [V, V]."""
    counts = np.zeros((vocab_size, vocab_size))
    for first, last, prompt in zip(file.offsets, file.offsets[1:], file.prompt_lengths, strict=False):
        tokens = file.tokens[first:last].astype(np.int64)
        begin = max(int(prompt), 1)
        np.add.at(counts, (tokens[begin - 1 : -1], tokens[begin:]), 1)
    counts += SMOOTHING
    given = counts / counts.sum(axis=1, keepdims=True)
    alone = counts.sum(axis=0) / counts.sum()
    return (np.log(given) - np.log(alone)).astype(np.float32)


def bigram_walk(
    anchor_ids: np.ndarray, candidate_ids: np.ndarray, logprobs: np.ndarray, gains: np.ndarray, beta: float
) -> np.ndarray:
    """The greedy walk over the candidates, each behind the one that was picked before it.

    Args:
        anchor_ids: [N].
        candidate_ids, logprobs: the pool of each slot, [N, S, K].
        gains: of `pair_gains`.

    Returns:
        Drafts [N, S].
    """
    rows, before, drafts = np.arange(len(anchor_ids)), anchor_ids, []
    for slot in range(candidate_ids.shape[1]):
        ids = candidate_ids[:, slot]
        scores = logprobs[:, slot] + beta * gains[before[:, None], ids]  # [N, K]
        before = ids[rows, scores.argmax(axis=1)]
        drafts.append(before)
    return np.stack(drafts, axis=1)
