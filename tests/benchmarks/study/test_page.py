"""The page from kept arms that are made up: its figures are the files', and what was not measured is left out."""

import json

import pytest

from benchmarks.study import blocks
from benchmarks.study.__main__ import StudyConfig
from benchmarks.study.chain import SHARES
from benchmarks.study.gather import gather
from benchmarks.study.page import figures, page
from benchmarks.study.summary import ALL

WAYS = {
    "dflash": {"argmax": "22", "bigram 0.5": "4"},
    "lilicorr": {"greedy": "4", "exact": "31", "exact, rows normalised": "4"},
    "dflash-3x": {"argmax": "31"},
    "lilicorr-3x": {"greedy": "4"},
}
RUN = {
    "command": "python -m benchmarks.study", "steps": 2000, "revision": "0123456789",
    "versions": {"jax": "0"}, "device": {"kind": "a processor", "cpus": 2}, "finished": "2026-11-30T14:00+00:00",
}  # fmt: skip


def an_arm(folder, variant: str, seed: int, step_cpu_s: float) -> None:
    """Two prompts; the second's blocks are those of plain decoding."""
    folder = folder / f"{variant}-s{seed}"
    folder.mkdir(parents=True)
    record = {
        "arm": folder.name, "variant": variant, "seed": seed, "steps": 2000, "step_cpu_s": step_cpu_s,
        "flags": ["--flagfile=x", f"--seed={seed}"], "revision": "abcdefabcdef", "finished": "2026-11-30",
    }  # fmt: skip
    (folder / "arm.json").write_text(json.dumps(record))
    lines = [{"step": step, "held_out_drafter_loss": 1.0, "held_out_top1_prefix": step / 500} for step in (500, 1000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"step": 50}, *lines]))
    ways = WAYS[variant]
    part = {"slots": [9] * 15} | {name: [0.5] * 15 for name in SHARES}
    measured = {
        "curves": {way: {"inside": part, "end": part} for way in ways},
        "engine": {"x": dict.fromkeys(COUNTS, 7)},
    }
    replies = [
        blocks.Reply(way=way, temperature=t, seed=s, id=id, category=c, emitted=e, causes="r" * (len(e) - 1) + "-")
        for way, emitted in ways.items()
        for t, s in ((0.0, 0), (1.0, 42))
        for id, c, e in (("a", "code", emitted), ("b", "math", "1111"))
    ]
    blocks.write(folder / "blocks.jsonl", replies)
    (folder / "measured.json").write_text(json.dumps(measured))


COUNTS = ("replies", "same_blocks")


@pytest.fixture
def results(tmp_path):
    for variant, cost in (("dflash", 0.1), ("lilicorr", 0.25)):
        for seed in (0, 1):
            an_arm(tmp_path / "arms", variant, seed, cost)
    (tmp_path / "arms" / "domino-s0").mkdir()  # begun, not measured
    return json.loads(json.dumps(gather(tmp_path / "arms", {"dflash": 0.09}) | {"run": RUN}))


def test_every_arm_that_was_measured_is_on_the_page_with_its_numbers(results):
    text = page(results)
    tau = {"DFlash": 8 / 6, "LiLiCorr": 8 / 5}
    for label, value in tau.items():
        assert f"| {label} " in text and f"{value:.3f} ± 0.000" in text
    assert "+20.0 ± 0.0 % [" in text  # 8 / 5 over 8 / 6
    assert "on 2 held-out prompts" in text and "sampling seeds 42." in text
    assert "LiLiCorr (1.60) > DFlash (1.33)" in text and "The order is the paper's." in text
    assert "decoded 28 replies with deterministic drafts too, 28 of them" in text
    assert "Domino" not in text.split("## The paper's figures")[0].split("by speed-up")[0]


def test_the_room_that_coherence_has_is_measured_by_pair_counts(results):
    assert "lift tau from 1.33 to 1.60" in page(results) and "take: LiLiCorr 100 %." in page(results)


def test_longer_runs_are_compared_with_the_longer_base(results, tmp_path):
    assert "times the steps" not in page(results)
    for variant in ("dflash-3x", "lilicorr-3x"):
        an_arm(tmp_path / "arms", variant, 0, 0.1)
    text = page(gather(tmp_path / "arms", {}) | {"run": RUN})
    assert "At T = 0 DFlash's own tau goes from 1.33 to 1.33" in text
    assert "once and 3 times: LiLiCorr +20% and +20%." in text
    assert "LiLiCorr (1.60) > DFlash (1.33)" in text  # the short runs' order, not the longer ones'


def test_walks_are_compared_on_the_same_weights(results):
    (line,) = [line for line in page(results).splitlines() if line.startswith("| LiLiCorr ") and "-16.7 %" in line]
    assert "-16.7 %, -16.7 % " in line and "+0.0 %, +0.0 %" in line  # 8 / 6 over 8 / 5, seed by seed; the same blocks


def test_costs_are_those_of_the_runs_and_of_the_timing(results):
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page(results).splitlines()]
    found = {cells[0]: cells[1:5] for cells in lines if cells[1:2] == ["2000"]}
    assert found == {"DFlash": ["2000", "0.100", "0.090", "200"], "LiLiCorr": ["2000", "0.250", "-", "500"]}


def test_deaths_of_all_seeds_add_up(results):
    found = results["deaths"]["dflash/argmax/0"]
    assert found[ALL]["blocks"] == 12 and found[ALL]["ranking"] == 8 and found[ALL]["ended"] == 4
    assert found["code"]["slots"]["ranking"][:2] == [0, 2] and found["math"]["slots"]["ranking"][0] == 6


def test_a_change_in_a_file_is_a_change_of_the_page(results, tmp_path):
    path = tmp_path / "arms" / "lilicorr-s0" / "blocks.jsonl"
    path.write_text(path.read_text().replace('"emitted":"4","causes":"-"', '"emitted":"22","causes":"r-"'))
    assert page(gather(tmp_path / "arms", {}) | {"run": RUN}) != page(results)


def test_figures_are_drawn(results, tmp_path):
    figures(results, tmp_path)
    for name in ("tau", "slots", "deaths", "training"):
        path = tmp_path / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG") and f"({name}.png)" in page(results)


def test_stages_have_names():
    assert StudyConfig().stages == ("train", "measure", "cost", "write")
