"""A parser for the text of an HLO program: computations, their runs, instructions and shapes.

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
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|(?:true|false)_computation|(?:branch|called)_computations)"
    r"=(?:%?([\w.\-]+)|\{([^{}]*)\})"
)
_NAME = re.compile(r"[\w.\-]+")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LITERAL = re.compile(r"^(-?\d+)\)")
_MOVES = ("copy", "bitcast", "copy-start", "copy-done")


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


class Runs(NamedTuple):
    """The number of runs of a computation.

    Attributes:
      times: the number.
      known: False if it is in a loop of unknown trip count, or in one of several branches: that
        counts once.
    """

    times: int = 1
    known: bool = True


def runs(program: Computations) -> dict[str, Runs]:
    """Returns the number of runs of each computation in one run of the program."""
    found: dict[str, Runs] = {}
    # XLA prints a computation below those that it calls.
    for computation in reversed(list(program.values())):
        outer = found.setdefault(computation.name, Runs())  # the entry, or one that nothing calls
        for instruction in computation.instructions:
            # The second half of an asynchronous pair repeats what the first half calls.
            if instruction.op.endswith(("-done", "-update")):
                continue
            for name, inner in called(program, instruction):
                times, known = found.get(name, Runs(0))
                known = known and outer.known and inner.known
                found[name] = Runs(times + outer.times * inner.times, known)
    return found


def called(program: Computations, instruction: Instruction) -> Iterator[tuple[str, Runs]]:
    """Yields the names of the computations that an instruction calls, and how often it does."""
    trips = trips_of(program, instruction) if instruction.op == "while" else 1
    known = trips is not None and instruction.op != "conditional"
    for word, one, several in _CALLED.findall(instruction.rest):
        times = 1 if trips is None else trips + (word == "condition")
        for name in _NAME.findall(one or several):
            if name in program:
                yield name, Runs(times, known)


class _Element(NamedTuple):
    """An element of a computation's one parameter, a tuple."""

    number: int


def trips_of(program: Computations, loop: Instruction) -> int | None:
    """Returns the trip count of a ``while``, by the compiler (CPU, GPU) or by its code (TPU).

    The code tells it if the loop counts from a constant, by a constant, while less than a constant,
    as those of `jax.lax.scan` do. Else it is None.
    """
    said = _TRIPS.search(loop.rest)
    if said:
        return int(said.group(1))
    around = program[loop.computation]
    test, body = (program.get(loop.attribute(word), around) for word in ("condition", "body"))
    start, compare, end = around.by_name.get(loop.operands()[0]), test.root(), body.root()
    if start is None or compare is None or end is None or compare.attribute("direction") != "LT":
        return None
    if (start.op, compare.op, end.op) != ("tuple", "compare", "tuple"):
        return None
    before = [_value(around, name) for name in start.operands()]
    after = [_value(body, name) for name in end.operands()]

    def constant(value: int | _Element | None) -> int | None:
        """Returns the constant that a value or state element is in every trip; else None."""
        if isinstance(value, _Element):
            value = before[value.number] if after[value.number] == value else None
        return value if isinstance(value, int) else None

    counter, stop = (_value(test, name) for name in compare.operands())
    stop = constant(stop)
    if not isinstance(counter, _Element) or stop is None:
        return None
    first, added = before[counter.number], moved_from(body, end.operands()[counter.number])
    if not isinstance(first, int) or added is None or added.op != "add":
        return None
    terms = [_value(body, name) for name in added.operands()]
    steps = [constant(term) for term in terms if term != counter]
    if len(steps) != 1 or not steps[0] or steps[0] < 0:
        return None
    return max(0, -(-(stop - first) // steps[0]))


def _value(where: Computation, name: str) -> int | _Element | None:
    """Returns an operand's integer, or the element of the parameter it is; None if neither."""
    found = moved_from(where, name)
    if found is None:
        return None
    if found.op == "constant":
        value = _LITERAL.match(found.rest)
        return int(value.group(1)) if value else None
    source = moved_from(where, found.operands()[0]) if found.op == "get-tuple-element" else None
    if source is None or source.op != "parameter":
        return None
    return _Element(int(found.attribute("index")))


def moved_from(where: Computation, name: str) -> Instruction | None:
    """Returns the instruction that computes an operand, past copies and bitcasts."""
    found = where.by_name.get(name)
    while found is not None and found.op in _MOVES:
        found = where.by_name.get(found.operands()[0])
    return found
