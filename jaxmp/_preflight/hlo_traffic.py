"""The bytes that the kernels of an HLO program read and write, as often as they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxmp._preflight.hlo_collectives import KINDS
from jaxmp._preflight.hlo_loops import called, moved_from, runs
from jaxmp._preflight.hlo_text import Computation, Computations, Instruction, sizes_by_dtype

# Instructions that run no kernel of their own: their computations do, or nothing does.
_CALLS = frozenset({
    "while", "conditional", "call", "async-start", "async-update", "async-done",
})  # fmt: skip
_NOTHING = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
    "add-dependency", "partition-id", "replica-id",
})  # fmt: skip


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
