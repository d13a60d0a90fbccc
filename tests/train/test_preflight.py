"""The train step as machine code for eight H100s: what it holds, and that parameters travel rather than activations."""

import json
from dataclasses import replace

import pytest

from lilicorr_jax.presets import PRESETS
from pallas_kernels.program import Instruction, Memory, Program
from train import preflight
from train.config import MeshConfig, TrainConfig

VOCAB, CHUNK, TOKENS, ANCHORS = 16_384, 32, 64, 12  # 64 tokens and 12 x 5 slots a row: more than a chunk of either
RECIPE = dict(target="models/Qwen3-8B", data="replies.npz", output="run", dry_run=True, json=True)


@pytest.fixture(scope="module")
def wide_vocabulary():
    """The smallest preset with a vocabulary beside which all else is small, as at Qwen3's size; layers only repeat."""
    tiny = PRESETS["tiny"]()
    layers = dict(num_layers=1, num_target_layers=2, target_layer_ids=(0,))
    wide = replace(
        tiny,
        target=replace(tiny.target, vocab_size=VOCAB, num_layers=2),
        drafter=replace(tiny.drafter, vocab_size=VOCAB, **layers),
        reranker=replace(tiny.reranker, num_layers=1),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", lambda: wide)
        yield


@pytest.fixture(scope="module")
def config(wide_vocabulary):
    return TrainConfig(
        **RECIPE, preset="tiny", steps=10, batch_rows=8, sequence_length=TOKENS, anchors=ANCHORS,
        vocabulary_chunk=CHUNK, anchor_chunk=4, mesh=MeshConfig(fsdp=8),
    )  # fmt: skip


@pytest.fixture(scope="module")
def program(config):
    return preflight.compile_step(config)


@pytest.mark.aot
@pytest.mark.slow
class TestStepOnEightDevices:
    """Slow because even the smallest step, with its backward pass, compiles for a minute."""

    @pytest.fixture(scope="class")
    def found(self, config, program):
        return preflight.findings(config, program)

    def test_nothing_as_wide_as_the_vocabulary_outlives_a_chunk(self, found):
        assert found["fits"] and found["wider_than_a_chunk"] == [] and found["larger_than_a_chunk"] == []
        assert found["chunk_bytes"] == CHUNK * VOCAB * 4

    def test_what_is_larger_is_a_gathered_table(self, found):
        assert set(found["gathered_parameters"].values()) <= {"target/embed/embedding", "target/unembed/embedding"}

    def test_no_host_is_waited_for(self, found):
        assert found["conditionals"] == 0 and found["host_transfers"] == []

    def test_parameters_travel_and_activations_stay(self, found):
        """Scalars and what selects anchors aside: the rows of one batch fill more than that."""
        assert max(found["activations_moved"].values(), default=0) < TOKENS * PRESETS["tiny"]().target.width
        assert {"all-gather"} <= set(found["collectives"])

    def test_a_device_holds_an_eighth_of_what_is_split(self, program):
        """Against sums over the shapes in the configuration; norms are whole everywhere."""
        t = PRESETS["tiny"]().target
        held = program.arguments["target_params['embed']['embedding']"]
        assert held == VOCAB * t.width * 4 // 8

    def test_the_report_has_every_number(self, config, found):
        assert json.loads(json.dumps(found)) == found
        text = preflight.as_table(config, found)
        assert "an estimate" in text.lower() and "all-gather" in text


def test_what_is_too_wide_is_named():
    """Planted: the logits of all slots and of all positions; a chunk's and a table may be there."""
    config = TrainConfig(**RECIPE, preset="qwen3_8b", steps=1)

    def made(scope, *sizes):
        return Instruction(name=scope, opcode="fusion", shapes=(("f32", sizes),), scope=scope, computation="", text="")

    program = Program(
        text="", arguments={}, launches=(), command_buffers=0, captured=0, flops=0.0, bytes_accessed=0.0, kernels=(),
        memory=Memory(arguments=0, outputs=0, aliased=0, temporary=0),
        instructions=(
            made("slots", 7680, 151_936), made("positions", 1, 3072, 151_936), made("chunk", 1024, 151_936),
            made("table", 151_936, 4096),
        ),
    )  # fmt: skip
    assert [i.scope for i in preflight.vocabulary_wide(config, program)] == ["slots", "positions"]


@pytest.mark.aot
@pytest.mark.slow
def test_the_recipe_of_qwen3_8b_fits():
    """The step of train/flagfiles/qwen3_8b.flags; slow because 36 layers compile for many minutes."""
    config = TrainConfig(**RECIPE, preset="qwen3_8b", epochs=6, mesh=MeshConfig(fsdp=8), accumulation=8)
    found = preflight.findings(config, preflight.compile_step(config))
    assert found["fits"] and found["wider_than_a_chunk"] == [] and found["larger_than_a_chunk"] == []
