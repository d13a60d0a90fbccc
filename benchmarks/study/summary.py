"""From measured blocks to the numbers of the study: tau, its spread and interval, and gains; what results.json holds.

tau is block-weighted: tokens emitted over verification blocks, the target's own token counted. Three spreads, never to
be mixed: over training seeds (sample deviation, where there are several), over sampling seeds at a temperature, and a
95 % bootstrap interval over prompts, which pools the training seeds. Gains are relative and paired: same seeds, and the
same prompts in each resample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.study.blocks import Reply
from serve.report import LEVEL, RESAMPLES, mean_and_std

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its spreads; None where there is no such spread."""

    mean: float  # over training seeds
    std: float | None  # over training seeds, n - 1
    low: float  # of the interval over prompts
    high: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of drafting of one variant, at one temperature, in one category.

    Attributes:
        seeds: of training.
        taus: tokens per block, of each seed.
        tau: their mean and spreads.
        sampling_std: deviation over sampling seeds, the mean over training seeds; None at temperature 0.
        gain: relative, over the base's tau at the same training seeds; None for a base itself, and without one.
    """

    variant: str
    way: str
    temperature: float
    category: str
    seeds: tuple[int, ...]
    taus: tuple[float, ...]
    tau: Estimate
    sampling_std: float | None
    gain: Estimate | None


class Counts:
    """Tokens and blocks of one way of drafting, [training seeds, sampling seeds, prompts, 2]."""

    def __init__(self, by_seed: Mapping[int, Sequence[Reply]]):
        self.seeds = tuple(sorted(by_seed))
        first = by_seed[self.seeds[0]]
        prompts = sorted({reply.id for reply in first})
        draws = sorted({reply.seed for reply in first})
        self.values = np.zeros((len(self.seeds), len(draws), len(prompts), 2), np.int64)
        for place, seed in enumerate(self.seeds):
            if len(by_seed[seed]) != len(draws) * len(prompts):
                raise ValueError(f"Seed {seed} has {len(by_seed[seed])} replies, not {len(draws)} of {len(prompts)}.")
            for reply in by_seed[seed]:
                self.values[place, draws.index(reply.seed), prompts.index(reply.id)] = reply.counts

    def of_seeds(self, seeds: Sequence[int]) -> np.ndarray:
        """The counts of these training seeds."""
        return self.values[[self.seeds.index(seed) for seed in seeds]]

    @property
    def taus(self) -> np.ndarray:
        """tau of every training seed."""
        return ratio(self.values.sum(axis=(1, 2)))

    @property
    def sampling_std(self) -> float | None:
        if self.values.shape[1] == 1:
            return None
        return float(ratio(self.values.sum(axis=2)).std(axis=1, ddof=1).mean())


def ratio(counts: np.ndarray) -> np.ndarray:
    return counts[..., 0] / counts[..., 1]


def resampled(counts: np.ndarray) -> np.ndarray:
    """Counts of prompts, [..., prompts, 2], pooled over the leading axes and summed over each resample of prompts."""
    pooled = counts.reshape(-1, *counts.shape[-2:]).sum(axis=0)
    drawn = np.random.default_rng(0).integers(len(pooled), size=(RESAMPLES, len(pooled)))
    return pooled[drawn].sum(axis=1)


def estimate(by_seed: np.ndarray, drawn: np.ndarray) -> Estimate:
    """From one value per training seed and one per resample."""
    mean, std = mean_and_std(by_seed.tolist())
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean=mean, std=std, low=float(low), high=float(high))


def gain(ours: Counts, base: Counts) -> Estimate:
    """tau over the base's, minus 1, over the training seeds that both have.

    Raises:
        ValueError: they share no seed.
    """
    seeds = [seed for seed in ours.seeds if seed in base.seeds]
    if not seeds:
        raise ValueError(f"Seeds {ours.seeds} and {base.seeds} have none in common; a gain needs paired runs.")
    own, theirs = ours.of_seeds(seeds), base.of_seeds(seeds)
    by_seed = ratio(own.sum(axis=(1, 2))) / ratio(theirs.sum(axis=(1, 2))) - 1
    return estimate(by_seed, ratio(resampled(own)) / ratio(resampled(theirs)) - 1)


def rows(
    measured: Mapping[str, Mapping[int, Sequence[Reply]]], bases: Mapping[str, tuple[str, str]]
) -> list[Row]:  # fmt: skip
    """A row for every variant, way, temperature and category.

    Args:
        measured: by variant, by training seed; not every seed needs to have every way.
        bases: by variant, the (variant, way) that its gains are over.
    """
    found: dict[tuple[str, str, float, str], Counts] = {}
    for variant, by_seed in measured.items():
        everything = [reply for replies in by_seed.values() for reply in replies]
        for way, temperature in dict.fromkeys((reply.way, reply.temperature) for reply in everything):
            for category in (ALL, *sorted({reply.category for reply in everything})):
                asked = {
                    seed: [
                        reply
                        for reply in replies
                        if (reply.way, reply.temperature) == (way, temperature) and category in (ALL, reply.category)
                    ]
                    for seed, replies in by_seed.items()
                }
                if any(asked.values()):
                    found[variant, way, temperature, category] = Counts({seed: r for seed, r in asked.items() if r})
    return [
        Row(
            variant=variant,
            way=way,
            temperature=temperature,
            category=category,
            seeds=counts.seeds,
            taus=tuple(counts.taus.tolist()),
            tau=estimate(counts.taus, ratio(resampled(counts.values))),
            sampling_std=counts.sampling_std,
            gain=gain(counts, found[*base, temperature, category]) if base not in (None, (variant, way)) else None,
        )
        for (variant, way, temperature, category), counts in found.items()
        for base in [bases.get(variant)]
    ]


def to_json(found: Sequence[Row]) -> list[dict]:
    return [asdict(row) for row in found]


def from_json(values: Sequence[dict]) -> list[Row]:
    """What `to_json` gave, after a passage through JSON."""

    def row(value: dict) -> Row:
        estimates = {name: Estimate(**value[name]) for name in ("tau", "gain") if value[name]}
        return Row(**value | estimates | {name: tuple(value[name]) for name in ("seeds", "taus")})

    return [row(value) for value in values]
