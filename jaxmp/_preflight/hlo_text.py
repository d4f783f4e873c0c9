"""A parser for the text of an HLO program: computations, instructions and shapes.

jaxlib's objects for a compiled program have no attributes of instructions, and before JAX 0.12 no
shapes: only the text has those.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(?[^=]*?\)?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_OPERAND = re.compile(r"%?([\w.\-]+)")
_BRACES = re.compile(r"\{[^{}]*\}")
# XLA's comments in a tuple's shape, and among operands, from the sixth on: /*index=5*/.
_COMMENT = re.compile(r"/\*.*?\*/")
_SHAPE = re.compile(
    r"\b(?:pred|(?P<kind>bf|[fsuc])(?P<bits>\d+)(?P<variant>\w*))\[(?P<dims>[\d,]*)\]"
)
# HLO's names of dtypes → NumPy's: f8e4m3fn is float8_e4m3fn.
_KINDS = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}


class Instruction(NamedTuple):
    """An instruction: a line of a program.

    Attributes:
      name: its name, by which other instructions refer to it.
      shape: the shape of its result, as XLA writes it.
      op: ``dot``, ``all-gather-start``, ….
      rest: the text after the parenthesis that opens its operands.
      computation: the name of the computation that it is in; empty outside of any.
      root: whether it is the result of the computation.
    """

    name: str
    shape: str
    op: str
    rest: str
    computation: str = ""
    root: bool = False

    def operands(self) -> list[str]:
        """Returns the names of its operands."""
        text = next(split(self.rest, ")"))
        return _OPERAND.findall(_SHAPE.sub("", _BRACES.sub("", text)))

    def attribute(self, name: str) -> str:
        """Returns the value of an attribute by name, without quotes; empty if there is none."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|%?([^\s,{{}}]+))', self.rest)
        return (found[1] or found[2] or "") if found else ""


class Computation(NamedTuple):
    """A computation: its instructions in the order of the text, and the same by name."""

    name: str
    instructions: list[Instruction]
    by_name: dict[str, Instruction]

    def root(self) -> Instruction | None:
        """Returns the root instruction, which is the computation's result."""
        return next((i for i in self.instructions if i.root), None)


Computations = Mapping[str, Computation]


def computations(text: str) -> dict[str, Computation]:
    """Parses the computations of a program, by name; "" has the instructions outside of any."""
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


def split(text: str, separator: str) -> Iterator[str]:
    """Yields the parts of a text between separators outside of parentheses, brackets and braces."""
    start, depth = 0, 0
    for i, char in enumerate(text):
        if char == separator and not depth:
            yield text[start:i]
            start = i + 1
        else:
            depth += (char in "([{") - (char in ")]}")
    yield text[start:]


def members(shape: str) -> list[str]:
    """Returns the shapes in a tuple's shape; the shape itself if it is not a tuple."""
    if not shape.startswith("("):
        return [shape]
    return [member.strip() for member in split(shape[1:-1], ",")]


def type_of(shape: str) -> str:
    """Returns the type of an array, or of the first in a tuple: ``float8_e4m3fn[512,256]``."""
    match = _SHAPE.search(shape)
    return f"{_dtype(match)}[{match['dims']}]" if match else ""


def sizes_by_dtype(shape: str) -> Counter[str]:
    """Returns the bytes by dtype of an array, or of the arrays in a tuple."""
    sizes: Counter[str] = Counter()
    for match in _SHAPE.finditer(shape):
        count = math.prod(int(d) for d in match["dims"].split(",") if d)
        sizes[_dtype(match)] += math.ceil(count * int(match["bits"] or 8) / 8)
    return sizes


def _dtype(shape: re.Match[str]) -> str:
    """Returns NumPy's name of an array's dtype."""
    kind, bits, variant = shape.group("kind", "bits", "variant")
    if not kind:
        return "bool"
    return f"{_KINDS[kind]}{bits}" + (f"_{variant}" if variant else "")
