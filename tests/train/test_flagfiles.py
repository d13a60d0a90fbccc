"""The recipes as they stand in the repository, against the paper's numbers and against each other."""

from pathlib import Path

import pytest
from absl import flags

from lilicorr_jax.conversion.checkpoint import abstract_drafter
from lilicorr_jax.flags import define_flags, record_from_flags
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
