"""Rotary settings in every public spelling become our record and come back; contradictions are named."""

import dataclasses
import json
import re

import numpy as np
import pytest

from lilicorr_jax import presets
from lilicorr_jax.config import RopeConfig
from lilicorr_jax.conversion.config_json import drafter_from_json, drafter_to_json, target_from_json, target_to_json
from lilicorr_jax.models.layers import rotary_frequencies
from tests.conversion.configs import DFLASH, LILICORR, TARGET, YARN, changed

OLD = {"rope_theta": 1e6, "rope_scaling": YARN}
NEW = {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {**YARN, "rope_theta": 1e6}}
LEGACY = {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}


@pytest.mark.parametrize(
    "spelling",
    [OLD, NEW, LEGACY, OLD | {"rope_parameters": NEW["rope_parameters"]}, NEW | {"rope_theta": 1e6}],
    ids=["old", "new", "legacy", "both", "new with an old theta"],
)
@pytest.mark.parametrize("base", [TARGET, DFLASH, LILICORR], ids=["target", "dflash", "lilicorr"])
def test_yarn_is_read_in_every_spelling_and_written_in_both(base, spelling):
    is_target = base is TARGET
    record = (
        target_from_json(changed(base, **spelling)) if is_target else drafter_from_json(changed(base, **spelling))[0]
    )
    want = RopeConfig(theta=1e6, yarn_factor=4.0, yarn_original_positions=32768)
    assert record.rope == want
    written = json.loads(json.dumps(target_to_json(record) if is_target else drafter_to_json(record)))
    assert written["rope_scaling"]["factor"] == written["rope_parameters"]["factor"] == 4.0
    again = target_from_json(written) if is_target else drafter_from_json(written)[0]
    before, after = rotary_frequencies(record.rope, 128), rotary_frequencies(again.rope, 128)
    np.testing.assert_array_equal(before[0], after[0])
    assert before[1] == after[1]


def test_an_odd_yarn_survives_bit_for_bit():
    rope = RopeConfig(
        theta=1e6 / 3, yarn_factor=10 / 3, yarn_original_positions=4096, yarn_beta_fast=31.7, yarn_beta_slow=1.1,
        yarn_attention_factor=1 / 3,
    )  # fmt: skip
    ours = dataclasses.replace(presets.tiny().target, rope=rope)
    assert target_from_json(json.loads(json.dumps(target_to_json(ours)))).rope == rope


@pytest.mark.parametrize(
    "changes, value",
    [
        ({**OLD, "rope_parameters": {**YARN, "factor": 8.0, "rope_theta": 1e6}}, "8.0"),
        ({"rope_theta": 1e6, "rope_scaling": None, "rope_parameters": {**YARN, "rope_theta": 1e6}}, "yarn_factor=4.0"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, "100000.0"),
        ({"rope_theta": ...}, "rope_theta"),
        ({"rope_theta": "1e6"}, "'1e6'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "0.5"),
    ],
)
def test_rotary_settings_that_disagree_or_lack_something_are_refused(changes, value):
    with pytest.raises(ValueError, match=re.escape(value)):
        target_from_json(changed(TARGET, **changes))
