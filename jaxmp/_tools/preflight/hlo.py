"""Reads an optimized HLO program: products, collectives, library calls, cycles, memory traffic."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxmp._core.jaxprs.source import in_library, plain_path
from jaxmp._tools.preflight.hlo_collectives import KINDS, Collective, Mesh, collectives
from jaxmp._tools.preflight.hlo_text import (
    Computation,
    Computations,
    Instruction,
    called,
    computations,
    moved_from,
    runs,
    sizes_by_dtype,
    split,
    type_of,
)

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# An operation whose cycles the TPU compiler does not know has the largest 63- or 64-bit integer.
_UNKNOWN_CYCLES = 2**62
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
# Library calls that are matmuls or convolutions (attention, which is several, is not).
_MULTIPLIES = re.compile(r"matmul|gemm|blockScaledDot|^__cudnn\$conv")
# Attention by cuDNN, and the shape of its scores.
_ATTENDS = "__cudnn$fmha"
_SCORES = re.compile(r'"intermediate_tensor_shape": *\{.*?"dimensions": *\[([^\]]*)\]')
_NARROW = ("float8_", "int8", "uint8", "float4_", "int4", "uint4")
_FIELD = re.compile(r"(\w+)=(\d+)")
# The scopes that JAX and `jax.export` add to the name stack, around the user's.
_NOT_WRITTEN = re.compile(
    r"^(?:jit\(.*\)|call_exported|while|body|cond|closed_call|branch_\d+_fun)$"
)
_TRANSFORMED = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint)\((.*)\)$")
# Instructions that run no kernel of their own: their computations do, or nothing does.
_CALLS = frozenset({
    "while", "conditional", "call", "async-start", "async-update", "async-done",
})  # fmt: skip
_NOTHING = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "add-dependency", "partition-id", "replica-id",
})  # fmt: skip


class HloPlace(NamedTuple):
    """The place that an instruction comes from; fields that are unknown are empty.

    Attributes:
      path: the module path and named scopes around it.
      source: ``file.py:line``, the innermost line outside of libraries.
      backward: whether it belongs to a backward pass.
    """

    path: str = ""
    source: str = ""
    backward: bool = False

    def __str__(self) -> str:
        words = (self.source, self.path, "backward" if self.backward else "forward")
        return " ".join(word for word in words if word)


class Multiplied(NamedTuple):
    """A matmul or convolution of an optimized program.

    Attributes:
      op: ``dot``, ``convolution``, or the target of the library call.
      dtype: the dtype that it multiplies, ``float8_e4m3fn``, or both, ``bfloat16*float32``.
      operands: the operands, ``float8_e4m3fn[512,256]``, as the compiler has transposed or reshaped
        them.
      result: the result, likewise.
      place: the place where it was written.
    """

    op: str
    dtype: str
    operands: tuple[str, ...]
    result: str
    place: HloPlace

    @property
    def in_8_bits(self) -> bool:
        """Whether it multiplies 8-bit operands (or 4-bit ones), and no others."""
        return all(dtype.startswith(_NARROW) for dtype in self.dtype.split("*"))


class Traffic(NamedTuple):
    """Bytes of operands and results of kernels on one device, without collectives.

    A loop's body counts as often as the loop runs. Of an array of which a kernel reads or writes a
    slice, only the slice counts.

    Attributes:
      products: the bytes of kernels that are a product, or contain one.
      others: the bytes of all other kernels.
      kernels: the number of other kernels that run.
    """

    products: int = 0
    others: int = 0
    kernels: int = 0


class HloProgram(NamedTuple):
    """The operations of an optimized program, and their costs.

    Attributes:
      contractions: the number of matmuls and convolutions by the dtype they multiply, library calls
        included. A loop's body counts once.
      library_calls: the number of custom calls of each target.
      cycles: the schedule's estimated cycles, where the compiler gives them (TPU), without those of
        `unknown_cycles`.
      products: the matmuls and convolutions, one by one.
      unknown_cycles: the number of operations whose cycles the compiler does not know.
      moved: the collectives, one by one, each with the number of its runs.
      cycles_run: the known cycles, a loop's body as often as the loop runs.
      traffic: the bytes that kernels read and write, likewise.
      attention_flops: the dtypes and the FLOPs of attention that a library computes, likewise.
    """

    contractions: dict[str, int]
    library_calls: dict[str, int]
    cycles: int | None
    products: tuple[Multiplied, ...] = ()
    unknown_cycles: int = 0
    moved: tuple[Collective, ...] = ()
    cycles_run: int | None = None
    traffic: Traffic = Traffic()
    attention_flops: tuple[tuple[str, int], ...] = ()

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(kind, dtype) → (number of runs, bytes of all results on one device).

        A loop's body counts as often as the loop has trips.
        """
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for one in self.moved:
            count, size = found.get((one.kind, one.dtype), (0, 0))
            found[one.kind, one.dtype] = count + one.times, size + one.times * one.bytes
        return found

    @property
    def products_in_8_bits(self) -> tuple[Multiplied, ...]:
        """The products that multiply 8-bit operands."""
        return tuple(product for product in self.products if product.in_8_bits)


def read_hlo(text: str, mesh: Mesh = ()) -> HloProgram:
    """Reads the text of a compiled program.

    Args:
      text: the text, from ``compiled.as_text()``.
      mesh: the names and sizes of the axes of the mesh that its arguments are sharded over.

    Example:
      >>> read_hlo('''
      ...   %a = bf16[8,8]{1,0} parameter(0)
      ...   ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}
      ... ''').contractions
      {'bfloat16': 1}
    """
    program = computations(text)
    places = HloPlaces(text)
    products: list[Multiplied] = []
    calls: Counter[str] = Counter()
    cycles: list[tuple[int, int]] = []  # and how often
    attention: Counter[str] = Counter()
    often = runs(program)
    for computation in program.values():
        times = often[computation.name].times
        for instruction in computation.instructions:
            target = _target(instruction)
            if target:
                calls[target] += 1
            if multiplies(instruction):
                products.append(_product(instruction, target, computation.by_name, places))
            if estimated := _CYCLES.search(instruction.rest):
                cycles.append((int(estimated.group(1)), times))
            if target.startswith(_ATTENDS):
                queries = computation.by_name[instruction.operands()[0]].shape
                attention += _attention(instruction, type_of(queries), times)
    head = text.lstrip().partition("\n")[0]
    known = [(count, times) for count, times in cycles if count < _UNKNOWN_CYCLES]
    return HloProgram(
        dict(Counter(product.dtype for product in products).most_common()),
        dict(calls),
        sum(count for count, _ in known) if known else None,
        tuple(products),
        len(cycles) - len(known),
        collectives(program, mesh, max(map(int, _DEVICES.findall(head)), default=0)),
        sum(count * times for count, times in known) if known else None,
        traffic(program, multiplies),
        tuple(attention.items()),
    )


def multiplies(instruction: Instruction) -> bool:
    """Returns whether an instruction is a matmul or convolution, or a library call for one."""
    return instruction.op in ("dot", "convolution") or bool(
        _MULTIPLIES.search(_target(instruction))
    )


def _target(instruction: Instruction) -> str:
    """Returns the target of a custom call; empty for other instructions."""
    return instruction.attribute("custom_call_target") if instruction.op == "custom-call" else ""


def _attention(call: Instruction, queries: str, times: int) -> Counter[str]:
    """Returns the FLOPs of attention by cuDNN: two products, backward five; half if causal."""
    dtype, _, dims = queries.rstrip("]").partition("[")
    scores = _SCORES.search(call.rest)
    size = math.prod(map(int, re.findall(r"\d+", scores.group(1)))) if scores else 0
    products = 5 if "Backward" in call.rest else 2
    flops = 2 * products * size * int(dims.split(",")[-1]) * times
    return Counter({dtype: flops // 2 if "CAUSAL" in call.rest else flops})


def _product(
    instruction: Instruction, target: str, around: dict[str, Instruction], places: HloPlaces
) -> Multiplied:
    """Describes a product; `target` is the library call's, if it is one."""
    operands = [type_of(around[o].shape) for o in instruction.operands()[:2] if o in around]
    return Multiplied(
        target or instruction.op,
        "*".join(sorted({operand.partition("[")[0] for operand in operands} - {""})),
        tuple(operands),
        type_of(instruction.shape),
        places.of(instruction),
    )


class HloPlaces:
    """The tables at the head of a program, to which the metadata of instructions refers."""

    def __init__(self, text: str) -> None:
        self._files = _rows(text, "FileNames")
        self._locations = _rows(text, "FileLocations")
        self._frames = _rows(text, "StackFrames")

    def of(self, instruction: Instruction) -> HloPlace:
        """Returns the place that the metadata of an instruction names."""
        stack = instruction.attribute("op_name")
        parts = [p for p in map(_inner, [*split(stack, "/")][:-1]) if not _NOT_WRITTEN.match(p)]
        source = self._line(int(instruction.attribute("stack_frame_id") or 0))
        return HloPlace(plain_path("/".join(parts)), source, "transpose(" in stack)

    def _line(self, frame: int) -> str:
        """Returns the innermost line outside of libraries, from a frame outwards."""
        while frame in self._frames:
            fields = _fields(self._frames[frame])
            location = _fields(self._locations.get(fields["file_location_id"], ""))
            file = self._files.get(location.get("file_name_id", 0), "").strip('"')
            if file and not in_library(file):
                return f"{Path(file).name}:{location['line']}"
            # XLA prints parents one too large: 1 stands for no parent, 0.
            frame = min(fields["parent_frame_id"], frame) - 1
        return ""


def _rows(text: str, table: str) -> dict[int, str]:
    """Returns the rows of a table at the head of a program, by number."""
    found = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found[1].splitlines() if found else []
    return {int(number): row for number, _, row in (line.partition(" ") for line in rows)}


def _fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in _FIELD.findall(row)}


def _inner(part: str) -> str:
    """Strips the transformations from a part of a name stack: ``jvp(Dense_0)``."""
    while match := _TRANSFORMED.match(part):
        part = match.group(1)
    return part


def traffic(program: Computations, multiplies: Callable[[Instruction], bool]) -> Traffic:
    """Computes the traffic of a program.

    Args:
      program: its computations.
      multiplies: returns whether an instruction is a matmul or convolution.
    """
    often = runs(program)
    inner = {
        name
        for computation in program.values()
        for instruction in computation.instructions
        if instruction.op not in _CALLS
        for name, _ in called(program, instruction)
    }
    products = others = kernels = 0
    for computation in program.values():
        if computation.name in inner:
            continue
        times = often[computation.name].times
        for instruction in filter(_is_kernel, computation.instructions):
            within = [program[name] for name, _ in called(program, instruction)]
            size = times * sum(_sizes(instruction, computation, within))
            if multiplies(instruction) or any(
                multiplies(i) for c in within for i in c.instructions
            ):
                products += size
            else:
                others += size
                kernels += times
    return Traffic(products, others, kernels)


def _is_kernel(instruction: Instruction) -> bool:
    op = instruction.op
    crosses = op.removesuffix("-start") in KINDS
    return not (crosses or op.endswith("-done") or op in _CALLS or op in _NOTHING)


def _sizes(kernel: Instruction, around: Computation, within: list[Computation]) -> Iterator[int]:
    """Yields the bytes that a kernel writes, and those that it reads of each operand."""
    operands = [
        _bytes(around.by_name[name]) for name in kernel.operands() if name in around.by_name
    ]
    fused = within[0] if kernel.op == "fusion" and within else None
    root = fused.root() if fused else None
    if fused is None or root is None:
        yield from _written(around, kernel.name)
        yield from operands[kernel.op == "dynamic-update-slice" :]
        return
    for name in root.operands() if root.op == "tuple" else [root.name]:
        yield from _written(fused, name)
    yield from _read(fused)


def _written(where: Computation, name: str) -> Iterator[int]:
    """Yields the bytes of a result; if it is an array updated in place, those of the slice."""
    found = moved_from(where, name)
    if found is not None and found.op == "dynamic-update-slice":
        found = where.by_name.get(found.operands()[1])
    if found is not None:
        yield _bytes(found)


def _read(fused: Computation) -> Iterator[int]:
    """Yields the bytes that a fusion reads of each parameter; if it only slices it, the slices'."""
    reads: dict[str, list[int]] = {i.name: [] for i in fused.instructions if i.op == "parameter"}
    for instruction in fused.instructions:
        for place, name in enumerate(
            instruction.operands() if instruction.op != "parameter" else ()
        ):
            if name in reads:
                sliced = instruction.op in ("dynamic-slice", "gather") and not place
                updated = instruction.op == "dynamic-update-slice" and not place
                whole = fused.by_name[name]
                reads[name].append(0 if updated else _bytes(instruction if sliced else whole))
    for name, sizes in reads.items():
        yield min(sum(sizes), _bytes(fused.by_name[name]))


def _bytes(instruction: Instruction) -> int:
    return sizes_by_dtype(instruction.shape).total()
