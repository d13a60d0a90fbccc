"""docs/study/README.md from the study's numbers: every figure and every sentence with a figure is computed here."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.study import paper
from benchmarks.study.summary import ALL, Estimate, Row
from serve.attribution import CAUSES
from serve.table import markdown

Find = Callable[..., Row | None]
EMPTY = "-"
METHODS = (
    ("DFlash", "dflash", "argmax"),
    ("Domino", "domino", "greedy"),
    ("DSpark", "dspark", "greedy"),
    ("LiLiCorr", "lilicorr", "greedy"),
)


def finder(rows: Sequence[Row]) -> Find:
    """(variant, way, temperature, category) -> its row, or None where that was not measured."""
    table = {(row.variant, row.way, row.temperature, row.category): row for row in rows}

    def find(variant: str, way: str, temperature: float = 0.0, category: str = ALL) -> Row | None:
        return table.get((variant, way, temperature, category))

    return find


def percent(value: float | None, form: str = "+.1f") -> str:
    return EMPTY if value is None else f"{100 * value:{form}} %"


def tau(row: Row | None) -> str:
    """Mean and deviation over training seeds, with the interval over prompts."""
    if row is None:
        return EMPTY
    spread = "" if row.tau.std is None else f" ± {row.tau.std:.3f}"
    return f"{row.tau.mean:.3f}{spread} [{row.tau.low:.2f}, {row.tau.high:.2f}]"


def gain(estimate: Estimate | None) -> str:
    if estimate is None:
        return EMPTY
    spread = "" if estimate.std is None else f" ± {100 * estimate.std:.1f}"
    return f"{100 * estimate.mean:+.1f}{spread} % [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def tau_table(find: Find, shown: Sequence[tuple[str, str, str]], temperature: float, categories: Sequence[str]) -> str:
    """A line for each (label, variant, way): tau, its gain over DFlash at the same seeds, and tau by category."""
    head = ["", "seeds", "tau", "over DFlash", *categories]
    lines = []
    for label, variant, way in shown:
        row = find(variant, way, temperature)
        if row is None:
            continue
        cells = [find(variant, way, temperature, category) for category in categories]
        lines.append(
            [label, str(len(row.seeds)), tau(row), gain(row.gain)]
            + [EMPTY if cell is None else f"{cell.tau.mean:.2f}" for cell in cells]
        )
    return markdown(head, lines)


def gain_table(find: Find, shown: Sequence[tuple[str, str, str]], temperature: float, categories: Sequence[str]) -> str:
    """Relative gains over DFlash by category, with intervals."""
    lines = []
    for label, variant, way in shown:
        found = [find(variant, way, temperature, category) for category in categories]
        if any(row is not None and row.gain for row in found):
            lines.append([label, *(gain(row.gain) if row else EMPTY for row in found)])
    return markdown(["over DFlash", *categories], lines)


def versus(find: Find, ours: tuple[str, str], base: tuple[str, str], temperature: float = 0.0) -> str:
    """How much tau one way gains over another, over the seeds that both have."""
    one, other = find(*ours, temperature), find(*base, temperature)
    if one is None or other is None:
        return EMPTY
    seeds = [seed for seed in one.seeds if seed in other.seeds]
    if not seeds:
        return EMPTY
    gains = [one.taus[one.seeds.index(s)] / other.taus[other.seeds.index(s)] - 1 for s in seeds]
    return ", ".join(percent(value) for value in gains)


def ordering(find: Find, temperature: float) -> str:
    """One sentence: the four methods from best to worst as seen, and as the paper has them."""
    seen = [(row.tau.mean, label) for label, variant, way in METHODS if (row := find(variant, way, temperature))]
    ranked = [f"{label} ({value:.2f})" for value, label in sorted(seen, reverse=True)]
    theirs = sorted(
        ((values[temperature][0], label) for label, values in paper.SPEEDUPS.items() if temperature in values),
        reverse=True,
    )
    theirs_ranked = [f"{label} ({value:.2f})" for value, label in theirs if label in {name for _, name in seen}]
    same = [r.split(" (")[0] for r in ranked] == [r.split(" (")[0] for r in theirs_ranked]
    verdict = "The order is the paper's" if same else "The order is **not** the paper's"
    return (
        f"At T = {temperature:g}, by tau: {' > '.join(ranked)}. The paper's order by speed-up on Qwen3-8B "
        f"({paper.TITLE}): {' > '.join(theirs_ranked)}. {verdict}."
    )


def death_table(deaths: Mapping[str, Mapping]) -> str:
    """Shares of blocks by label."""
    head = ["", "blocks", *(f"{cause}" for cause in CAUSES), "kept whole", "ended the reply"]
    lines = [
        [label, str(found["blocks"]), *(f"{found[key] / found['blocks']:.1%}" for key in (*CAUSES, "whole", "ended"))]
        for label, found in deaths.items()
    ]
    return markdown(head, lines)


def curve_table(curves: Mapping[str, Mapping[str, Sequence[float]]], shown: Sequence[int]) -> str:
    """Shares at some slots, a line for each label and share."""
    lines = [
        [f"{label}, {name}", *(EMPTY if shares[slot - 1] is None else f"{shares[slot - 1]:.3f}" for slot in shown)]
        for label, found in curves.items()
        for name, shares in found.items()
        if name != "slots"
    ]
    return markdown(["slot", *map(str, shown)], lines)


def paper_table() -> str:
    lines = [
        [label, *(f"{values[t][0]:.2f} / {values[t][1]:.2f}" if t in values else EMPTY for t in (0.0, 1.0))]
        for label, values in paper.SPEEDUPS.items()
    ]
    return markdown([f"speed-up, 8B / 4B ({paper.TITLE})", "T = 0", "T = 1"], lines)
