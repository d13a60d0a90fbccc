"""The speculative block as machine code for an H100: what it launches, and that nothing in it waits for the host."""

import dataclasses
import json
from dataclasses import replace

import pytest

from lilicorr_jax.presets import PRESETS
from pallas_kernels import aot
from serve import preflight
from serve.preflight import PreflightConfig

KERNELS = {"topk_logprobs_chunks": 1, "topk_logprobs_merge": 1, "lattice_attention": 2, "match_walk_greedy": 1}
DRAFTING_LAUNCHES = {1: 40, 32: 36}  # by texts, at most; a few texts' products are cut into parts that are then summed


def shallow():
    """Qwen3-8B with two target layers and one of the drafter's: layers only repeat each other."""
    whole = PRESETS["qwen3_8b"]()
    fewer = dict(num_layers=1, num_target_layers=2, target_layer_ids=(0,))
    return replace(whole, target=replace(whole.target, num_layers=2), drafter=replace(whole.drafter, **fewer))


@pytest.fixture(scope="module")
def block():
    return preflight.compile_block(PreflightConfig(), shallow())


def check_block(found):
    assert found["fits"] and found["loops"] == found["conditionals"] == 0 and found["host_transfers"] == []
    assert found["kernel_calls"] == KERNELS
    assert [kernel for kernel in found["kernels"] if kernel["spill_bytes"]] == []


@pytest.mark.aot
def test_a_block_is_one_program_with_each_kernel_once_and_the_attention_in_each_lattice_layer(block):
    found = preflight.findings(PreflightConfig(), block, {})
    check_block(found)
    stages = {name.split()[0] for name in found["launches_by_stage"]}
    assert {"draft", "propose", "target", "advance"} <= stages
    assert sum(found["launches_by_stage"].values()) == found["launches"] == len(block.launches)
    assert json.loads(json.dumps(found)) == found
    assert "an estimate" in preflight.as_table(PreflightConfig(), found).lower()


@pytest.mark.aot
def test_weights_and_caches_are_counted_to_the_byte(block):
    """Against sums over the shapes in the configuration."""
    t = shallow().target
    embed = t.vocab_size * t.width * 2
    assert block.arguments["params['target']['embed']['embedding']"] == embed
    cache = 2 * t.num_kv_heads * (4096 + 16) * t.head_width * 2
    held = sum(size for name, size in block.arguments.items() if "target_cache" in name)
    assert held == t.num_layers * cache
    assert block.memory.arguments == pytest.approx(sum(block.arguments.values()), rel=1e-3)


@pytest.mark.aot
@pytest.mark.parametrize("concurrency", DRAFTING_LAUNCHES)
def test_from_the_final_norm_to_the_drafted_ids_takes_few_launches(concurrency):
    program = preflight.compile_drafting(PreflightConfig(concurrency=concurrency), shallow())
    assert len(program.launches) <= DRAFTING_LAUNCHES[concurrency]
    assert program.kernel_calls == KERNELS and program.opcodes["while"] == 0


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 32])
def test_the_whole_of_qwen3_8b_fits(concurrency):
    config = PreflightConfig(concurrency=concurrency)
    check_block(preflight.findings(config, preflight.compile_block(config), {}))


def test_without_the_compiler_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(aot, "missing_packages", lambda: ["nvidia-nvvm"])
    assert preflight.main(["--target=tiny"]) == 2
    assert "nvidia-nvvm; install it with pip install -e '.[aot]'" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["concurrency", "context"])
def test_sizes_are_at_least_one(field):
    with pytest.raises(ValueError, match=f"--{field} must be at least 1; got 0"):
        PreflightConfig(**{field: 0})


def test_every_choice_of_the_record_is_one_of_the_presets():
    choices = next(f for f in dataclasses.fields(PreflightConfig) if f.name == "target").type
    assert set(choices.__args__) == set(PRESETS)
