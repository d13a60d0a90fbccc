"""Why blocks died, on traces made by hand, whose causes are known."""

import numpy as np
import pytest

from lilicorr_jax.decoding.speculate import Trace
from serve import attribution
from serve.report import Request
from serve.request import Block

POOL = np.array([[5, 6], [7, 8], [9, 4]])  # of three slots


def a_block(emitted: int, accepted: int, best=(5, 7, 9, 2), pool=POOL, proposed: int = 3) -> Block:
    trace = Trace(
        draft_ids=np.array([5, 7, 9]),
        candidate_ids=pool,
        picks=None,
        target_choices=np.zeros(4, int),
        target_best=np.array(best),
    )
    return Block(emitted=emitted, accepted=accepted, proposed=proposed, trace=trace)


@pytest.mark.parametrize(
    ("block", "token", "expected"),
    [
        (a_block(2, 1, best=(5, 8, 0, 0)), 8, "ranking"),  # 8 was among the second slot's candidates
        (a_block(2, 1, best=(5, 9, 0, 0)), 9, "coverage"),  # 9 only among the third's
        (a_block(1, 0, best=(6, 0, 0, 0)), 6, "ranking"),
        (a_block(2, 1, best=(5, 7, 0, 0)), 8, "sampling"),  # the target would have preferred the draft
        (a_block(2, 1, best=(5, 7, 0, 0)), 3, "sampling"),  # asked first: 3 is not covered either
        (a_block(4, 3), 2, None),  # kept whole, then the target's own token
        (a_block(2, 2), 7, None),  # the reply ended with an accepted draft
        (a_block(1, 3), 5, None),
        (a_block(2, 1, best=(5, 3, 0, 0), pool=None), 3, "ranking"),  # the whole vocabulary was the pool
        (a_block(3, 2, proposed=2), 1, None),  # all that were proposed were kept
    ],
)
def test_a_cause_is_the_first_that_holds(block, token, expected):
    assert attribution.cause(block, token) == expected


def test_each_block_is_judged_by_the_last_token_that_it_wrote():
    blocks = [a_block(2, 1, best=(5, 8, 0, 0)), a_block(4, 3), a_block(1, 0, best=(3, 0, 0, 0)), a_block(1, 1)]
    token_ids = (0, 5, 8, 5, 7, 9, 2, 3, 5)
    assert attribution.causes(token_ids, blocks) == ("ranking", None, "coverage", None)


def test_a_block_without_a_trace_is_refused():
    with pytest.raises(ValueError, match="EngineConfig.trace"):
        attribution.cause(Block(emitted=1, accepted=0, proposed=3), 1)


def a_request(emitted, accepted, causes, id="r") -> Request:
    return Request(
        arm="greedy", temperature=0.0, seed=0, id=id, category="code", prompt_tokens=1, finish_reason="stop",
        token_ids=(0,) * (1 + sum(emitted)), emitted=emitted, accepted_untrimmed=accepted, proposed=(3,) * len(emitted),
        causes=causes, sent_s=0.0, first_s=0.0, last_s=0.0,
    )  # fmt: skip


def test_deaths_are_counted_by_slot_and_every_block_has_one_fate():
    requests = [
        a_request((2, 4, 1), (1, 3, 0), ("ranking", None, "coverage")),
        a_request((2, 2), (1, 2), ("sampling", None)),
    ]
    found = attribution.summarize(requests, 3)
    assert found["slots"] == {"sampling": [0, 1, 0], "coverage": [1, 0, 0], "ranking": [0, 1, 0]}
    fates = {"sampling": 1, "coverage": 1, "ranking": 1, "whole": 1, "ended": 1}
    assert {name: found[name] for name in fates} == fates and found["blocks"] == sum(fates.values())


def test_counting_needs_traced_requests():
    with pytest.raises(ValueError, match="'untraced'.*--trace"):
        attribution.by_slot([a_request((1,), (0,), None, id="untraced")], 3)
