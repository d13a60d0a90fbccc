"""The chain of blocks against a plain simulation of drafting and verifying, token by token; curves against loops."""

import numpy as np
import pytest

from benchmarks.study import chain
from serve import report

S, K, VOCAB = 4, 3, 5
RNG = np.random.default_rng(3)


def a_text(length: int, id: str = "t") -> chain.Text:
    return chain.Text(
        id=id, category="code", prompt_ids=(1, 2), reply_ids=tuple(RNG.integers(0, VOCAB, length).tolist())
    )


def random_drafts(text: chain.Text) -> np.ndarray:
    """Often right, and right beyond the reply's end where nothing is there to agree with."""
    gold, exists = chain.gold_tokens(text, S)
    return np.where(RNG.random(gold.shape) < 0.7, np.where(exists, gold, 0), RNG.integers(0, VOCAB, gold.shape))


def simulated(reply: tuple[int, ...], drafts: np.ndarray) -> list[int]:
    """Tokens that each block emits, by writing the reply down block by block."""
    written, emitted = [reply[0]], []
    while len(written) < len(reply):
        anchor, count = len(written) - 1, 0
        for slot in range(S):
            if len(written) == len(reply) or drafts[anchor][slot] != reply[len(written)]:
                break
            written.append(reply[len(written)])
            count += 1
        if len(written) < len(reply):  # the target's own token
            written.append(reply[len(written)])
            count += 1
        emitted.append(count)
    return emitted


@pytest.mark.parametrize("length", [2, 3, 9, 40])
def test_blocks_are_those_of_writing_the_reply_down(length):
    for _ in range(20):
        text = a_text(length)
        drafts = random_drafts(text)
        request = chain.chain_request("greedy", text, drafts)
        assert list(request.emitted) == simulated(text.reply_ids, drafts)
        assert sum(request.emitted) == length - 1 and request.token_ids == text.reply_ids


def test_perfect_and_hopeless_drafts_bound_tau():
    text = a_text(1 + 3 * (S + 1))
    gold, _ = chain.gold_tokens(text, S)
    assert report.tau([chain.chain_request("x", text, gold)]) == S + 1
    assert report.tau([chain.chain_request("x", text, gold + 1)]) == 1


def test_a_block_s_cause_is_whether_the_pool_had_the_token_where_it_died():
    text = chain.Text(id="t", category="code", prompt_ids=(1,), reply_ids=(0, 1, 2, 3, 4, 0))
    drafts = np.full((5, S), 9)
    drafts[0, :2] = 1, 2  # accepts two, then gold is 3
    drafts[4, 0] = 0  # the end of the reply, accepted
    pools = np.full((5, S, K), 8)
    pools[0, 2] = 8, 3, 8
    request = chain.chain_request("x", text, drafts, pools)
    assert request.emitted == (3, 1, 1) and request.accepted_untrimmed == (2, 0, 1)
    assert request.causes == ("ranking", "coverage", None)


def test_a_token_that_the_target_would_not_have_preferred_is_sampling_s_doing():
    text = chain.Text(id="t", category="code", prompt_ids=(1,), reply_ids=(0, 1, 2, 3), temperature=1.0, seed=7)
    drafts = np.array([[1, 9, 9, 9], [9] * 4, [9] * 4])  # accepts one, then gold is 2; then gold is 3
    pools = np.full((3, S, K), 3)
    found = [
        chain.chain_request("x", text, drafts, pools, np.array(best)) for best in ([1, 2, 3], [1, 5, 3], [5, 5, 5])
    ]
    assert [request.causes for request in found] == [
        ("coverage", "ranking"), ("sampling", "ranking"), ("sampling", "sampling")
    ]  # fmt: skip
    assert {(request.temperature, request.seed) for request in found} == {(1.0, 7)}


def test_curves_are_shares_over_anchors_with_the_end_of_turn_apart():
    texts = [a_text(7), a_text(12)]
    drafts = [random_drafts(text) for text in texts]
    pools = [RNG.integers(0, VOCAB, (text.num_anchors, S, K)) for text in texts]
    curves = chain.slot_curves(texts, drafts, pools)
    for slot in range(S):
        counts = {part: {name: [] for name in chain.SHARES} for part in ("inside", "end")}
        for text, draft, pool in zip(texts, drafts, pools, strict=True):
            for anchor in range(text.num_anchors):
                gold = [
                    text.reply_ids[anchor + 1 + s] if anchor + 1 + s < len(text.reply_ids) else None for s in range(S)
                ]
                if gold[slot] is None:
                    continue
                covered = [g is not None and g in pool[anchor, s] for s, g in enumerate(gold)]
                right = [g is not None and g == draft[anchor, s] for s, g in enumerate(gold)]
                values = (covered[slot], all(covered[: slot + 1]), pool[anchor, slot, 0] == gold[slot])
                part = "end" if anchor + 1 + slot == len(text.reply_ids) - 1 else "inside"
                for name, value in zip(chain.SHARES, (*values, right[slot], all(right[: slot + 1])), strict=True):
                    counts[part][name].append(value)
        for part, found in counts.items():
            assert curves[part]["slots"][slot] == len(found["top1"])
            for name, values in found.items():
                assert curves[part][name][slot] == pytest.approx(np.mean(values))
