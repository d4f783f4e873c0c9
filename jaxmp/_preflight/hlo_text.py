"""The text of an HLO program as computations of instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxmp._preflight.hlo_shapes import SHAPE

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(?[^=]*?\)?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_OPERAND = re.compile(r"%?([\w.\-]+)")
_BRACES = re.compile(r"\{[^{}]*\}")
# What XLA writes into a tuple's shape, and among operands, from the sixth on: /*index=5*/.
_COMMENT = re.compile(r"/\*.*?\*/")


class Instruction(NamedTuple):
    """A line of a program.

    Attributes:
      name: what others call it.
      shape: the shape of its result, as XLA writes it.
      op: ``dot``, ``all-gather-start``, ….
      rest: the text after the parenthesis that opens its operands.
      computation: the name of the computation that it is in; empty outside of any.
      root: whether it is what the computation returns.
    """

    name: str
    shape: str
    op: str
    rest: str
    computation: str = ""
    root: bool = False

    def operands(self) -> list[str]:
        """The names of its operands."""
        depth = 1
        for i, char in enumerate(self.rest):
            depth += (char == "(") - (char == ")")
            if not depth:
                return _OPERAND.findall(SHAPE.sub("", _BRACES.sub("", self.rest[:i])))
        return _OPERAND.findall(self.rest)


class Computation(NamedTuple):
    """A computation: its instructions in the order of the text, and the same by name."""

    name: str
    instructions: list[Instruction]
    by_name: dict[str, Instruction]

    def root(self) -> Instruction | None:
        """What it returns."""
        return next((i for i in self.instructions if i.root), None)


def computations(text: str) -> dict[str, Computation]:
    """The computations of a program by name; what is in none is under the empty one."""
    current = Computation("", [], {})
    found = {"": current}
    for line in text.splitlines():
        plain = _COMMENT.sub("", line)
        match = _INSTRUCTION.match(plain)
        if match is not None:
            root, name, shape, op, rest = match.groups()
            instruction = Instruction(name, shape, op, rest, current.name, bool(root))
            current.instructions.append(instruction)
            current.by_name[name] = instruction
        elif (head := _COMPUTATION.match(plain)) is not None:
            current = found[head.group(2)] = Computation(head.group(2), [], {})
        elif line == "}":
            current = found[""]
    return found
