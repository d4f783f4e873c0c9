"""The number of runs of each computation of an HLO program, and the trip counts of its loops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxmp._preflight.hlo_text import Computation, Computations, Instruction

_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|(?:true|false)_computation|(?:branch|called)_computations)"
    r"=(?:%?([\w.\-]+)|\{([^{}]*)\})"
)
_NAME = re.compile(r"[\w.\-]+")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LITERAL = re.compile(r"^(-?\d+)\)")
_MOVES = ("copy", "bitcast", "copy-start", "copy-done")


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
