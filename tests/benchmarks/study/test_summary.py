"""Numbers of the study from replies whose blocks are written down: means, spreads, paired gains; and their files."""

import json

import numpy as np
import pytest

from benchmarks.study import blocks, summary
from serve import attribution
from serve.report import Request


def reply(emitted: str, id: str = "a", way: str = "argmax", temperature: float = 0.0, seed: int = 0, category="code"):
    return blocks.Reply(
        way=way,
        temperature=temperature,
        seed=seed,
        id=id,
        category=category,
        emitted=emitted,
        causes="-" * len(emitted),
    )


BASE = {0: [reply("22"), reply("1111", "b", category="math")], 1: [reply("4"), reply("22", "b", category="math")]}
OURS = {0: [reply("4", way="greedy"), reply("22", "b", way="greedy", category="math")]}

BASES = {"dflash": ("dflash", "argmax"), "lilicorr": ("dflash", "argmax")}


def rows():
    found = summary.rows({"dflash": BASE, "lilicorr": OURS}, BASES)
    return {(row.variant, row.category): row for row in found}


def test_tau_weighs_blocks_and_spreads_over_training_seeds():
    row = rows()["dflash", "all"]
    assert row.taus == (8 / 6, 8 / 3) and row.tau.mean == pytest.approx(2.0)
    assert row.tau.std == pytest.approx(np.std([8 / 6, 8 / 3], ddof=1)) and row.gain is None
    assert row.tau.low <= 16 / 9 <= row.tau.high  # seeds pooled
    assert rows()["dflash", "math"].taus == (1.0, 2.0)


def test_gains_are_paired_by_seed():
    row = rows()["lilicorr", "all"]
    assert row.gain.mean == pytest.approx((8 / 3) / (8 / 6) - 1) and row.gain.std is None  # against seed 0 alone
    assert row.gain.low == pytest.approx(row.gain.high) == pytest.approx(1.0)  # each prompt is twice as fast
    assert rows()["lilicorr", "math"].gain.mean == pytest.approx(1.0)


def test_a_variant_may_have_a_base_of_its_own_or_none():
    measured = {"dflash": BASE, "lilicorr": OURS, "long": BASE}
    found = {
        row.variant: row
        for row in summary.rows(measured, {"long": ("lilicorr", "greedy"), "lilicorr": ("dflash", "argmax")})
        if row.category == "all"
    }
    assert found["long"].gain.mean == pytest.approx((8 / 6) / (8 / 3) - 1) and found["dflash"].gain is None


def test_runs_without_a_common_seed_can_not_be_compared():
    with pytest.raises(ValueError, match=r"\(5,\) and \(0, 1\)"):
        summary.rows({"dflash": BASE, "lilicorr": {5: OURS[0]}}, BASES)


def test_a_way_may_be_measured_for_some_seeds_alone():
    more = {0: [*BASE[0], reply("4", way="sampled"), reply("4", "b", way="sampled")], 1: BASE[1]}
    found = {row.way: row.seeds for row in summary.rows({"dflash": more}, BASES) if row.category == "all"}
    assert found == {"argmax": (0, 1), "sampled": (0,)}


def test_sampling_seeds_are_pooled_in_tau_and_have_a_spread_of_their_own():
    drawn = [reply("22", temperature=1.0, seed=42), reply("4", temperature=1.0, seed=43)]
    (row, _) = summary.rows({"dflash": {0: drawn}}, BASES)
    assert row.taus == (8 / 3,) and row.tau.std is None
    assert row.sampling_std == pytest.approx(np.std([2, 4], ddof=1))
    with pytest.raises(ValueError, match="Seed 1 has 1 replies, not 2 of 1"):
        summary.Counts({0: drawn, 1: drawn[:1]})


def test_the_interval_is_the_bootstrap_s_over_prompts():
    """Of two prompts a resample has two, one or none of each: tau takes three values."""
    replies = [reply("31"), reply("1111", "b")]
    drawn = summary.ratio(summary.resampled(summary.Counts({0: replies}).values))
    assert set(np.round(drawn, 6)) == {2.0, 1.0, round(8 / 6, 6)}
    assert np.mean(drawn == 2.0) == pytest.approx(0.25, abs=0.03)


def test_rows_survive_json():
    found = list(rows().values())
    assert summary.from_json(json.loads(json.dumps(summary.to_json(found)))) == found


def a_request() -> Request:
    return Request(
        arm="greedy", temperature=1.0, seed=42, id="a", category="code", prompt_tokens=1, finish_reason="stop",
        token_ids=(0,) * 22, emitted=(16, 2, 2, 1), accepted_untrimmed=(15, 1, 1, 1), proposed=(15,) * 4,
        causes=(None, "ranking", "sampling", None), sent_s=0.0, first_s=0.0, last_s=0.0,
    )  # fmt: skip


def test_a_reply_is_kept_short_and_comes_back(tmp_path):
    kept = blocks.short(a_request())
    assert (kept.emitted, kept.causes, kept.counts) == ("g221", "-rs-", (21, 4))
    blocks.write(tmp_path / "blocks.jsonl", [kept, kept])
    assert blocks.read(tmp_path / "blocks.jsonl") == [kept, kept]


def test_deaths_of_short_replies_are_those_of_the_requests():
    assert blocks.deaths([blocks.short(a_request())], 15) == attribution.summarize([a_request()], 15)
