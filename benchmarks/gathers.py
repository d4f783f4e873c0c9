"""Which of its parameters a compiled program gathers, and how often: reads its text backwards.

What an all-gather takes is followed to where it comes from, through what only moves or narrows it,
into fusions and out of tuples. If that is parameters of the program and nothing else, they are what
is gathered. (A gather inside a loop's body takes what the loop carries, and is not followed.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxmp._tools.preflight.hlo_text import (
    Computation,
    Instruction,
    computations,
    members,
    sizes_by_dtype,
)

# What moves a value, and what jaxmp narrows one with: finite values stay finite.
MOVES = frozenset(
    {"bitcast", "bitcast-convert", "broadcast", "concatenate", "copy", "copy-done", "copy-start"}
    | {"dynamic-slice", "opt-barrier", "pad", "reshape", "slice", "transpose"}
    | {"abs", "clamp", "compare", "convert", "select"}
)
# Of these only the first operand is data; the others say where.
FIRST_ONLY = frozenset({"dynamic-slice", "pad"})
CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
INDEX = re.compile(r"\bindex=(\d+)")

Program = Mapping[str, Computation]


class Gathered(NamedTuple):
    """A value that is gathered.

    Attributes:
      parameters: the numbers of the program's parameters that it is made of; none if something is
        computed for it.
      dtype: in which it crosses.
      bytes: of the result on one device.
    """

    parameters: frozenset[int]
    dtype: str
    bytes: int


class Call(NamedTuple):
    """A fusion, and the one that it is in."""

    fusion: Instruction
    outer: Call | None


def gathered(text: str) -> list[Gathered]:
    """What a program gathers, value by value."""
    program = computations(text)
    found = []
    for computation in program.values():
        for instruction in computation.instructions:
            if instruction.op in ("all-gather", "all-gather-start"):
                results = members(instruction.shape)
                if instruction.op == "all-gather-start":
                    results = members(results[1])
                for name, shape in zip(instruction.operands(), results, strict=True):
                    [(dtype, size)] = sizes_by_dtype(shape).items()
                    origins = _origins(program, computation, name, (), None)
                    found.append(Gathered(frozenset(origins or ()), dtype, size))
    return found


def _origins(
    program: Program, where: Computation, name: str, path: tuple[int, ...], call: Call | None
) -> set[int] | None:
    """The numbers of the program's parameters that a value is made of; None if it is computed.

    Args:
      program: its computations.
      where: the computation that the value is in.
      name: the value's.
      path: which element of it, if it is a tuple.
      call: the fusion that `where` is of.
    """
    instruction = where.by_name.get(name)
    if instruction is None:
        return None
    operands, op = instruction.operands(), instruction.op
    if op == "parameter":
        number = int(instruction.rest.partition(")")[0])
        if call is not None:
            outer = program[call.fusion.computation]
            return _origins(program, outer, call.fusion.operands()[number], path, call.outer)
        return {number} if _is_entry(program, where) else None
    if op == "get-tuple-element":
        index = int(_search(INDEX, instruction))
        return _origins(program, where, operands[0], (index, *path), call)
    if op == "tuple" and path:
        return _origins(program, where, operands[path[0]], path[1:], call)
    if op == "fusion":
        inner = program[_search(CALLED, instruction)]
        root = inner.root()
        return root and _origins(program, inner, root.name, path, Call(instruction, call))
    if op == "constant":
        return set()
    if op not in MOVES:
        return None
    followed = operands[:1] if op in FIRST_ONLY else operands
    origins = [_origins(program, where, operand, path, call) for operand in followed]
    return None if None in origins else set().union(*(some for some in origins if some))


def _search(pattern: re.Pattern[str], instruction: Instruction) -> str:
    found = pattern.search(instruction.rest)
    if found is None:
        raise ValueError(f"gathers: cannot read {instruction}")
    return found.group(1)


def _is_entry(program: Program, where: Computation) -> bool:
    """Whether a computation is the program's: the last of the text."""
    return where.name == list(program)[-1]
