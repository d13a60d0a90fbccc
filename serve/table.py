"""The benchmark's tables: one row for each arm and temperature, as text to read and as numbers to keep.

Owns what is put beside what, and the warnings that a reader must see with it. Definitions are `serve.report`'s.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve import attribution, report
from serve.report import Difference, Interval, Request, Summary

FEWEST_PROMPTS = 5  # of a category, below which its row says little
SHOWN_SLOTS = 3
SHOWN_DIFFERENCES = 5
EMPTY = "-"


UNITS = {
    "tau_interval": "tokens per block, with the bounds of its 95 % bootstrap interval over prompts",
    "tau_seeds": "tokens per block, mean and sample deviation over seeds",
    "tau_gain": "tokens per block, paired difference to the arm `tau_gain_over` with its 95 % bootstrap interval",
    "attribution": "blocks that died by cause and slot, see serve.attribution",
    "tau_category_mean": "tokens per block, unweighted mean over categories",
    "ar_output_tps": "tokens per s of plain decoding",
    "speedup": "output_tps / ar_output_tps",
    "compared": "replies held against plain decoding's",
    "identical": "replies with plain decoding's very ids",
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of decoding.

    Attributes:
        name: as in --arms, behind the export's label where there are several.
        label: what it is called in tables.
        num_slots: draft tokens that a block can propose; 0 for plain decoding.
        draws_drafts: drafts are drawn at random, so that at a temperature its text need not be plain decoding's.
        base: the arm with which its tau is compared.
    """

    name: str
    label: str
    num_slots: int
    draws_drafts: bool = False
    base: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one arm did at one temperature.

    Attributes:
        tau: with its bootstrap interval over prompts.
        tau_seeds: mean and sample deviation over seeds, where there are several.
        tau_gain: paired difference to the tau of the arm's base.
        speedup: against plain decoding; None without it.
        num_compared: replies held against plain decoding's; 0 where they need not be equal.
        differences: the first difference of each reply that was not.
        categories: summaries by category.
        thin: categories of fewer than FEWEST_PROMPTS prompts.
        attribution: where blocks died, in all and by category; None where nobody looked.
    """

    arm: Arm
    temperature: float
    summary: Summary
    tau: Interval | None
    tau_seeds: tuple[float, float | None] | None
    tau_gain: Interval | None
    plain_tps: float | None
    speedup: float | None
    num_compared: int
    differences: tuple[Difference, ...]
    categories: dict[str, Summary]
    thin: tuple[str, ...]
    attribution: dict[str, dict] | None

    @property
    def unexcused(self) -> tuple[Difference, ...]:
        return tuple(difference for difference in self.differences if not difference.is_excused)

    def to_json(self) -> dict:
        """Numbers under their names; `report.UNITS` has the units of a summary's."""
        extra = {
            "arm": self.arm.name,
            "label": self.arm.label,
            "temperature": self.temperature,
            "tau_interval": _plain(self.tau),
            "tau_seeds": self.tau_seeds and dict(zip(("mean", "std"), self.tau_seeds, strict=True)),
            "tau_gain": _plain(self.tau_gain),
            "tau_gain_over": self.tau_gain and self.arm.base,
            "tau_category_mean": category_mean(self),
            "ar_output_tps": self.plain_tps,
            "speedup": self.speedup,
            "compared": self.num_compared,
            "identical": self.num_compared - len(self.differences),
            "differences": [dataclasses.asdict(d) | {"excused": d.is_excused} for d in self.differences],
            "flagged_degenerate": self.summary.is_flagged,
            "categories": {name: _plain(summary) for name, summary in self.categories.items()},
            "attribution": self.attribution,
        }
        return extra | dataclasses.asdict(self.summary)


def rows(requests: Sequence[Request], arms: Sequence[Arm], with_gap: Callable[[Difference], Difference]) -> list[Row]:
    """One row for each temperature and arm, in the order of `arms`.

    Args:
        with_gap: looks up how far apart the target's two best choices lie at a difference.
    """
    found = []
    for temperature in sorted({request.temperature for request in requests}):
        of_arm = {arm.name: [r for r in requests if r.arm == arm.name and r.temperature == temperature] for arm in arms}
        found += [_row(arm, temperature, of_arm, with_gap) for arm in arms]
    return found


def _row(arm: Arm, temperature: float, of_arm: dict[str, list[Request]], with_gap) -> Row:
    ours, plain, base = of_arm[arm.name], of_arm.get("ar", []), of_arm.get(arm.base or "", [])
    is_compared = bool(plain) and arm.name != "ar" and not (arm.draws_drafts and temperature > 0)
    differences = report.differences(ours, plain) if is_compared else ()
    seeds = sorted({request.seed for request in ours})
    taus = [report.tau([r for r in ours if r.seed == seed]) for seed in seeds]
    has_seeds = len(seeds) > 1 and None not in taus
    groups = report.by_category(ours)
    return Row(
        arm=arm,
        temperature=temperature,
        summary=report.summarize(ours, arm.num_slots),
        tau=report.tau_interval(ours),
        tau_seeds=report.mean_and_std(taus) if has_seeds else None,
        tau_gain=report.tau_difference(ours, base) if base else None,
        plain_tps=report.summarize(plain, 0).output_tps,
        speedup=report.speedup(ours, plain) if plain else None,
        num_compared=len(report.paired(ours, plain)[0]) if is_compared else 0,
        differences=tuple(map(with_gap, differences)),
        categories={name: report.summarize(group, arm.num_slots) for name, group in groups.items()},
        thin=tuple(name for name, group in groups.items() if len({request.id for request in group}) < FEWEST_PROMPTS),
        attribution=_attribution(arm, groups) if all(r.causes is not None for r in ours) else None,
    )


def _attribution(arm: Arm, groups: dict[str, list[Request]]) -> dict[str, dict]:
    everything = [request for group in groups.values() for request in group]
    return {name: attribution.summarize(group, arm.num_slots) for name, group in ({"all": everything} | groups).items()}


def category_mean(row: Row) -> float | None:
    """tau averaged over categories, unweighted."""
    taus = [summary.tau for summary in row.categories.values() if summary.tau is not None]
    return sum(taus) / len(taus) if taus else None


def render(found: Sequence[Row]) -> str:
    """All tables and warnings, as aligned Markdown."""
    parts = []
    for temperature in dict.fromkeys(row.temperature for row in found):
        group = [row for row in found if row.temperature == temperature]
        parts += [f"## Temperature {temperature:g}", _headline(group), _definitions(group), _times(group)]
        if len(group[0].categories) > 1:
            parts.append(_categories(group))
        parts += [_deaths(row) for row in group if row.attribution and row.arm.num_slots]
    return "\n\n".join([*parts, *warnings(found)])


def _headline(group: Sequence[Row]) -> str:
    head = ["", "tau [95 %]", f"over {_bases(group)} [95 %]", "tok/s", "AR tok/s", "speed-up", "identical"]
    return markdown(
        head,
        [
            [
                row.arm.label,
                _interval(row.tau) + (" DEGENERATE" if row.summary.is_flagged else ""),
                _interval(row.tau_gain, "+.2f"),
                _number(row.summary.output_tps, ".1f"),
                _number(row.plain_tps, ".1f"),
                "no AR arm" if row.plain_tps is None else _number(row.speedup, ".2f"),
                _identical(row),
            ]
            for row in group
        ],
    )


def _bases(group: Sequence[Row]) -> str:
    """With what the group's gains are compared, in a word."""
    bases = {row.arm.base for row in group if row.arm.base}
    if len(bases) != 1:
        return "own argmax"
    return bases.pop()


def _definitions(group: Sequence[Row]) -> str:
    shown = range(min(SHOWN_SLOTS, max(row.arm.num_slots for row in group)))
    head = ["acceptance", "tau", "untrimmed", "sglang", "request mean", "draft", "seeds", "accept rate", "B"]
    lines = []
    for row in group:
        s = row.summary
        taus = (s.tau, s.tau_untrimmed, s.tau_sglang, s.tau_request_mean, s.tau_draft)
        positions = s.pos_uncond + (None,) * SHOWN_SLOTS
        lines.append(
            [row.arm.label, *(_number(value, ".3f") for value in taus), _seeds(row.tau_seeds)]
            + [_number(s.accept_rate, ".3f"), str(row.arm.num_slots + 1)]
            + [_number(positions[i], ".2f") for i in shown]
        )
    return markdown(head + [f"accept@{i + 1}" for i in shown], lines)


def _times(group: Sequence[Row]) -> str:
    head = ["", "ttft p50 ms", "tpot p50 ms", "e2e p50 s", "p99 s", "decode tok/s", "tokens", "blocks"]
    lines = []
    for row in group:
        s = row.summary
        lines.append(
            [
                row.arm.label,
                _number(s.ttft and 1e3 * s.ttft.p50, ".1f"),
                _number(s.tpot and 1e3 * s.tpot.p50, ".2f"),
                _number(s.e2e and s.e2e.p50, ".3f"),
                _number(s.e2e and s.e2e.p99, ".3f"),
                _number(s.decode_tps, ".1f"),
                str(s.completion_tokens),
                str(s.blocks),
                str(s.truncated),
                str(s.failed),
                f"{s.degenerate:.1%}",
            ]
        )
    return markdown([*head, "truncated", "failed", "degenerate"], lines)


def _categories(group: Sequence[Row]) -> str:
    head = ["tau by category", "replies", *(row.arm.label for row in group)]
    lines = [
        [name, str(summary.requests), *(_number(row.categories[name].tau, ".2f") for row in group)]
        for name, summary in group[0].categories.items()
    ]
    mean = ["mean, unweighted", "", *(_number(category_mean(row), ".2f") for row in group)]
    return markdown(head, [*lines, mean])


def _deaths(row: Row) -> str:
    """Of an arm's blocks, by category: those that died by cause, and where on average; and those that did not die."""
    head = ["where blocks die", "blocks", *(f"{name} (slot)" for name in attribution.CAUSES), "kept whole", "ended"]
    lines = []
    for name, found in (row.attribution or {}).items():
        died = [
            f"{found[cause] / max(found['blocks'], 1):.1%} ({_mean_slot(found['slots'][cause])})"
            for cause in attribution.CAUSES
        ]
        rest = [f"{found[key] / max(found['blocks'], 1):.1%}" for key in ("whole", "ended")]
        lines.append([f"{row.arm.label}, {name}", str(found["blocks"]), *died, *rest])
    return markdown(head, lines)


def _mean_slot(counts: Sequence[int]) -> str:
    return f"{sum(i * n for i, n in enumerate(counts, 1)) / sum(counts):.1f}" if sum(counts) else EMPTY


def warnings(found: Sequence[Row]) -> list[str]:
    """What must be read with the tables, one sentence each."""
    notes = []
    for row in found:
        where = f"{row.arm.label}, T = {row.temperature:g}"
        if row.summary.is_flagged:
            notes.append(
                f"DEGENERATE ({where}): {row.summary.degenerate:.1%} of the replies repeat themselves, "
                "which raises tau and speed; this is no result."
            )
        if row.summary.failed:
            notes.append(f"FAILED ({where}): {row.summary.failed} requests, left out of all rates.")
        for difference in row.differences[:SHOWN_DIFFERENCES]:
            notes.append(f"{'Excused' if difference.is_excused else 'DIFFERENT'} ({where}): {_story(difference)}")
        if hidden := row.differences[SHOWN_DIFFERENCES:]:
            notes.append(f"({where}): {len(hidden)} more replies differ; requests.jsonl and summary.json have all.")
    if thin := found[0].thin:
        notes.append(f"Fewer than {FEWEST_PROMPTS} prompts stand behind {', '.join(thin)}: read no row of them alone.")
    if all(row.plain_tps is None for row in found):
        notes.append("No speed-up and no comparison of texts without plain decoding in the same run: add ar to --arms.")
    return notes


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded cells: the first column to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]

    def write(cells):
        padded = (cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = "|" + "|".join(f"{'-' * (w + 1)}:" if i else "-" * (w + 2) for i, w in enumerate(widths)) + "|"
    return "\n".join([write(head), rule, *map(write, lines)])


def _story(difference: Difference) -> str:
    name, turn, _, seed = difference.key
    gap = "unknown" if difference.gap is None else f"{difference.gap:.2g}"
    return (
        f"request {name} (turn {turn}, seed {seed}) parts from AR at token {difference.position}: "
        f"{difference.ids[0]} instead of {difference.ids[1]}, where the target's two choices lie {gap} apart."
    )


def _identical(row: Row) -> str:
    if not row.num_compared:
        return EMPTY
    excused = len(row.differences) - len(row.unexcused)
    note = f" ({excused} excused)" if excused else ""
    return f"{row.num_compared - len(row.differences)}/{row.num_compared}{note}"


def _interval(interval: Interval | None, form: str = ".2f") -> str:
    if interval is None:
        return EMPTY
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _seeds(seeds: tuple[float, float | None] | None) -> str:
    return EMPTY if seeds is None else f"{seeds[0]:.3f} ± {seeds[1]:.3f}"


def _number(value: float | None, form: str) -> str:
    return EMPTY if value is None else f"{value:{form}}"


def _plain(record: Interval | Summary | None) -> dict | None:
    return None if record is None else dataclasses.asdict(record)
