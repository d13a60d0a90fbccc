"""The study's figures, from its numbers alone. Needs matplotlib, of the extra `plots`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.patches import Rectangle

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
CAUSE_STYLE = {
    "ranking": ("#dd8452", "ranking: the right token was among the drafter's 8 likeliest, another was chosen"),
    "coverage": ("#4c72b0", "coverage: the right token was not among the drafter's 8 likeliest"),
    "sampling": ("#b0b0b0", "sampling: the target drew a token that was not its likeliest"),
}
SHARE_STYLE = {
    "coverage": ("#4c72b0", "-", "right token among the drafter's 8 likeliest"),
    "oracle": ("#4c72b0", "--", "it, and at every slot before (oracle prefix)"),
    "top1": ("#7f7f7f", "-", "drafter's own likeliest token is right"),
    "selected": ("#dd8452", "-", "drafted token is right"),
    "accepted": ("#dd8452", "--", "it, and at every slot before (accepted)"),
}


def save(figure, path: Path) -> None:
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def tau_bars(path: Path, series: Mapping[str, Mapping[str, tuple[float, float, float]]], title: str) -> None:
    """Bars by category.

    Args:
        series: by label, by category: tau and the ends of its interval.
    """
    categories = list(next(iter(series.values())))
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        taus = [values[category][0] for category in categories]
        places = [i + (number - (len(series) - 1) / 2) * width for i in range(len(categories))]
        ends = [[abs(values[c][side] - values[c][0]) for c in categories] for side in (1, 2)]
        axes.bar(
            places, taus, width, yerr=ends, label=label, color=COLOURS[number % len(COLOURS)], error_kw={"lw": 0.8}
        )
    axes.axhline(1, color="black", lw=0.8, ls=":")
    axes.set_xticks(range(len(categories)), categories)
    axes.set_ylabel("tau: tokens per verification block")
    axes.set_title(title)
    axes.legend(frameon=False, ncols=2, fontsize=8)
    save(figure, path)


def slot_lines(path: Path, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """What is true at each slot, a panel for each way of drafting.

    Args:
        curves: by label, shares over slots by the names of `chain.SHARES`.
    """
    figure, panels = plt.subplots(
        1, len(curves), figsize=(4 * len(curves), 4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, (label, shares) in zip(panels[0], curves.items(), strict=True):
        for name, (colour, line, text) in SHARE_STYLE.items():
            axes.plot(range(1, len(shares[name]) + 1), shares[name], color=colour, ls=line, label=text)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("slot")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("share of anchors that have the slot")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save(figure, path)


def death_bars(path: Path, deaths: Mapping[str, Mapping], columns: int) -> None:
    """Where blocks die: per slot and cause, as a share of all blocks, a panel for each way of drafting.

    Args:
        deaths: by label, what `serve.attribution.summarize` gives.
    """
    lines = -(-len(deaths) // columns)
    figure, panels = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.1 * lines + 0.8), sharex=True, sharey=True, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axes in panels.flat[len(deaths) :]:
        axes.set_axis_off()
    for axes, (label, found) in zip(panels.flat, deaths.items(), strict=False):
        floor = [0.0] * len(next(iter(found["slots"].values())))
        for cause, (colour, _) in CAUSE_STYLE.items():
            shares = [count / found["blocks"] for count in found["slots"][cause]]
            axes.bar(range(1, len(shares) + 1), shares, bottom=floor, color=colour, width=0.85)
            floor = [a + b for a, b in zip(floor, shares, strict=True)]
        whole, ended = (found[key] / found["blocks"] for key in ("whole", "ended"))
        died = ", ".join(f"{cause} {found[cause] / found['blocks']:.0%}" for cause in CAUSE_STYLE if found[cause])
        axes.text(
            0.98, 0.95, f"of {found['blocks']} blocks\n{died}\nkept whole {whole:.1%}, ended the reply {ended:.1%}",
            transform=axes.transAxes, ha="right", va="top", fontsize=8,
        )  # fmt: skip
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("slot of the first rejected draft")
    for row in panels:
        row[0].set_ylabel("share of blocks")
    figure.suptitle("Where do blocks die?")
    bars = [Rectangle((0, 0), 1, 1, color=colour) for colour, _ in CAUSE_STYLE.values()]
    figure.legend(
        bars, [text for _, text in CAUSE_STYLE.values()], loc="outside lower center", frameon=False, fontsize=8
    )
    save(figure, path)


def training_lines(path: Path, runs: Mapping[str, Sequence[tuple[float, float]]], ylabel: str) -> None:
    """Progress on held-out rows over CPU time.

    Args:
        runs: by label, pairs of CPU seconds and value.
    """
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for number, (label, points) in enumerate(runs.items()):
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=label, color=f"C{number % 10}")
    axes.set_xlabel("CPU seconds of training steps")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
