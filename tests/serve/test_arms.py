"""Which arms there are, what they are called, and with which of them each is compared; no weights are needed."""

import pytest

from lilicorr_jax.presets import tiny
from serve import arms
from serve.models import Models


def models(method: str) -> Models:
    preset = tiny()
    drafter, corrector = preset.for_method(method)
    return Models(target=preset.target, drafter=drafter, corrector=corrector, params={})


EVERY = {f"{method}-s0": models(method) for method in ("lilicorr", "dflash", "domino", "dspark")}


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        ("dflash", {"ar", "argmax"}),
        ("lilicorr", {"ar", "argmax", "greedy", "exact", "sampled"}),
        ("domino", {"ar", "greedy"}),
        ("dspark", {"ar", "greedy", "sampled"}),
    ],
)
def test_a_method_has_its_kinds_and_no_other(method, kinds):
    ways = arms.ways(models(method))
    assert set(ways) == kinds
    for kind, way in ways.items():
        assert way.method == {"ar": "ar", "argmax": "dflash"}.get(kind, method)
        assert kind in ("ar", "argmax") or way.proposal == kind


def test_one_export_s_arms_are_named_by_their_kind():
    chosen = arms.choose({"run": EVERY["lilicorr-s0"]}, ("ar", "argmax", "greedy", "sampled"))
    assert list(chosen) == [arm.name for arm, _ in chosen.values()] == ["ar", "argmax", "greedy", "sampled"]
    assert [arm.base for arm, _ in chosen.values()] == [None, None, "argmax", "argmax"]
    assert [arm.draws_drafts for arm, _ in chosen.values()] == [False, False, False, True]
    assert chosen["ar"][0].num_slots == 0 and chosen["greedy"][0].num_slots == 5
    assert chosen["greedy"][0].label == "LiLiCorr (greedy walk)"


def test_several_exports_draft_in_every_way_that_each_has_beside_one_plain_arm():
    chosen = arms.choose(EVERY, ("ar", "argmax", "greedy", "exact"))
    assert list(chosen) == [
        "ar", "lilicorr-s0/argmax", "dflash-s0/argmax", "lilicorr-s0/greedy", "domino-s0/greedy", "dspark-s0/greedy",
        "lilicorr-s0/exact",
    ]  # fmt: skip
    bases = {name: arm.base for name, (arm, _) in chosen.items()}
    assert bases.pop("ar") is None and bases.pop("dflash-s0/argmax") is None
    assert set(bases.values()) == {"dflash-s0/argmax"}  # the drafter that was trained alone
    assert chosen["domino-s0/greedy"][0].label == "domino-s0: Domino"


def test_without_a_drafter_trained_alone_an_export_is_compared_with_its_own_argmax():
    two = {name: EVERY["lilicorr-s0"] for name in ("one", "two")} | {"domino-s0": EVERY["domino-s0"]}
    bases = {name: arm.base for name, (arm, _) in arms.choose(two, ("argmax", "greedy")).items()}
    assert bases["two/greedy"] == "two/argmax" and bases["two/argmax"] is None and bases["domino-s0/greedy"] is None
    assert {arm.base for arm, _ in arms.choose(two, ("greedy",)).values()} == {None}


def test_a_kind_that_no_export_has_is_refused_with_the_methods_that_there_are():
    two = {name: EVERY[name] for name in ("domino-s0", "dspark-s0")}
    with pytest.raises(ValueError, match="'exact'.*domino, dspark"):
        arms.choose(two, ("ar", "exact"))


@pytest.mark.parametrize(
    ("folder", "label"),
    [
        ("runs/demo/export/orbax", "demo"),
        ("docs/study/arms/domino-s0/export", "domino-s0"),
        ("models/Qwen-b16", "Qwen-b16"),
    ],
)
def test_an_export_is_called_after_its_run(folder, label):
    assert arms.label_of(folder) == label


def test_two_exports_of_one_name_are_refused():
    with pytest.raises(ValueError, match="'demo'; rename"):
        arms.load("target", ["a/demo", "b/demo/export"], "float32")


def test_a_jointly_trained_argmax_is_not_called_dflash():
    labels = [arms.choose({"": EVERY[name]}, ("argmax",))["argmax"][0].label for name in ("dflash-s0", "lilicorr-s0")]
    assert labels == ["DFlash", "jointly trained drafter's own argmax"]
