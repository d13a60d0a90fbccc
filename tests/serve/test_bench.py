"""The benchmark on a tiny random pair: the order of its turns, its refusals, and numbers that follow from its files."""

import contextlib
import dataclasses
import io
import json
import re

import jax
import numpy as np
import pytest

from serve import bench, report, results, workload
from tests.serve.conftest import CONTEXT

ARMS = ("ar", "greedy")


def arguments(folders, **changes) -> list[str]:
    values = {
        "target": folders / "target",
        "drafter": folders / "orbax",
        "arms": ",".join(ARMS),
        "prompts": folders / "prompts.jsonl",
        "num_prompts": 4,
        "max_new_tokens": 25,
        "chunk_prompts": 2,
        "seed": "1,2",
    }
    return [f"--{name}={value}" for name, value in (values | changes).items()]


@pytest.fixture(scope="module")
def finished(folders, tmp_path_factory):
    """One run of everything, with its files: exit code, stdout, stderr, folder."""
    folder = tmp_path_factory.mktemp("results") / "run"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bench.main(arguments(folders, output_dir=folder))
    return code, out.getvalue(), err.getvalue(), folder


def test_texts_equal_plain_decoding_s_at_both_temperatures(finished):
    code, out, _, _ = finished
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert code == 0
    assert [(row["temperature"], row["arm"]) for row in rows] == [(t, arm) for t in (0, 1) for arm in ARMS]
    for row in rows:
        replies = 0 if row["arm"] == "ar" else 4 * (2 if row["temperature"] else 1)
        assert row["compared"] == replies and row["identical"] + len(row["differences"]) == replies
        assert all(difference["excused"] for difference in row["differences"])


def test_printed_numbers_follow_from_the_stored_requests(finished):
    _, out, _, folder = finished
    summary = json.loads(out.splitlines()[-1])
    assert json.loads((folder / results.SUMMARY_FILE).read_text()) == summary
    assert (folder / results.TEXT_FILE).read_text().strip() in out
    requests = results.read_requests(folder)
    for row in summary["rows"]:
        ours = [r for r in requests if (r.arm, r.temperature) == (row["arm"], row["temperature"])]
        plain = [r for r in requests if (r.arm, r.temperature) == ("ar", row["temperature"])]
        emitted = sum(sum(r.emitted) for r in ours)
        assert row["tau"] == emitted / sum(len(r.emitted) for r in ours)
        assert row["tau_sglang"] == sum(len(r.token_ids) for r in ours) / sum(len(r.emitted) for r in ours)
        assert row["speedup"] == pytest.approx(report.speedup(ours, plain))
        assert f"{row['tau']:.3f}" in out


def test_both_arms_serve_the_same_prompts_with_the_same_caps_and_seeds(finished):
    requests = results.read_requests(finished[3])
    asked = {arm: sorted((r.key, r.prompt_tokens) for r in requests if r.arm == arm) for arm in ARMS}
    assert all(asked[arm] == asked["ar"] and len(asked[arm]) == 4 * 3 for arm in ARMS)
    assert all(len(r.token_ids) == 25 for r in requests if r.finish_reason == "length")
    assert {r.seed for r in requests if r.temperature == 1} == {1, 2}


def test_a_temperature_changes_the_text_and_so_does_the_seed(finished):
    texts = {(r.temperature, r.seed): [] for r in results.read_requests(finished[3])}
    for request in results.read_requests(finished[3]):
        if request.arm == "ar":
            texts[request.temperature, request.seed].append((request.id, request.token_ids))
    assert len({tuple(sorted(text)) for text in texts.values()}) == len(texts) == 3


def test_nothing_is_compiled_inside_the_clock(finished):
    compilations = json.loads(finished[1].splitlines()[-1])["run"]["compilations"]
    assert compilations["measured"] == 0 and compilations["warm_up"] >= 2 * len(ARMS) * 2  # prefill, blocks; two modes
    assert "COMPILED" not in finished[1]


def test_a_result_says_where_it_comes_from(finished, folders):
    _, out, _, folder = finished
    run = json.loads((folder / results.RUN_FILE).read_text())
    assert run == json.loads(out.splitlines()[-1])["run"]
    assert run["command"].startswith("python -m serve.bench --target=") and "--seed=1,2" in run["command"]
    chosen = workload.choose(workload.read_prompts(folders / "prompts.jsonl"), 4, seed=0)
    assert run["prompts"] == {"count": 4, "sha256": workload.digest(chosen)}
    assert (
        len(run["folders_sha256"]) == 2
        and "target" in run["folders_sha256"]
        and run["versions"]["jax"] == jax.__version__
    )
    assert "4 conversations have more turns" in out and "thinking off" in out


def test_results_are_not_overwritten(finished, folders, capsys):
    assert bench.main(arguments(folders, output_dir=finished[3])) == 2
    assert f"{finished[3]} holds run.json of another run" in capsys.readouterr().err


def test_both_export_formats_are_read(folders):
    config = {"target": str(folders / "target"), "prompts": str(folders / "prompts.jsonl"), "arms": ("greedy",)}
    engines = [
        bench.prepare(bench.BenchConfig(drafter=(str(folders / name),), **config)).engines["greedy"]
        for name in ("orbax", "hf")
    ]
    jax.tree.map(np.testing.assert_array_equal, *(engine.models.params for engine in engines))
    assert engines[0].context_limit == CONTEXT  # 2048 new tokens are more than there is room for


def a_config(**changes) -> bench.BenchConfig:
    return bench.BenchConfig(**({"target": "t", "drafter": ("d",), "prompts": "p"} | changes))


def prompts(count: int) -> list[workload.Prompt]:
    return [workload.Prompt(id=str(i), category="all", text="?") for i in range(count)]


def test_arms_take_turns_forth_and_back():
    plan = list(bench.turns(a_config(temperature=(0.0,), chunk_prompts=2), ARMS, prompts(5)))
    assert [turn.arm for turn in plan] == [*ARMS, *ARMS[::-1], *ARMS]
    assert [[p.id for p in turn.prompts] for turn in plan[::2]] == [["0", "1"], ["2", "3"], ["4"]]
    assert [turn.chunk for turn in plan[::2]] == [0, 1, 2]


def test_temperature_zero_runs_once_and_others_once_per_seed():
    plan = bench.turns(a_config(seed=(5, 6)), ("ar",), prompts(1))
    assert [(turn.temperature, turn.seed) for turn in plan] == [(0, 5), (1, 5), (1, 6)]


def test_an_unexcused_difference_fails_the_run(finished, folders, monkeypatch, capsys):
    """Stored requests, one of them changed at its first token; the target looks up the gap there."""
    stored = [r for r in results.read_requests(finished[3]) if r.temperature == 0]
    changed = dataclasses.replace(stored[-1], token_ids=(8, *stored[-1].token_ids[1:]))
    monkeypatch.setattr(bench, "measure", lambda *_: ([*stored[:-1], changed], {"warm_up": [], "measured": [0.5]}))
    assert bench.main(arguments(folders, temperature=0)) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT (LiLiCorr (greedy walk), T = 0): request" in printed
    (difference,) = json.loads(printed.splitlines()[-1])["rows"][1]["differences"]
    assert difference["gap"] > 1e-4 and difference["tolerance"] == 1e-4 and not difference["excused"]
    assert "COMPILED inside the clock: 1 programs, 0.50 s" in printed


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arms": "ar,beam"}, "beam"),
        ({"arms": "ar,ar"}, r"\('ar', 'ar'\)"),
        ({"temperature": "0,-1"}, "-1.0"),
        ({"concurrency": 0}, "--concurrency must be at least 1; got 0"),
        ({"drafter": ""}, "--arms=ar,greedy drafts"),
        ({"drafter": "a/run,b/run"}, "'run'; rename the folder"),
        ({"num_prompts": 7}, "between 1 and the 6 prompts of the file; got 7"),
        ({"top_p": 1.5}, "--top_p must lie in .*1.5 and 0"),
        ({"seed": -3}, "--seed must lie in .*-3"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"target": "nowhere"}, "nowhere"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_code_two(folders, changes, sentence, capsys):
    assert bench.main(arguments(folders, **changes)) == 2
    printed = capsys.readouterr()
    assert re.search(sentence, printed.err) and printed.out == "" and len(printed.err.splitlines()) == 1


def test_a_drafter_without_reranker_can_not_walk(folders, capsys):
    assert bench.main(arguments(folders, drafter=folders / "plain")) == 2
    assert "'greedy', which no export of --drafter can do; they are of dflash" in capsys.readouterr().err


def test_several_exports_are_measured_beside_one_plain_arm_and_traced(folders, capsys):
    """Both drafters are the same weights, one of them with a reranker, so their argmax arms must agree."""
    asked = {"drafter": f"{folders / 'orbax'},{folders / 'plain'}", "arms": "ar,argmax,greedy", "num_prompts": 2}
    assert bench.main(arguments(folders, **asked, temperature=0, trace="true")) == 0
    *text, last = capsys.readouterr().out.splitlines()
    rows = {row["arm"]: row for row in json.loads(last)["rows"]}
    label = folders.name  # the export's folder lies in it, and is called orbax, which says nothing
    assert list(rows) == ["ar", f"{label}/argmax", "plain/argmax", f"{label}/greedy"]
    for name, row in rows.items():
        found = row["attribution"]["all"]
        assert found["blocks"] == row["blocks"]
        assert sum(found[key] for key in ("sampling", "coverage", "ranking", "whole", "ended")) == row["blocks"]
        assert found["sampling"] == 0 and (name == "ar" or found["coverage"] + found["ranking"] > 0)
    assert rows[f"{label}/argmax"]["hist"] == rows["plain/argmax"]["hist"]
    assert rows[f"{label}/greedy"]["tau_gain_over"] == "plain/argmax"
    assert any("where blocks die" in line for line in text) and any("take no speed" in line for line in text)


def test_a_prompt_that_fills_the_context_is_refused_by_name(folders, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "endless", "turns": ["so " * 100]}))
    assert bench.main(arguments(folders, prompts=path, num_prompts=1)) == 2
    assert f"context of {CONTEXT} tokens, the first of them 'endless'" in capsys.readouterr().err
