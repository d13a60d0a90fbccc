"""What is said of a compiled program: one JSON-able record, and its lines for people."""

from typing import Any

from pallas_kernels.aot import Gpu
from pallas_kernels.program import Instruction, Program, shape_bytes

UNKNOWN = (
    "An estimate of structure, never of speed. What only a GPU can tell: which matrix products its autotuner picks "
    "(here every one is an untuned default), whether the driver captures each custom call into a command buffer, and "
    "how long anything takes."
)


def findings(program: Program, gpu: Gpu, looked_up: tuple[str, ...] = ()) -> dict[str, Any]:
    """Memory, launches, loops, transfers, work and kernels of a program on one device; `looked_up` as in the floor."""
    memory = program.memory
    arguments = sorted(program.arguments.items(), key=lambda item: -item[1])
    return {
        "gpu": gpu.name,
        "memory_bytes": {
            "arguments": memory.arguments,
            "temporary": memory.temporary,
            "outputs": memory.outputs - memory.aliased,
            "total": memory.total,
            "device": gpu.memory_bytes,
        },
        "fits": memory.total <= gpu.memory_bytes,
        "largest_arguments": dict(arguments[:10]),
        "largest_results": {describe(instruction): instruction.stored_bytes for instruction in program.largest(10)},
        "launches": len(program.launches),
        "command_buffers": program.command_buffers,
        "launches_captured": program.captured,
        "loops": program.opcodes["while"],
        "conditionals": program.opcodes["conditional"],
        "host_transfers": program.host_transfers,
        "collectives": program.collectives,
        "moved_bytes": {
            name: sum(i.stored_bytes for i in program.moved if i.opcode.startswith(name))
            for name in program.collectives
        },
        "flops": program.flops,
        "bytes_accessed": program.bytes_accessed,
        "floor_seconds": floor_seconds(program, gpu, looked_up),
        "kernels": [vars(kernel) for kernel in program.kernels],
        "kernel_calls": dict(program.kernel_calls),
        "caveat": UNKNOWN,
    }


def floor_seconds(program: Program, gpu: Gpu, looked_up: tuple[str, ...] = ()) -> float:
    """What the data sheet's figures need to read every argument once, or to make every product that XLA counts.

    Arguments with a part of `looked_up` in their name are tables of which only rows are read: they cost nothing here.
    """
    tables = sum(size for name, size in program.arguments.items() if any(part in name for part in looked_up))
    return max((program.memory.arguments - tables) / gpu.bandwidth, program.flops / gpu.bfloat16_flops)


def describe(instruction: Instruction) -> str:
    """An operation's scope and its largest result."""
    kind, sizes = largest_shape(instruction)
    return f"{instruction.scope or instruction.name} {kind}{list(sizes)}"


def largest_shape(instruction: Instruction) -> tuple[str, tuple[int, ...]]:
    return max(instruction.shapes, key=lambda shape: shape_bytes(*shape))


def memory_lines(found: dict[str, Any]) -> list[str]:
    memory = found["memory_bytes"]
    return [
        "Memory per device",
        *(f"  {name:<12}{gigabytes(memory[name])}" for name in ("arguments", "temporary", "outputs", "total")),
        f"  {'fits' if found['fits'] else 'DOES NOT FIT'} {gigabytes(memory['device']).strip()}",
        "Ten largest arguments",
        *(f"  {gigabytes(size)}  {name}" for name, size in found["largest_arguments"].items()),
        "Ten largest results (they share memory over time; a cache is written in place)",
        *(f"  {gigabytes(size)}  {name}" for name, size in found["largest_results"].items()),
    ]


def collective_lines(found: dict[str, Any]) -> list[str]:
    """One line for each kind: how many stand in the program, and the bytes of their results."""
    kinds = sorted(found["collectives"].items())
    return ["Collectives, a loop's body once" + ("" if kinds else ": none")] + [
        f"  {count:>5} {name:<20}{gigabytes(found['moved_bytes'][name])}" for name, count in kinds
    ]


def work_lines(found: dict[str, Any], gpu: Gpu) -> list[str]:
    return [
        f"Work: {found['flops'] / 1e9:,.1f} GFLOP in matrix products, loops as often as they turn; "
        f"{found['bytes_accessed'] / 1e9:,.2f} GB by XLA's count, which takes a loop's body once; our kernels apart",
        f"Floor: {found['floor_seconds'] * 1e3:.2f} ms at the data sheet's {gpu.bandwidth / 1e12:.2f} TB/s and "
        f"{gpu.bfloat16_flops / 1e12:.0f} TFLOP/s (bf16): every argument but looked-up tables read once",
    ]


def kernel_lines(found: dict[str, Any]) -> list[str]:
    if not found["kernel_calls"]:
        return ["Our kernels: none in this program"]
    calls = found["kernel_calls"]
    return ["Our kernels"] + [
        f"  {k['name']:<28}{calls[k['name']]} call(s), {k['registers']} registers, {k['spill_bytes']} bytes spilled, "
        f"{k['shared_bytes']} bytes of shared memory"
        for k in found["kernels"]
        if k["name"] in calls
    ]


def gigabytes(size: int | float) -> str:
    return f"{size / 1e9:>9.3f} GB"
