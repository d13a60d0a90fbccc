"""Everything that is known of the kept arms, as one record: what results.json holds and the page is made of."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.study import blocks, summary
from benchmarks.study.arms import VARIANTS, Variant
from benchmarks.study.measure import BLOCKS_FILE, MEASURED_FILE
from benchmarks.study.train import ARM_FILE, METRICS_FILE

NUM_SLOTS = 15


def gather(keep: Path, costs: Mapping[str, float], variants: Sequence[Variant] = VARIANTS) -> dict:
    """What was made, cost and measured.

    Args:
        keep: folder of kept arms; those that are not measured are left out.
        costs: CPU seconds of a step by variant, all at one commit.

    Returns:
        `arms`: records of training, with progress on held-out rows; `rows`: see `summary.Row`; `deaths`: by
        "variant/way/temperature", of all training seeds; `curves`: by "variant/way", means over training seeds;
        `engine`: how many replies the engine decoded with the predicted blocks, over all arms; `costs`; `prompts`: how
        many; `seeds`: of sampling.
    """
    folders = sorted(path.parent for path in keep.glob(f"*/{MEASURED_FILE}"))
    records = [json.loads((folder / ARM_FILE).read_text()) for folder in folders]
    measured = [json.loads((folder / MEASURED_FILE).read_text()) for folder in folders]
    replies: dict[str, dict[int, list[blocks.Reply]]] = {}
    for folder, record in zip(folders, records, strict=True):
        replies.setdefault(record["variant"], {})[record["seed"]] = blocks.read(folder / BLOCKS_FILE)
        record["held_out"] = held_out(folder / METRICS_FILE)
    order = [variant.name for variant in variants if variant.name in replies]
    bases = {variant.name: (variant.base, "argmax") for variant in variants if variant.base in replies}
    rows = summary.rows({name: replies[name] for name in order}, bases)
    everything = [reply for by_seed in replies.values() for group in by_seed.values() for reply in group]
    return {
        "prompts": len({reply.id for reply in everything}),
        "seeds": sorted({reply.seed for reply in everything if reply.temperature > 0}),
        "arms": records,
        "costs": dict(costs),
        "rows": summary.to_json(rows),
        "deaths": deaths({name: replies[name] for name in order}),
        "curves": mean_curves(records, measured),
        "engine": engine_totals(measured),
    }


def held_out(metrics: Path) -> list[dict]:
    """The measurements on held-out rows of a training run."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {name.removeprefix("held_out_"): value for name, value in line.items()}
        for line in lines
        if "held_out_drafter_loss" in line
    ]


def deaths(replies: Mapping[str, Mapping[int, Sequence[blocks.Reply]]]) -> dict[str, dict]:
    """Where blocks died, by "variant/way/temperature", in all and by category, of all training seeds."""
    found = {}
    for variant, by_seed in replies.items():
        everything = [reply for group in by_seed.values() for reply in group]
        for way, temperature in dict.fromkeys((reply.way, reply.temperature) for reply in everything):
            asked = [r for r in everything if (r.way, r.temperature) == (way, temperature)]
            categories = sorted({reply.category for reply in asked})
            found[f"{variant}/{way}/{temperature:g}"] = {summary.ALL: blocks.deaths(asked, NUM_SLOTS)} | {
                category: blocks.deaths([r for r in asked if r.category == category], NUM_SLOTS)
                for category in categories
            }
    return found


def mean_curves(records: Sequence[Mapping], measured: Sequence[Mapping]) -> dict[str, dict]:
    """Curves over slots by "variant/way", each the mean over training seeds."""
    found: dict[str, list[dict]] = {}
    for record, one in zip(records, measured, strict=True):
        for way, curves in one["curves"].items():
            found.setdefault(f"{record['variant']}/{way}", []).append(curves)
    return {
        key: {
            part: {
                name: [mean(values) for values in zip(*(curves[part][name] for curves in group), strict=True)]
                for name in group[0][part]
            }
            for part in group[0]
        }
        for key, group in found.items()
    }


def engine_totals(measured: Sequence[Mapping]) -> dict[str, int]:
    counts = [count for one in measured for count in one["engine"].values()]
    return {key: sum(count[key] for count in counts) for key in ("replies", "same_blocks")}
