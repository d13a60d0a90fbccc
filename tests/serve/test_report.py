"""Definitions against numbers worked out by hand, refusals, and the bootstrap against enumeration."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from serve import report

S = 15  # slots of the blocks below, B = 16


def a_request(
    emitted=(), untrimmed=None, proposed=None, *, token_ids=None, arm="greedy", id="a", finish_reason="stop", **changes
) -> report.Request:
    """A request whose blocks propose S drafts and accept all but the last emitted token, unless told otherwise."""
    untrimmed = tuple(count - 1 for count in emitted) if untrimmed is None else untrimmed
    values = {"temperature": 0.0, "seed": 0, "category": "all", "prompt_tokens": 3}
    values |= {"sent_s": 0.0, "first_s": 0.0, "last_s": 0.0} | changes
    return report.Request(
        arm=arm,
        id=id,
        finish_reason=finish_reason,
        emitted=tuple(emitted),
        accepted_untrimmed=tuple(untrimmed),
        proposed=(S,) * len(emitted) if proposed is None else tuple(proposed),
        token_ids=tuple(range(1 + sum(emitted))) if token_ids is None else tuple(token_ids),
        **values,
    )


def test_tokens_behind_an_end_of_turn_do_not_count():
    """One block accepts 5 drafts, the third committed token is the end of turn."""
    summary = report.summarize([a_request([3], [5])], S)
    assert (summary.tau, summary.tau_untrimmed, summary.tau_draft) == (3, 6, 3)
    assert summary.tau_sglang == 4  # the prefill's token
    assert summary.accept_rate == 3 / 15
    assert summary.hist[3] == 1 and sum(summary.hist) == 1


def test_a_histogram_over_four_requests_gives_the_block_weighted_tau_and_the_request_mean_apart():
    """Accepted drafts {0: 10, 3: 5, 15: 1}: tau = 1 + 30 / 16."""
    accepted = [[0] * 10, [3, 3], [3, 3, 3], [15]]
    requests = [a_request([n + 1 for n in blocks], id=str(i)) for i, blocks in enumerate(accepted)]
    summary = report.summarize(requests, S)
    assert summary.tau == summary.tau_untrimmed == 2.875
    assert summary.tau_draft == 1.875
    assert summary.tau_sglang == (46 + 4) / 16
    assert summary.tau_request_mean == (1 + 4 + 4 + 16) / 4
    assert summary.accept_rate == 30 / (16 * 15)
    assert summary.hist == (10, 0, 0, 5) + (0,) * 11 + (1,)
    assert summary.pos_uncond == (6 / 16,) * 3 + (1 / 16,) * 12
    assert summary.pos_cond == (6 / 16, 1, 1, 1 / 6) + (1,) * 11
    again = [report.Request.from_row(json.loads(json.dumps(request.to_row()))) for request in requests]
    assert again == requests and report.summarize(again, S) == summary


def test_blocks_and_requests_weigh_differently():
    """100 blocks of 2 and 10 blocks of 10: 300 / 110 by blocks, 6 by requests."""
    summary = report.summarize([a_request([2] * 100), a_request([10] * 10, id="b")], S)
    assert (summary.tau, summary.tau_request_mean) == (pytest.approx(300 / 110), 6)


def test_a_position_counts_only_blocks_that_proposed_it():
    """Blocks (accepted of proposed): 2 of 2, 1 of 3, 0 of 1, 0 of 0."""
    summary = report.summarize([a_request([3, 2, 1, 1], proposed=[2, 3, 1, 0])], 3)
    assert summary.pos_uncond == (2 / 3, 1 / 2, 0)
    assert summary.pos_cond == (2 / 3, 1 / 2, None)
    assert summary.accept_rate == 3 / 6


def test_plain_decoding_has_one_token_a_block_and_no_acceptance():
    summary = report.summarize([a_request([1, 1, 1], proposed=[0, 0, 0])], 2)
    assert (summary.tau, summary.tau_draft, summary.accept_rate) == (1, 0, None)
    assert summary.pos_uncond == summary.pos_cond == (None, None)


def test_a_reply_that_ends_with_the_prefill_has_no_block():
    summary = report.summarize([a_request(id="b")], S)
    assert summary.blocks == 0 and summary.completion_tokens == 1
    assert summary.tau is summary.tau_sglang is summary.tau_request_mean is summary.tpot is None
    assert report.tau_interval([a_request()]) is None


def test_times_and_throughputs_are_those_of_the_clock():
    """Two chunks, [10, 14] with two requests and [20, 22]; what lies between belongs to others."""
    requests = [
        a_request([4, 4], id="a", sent_s=10.0, first_s=11.0, last_s=13.0),
        a_request([1], id="b", sent_s=10.5, first_s=13.5, last_s=14.0),
        a_request([5], id="c", sent_s=20.0, first_s=20.5, last_s=22.0, chunk=1),
    ]
    summary = report.summarize(requests, S)
    assert summary.completion_tokens == 9 + 2 + 6
    assert summary.output_tps == pytest.approx(17 / (4 + 2))
    assert summary.decode_tps == pytest.approx((8 + 1 + 5) / (2 + 0.5 + 1.5))
    assert summary.ttft.mean == pytest.approx((1 + 3 + 0.5) / 3) and summary.ttft.p50 == 1
    assert summary.ttft.p90 == pytest.approx(1 + 0.8 * 2)  # between the second and the third of three
    assert summary.e2e.mean == pytest.approx((3 + 3.5 + 2) / 3)
    assert summary.tpot.mean == pytest.approx((2 / 8 + 0.5 / 1 + 1.5 / 5) / 3)


def test_failed_requests_are_shown_and_left_out_of_rates():
    failed = a_request(id="b", finish_reason="failed", token_ids=(), last_s=99.0)
    cut = a_request([2], id="c", finish_reason="length", last_s=1.0)
    summary = report.summarize([failed, cut], S)
    assert (summary.requests, summary.failed, summary.truncated) == (1, 1, 1)
    assert summary.output_tps == 3 and summary.tau == 2


def test_speedup_is_the_ratio_of_output_throughputs():
    plain = [a_request([1] * 4, proposed=[0] * 4, arm="ar", last_s=2.0)]
    assert report.speedup([a_request([4], last_s=0.5)], plain) == 4


def test_a_speedup_without_the_plain_arm_is_refused():
    with pytest.raises(ValueError, match="got no request of it.*--arms"):
        report.speedup([a_request([4], last_s=0.5)], [])


@pytest.mark.parametrize("changes", [{"id": "other"}, {"seed": 9}, {"turn": 2}, {"temperature": 1.5}])
def test_arms_that_served_different_requests_are_not_compared(changes):
    ours, plain = [a_request([4], last_s=0.5)], [a_request([4], last_s=0.5, **changes)]
    for compare in (report.speedup, report.tau_difference, report.differences):
        with pytest.raises(ValueError, match=str(next(iter(changes.values())))):
            compare(ours, plain)


def test_a_request_served_twice_is_not_compared():
    with pytest.raises(ValueError, match="twice"):
        report.speedup([a_request([4], last_s=0.5)] * 2, [a_request([4], last_s=0.5)] * 2)


def test_ids_of_turns_do_not_clash():
    keys = {a_request(id="1", turn=1).key, a_request(id="11").key, a_request(id="1.1").key, a_request(id="1").key}
    assert len(keys) == 3


def test_a_request_that_failed_in_one_arm_is_left_out_of_both():
    ours = [a_request([4], last_s=0.5), a_request(id="b", finish_reason="failed", token_ids=())]
    plain = [a_request([1, 1, 1, 1], last_s=2.0), a_request([1], id="b", last_s=50.0)]
    assert report.speedup(ours, plain) == 4


@pytest.mark.parametrize(
    ("token_ids", "degenerate"),
    [
        ([7] * 400, True),
        (list(range(300)) + [7] * 33, True),
        (list(range(300)) + [7] * 32, False),
        (list(range(8)) * 3, True),  # 17 8-grams, 8 of them new
        (list(range(8)) * 2, False),  # 9 8-grams, 8 of them new
        (list(range(100)), False),
        ([7] * 5, False),
        ([], False),
    ],
)
def test_a_reply_that_repeats_itself_is_degenerate(token_ids, degenerate):
    assert report.is_degenerate(token_ids) == degenerate


def test_a_loop_does_not_win_without_a_flag():
    sound = [a_request([4] * 25, id=str(i)) for i in range(98)]
    loop = a_request([16] * 25, id="loop", token_ids=[7] * 401)
    assert report.summarize([*sound, loop], S).is_flagged  # 1 of 99
    assert not report.summarize([*sound, a_request([4] * 25, id="98"), loop], S).is_flagged  # 1 of 100


@pytest.mark.parametrize(
    ("emitted", "untrimmed", "proposed"), [([0], [0], [15]), ([4], [2], [15]), ([3], [5], [4]), ([1], [-1], [15])]
)
def test_impossible_blocks_are_refused(emitted, untrimmed, proposed):
    with pytest.raises(ValueError, match=rf"\({emitted[0]}, {untrimmed[0]}, {proposed[0]}\)"):
        a_request(emitted, untrimmed, proposed)


def test_counters_that_include_cut_tokens_are_refused():
    """6 committed tokens, of which 3 were returned besides the prefill's."""
    with pytest.raises(ValueError, match="returned 4 tokens.*account for 7"):
        a_request([6], token_ids=range(4))


def test_times_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"\(0.0, 2.0, 1.0\)"):
        a_request([6], first_s=2.0, last_s=1.0)


def test_first_differences_are_found_and_excused_only_at_a_small_gap():
    plain = [
        a_request([1, 1], id=name, token_ids=ids, arm="ar") for name, ids in zip("abc", [(5, 6, 7)] * 3, strict=True)
    ]
    ours = [
        a_request([2], id="a", token_ids=(5, 6, 7)),
        a_request([2], id="b", token_ids=(5, 8, 7)),
        a_request([1], id="c", token_ids=(5, 6)),
    ]
    changed, ended = report.differences(ours, plain)
    assert (changed.key, changed.position, changed.ids) == (("b", 1, 0.0, 0), 1, (8, 6))
    assert (ended.key, ended.position, ended.ids) == (("c", 1, 0.0, 0), 2, (None, 7))
    with_gap = lambda difference, gap: dataclasses.replace(difference, gap=gap)  # noqa: E731
    assert with_gap(changed, 0.9e-4).is_excused and not with_gap(changed, 1.1e-4).is_excused
    assert not changed.is_excused and not with_gap(ended, 0.0).is_excused


def test_the_interval_of_tau_is_that_of_all_resamples():
    """Three prompts have 27 equally likely resamples; the percentiles of their taus are known."""
    blocks = {"a": [1, 1, 1, 1], "b": [4, 4], "c": [9]}
    interval = report.tau_interval([a_request(emitted, id=name) for name, emitted in blocks.items()])
    exact = [
        sum(sum(blocks[name]) for name in names) / sum(len(blocks[name]) for name in names)
        for names in itertools.product(blocks, repeat=3)
    ]
    assert interval.value == 21 / 7
    assert [interval.low, interval.high] == list(np.quantile(exact, [0.025, 0.975], method="inverted_cdf")) == [1, 9]


def test_the_interval_resamples_prompts_and_not_blocks_or_seeds():
    """Many blocks and seeds of one prompt say nothing about other prompts."""
    requests = [a_request([2, 10] * 50, seed=seed) for seed in range(20)]
    interval = report.tau_interval(requests)
    assert interval.low == interval.high == interval.value == 6


def test_the_interval_has_the_width_of_the_normal_approximation(rng):
    counts = rng.integers(1, 12, size=(400, 5))
    requests = [a_request(row.tolist(), id=str(i)) for i, row in enumerate(counts)]
    interval = report.tau_interval(requests)
    half_width = 1.96 * counts.mean(axis=1).std() / np.sqrt(400)
    assert (interval.high - interval.low) / 2 == pytest.approx(half_width, rel=0.1)
    assert report.tau_interval(requests) == interval != report.tau_interval(requests, seed=1)


def test_the_paired_interval_cancels_what_prompts_share(rng):
    """Every prompt gains one token a block, whatever its own tau: the difference is 1 in each resample."""
    counts = rng.integers(1, 12, size=(50, 4))
    base = [a_request(row.tolist(), id=str(i), arm="argmax") for i, row in enumerate(counts)]
    ours = [a_request((row + 1).tolist(), id=str(i)) for i, row in enumerate(counts)]
    difference = report.tau_difference(ours[::-1], base)
    assert (difference.value, difference.low, difference.high) == (pytest.approx(1),) * 3


def test_categories_are_apart_and_sorted():
    requests = [a_request([2], id=str(i), category=name) for i, name in enumerate(["story", "code", "story"])]
    assert {name: [r.id for r in rows] for name, rows in report.by_category(requests).items()} == {
        "code": ["1"],
        "story": ["0", "2"],
    }


def test_the_spread_over_seeds_is_the_sample_deviation():
    assert report.mean_and_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(np.sqrt(7)))
    assert report.mean_and_std([2.0]) == (2.0, None)


def test_every_number_has_a_unit():
    assert report.UNITS.keys() == {entry.name for entry in dataclasses.fields(report.Summary)}
    assert all(report.UNITS.values())
