"""Reading compiled programs: against a program written by hand."""

from pathlib import Path

import pytest

from pallas_kernels.program import (
    Launch,
    count_flops,
    read_arguments,
    read_instructions,
    read_kernels,
    read_launches,
    shape_bytes,
)

HLO = """\
HloModule jit_block, is_scheduled=true

%fused_add (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %add.1 = bf16[4,8]{1,0} add(%p, %p), metadata={op_name="jit(block)/propose/add"}
}

%body (carry: (s32[], f32[3])) -> (s32[], f32[3]) {
  %carry = (s32[], f32[3]{0}) parameter(0)
  %loop_fusion.9 = f32[3]{0} fusion(%carry), kind=kLoop, calls=%fused_add
  ROOT %tuple.2 = (s32[], f32[3]{0}) tuple(%carry, %loop_fusion.9)
}

%async_computation (param_0: f32[5,8]) -> f32[40,8] {
  %param_0 = f32[5,8]{1,0} parameter(0)
  ROOT %all-gather.8 = f32[40,8]{1,0} all-gather(%param_0), dimensions={0}
}

ENTRY %main (Arg_0: bf16[4,8], Arg_1: s32[2]) -> bf16[4,8] {
  %Arg_0 = bf16[4,8]{1,0} parameter(0), metadata={op_name="params[\\'target\\'][\\'norm\\']"}
  %Arg_1 = s32[2]{0} parameter(1), metadata={op_name="state.length"}
  %loop_fusion.1 = bf16[4,8]{1,0} fusion(%Arg_0), kind=kLoop, calls=%fused_add
  %top.3 = (f32[15,8]{1,0}, s32[15,8]{1,0}) custom-call(%loop_fusion.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(block)/propose/topk/mpmd_map"}
  %while.4 = (s32[], f32[3]{0}) while(%top.3), condition=%cond, body=%body
  %all-gather-start.5 = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%loop_fusion.1), dimensions={0}
  %gathering.8 = ((f32[5,8]{1,0}), f32[40,8]{1,0}) async-start(%shard), calls=%async_computation
  %gathered.8 = f32[40,8]{1,0} async-done(%gathering.8)
  %call.6 = f32[] custom-call(%Arg_1), custom_call_target="xla_ffi_python_gpu_callback"
  ROOT %copy.7 = bf16[4,8]{1,0:S(5)} copy(%loop_fusion.1)
}
"""  # noqa: E501

METADATA = """
thunk_metadata { thunk_info { profile_annotation: "command_buffer" } thunk_kind: "kCommandBuffer" }
thunk_metadata { thunk_info { profile_annotation: "loop_fusion.1" thunk_id: 1 } thunk_kind: "kKernel" }
thunk_metadata { thunk_info { profile_annotation: "top.3" thunk_id: 2 } thunk_kind: "kCustomCall" }
thunk_metadata { thunk_info { } thunk_kind: "kSequential" }
"""


@pytest.fixture(scope="module")
def instructions():
    return {instruction.name: instruction for instruction in read_instructions(HLO)}


def test_what_is_fused_is_not_listed_but_gives_its_name(instructions):
    assert "add.1" not in instructions
    assert instructions["loop_fusion.1"].scope == "jit(block)/propose/add"
    assert instructions["loop_fusion.9"].computation == "body"


def test_a_collective_that_is_begun_and_awaited_apart_stands_in_the_list(instructions):
    assert instructions["all-gather.8"].stored_bytes == 40 * 8 * 4


def test_every_result_has_its_shape_and_the_largest_its_bytes(instructions):
    top = instructions["top.3"]
    assert top.shapes == (("f32", (15, 8)), ("s32", (15, 8)))
    assert top.stored_bytes == 15 * 8 * 4


def test_host_transfers_are_callbacks_and_copies_to_the_hosts_memory(instructions):
    from pallas_kernels.program import is_host_transfer

    assert {name for name, i in instructions.items() if is_host_transfer(i)} == {"call.6", "copy.7"}


def test_arguments_have_the_names_that_jax_gave_them():
    assert read_arguments(HLO) == {"params['target']['norm']": 64, "state.length": 8}


def test_launches_are_those_of_the_compiler_in_their_scopes(instructions):
    assert read_launches(METADATA, tuple(instructions.values())) == (
        Launch(kind="Kernel", name="loop_fusion.1", scope="jit(block)/propose/add"),
        Launch(kind="CustomCall", name="top.3", scope="jit(block)/propose/topk/mpmd_map"),
    )


LOOPS = """\
%product (p0: bf16[2,8,16], p1: bf16[2,16,4]) -> f32[2,8,4] {
  %p0 = bf16[2,8,16]{2,1,0} parameter(0)
  %p1 = bf16[2,16,4]{2,1,0} parameter(1)
  ROOT %dot.1 = f32[2,8,4]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

%inner_body (carry: (s32[])) -> (s32[]) {
  %fusion.1 = f32[2,8,4]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%product
}

%outer_body (carry.1: (s32[])) -> (s32[]) {
  %while.1 = (s32[]) while(%carry.1), condition=%inner_cond, body=%inner_body, backend_config={"known_trip_count":{"n":"3"}}
  %fusion.2 = f32[2,8,4]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%product
}

ENTRY %main (x: bf16[6,32]) -> f32[] {
  %x = bf16[6,32]{1,0} parameter(0)
  %while.2 = (s32[]) while(%t), condition=%outer_cond, body=%outer_body, backend_config={"known_trip_count":{"n":"5"}}
  %cublas.1 = (f32[6,7]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501


def test_products_count_as_often_as_their_loops_turn():
    """5 turns of a loop with a product and with 3 turns of another; a library's product, once."""
    assert count_flops(LOOPS) == 5 * (3 + 1) * 2 * (2 * 8 * 4) * 16 + 2 * (6 * 7) * 32


def test_resources_are_those_of_the_assembler(tmp_path: Path):
    report = (
        "ptxas info    : 0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\nUsed 149 registers, used 2"
    )
    (tmp_path / "topk_logprobs_chunks_0.ptxas").write_text(report)
    (tmp_path / "topk_logprobs_chunks_0.mlir-passes.log").write_text(
        "gpu.launch dynamic_shared_memory_size %c14344_i32 {"
    )
    (kernel,) = read_kernels(tmp_path)
    assert (kernel.name, kernel.registers, kernel.spill_bytes, kernel.shared_bytes) == (
        "topk_logprobs_chunks", 149, 20, 14_344,
    )  # fmt: skip


@pytest.mark.parametrize("kind, size", [("bf16", 2), ("pred", 1), ("f8e4m3fn", 1), ("s32", 4), ("s4", 1)])
def test_bytes_of_an_element(kind, size):
    assert shape_bytes(kind, ()) == size
