"""What the study trains: a table of arms, each a line of flags of `train.main` with a seed.

Arms of one seed are paired: the same start of the backbone, the same order of rows, the same anchors. Owns no process
and no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLAGFILE = "train/flagfiles/demo.flags"
STEPS = 2000
REFERENCE, BASE = "lilicorr", "dflash"  # the method, and the one that it is compared with


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of training.

    Attributes:
        label: what tables call it.
        flags: of `train.main`, behind the shared flagfile.
        seeds: of training.
        kinds: deterministic ways of drafting, as `serve.bench` calls them.
        drawn: ways whose drafts are drawn at a temperature.
        confirmed: the engine also decodes the first seed in every way, to be held against what was predicted.
        equal_time: it makes as many steps as the reference's CPU time allows, instead of the reference's steps.
        times: how often it makes the study's steps.
        base: the variant that its gains are over; of a base, itself.
    """

    name: str
    label: str
    flags: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    kinds: tuple[str, ...]
    drawn: tuple[str, ...] = ()
    confirmed: bool = False
    equal_time: bool = False
    times: int = 1
    base: str = BASE

    @property
    def is_base(self) -> bool:
        return self.base == self.name


LONGER, LONG_BASE = 3, "dflash-3x"
ARGMAX, GREEDY, WALKS, DRAWN = ("argmax",), ("greedy",), ("greedy", "exact", "argmax"), ("sampled",)

VARIANTS = (
    Variant(
        name="dflash", label="DFlash", flags=("--method=dflash",), seeds=(0, 1, 2), kinds=ARGMAX,
        confirmed=True,
    ),
    Variant(
        name="lilicorr", label="LiLiCorr", flags=("--method=lilicorr",), seeds=(0, 1, 2), kinds=WALKS,
        drawn=DRAWN, confirmed=True,
    ),
    Variant(
        name="lilicorr-margin", label="LiLiCorr + margin", kinds=WALKS,
        flags=("--method=lilicorr", "--objective.margin_weight=0.5", "--objective.margin=2"),
    ),
    Variant(  # lambda is 1, so the cross-entropy's weight doubles
        name="lilicorr-no-penalty", label="LiLiCorr without the distractor penalty", kinds=WALKS,
        flags=("--method=lilicorr", "--objective.distractor_weight=0", "--objective.rerank_weight=0.1"),
    ),
    Variant(
        name="lilicorr-paper-weight", label="LiLiCorr, the paper's lattice weight 0.25", kinds=WALKS,
        flags=("--method=lilicorr", "--objective.rerank_weight=0.25"),
    ),
    Variant(
        name="domino", label="Domino", flags=("--method=domino",), seeds=(0, 1, 2), kinds=GREEDY, confirmed=True,
    ),
    Variant(
        name="dspark", label="DSpark", flags=("--method=dspark",), seeds=(0, 1, 2), kinds=GREEDY, drawn=DRAWN,
        confirmed=True,
    ),
    Variant(
        name="dflash-long", label="DFlash at LiLiCorr's CPU time", flags=("--method=dflash",), kinds=ARGMAX,
        equal_time=True,
    ),
    Variant(
        name=LONG_BASE, label="DFlash, 3 times the steps", flags=("--method=dflash",), kinds=ARGMAX,
        times=LONGER, base=LONG_BASE,
    ),
    Variant(
        name="domino-3x", label="Domino, 3 times the steps", flags=("--method=domino",), kinds=GREEDY,
        times=LONGER, base=LONG_BASE,
    ),
    Variant(
        name="lilicorr-3x", label="LiLiCorr, 3 times the steps", flags=("--method=lilicorr",), kinds=WALKS,
        times=LONGER, base=LONG_BASE,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A variant at one seed."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant.name}-s{self.seed}"


def arms(variants: Sequence[Variant] = VARIANTS) -> list[Arm]:
    """Every arm, first seeds before second ones; what needs others' times, and what takes longest, comes last."""
    deepest = max(len(variant.seeds) for variant in variants)
    rounds = [
        Arm(variant=variant, seed=variant.seeds[i])
        for i in range(deepest)
        for variant in variants
        if i < len(variant.seeds)
    ]
    return sorted(rounds, key=lambda arm: (arm.variant.times, arm.variant.equal_time))


def choose(names: Sequence[str], variants: Sequence[Variant] = VARIANTS) -> list[Arm]:
    """The arms of these names, of arms or of whole variants, in the order given; all if there is none.

    Raises:
        ValueError: a name belongs to nothing.
    """
    everything = arms(variants)
    found = {arm.name: [arm] for arm in everything}
    found |= {variant.name: [arm for arm in everything if arm.variant is variant] for variant in variants}
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"--arms names {unknown[0]!r}; choose among {', '.join(found)}.")
    return list(dict.fromkeys(arm for name in names for arm in found[name])) or everything


def num_steps(arm: Arm, steps: int, step_cpu_s: Mapping[str, float]) -> int:
    """Optimizer steps of an arm.

    Args:
        steps: what a variant makes, unless it says otherwise.
        step_cpu_s: CPU seconds of a step by variant, timed side by side.

    Raises:
        ValueError: the arm's steps follow from times that are not known yet.
    """
    if not arm.variant.equal_time:
        return steps * arm.variant.times
    if missing := [name for name in (REFERENCE, BASE) if name not in step_cpu_s]:
        raise ValueError(f"The steps of {arm.name} follow from the CPU time of {missing[0]}, which is not timed yet.")
    return round(steps * step_cpu_s[REFERENCE] / step_cpu_s[BASE])


def train_flags(arm: Arm, steps: int, output: str) -> list[str]:
    """The arguments of `train.main`; the last occurrence of a flag wins."""
    settings = [f"--seed={arm.seed}", f"--steps={steps}", f"--output={output}"]
    return [f"--flagfile={FLAGFILE}", *arm.variant.flags, *settings]
