"""docs/study/README.md and its figures, from what `gather` found: no figure is typed by hand."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.study import paper, plots
from benchmarks.study.arms import BASE, LONG_BASE, LONGER, REFERENCE, VARIANTS
from benchmarks.study.render import (
    METHODS,
    Find,
    curve_table,
    death_table,
    finder,
    gain_table,
    ordering,
    paper_table,
    percent,
    tau_table,
    versus,
)
from benchmarks.study.summary import ALL, from_json
from serve.table import markdown

LABELS = {variant.name: variant.label for variant in VARIANTS}
NORMALISED = "exact, rows normalised"
SHOWN = (
    *METHODS[:3],
    ("DSpark, sampled proposals", "dspark", "sampled"),
    METHODS[3],
    ("LiLiCorr, sampled walk", REFERENCE, "sampled"),
    ("LiLiCorr, exact walk", REFERENCE, "exact"),
    ("LiLiCorr, exact walk, rows normalised", REFERENCE, NORMALISED),
    ("LiLiCorr's drafter alone (its own argmax)", REFERENCE, "argmax"),
    *((LABELS[name], name, "greedy") for name in ("lilicorr-margin", "lilicorr-no-penalty", "lilicorr-paper-weight")),
)
BIGRAMS = tuple((f"bigram walk over DFlash's 8, beta {beta}", BASE, f"bigram {beta}") for beta in ("0.25", "0.5", "1"))
LONG_RUNS = (
    (LABELS[LONG_BASE], LONG_BASE, "argmax"),
    *((LABELS[name], name, "greedy") for name in ("domino-3x", "lilicorr-3x")),
    ("LiLiCorr's drafter alone (its own argmax)", "lilicorr-3x", "argmax"),
    *((label, LONG_BASE, way) for label, _, way in BIGRAMS),
)
SLOTS = (1, 2, 3, 5, 7, 9, 11, 13, 15)
DEATHS = (
    ("DFlash", f"{BASE}/argmax"),
    ("LiLiCorr", f"{REFERENCE}/greedy"),
    ("Domino", "domino/greedy"),
    ("DSpark", "dspark/greedy"),
)


def page(results: Mapping) -> str:
    """The whole page."""
    find = finder(from_json(results["rows"]))
    categories = list(dict.fromkeys(row["category"] for row in results["rows"] if row["category"] != ALL))
    parts = [
        "# The methods on the demo target, at equal budget",
        opening(results),
        "## Temperature 0",
        ordering(find, 0.0),
        tau_table(find, (*SHOWN, *BIGRAMS), 0.0, categories),
        READING,
        *room(find),
        "![tau by category](tau.png)",
        gain_table(find, SHOWN, 0.0, categories),
        "## Temperature 1",
        ordering(find, 1.0),
        tau_table(find, SHOWN, 1.0, categories),
        sampling_line(find),
        gain_table(find, SHOWN, 1.0, categories),
        "## At equal CPU time",
        *equal_time(results, find),
        "![progress over CPU time](training.png)",
        *longer(find, categories),
        "## Greedy or exact walk",
        *walks(find),
        "## The terms of the loss",
        *terms(find),
        "## Slot by slot",
        *slots(results),
        "## Where do blocks die?",
        *deaths(results),
        "## The paper's figures",
        *the_paper(),
        "## How this was made",
        *provenance(results),
    ]
    return "\n\n".join(parts) + "\n"


READING = (
    "tau: tokens per verification block, the target's own token counted, averaged over blocks, cut at the end of turn. "
    "`±`: sample deviation over training seeds. Brackets: 95 % bootstrap interval over prompts, training seeds pooled. "
    "Gains are relative, over DFlash trained with the same seeds: same start of the backbone, same rows, same anchors."
)


def opening(results: Mapping) -> str:
    seeds = {name: sum(arm["variant"] == name for arm in results["arms"]) for name in LABELS}
    counts = ", ".join(f"{LABELS[name]} {count}" for name, count in seeds.items() if count)
    return (
        "Written by a program; edit nothing here. Every arm is a run of `train.main` with the flags of "
        f"train/flagfiles/demo.flags and its own (below): {results['run']['steps']} steps of 8 rows x 4 anchors, "
        f"where the label says nothing else. Runs: {counts}. Measured on "
        f"{results['prompts']} held-out prompts of five categories, at T = 1 with sampling seeds "
        f"{', '.join(map(str, results['seeds']))}. One small corpus and one small target (1.1 million parameters, 512 "
        "tokens): what is seen here is direction and mechanism, and no claim about another target."
    )


def room(find: Find) -> list[str]:
    """How much coherence could bring on this corpus, by pair counts, and how much of it each method takes."""
    base, walks = find(BASE, "argmax"), [row for _, *key in BIGRAMS if (row := find(*key))]
    if base is None or not walks:
        return []
    best = max(walks, key=lambda row: row.tau.mean)
    reach = best.tau.mean - base.tau.mean
    taken = [
        f"{label} {percent((row.tau.mean - base.tau.mean) / reach, '.0f')}"
        for label, variant, way in METHODS[1:]
        if (row := find(variant, way))
    ]
    return [
        "How much room has coherence here? Pair counts of the training replies alone, walked over DFlash's candidates "
        f"without any training, lift tau from {base.tau.mean:.2f} to {best.tau.mean:.2f}. Measured by that step, the "
        f"trained methods take: {', '.join(taken)}. A likely cause, which "
        "nothing here proves, is the corpus: it has 512 tokens, and tables that decide the wording."
    ]


def sampling_line(find: Find) -> str:
    """How far apart sampling seeds are."""
    found = [
        f"{label} {row.sampling_std:.3f}"
        for label, variant, way in SHOWN
        if (row := find(variant, way, 1.0)) and row.sampling_std is not None
    ]
    return f"Deviation of tau over sampling seeds: {'; '.join(found)}."


def equal_time(results: Mapping, find: Find) -> list[str]:
    """What a step costs by method, and DFlash with as much CPU time as LiLiCorr."""
    rows = []
    for name, label in LABELS.items():
        arms = [arm for arm in results["arms"] if arm["variant"] == name]
        if not arms:
            continue
        kind = "argmax" if name.startswith(BASE) else "greedy"
        row, cost = find(name, kind), results["costs"].get(name)
        trained = statistics.mean(arm["step_cpu_s"] for arm in arms)
        rows.append(
            [label, str(arms[0]["steps"]), f"{trained:.3f}", "-" if cost is None else f"{cost:.3f}"]
            + [f"{trained * arms[0]['steps']:.0f}", f"{row.tau.mean:.3f}" if row else "-"]
        )
    head = ["", "steps", "CPU s a step, in the run", "side by side", "CPU s in all", "tau, T = 0"]
    time_gain = versus(find, (REFERENCE, "greedy"), ("dflash-long", "argmax"))
    return [
        markdown(head, rows),
        f"LiLiCorr over DFlash at LiLiCorr's CPU time, T = 0: {time_gain} (seed by seed).",
        "CPU seconds are the trainer's user and system time between steps, without compilation; wall time on a shared "
        "machine means nothing. *In the run*: the median while the arm was trained, whatever else ran. *Side by side*: "
        "short runs of the same commit, one after the other.",
    ]


def longer(find: Find, categories: Sequence[str]) -> list[str]:
    """The same methods with several times the steps: is the short budget the cause of what was seen?"""
    base, long_base = find(BASE, "argmax"), find(LONG_BASE, "argmax")
    if long_base is None:
        return []
    compared = [
        f"{label} {short.gain.mean:+.0%} and {long.gain.mean:+.0%}"
        for label, name, way in METHODS[1:]
        if (short := find(name, way)) and (long := find(f"{name}-{LONGER}x", way)) and short.gain and long.gain
    ]
    seen = [
        f"DFlash's own tau goes from {base.taus[0]:.2f} to {long_base.taus[0]:.2f}" if base else "",
        f"over it, with the steps once and {LONGER} times: {'; '.join(compared)}" if compared else "",
    ]
    return [
        f"## With {LONGER} times the steps",
        "One training seed. Is the short budget the cause of the order above? At T = 0 "
        f"{'; '.join(filter(None, seen))}.",
        tau_table(find, LONG_RUNS, 0.0, categories),
        tau_table(find, LONG_RUNS, 1.0, categories),
    ]


def walks(find: Find) -> list[str]:
    """The paper's Table 12."""
    lines = []
    for name in (REFERENCE, "lilicorr-margin", "lilicorr-no-penalty", "lilicorr-paper-weight", "lilicorr-3x"):
        greedy = (name, "greedy")
        if find(*greedy):
            cells = [
                versus(find, (name, way), greedy, t) for way, t in (("exact", 0.0), (NORMALISED, 0.0), ("exact", 1.0))
            ]
            lines.append([LABELS[name], *cells])
    worst, average, best = paper.EXACT_LOSS
    return [
        markdown(["exact over greedy walk", "raw scores, T = 0", "rows normalised, T = 0", "raw scores, T = 1"], lines),
        "Change of tau with the same weights, seed by seed. *Rows normalised*: the path of highest probability, Eq. 2 "
        f"at every slot. The paper's Table 12 ({paper.TITLE}): {percent(average)} on average, from {percent(worst)} to "
        f"{percent(best)}.",
    ]


def terms(find: Find) -> list[str]:
    """The paper's Table 11, and the margin."""
    lines = []
    for name in ("lilicorr-no-penalty", "lilicorr-margin", "lilicorr-paper-weight"):
        if find(name, "greedy"):
            lines.append(
                [LABELS[name], *(versus(find, (name, "greedy"), (REFERENCE, "greedy"), t) for t in (0.0, 1.0))]
            )
    least, average, most = paper.PENALTY_GAIN
    return [
        markdown(["over LiLiCorr at the same seeds", "T = 0", "T = 1"], lines),
        f"The paper ({paper.TITLE}): the penalty adds {percent(average)} on average, {percent(least)} to "
        f"{percent(most)} (Table 11); the margin variant is {paper.MARGIN}.",
    ]


def slots(results: Mapping) -> list[str]:
    curves = results["curves"]
    shown = {label: curves[key]["inside"] for label, key in DEATHS if key in curves}
    ends = {label: curves[key]["end"] for label, key in DEATHS if key in curves}
    return [
        "![curves over slots](slots.png)",
        "Shares over all anchors that have the slot, the end of turn left out; `oracle` and `accepted` ask the same of "
        "every slot before. The pool is the drafter's own 8 likeliest tokens, for every method.",
        curve_table(shown, SLOTS),
        "Slot 1 stands next to the anchor, which every method knows: nothing has to cohere there. Drafted right: "
        f"{', '.join(f'{label} {curve["selected"][0]:.2f}' for label, curve in shown.items())}. Where a method is "
        "behind already there, its drafter has not yet learned to read the anchor through its masked rows; Domino "
        "predicts slot 1 from the anchor's own row, and DSpark's head is given the anchor's token.",
        "The end of turn alone: where it stood at the slot, was it covered, was it drafted?",
        curve_table(ends, SLOTS),
    ]


def deaths(results: Mapping) -> list[str]:
    found = {
        f"{label}, T = {temperature}": results["deaths"][f"{key}/{temperature}"]
        for label, key in DEATHS
        for temperature in ("0", "1")
        if f"{key}/{temperature}" in results["deaths"]
    }
    by_category = {
        f"{label}, {category}": counts
        for label, groups in found.items()
        if label.startswith("LiLiCorr")
        for category, counts in groups.items()
        if category != ALL
    }
    return [
        "![where blocks die](deaths.png)",
        "Asked in this order of each block's first rejected draft: did the target draw a token that was not its "
        "likeliest (sampling)? Was the token outside the drafter's 8 likeliest (coverage)? Else it was there and not "
        "chosen (ranking), also by a method that chooses among the whole vocabulary.",
        death_table({label: groups[ALL] for label, groups in found.items()}),
        death_table(by_category),
    ]


def the_paper() -> list[str]:
    low, high = paper.TAU_GAIN[0.0]
    return [
        paper_table(),
        f"LiLiCorr's tau over DFlash's, T = 0: {percent(low)} to {percent(high)}. Settings: {paper.SETTINGS}. Speeds "
        "of the demo are not compared with these: at 1.1 million parameters a drafter costs as much as its target.",
    ]


def provenance(results: Mapping) -> list[str]:
    run, engine = results["run"], results["engine"]
    rows = [
        [
            arm["arm"],
            " ".join(flag for flag in arm["flags"] if "flagfile" not in flag),
            arm["finished"],
            arm["revision"][:9],
        ]
        for arm in results["arms"]
    ]
    return [
        f"`{run['command']}`, {run['finished']}, {run['device']['kind']}, {run['device']['cpus']} CPUs shared with "
        f"other work, jax {run['versions']['jax']}, float32, commit {run['revision'][:9]}.",
        "Decoding is lossless, so the text is known beforehand: plain decoding's, greedy or drawn with a sampling "
        "seed. Blocks of deterministic drafts follow from drafts at every place of it; drafts that are drawn were "
        f"decoded. To check, the engine decoded {engine['replies']} replies with deterministic drafts too, "
        f"{engine['same_blocks']} of them in the very same blocks. Each arm's folder under arms/ has its weights "
        "(float16), its training metrics and every block of every reply; results.json has all numbers of this page, "
        "and more.",
        markdown(["arm", "flags behind --flagfile=train/flagfiles/demo.flags", "trained until", "commit"], rows),
    ]


def figures(results: Mapping, folder: Path) -> None:
    """The page's figures."""
    rows = from_json(results["rows"])
    find = finder(rows)
    categories = [*dict.fromkeys(row.category for row in rows)]
    bars = {}
    for label, variant, way in METHODS:
        if find(variant, way):
            found = {c: find(variant, way, 0.0, c) for c in categories}
            bars[label] = {c: (row.tau.mean, row.tau.low, row.tau.high) for c, row in found.items() if row}
    plots.tau_bars(
        folder / "tau.png", bars, "Demo target, T = 0, equal steps: mean over training seeds, 95 % over prompts"
    )
    curves = results["curves"]
    plots.slot_lines(folder / "slots.png", {label: curves[key]["inside"] for label, key in DEATHS if key in curves})
    found = {
        f"{label}, T = {temperature}": results["deaths"][f"{key}/{temperature}"][ALL]
        for temperature in ("0", "1")
        for label, key in DEATHS
        if f"{key}/{temperature}" in results["deaths"]
    }
    plots.death_bars(folder / "deaths.png", found, columns=len(found) // 2 or 1)
    runs = {
        LABELS[arm["variant"]]: [
            (point["step"] * arm["step_cpu_s"], point.get("selected_prefix") or point["top1_prefix"])
            for point in arm["held_out"]
        ]
        for arm in results["arms"]
        if arm["seed"] == 0
    }
    plots.training_lines(folder / "training.png", runs, "drafts right in a row, teacher forced, held-out rows")
