"""What does not belong together or can't be computed is refused by the value, whatever read or made the record."""

from dataclasses import replace

import pytest

from lilicorr_jax.config import METHODS, ObjectiveConfig, check_pair, corrector_name
from lilicorr_jax.presets import PRESETS, tiny

TARGET, DRAFTER, RERANKER = (getattr(tiny(), name) for name in ("target", "drafter", "reranker"))
DOMINO, DSPARK = tiny().domino, tiny().dspark


@pytest.mark.parametrize(
    ("target", "drafter", "reranker", "sentence"),
    [
        (dict(width=48), {}, {}, "width: target has 48, drafter expects 40"),
        (dict(vocab_size=128), {}, {}, "vocab_size: target has 128, drafter expects 96"),
        (dict(num_layers=7), {}, {}, "number of target layers: target has 7, drafter expects 6"),
        ({}, dict(num_slots=4, input_rows=5), {}, "number of slots: drafter has 4, reranker expects 5"),
        ({}, {}, dict(drafter_width=48), "drafter width: drafter has 40, reranker expects 48"),
    ],
)
def test_models_that_do_not_belong_together_are_refused_by_what_differs(target, drafter, reranker, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_pair(replace(TARGET, **target), replace(DRAFTER, **drafter), replace(RERANKER, **reranker))


def test_every_disagreement_is_named_at_once_and_presets_have_none():
    with pytest.raises(
        ValueError, match=r"width: .* 48, .* 40; vocab_size: .* 128, .* 96; number of slots: .* 5, .* 7"
    ):
        check_pair(replace(TARGET, width=48, vocab_size=128), DRAFTER, replace(RERANKER, num_slots=7))
    for preset in PRESETS.values():
        for method in METHODS:
            check_pair(preset().target, *preset().for_method(method))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_methods_share_a_drafter_but_for_its_rows(preset):
    """Fifteen slots behind every anchor of the public presets: rows 1 to 15, rows 0 to 14 of 16, or all of 15 rows."""
    ours = PRESETS[preset]()
    slots = ours.drafter.num_slots
    assert preset == "tiny" or slots == 15
    wanted = {
        "dflash": (slots + 1, "same", None),
        "lilicorr": (slots + 1, "same", "reranker"),
        "domino": (slots + 1, "next", "domino"),
        "dspark": (slots, "next", "dspark"),
    }
    for method in METHODS:
        drafter, corrector = ours.for_method(method)
        name = corrector and corrector_name(corrector)
        assert (drafter.input_rows, drafter.slot_convention, name) == wanted[method]
        assert replace(drafter, input_rows=slots + 1, slot_convention="same") == ours.drafter


@pytest.mark.parametrize(
    ("corrector", "sentence"),
    [
        (replace(DOMINO, vocab_size=97), "vocab_size: drafter has 96, domino expects 97"),
        (replace(DSPARK, drafter_width=48), "drafter width: drafter has 40, dspark expects 48"),
        (replace(DSPARK, num_slots=6), "number of slots: drafter has 5, dspark expects 6"),
    ],
)
def test_a_corrector_of_another_drafter_is_refused_by_what_differs(corrector, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_pair(TARGET, DRAFTER, corrector)


@pytest.mark.parametrize(
    ("record", "changes", "value"),
    [
        (RERANKER, dict(num_candidates=0), "got 0"),
        (RERANKER, dict(num_candidates=17), "got 17"),
        (DRAFTER, dict(target_layer_ids=(1, 5)), r"lie in \[0, 5\) for a target of 6 layers; got \(1, 5\)"),
        (DRAFTER, dict(target_layer_ids=(-1,)), r"got \(-1,\)"),
        (DRAFTER, dict(mask_id=96), "got 96"),
        (DRAFTER, dict(input_rows=5), "need at least 6 input rows; got 5"),
        (DOMINO, dict(plain_slots=6), "got 6"),
        (DOMINO, dict(state_width=0), "got 0"),
        (DSPARK, dict(rank=-1), "got -1"),
        (TARGET, dict(num_kv_heads=3), "got 3 and 4"),
        (TARGET, dict(eos_ids=(1, 96)), r"got \[96\]"),
        (ObjectiveConfig(), dict(margin_weight=1.5), "got 1.5"),
        (ObjectiveConfig(), dict(distractor_weight=float("nan")), "got nan"),
        (ObjectiveConfig(), dict(rerank_weight=-0.25), "got -0.25"),
        (ObjectiveConfig(), dict(slot_decay=0.0), "got 0.0"),
    ],
)
def test_a_value_out_of_range_is_refused(record, changes, value):
    with pytest.raises(ValueError, match=value):
        replace(record, **changes)
