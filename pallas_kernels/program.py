"""What a compiled GPU program is made of, read from XLA's text and from the compiler's dumps.

Owns the parsing: launches in their order, buffers, loops, transfers, collectives, and what Mosaic kernels take. Knows
no model; a stage is whatever `jax.named_scope` a launch was traced under.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jaxlib import _jax  # XLA's cost analysis of a compiled program has no public entry

ITEM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
              "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16}  # fmt: skip
NOT_STORED = frozenset(
    {"bitcast", "tuple", "get-tuple-element", "parameter", "constant", "after-all", "while", "copy-done"}
    | {"async-start", "async-update", "async-done"}
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
HOST_OPCODES = ("infeed", "outfeed", "send", "recv")
KERNEL_TARGET = "mosaic_gpu"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One operation of the optimised program, outside of fused computations."""

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # (element type, sizes) of every result
    scope: str  # JAX's name of it, with the named scopes that it was traced under
    computation: str
    text: str

    @property
    def stored_bytes(self) -> int:
        """Bytes of its largest result."""
        return max((shape_bytes(*shape) for shape in self.shapes), default=0)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One thing that the device is told to do: a kernel, a copy, a library call."""

    kind: str
    name: str
    scope: str


@dataclass(frozen=True, kw_only=True)
class KernelResources:
    """What the assembler and the linker of Mosaic kernels say of one of them."""

    name: str
    registers: int
    spill_bytes: int  # stores and loads together
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take over an argument's memory
    temporary: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporary


@dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program.

    Attributes:
        text: optimised HLO.
        instructions: of every computation that is not fused into another.
        arguments: name -> bytes per device.
        launches: in the order of the schedule, once each, loop bodies included.
        command_buffers: how many of them capture the launches.
        captured: launches inside a command buffer.
        flops: of the matrix products, those in loops as often as they turn; our own kernels count as nothing.
        bytes_accessed: XLA's own count, which takes a loop's body once and custom calls for nothing.
        kernels: our own, all that this process has compiled.
    """

    text: str
    instructions: tuple[Instruction, ...]
    arguments: dict[str, int]
    memory: Memory
    launches: tuple[Launch, ...]
    command_buffers: int
    captured: int
    flops: float
    bytes_accessed: float
    kernels: tuple[KernelResources, ...]

    @property
    def opcodes(self) -> Counter:
        return Counter(instruction.opcode.removesuffix("-start") for instruction in self.instructions)

    @property
    def collectives(self) -> dict[str, int]:
        return {name: count for name, count in self.opcodes.items() if name in COLLECTIVES}

    @property
    def moved(self) -> list[Instruction]:
        """The collectives."""
        return [i for i in self.instructions if i.opcode.removesuffix("-start") in COLLECTIVES]

    @property
    def host_transfers(self) -> list[str]:
        """Operations that wait for the host: feeds, callbacks, copies to or from its memory."""
        return [i.name for i in self.instructions if is_host_transfer(i)]

    @property
    def kernel_calls(self) -> Counter:
        """How often each of our kernels stands in the program, by name."""
        calls = [i for i in self.instructions if i.opcode == "custom-call" and KERNEL_TARGET in i.text]
        return Counter(call.scope.split("/")[-2] for call in calls)  # .../<name>/mpmd_map

    def largest(self, count: int | None = None) -> list[Instruction]:
        """The operations with the largest results, one for each scope and shape; None: all of them."""
        distinct = {(i.scope, i.shapes): i for i in self.instructions if i.opcode not in NOT_STORED}
        return sorted(distinct.values(), key=lambda i: -i.stored_bytes)[:count]


def is_host_transfer(instruction: Instruction) -> bool:
    to_host = "S(5)" in instruction.text.split("metadata=")[0]
    callback = instruction.opcode == "custom-call" and "callback" in instruction.text
    return to_host or callback or instruction.opcode.removesuffix("-done") in HOST_OPCODES


def shape_bytes(kind: str, sizes: tuple[int, ...]) -> int:
    return math.ceil(ITEM_BYTES.get(kind, ITEM_BYTES.get(kind[:2], 4)) * math.prod(sizes))


def read_shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`(f32[15,8]{1,0}, s32[])` -> (("f32", (15, 8)), ("s32", ()))."""
    found = re.findall(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]", text)
    return tuple((kind, tuple(int(size) for size in sizes.split(",") if size)) for kind, sizes in found)


INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(")
FUSED = re.compile(r"(?:calls|to_apply|called_computations)=\{?(%?[\w.\-]+(?:, ?%?[\w.\-]+)*)")


def read_instructions(text: str) -> tuple[Instruction, ...]:
    """The instructions of optimised HLO that stand for something done: those of fused computations are left out.

    A fusion that XLA left without a name has that of the last named operation in it.
    """
    found, inner, scopes, computation = [], set(), {}, ""
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            name, result, opcode = match.groups()
            called = FUSED.search(line) if opcode not in ("call", "async-start") else None
            parts = [word.strip(" %") for word in called[1].split(",")] if called else []
            inner |= set(parts)
            if scope := re.search(r'op_name="([^"]*)"', line):
                scopes[computation] = scope[1]
            own = scope[1] if scope else next((scopes[part] for part in parts if part in scopes), "")
            found.append(
                Instruction(
                    name=name, opcode=opcode, shapes=read_shapes(result), scope=own, computation=computation, text=line
                )
            )
        elif match := COMPUTATION.match(line):
            computation = match[1]
    return tuple(instruction for instruction in found if instruction.computation not in inner)


def read_arguments(text: str) -> dict[str, int]:
    """Bytes of the program's arguments by the names that JAX gave them."""
    entry = text[text.index("\nENTRY ") :]
    sizes = {}
    for line in entry.splitlines():
        match = INSTRUCTION.match(line)
        if not match or match[3] != "parameter":
            continue
        name = re.search(r'op_name="([^"]*)"', line)
        label = name[1] if name else match[1]
        sizes[label.replace("\\'", "'")] = sum(shape_bytes(*shape) for shape in read_shapes(match[2]))
    return sizes


CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
FIRST_OPERAND = re.compile(r"\(%?([\w.\-]+)")
CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?([\d",]*)')


def count_flops(text: str) -> float:
    """2 x rows x columns x contracted sizes of every matrix product in optimised HLO, times the turns of its loops.

    A loop whose number of turns XLA does not know counts once.
    """
    products, calls, sizes, computation = Counter(), [], {}, ""
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            name, result, opcode = match.groups()
            shapes = read_shapes(result)
            sizes[computation, name] = shapes[0][1] if shapes else ()
            if opcode == "dot" or 'custom_call_target="__cublas' in line:
                left = sizes[computation, _first(FIRST_OPERAND, line[match.end() - 1 :])]
                axes = re.findall(r"\d+", _first(CONTRACTED, line))
                depth = math.prod(left[int(axis)] for axis in axes)
                products[computation] += 2 * math.prod(shapes[0][1]) * depth
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for called in CALLED.findall(line):
                parts = [part.strip(" %") for part in called.split(",")]
                calls += [(computation, part, int(turns[1]) if turns else 1) for part in parts]
        elif match := COMPUTATION.match(line):
            computation = match[1]
    total = Counter({computation: 1})  # the entry stands last, and every computation before those that call it
    for caller, called, turns in reversed(calls):
        total[called] += total[caller] * turns
    return float(sum(total[name] * flops for name, flops in products.items()))


def _first(pattern: re.Pattern[str], text: str) -> str:
    """The first group of what a line of HLO must have."""
    match = pattern.search(text)
    if match is None:
        raise ValueError(
            f"XLA writes HLO otherwise than is read here: nothing like {pattern.pattern!r} in {text!r:.300}."
        )
    return match[1]


def read_launches(metadata: str, instructions: tuple[Instruction, ...]) -> tuple[Launch, ...]:
    """The compiler's list of launches, joined with the scopes of the instructions that they stand for."""
    scopes = {instruction.name: instruction.scope for instruction in instructions}
    launches = []
    for block in metadata.split("thunk_metadata {")[1:]:
        kind = re.search(r'thunk_kind: "k(\w+)"', block)
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        if kind and name and kind[1] not in ("Sequential", "CommandBuffer", "While", "Conditional", "Gemm"):
            launches.append(Launch(kind=kind[1], name=name[1], scope=scopes.get(name[1], "")))
    return tuple(launches)


def read_kernels(folder: Path) -> tuple[KernelResources, ...]:
    """Registers, spills and shared memory from the dumps of the Mosaic compiler, each once of those that are alike."""
    return tuple(dict.fromkeys(kernel for path in sorted(folder.glob("*.ptxas")) for kernel in _read_kernel(path)))


def _read_kernel(path: Path) -> Iterator[KernelResources]:
    report, passes = path.read_text(), path.with_suffix(".mlir-passes.log")
    shared = re.search(r"dynamic_shared_memory_size %c(\d+)", passes.read_text()) if passes.exists() else None
    for registers in re.findall(r"Used (\d+) registers", report):
        spills = re.findall(r"(\d+) bytes spill", report)
        yield KernelResources(
            name=re.sub(r"_\d+$", "", path.stem),
            registers=int(registers),
            spill_bytes=sum(map(int, spills)),
            shared_bytes=int(shared[1]) if shared else 0,
        )


def read_program(compiled: jax.stages.Compiled, folder: Path, kernels: Path) -> Program:
    """A compiled program, the folder that its compiler dumped into, and that of the Mosaic kernels' compiler."""
    text = compiled.as_text() or ""
    instructions = read_instructions(text)
    sizes, executable = compiled.memory_analysis(), compiled.runtime_executable()
    if sizes is None or executable is None:
        raise ValueError(
            "JAX keeps this compiled program's memory or modules to itself, of which the report is made; install the "
            "JAX that pyproject.toml names."
        )
    costs = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, executable.hlo_modules()[0])
    sequence = "".join(path.read_text() for path in folder.glob("*thunk_sequence_after_thunk_passes.txt"))
    launches = read_launches("".join(path.read_text() for path in folder.glob("*thunk_metadata.txt")), instructions)
    return Program(
        text=text,
        instructions=instructions,
        arguments=read_arguments(text),
        memory=Memory(
            arguments=sizes.argument_size_in_bytes,
            outputs=sizes.output_size_in_bytes,
            aliased=sizes.alias_size_in_bytes,
            temporary=sizes.temp_size_in_bytes,
        ),
        launches=launches,
        command_buffers=sequence.count(": kCommandBuffer"),
        captured=len(re.findall(r"^ {4,}\d+: k", sequence, re.M)),
        flops=count_flops(text),
        bytes_accessed=costs.get("bytes accessed", 0.0),
        kernels=read_kernels(kernels),
    )
