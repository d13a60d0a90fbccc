"""Tables from hand-made requests: the right number in the right cell, and every warning that must stand beside it."""

import dataclasses
import json

import pytest

from serve import report, table

AR = table.Arm(name="ar", label="AR", num_slots=0)
ARGMAX = table.Arm(name="argmax", label="own argmax", num_slots=3)
GREEDY = table.Arm(name="greedy", label="LiLiCorr (greedy walk)", num_slots=3, base="argmax")
SAMPLED = table.Arm(name="sampled", label="LiLiCorr (sampled walk)", num_slots=3, draws_drafts=True, base="argmax")


def a_request(arm: str, id: str, emitted, *, seconds=1.0, token_ids=None, **changes) -> report.Request:
    values = {"temperature": 0.0, "seed": 0, "category": "code", "prompt_tokens": 3, "finish_reason": "stop"}
    return report.Request(
        arm=arm,
        id=id,
        emitted=tuple(emitted),
        accepted_untrimmed=tuple(count - 1 for count in emitted),
        proposed=tuple(0 if arm == "ar" else 3 for _ in emitted),
        token_ids=tuple(range(1 + sum(emitted))) if token_ids is None else token_ids,
        **(values | {"sent_s": 0.0, "first_s": 0.0, "last_s": seconds} | changes),
    )


def never(difference):
    raise AssertionError(f"no gap was to be measured at {difference}")


def a_run(**changes) -> list[report.Request]:
    """Two prompts in two categories, 7 tokens each behind the prefill's."""
    found = []
    for index, category in enumerate(("code", "story")):
        kept = {"id": str(index), "category": category, "chunk": index} | changes
        found += [
            a_request("ar", emitted=[1] * 7, seconds=4.0, **kept),
            a_request("argmax", emitted=[2, 2, 2, 1], seconds=2.0, **kept),
            a_request("greedy", emitted=[4, 3] if index else [2, 3, 2], seconds=1.0, **kept),
        ]
    return found


def cells(text: str, title: str) -> dict[str, dict[str, str]]:
    """The table that begins with `title`, as row label -> column -> cell."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {title}"))
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:stop])
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in body}


def test_the_headline_leads_with_tau_and_puts_plain_speed_beside_each_speed():
    text = table.render(table.rows(a_run(), [AR, ARGMAX, GREEDY], never))
    headline = cells(text, "  ")
    assert list(headline) == ["AR", "own argmax", "LiLiCorr (greedy walk)"]
    greedy = headline["LiLiCorr (greedy walk)"]
    assert list(greedy)[0].startswith("tau")
    assert greedy["tau [95 %]"].startswith("2.80 [")  # 14 tokens in 5 blocks
    assert greedy["over argmax [95 %]"].startswith("+1.05 [")  # against 14 / 8
    assert (greedy["tok/s"], greedy["AR tok/s"], greedy["speed-up"]) == ("8.0", "2.0", "4.00")
    assert headline["AR"]["speed-up"] == "1.00" and headline["own argmax"]["speed-up"] == "2.00"
    assert greedy["identical"] == "2/2" and headline["AR"]["identical"] == table.EMPTY


def test_every_definition_has_its_column():
    definitions = cells(table.render(table.rows(a_run(), [AR, ARGMAX, GREEDY], never)), "acceptance")
    greedy = definitions["LiLiCorr (greedy walk)"]
    assert (greedy["tau"], greedy["untrimmed"], greedy["draft"], greedy["sglang"]) == (
        "2.800", "2.800", "1.800", "3.200"
    )  # fmt: skip
    assert greedy["request mean"] == f"{(7 / 3 + 7 / 2) / 2:.3f}"
    assert (greedy["accept rate"], greedy["B"]) == ("0.600", "4")
    assert [greedy[f"accept@{i}"] for i in (1, 2, 3)] == ["1.00", "0.60", "0.20"]
    assert definitions["AR"]["accept rate"] == definitions["AR"]["accept@1"] == table.EMPTY


def test_categories_stand_apart_with_their_unweighted_mean():
    categories = cells(table.render(table.rows(a_run(), [AR, GREEDY], never)), "tau by category")
    column = {name: row["LiLiCorr (greedy walk)"] for name, row in categories.items()}
    assert column == {"code": "2.33", "story": "3.50", "mean, unweighted": "2.92"}


def test_a_speedup_without_plain_decoding_is_refused_in_words():
    text = table.render(table.rows([r for r in a_run() if r.arm != "ar"], [ARGMAX, GREEDY], never))
    headline = cells(text, "  ")
    assert {row["speed-up"] for row in headline.values()} == {"no AR arm"}
    assert "No speed-up" in text and "add ar to --arms" in text


def test_a_difference_is_counted_measured_and_printed():
    requests = a_run()
    requests[2] = dataclasses.replace(requests[2], token_ids=(0, 1, 9, 3, 4, 5, 6, 7))
    for gap, identical, word in ((3e-5, "1/2 (1 excused)", "Excused"), (0.5, "1/2", "DIFFERENT")):
        found = table.rows(requests, [AR, GREEDY], lambda difference, gap=gap: dataclasses.replace(difference, gap=gap))
        text = table.render(found)
        assert cells(text, "  ")["LiLiCorr (greedy walk)"]["identical"] == identical
        (line,) = [line for line in text.splitlines() if line.startswith(word)]
        assert "request 0" in line and "token 2: 9 instead of 2" in line and f"{gap:.2g}" in line
        assert len(found[1].unexcused) == (gap > report.TEXT_GAP)


def test_texts_of_drawn_drafts_are_not_held_against_plain_decoding_at_a_temperature():
    requests = [dataclasses.replace(r, arm=r.arm.replace("greedy", "sampled")) for r in a_run(temperature=1.0)]
    requests[2] = dataclasses.replace(requests[2], token_ids=tuple(range(8, 16)))
    (_, row) = table.rows(requests, [AR, SAMPLED], never)
    assert row.num_compared == 0 and row.speedup == 4
    greedy = [r for r in a_run() if r.arm == "ar"] + [
        dataclasses.replace(r, arm="sampled") for r in a_run() if r.arm == "greedy"
    ]
    assert table.rows(greedy, [AR, SAMPLED], never)[1].num_compared == 2


def test_a_degenerate_arm_never_stands_without_its_flag():
    requests = [*a_run(), a_request("ar", "2", [1] * 60, token_ids=(7,) * 61)]
    requests.append(a_request("greedy", "2", [4] * 15, token_ids=(7,) * 61))
    text = table.render(table.rows(requests, [AR, GREEDY], never))
    assert "DEGENERATE" in cells(text, "  ")["LiLiCorr (greedy walk)"]["tau [95 %]"]
    assert "33.3% of the replies repeat themselves" in text
    assert "DEGENERATE" not in table.render(table.rows(a_run(), [AR, GREEDY], never))


def test_failed_requests_and_thin_categories_are_named():
    failed = a_request("greedy", "1", [], token_ids=(), finish_reason="failed", category="story", chunk=1)
    requests = [r for r in a_run() if (r.arm, r.id) != ("greedy", "1")] + [failed]
    text = table.render(table.rows(requests, [AR, GREEDY], never))
    assert "FAILED (LiLiCorr (greedy walk), T = 0): 1 requests" in text
    assert "Fewer than 5 prompts stand behind code, story" in text


def test_seeds_give_a_mean_and_a_sample_deviation():
    requests = []
    for seed, emitted in ((42, [4, 4]), (43, [2, 2]), (44, [3, 3])):
        requests.append(a_request("greedy", "a", emitted, seed=seed, temperature=1.0))
    requests += [dataclasses.replace(r, id=name, category="story") for r in requests for name in "bcdef"]
    (row,) = table.rows(requests, [GREEDY], never)
    assert row.thin == ("code",)  # one prompt under three seeds; the other category has five
    assert row.tau_seeds == (3, 1) and row.summary.tau == 3
    assert cells(table.render([row]), "acceptance")["LiLiCorr (greedy walk)"]["seeds"] == "3.000 ± 1.000"


def test_temperatures_have_tables_of_their_own():
    found = table.rows([*a_run(temperature=1.0), *a_run()], [AR, GREEDY], never)
    assert [(row.temperature, row.arm.name) for row in found] == [(0, "ar"), (0, "greedy"), (1, "ar"), (1, "greedy")]
    assert table.render(found).count("## Temperature") == 2


def test_a_row_survives_json_with_the_numbers_of_its_table():
    (row,) = [row for row in table.rows(a_run(), [AR, ARGMAX, GREEDY], never) if row.arm == GREEDY]
    numbers = json.loads(json.dumps(row.to_json()))
    assert (numbers["tau"], numbers["speedup"], numbers["identical"], numbers["compared"]) == (2.8, 4, 2, 2)
    assert numbers["tau_interval"]["value"] == 2.8 and numbers["tau_gain"]["value"] == pytest.approx(1.05)
    assert numbers["categories"]["story"]["tau"] == 3.5 and numbers["hist"] == [0, 2, 2, 1]
    assert report.UNITS.keys() <= numbers.keys()


def test_columns_are_aligned():
    lines = table.markdown(["", "x"], [["a long label", "1"], ["b", "22.5"]]).splitlines()
    assert lines == [
        "|              |    x |",
        "|--------------|-----:|",
        "| a long label |    1 |",
        "| b            | 22.5 |",
    ]
