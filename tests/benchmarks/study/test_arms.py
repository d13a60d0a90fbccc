"""The table of arms: what each is trained with, in which order, and steps that follow from CPU time."""

import pytest

from benchmarks.study import arms
from train.config import TrainConfig


def parsed(arm: arms.Arm, steps: int = 2000) -> TrainConfig:
    from absl import flags as absl_flags

    from lilicorr_jax.flags import define_flags, record_from_flags

    values = absl_flags.FlagValues()
    define_flags(TrainConfig, values)
    values(["study", *arms.train_flags(arm, steps, "runs/x")])
    return record_from_flags(TrainConfig, values)


def named(name: str) -> arms.Arm:
    (arm,) = arms.choose([name])
    return arm


def test_first_seeds_come_before_second_ones_and_what_needs_their_times_last():
    names = [arm.name for arm in arms.arms()]
    assert len(set(names)) == len(names) == sum(len(variant.seeds) for variant in arms.VARIANTS)
    last = ["dflash-long-s0", "dflash-3x-s0", "domino-3x-s0", "lilicorr-3x-s0"]
    assert names[:2] == ["dflash-s0", "lilicorr-s0"] and names[-4:] == last
    seeds = [arm.seed for arm in arms.arms()[:-4]]
    assert seeds == sorted(seeds)
    assert {"dflash-s2", "lilicorr-s2", "domino-s0", "dspark-s0"} < set(names)


def test_arms_of_one_seed_differ_in_method_and_weights_alone():
    base = parsed(named("lilicorr-s0"))
    assert (base.seed, base.steps, base.batch_rows, base.anchors) == (0, 2000, 8, 4)
    for name in ("dflash-s0", "lilicorr-margin-s0", "lilicorr-no-penalty-s0", "lilicorr-paper-weight-s0"):
        other = parsed(named(name))
        changed = {field for field in vars(base) if getattr(base, field) != getattr(other, field)}
        assert changed == ({"method"} if name.startswith("dflash") else {"objective"})


def test_the_ablation_gives_the_penalty_s_weight_to_the_cross_entropy():
    base, without = parsed(named("lilicorr-s0")).objective, parsed(named("lilicorr-no-penalty-s0")).objective
    assert without.distractor_weight == 0
    assert without.rerank_weight == base.rerank_weight * (1 + base.distractor_weight)


def test_margin_and_lattice_weight_are_the_paper_s():
    margin = parsed(named("lilicorr-margin-s0")).objective
    assert (margin.margin_weight, margin.margin) == (0.5, 2.0)
    assert parsed(named("lilicorr-paper-weight-s0")).objective.rerank_weight == 0.25


def test_variants_and_arms_are_chosen_by_name():
    assert [arm.name for arm in arms.choose(["domino-s0", "lilicorr-s2", "dflash"])] == [
        *("domino-s0", "lilicorr-s2", "dflash-s0", "dflash-s1", "dflash-s2")
    ]
    assert arms.choose([]) == arms.arms()
    with pytest.raises(ValueError, match="'eagle'"):
        arms.choose(["eagle"])


def test_equal_time_makes_as_many_steps_as_the_reference_s_time_allows():
    times = {"dflash": 0.1, "lilicorr": 0.35}
    assert arms.num_steps(named("dflash-long-s0"), 2000, times) == 7000
    assert arms.num_steps(named("lilicorr-s0"), 2000, {}) == 2000
    assert arms.num_steps(named("lilicorr-3x-s0"), 2000, {}) == 6000
    with pytest.raises(ValueError, match="dflash-long-s0 .* of dflash,"):
        arms.num_steps(named("dflash-long-s0"), 2000, {"lilicorr": 0.35})
