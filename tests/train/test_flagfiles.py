"""The recipes as they stand in the repository, against the paper's numbers and against each other."""

import contextlib
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from absl import flags

from lilicorr_jax.conversion.checkpoint import abstract_drafter
from lilicorr_jax.flags import define_flags, flags_from_record, record_from_flags
from lilicorr_jax.losses.terms import Terms, joint_loss
from lilicorr_jax.presets import PRESETS
from lilicorr_jax.sharding import count_parameters
from train.config import TrainConfig

FLAGFILES = Path(__file__).parents[2] / "train" / "flagfiles"

TABLE_4 = {  # copied from the paper by hand
    "method": "lilicorr",
    "objective.slot_decay": 7.0,
    "objective.distractor_weight": 1.0,
    "objective.rerank_weight": 0.25,
    "objective.margin_weight": 0.0,
    "drafter_learning_rate": 6e-4,
    "reranker_learning_rate": 1.5e-4,
    "drafter_weight_decay": 0.0,
    "reranker_weight_decay": 0.01,
    "warmup_share": 0.04,
    "clip": 1.0,
    "batch_rows": 64,
    "sequence_length": 3072,
    "epochs": 6,
    "steps": None,
    "anchors": 512,
}
TABLE_4_DRAFTER = {"input_rows": 16, "num_slots": 15, "num_layers": 5, "dtype": "bfloat16"}
TABLE_4_RERANKER = {
    "num_candidates": 8,
    "factor_width": 1024,
    "cosine_scale": 8.0,
    "num_layers": 2,
    "width": 1024,
    "num_heads": 8,
    "ffn_width": 2048,
    "dtype": "bfloat16",
}


def read(name: str) -> tuple[TrainConfig, set[str]]:
    """The record that a flagfile describes, and the flags that it names."""
    flag_values = flags.FlagValues()
    define_flags(TrainConfig, flag_values)
    with contextlib.chdir(FLAGFILES.parents[1]):  # a flagfile names another as the command line does, from the root
        flag_values(["test", f"--flagfile={FLAGFILES / name}"])
    named = {name for name in flag_values if flag_values[name].present}
    return record_from_flags(TrainConfig, flag_values), named


def value(record, path: str):
    for name in path.split("."):
        record = getattr(record, name)
    return record


@pytest.mark.parametrize(
    ("name", "reranker_parameters", "width"), [("qwen3_8b", 36_758_794, 4096), ("qwen3_4b", 32_040_202, 2560)]
)
def test_paper_flagfile_states_table_4_number_by_number(name, reranker_parameters, width):
    config, named = read(f"{name}.flags")
    assert {path: value(config, path) for path in TABLE_4} == TABLE_4
    omitted = {"objective.margin_weight", "steps"}  # the base method has no margin, and epochs decide
    assert set(TABLE_4) - named == omitted, "a number of the table is left to a default"
    drafter, reranker = config.models()
    assert config.preset == name and drafter.width == width
    assert {field: getattr(drafter, field) for field in TABLE_4_DRAFTER} == TABLE_4_DRAFTER
    assert {field: getattr(reranker, field) for field in TABLE_4_RERANKER} == TABLE_4_RERANKER
    assert count_parameters(abstract_drafter(drafter, reranker)["reranker"]) == reranker_parameters
    assert PRESETS[name]().target.width == width


METHODS = {  # copied from the papers and the public code by hand
    "dflash": {"method": "dflash"},
    "lilicorr_margin": {"objective.margin_weight": 0.5, "objective.margin": 2.0},
    "domino": {"method": "domino", "objective.base_weight_start": 1.0, "objective.base_decay_share": 1.0},
    "dspark": {
        "method": "dspark",
        "objective.cross_entropy_weight": 0.1,
        "objective.distance_weight": 0.9,
        "objective.confidence_weight": 1.0,
    },
}


@pytest.mark.parametrize("size", ["8b", "4b"])
@pytest.mark.parametrize("method", METHODS)
def test_flagfile_of_another_method_states_its_numbers_and_changes_nothing_else(size, method):
    base, named_by_base = read(f"qwen3_{size}.flags")
    config, named = read(f"qwen3_{size}_{method}.flags")
    assert {path: value(config, path) for path in METHODS[method]} == METHODS[method]
    assert named == named_by_base | METHODS[method].keys(), "a number is left to a default"
    changed = set(flags_from_record(config)) ^ set(flags_from_record(base))
    assert {line.removeprefix("--").split("=")[0] for line in changed} <= {"output"} | METHODS[method].keys()
    assert config.output != base.output


def test_ablation_without_the_distractor_penalty_needs_flags_alone():
    """Appendix C gives the penalty's weight to the cross-entropy."""
    base = read("qwen3_8b.flags")[0].objective
    ablated = replace(base, distractor_weight=0.0, rerank_weight=base.rerank_weight * (1 + base.distractor_weight))
    sums = dict(rerank_sum=3, distractor_sum=5, num_lattice_slots=1)
    terms = Terms.zero().replace(**{name: jnp.float32(value) for name, value in sums.items()})
    assert float(joint_loss(terms, base)) == 0.25 * 3 + 0.25 * 5 and float(joint_loss(terms, ablated)) == 0.5 * 3
    flags_named = f"--objective.distractor_weight=0 --objective.rerank_weight={ablated.rerank_weight}"
    assert all(flags_named in (FLAGFILES / f"qwen3_{size}.flags").read_text() for size in ("8b", "4b"))


def test_demo_flagfile_is_the_small_recipe():
    config, _ = read("demo.flags")
    assert (config.batch_rows, config.anchors) == (8, 4)  # 32 blocks a step
    assert (config.drafter_learning_rate, config.reranker_learning_rate) == (2e-3, 4e-3)
    assert config.objective.rerank_weight == 0.05
    assert config.models()[1].init == "fan_in"


def test_smoke_flagfile_is_the_demo_made_short():
    demo, smoke = read("demo.flags")[0], read("smoke.flags")[0]
    assert smoke.steps * smoke.batch_rows < demo.steps * demo.batch_rows / 50
    assert (smoke.target, smoke.data, smoke.preset) == (demo.target, demo.data, demo.preset)
    assert smoke.objective == demo.objective and smoke.output != demo.output


@pytest.mark.parametrize("path", sorted(FLAGFILES.glob("*.flags")), ids=lambda path: path.name)
def test_flagfile_says_where_it_comes_from_what_it_costs_and_what_it_gave(path):
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("Source", "Hardware", "Time", "Result", f"--flagfile=train/flagfiles/{path.name}"):
        assert word in header, f"{path.name} does not state its {word}"
