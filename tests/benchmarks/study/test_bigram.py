"""Pair counts and the walk by them, against loops."""

import math

import numpy as np
import pytest

from benchmarks.study import bigram
from train.tokens import TokenFile

TEXTS, PROMPTS = [[1, 2, 3, 2, 3], [2, 2, 1, 0]], [2, 1]


def a_file() -> TokenFile:
    tokens = np.array(sum(TEXTS, []), np.uint16)
    return TokenFile(tokens=tokens, offsets=np.array([0, 5, 9]), prompt_lengths=np.array(PROMPTS))


def test_pairs_are_counted_where_the_second_is_a_reply_s():
    counts = {}
    for text, prompt in zip(TEXTS, PROMPTS, strict=True):
        for place in range(prompt, len(text)):
            pair = (text[place - 1], text[place])
            counts[pair] = counts.get(pair, 0) + 1
    assert counts == {(2, 3): 2, (3, 2): 1, (2, 2): 1, (2, 1): 1, (1, 0): 1}
    smooth = lambda a, b: counts.get((a, b), 0) + bigram.SMOOTHING
    gains = bigram.pair_gains(a_file(), 4)
    total = sum(smooth(a, b) for a in range(4) for b in range(4))
    for a in range(4):
        for b in range(4):
            given = smooth(a, b) / sum(smooth(a, c) for c in range(4))
            alone = sum(smooth(c, b) for c in range(4)) / total
            assert gains[a, b] == pytest.approx(math.log(given / alone), rel=1e-5)


def test_the_walk_follows_what_it_picked():
    rng = np.random.default_rng(0)
    count, slots, size, vocab, beta = 6, 4, 3, 7, 0.7
    gains = rng.normal(size=(vocab, vocab))
    anchors = rng.integers(0, vocab, count)
    pools = np.stack([[rng.permutation(vocab)[:size] for _ in range(slots)] for _ in range(count)])
    logprobs = -rng.random((count, slots, size))
    drafts = bigram.bigram_walk(anchors, pools, logprobs, gains, beta)
    for row in range(count):
        before = anchors[row]
        for slot in range(slots):
            scores = [logprobs[row, slot, k] + beta * gains[before, pools[row, slot, k]] for k in range(size)]
            before = pools[row, slot, scores.index(max(scores))]
            assert drafts[row, slot] == before
    np.testing.assert_array_equal(
        bigram.bigram_walk(anchors, pools, np.sort(logprobs)[..., ::-1], gains, 0.0), pools[..., 0]
    )
