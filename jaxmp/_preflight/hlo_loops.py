"""How often each computation of an HLO program runs: loops, and what their trips are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from jaxmp._preflight.hlo_text import Computation, Instruction

_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(branch_computations|calls|called_computations)=\{([^{}]*)\}"
)
_NAME = re.compile(r"[\w.\-]+")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INDEX = re.compile(r"\bindex=(\d+)")
_LITERAL = re.compile(r"^(-?\d+)\)")
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_MOVES = ("copy", "bitcast", "copy-start", "copy-done")

Computations = Mapping[str, Computation]


class Runs(NamedTuple):
    """How often something runs.

    Attributes:
      times: how often.
      known: False if it is in a loop whose trips are not known, or in one of several branches: that
        counts once.
    """

    times: int = 1
    known: bool = True


def runs(program: Computations) -> dict[str, Runs]:
    """How often each computation runs when the program does once."""
    callers: dict[str, list[tuple[str, Runs]]] = defaultdict(list)
    for computation in program.values():
        for instruction in computation.instructions:
            # The second half of an asynchronous pair repeats what the first half calls.
            if not instruction.op.endswith(("-done", "-update")):
                for name, inner in _called(program, instruction):
                    callers[name].append((computation.name, inner))
    found: dict[str, Runs] = {}

    def of(name: str) -> Runs:
        if name not in found:
            found[name] = Runs()  # the entry, or what nothing calls
            calls = [(of(caller), inner) for caller, inner in callers[name]]
            if calls:
                times = sum(outer.times * inner.times for outer, inner in calls)
                known = all(outer.known and inner.known for outer, inner in calls)
                found[name] = Runs(times, known)
        return found[name]

    return {name: of(name) for name in program}


def _called(program: Computations, instruction: Instruction) -> list[tuple[str, Runs]]:
    """What an instruction calls, and how often."""
    return [
        (name, _times(program, instruction, word or words))
        for word, one, words, several in _CALLED.findall(instruction.rest)
        for name in _NAME.findall(one or several)
        if name in program
    ]


def _times(program: Computations, instruction: Instruction, word: str) -> Runs:
    """How often an instruction runs what it names by a word."""
    if instruction.op == "conditional":
        return Runs(known=False)
    if word not in ("body", "condition"):
        return Runs()
    trips = trips_of(program, instruction)
    if trips is None:
        return Runs(known=False)
    return Runs(trips + (word == "condition"))


def trips_of(program: Computations, loop: Instruction) -> int | None:
    """The trips of a ``while``: as the compiler says (CPU, GPU), or as it can be read (TPU).

    It can be read where the loop counts from a constant, by a constant, while less than a constant,
    as those of `jax.lax.scan` do.
    """
    said = _TRIPS.search(loop.rest)
    if said:
        return int(said.group(1))
    names = {word: name for word, name, _, _ in _CALLED.findall(loop.rest)}
    around = program[loop.computation]
    test, body = program.get(names.get("condition", "")), program.get(names.get("body", ""))
    start = around.by_name.get(loop.operands()[0])
    if test is None or body is None or start is None or start.op != "tuple":
        return None
    compare, end = test.root(), body.root()
    if compare is None or compare.op != "compare" or end is None or end.op != "tuple":
        return None
    direction = _DIRECTION.search(compare.rest)
    if direction is None or direction.group(1) != "LT":
        return None

    def constant(where: Computation, value: Instruction | None) -> int | None:
        """What a value is in every trip: a constant, or an element of the state that stays one."""
        element = _element(where, value)
        if element is None:
            return _literal(value)
        stays = _element(body, _operand(body, end, element)) == element
        return _literal(_operand(around, start, element)) if stays else None

    counter = _element(test, _operand(test, compare, 0))
    stop = constant(test, _operand(test, compare, 1))
    added = None if counter is None else _operand(body, end, counter)
    if counter is None or stop is None or added is None or added.op != "add":
        return None
    terms = [_operand(body, added, i) for i in (0, 1)]
    steps = [constant(body, term) for term in terms if _element(body, term) != counter]
    first = _literal(_operand(around, start, counter))
    if len(steps) != 1 or first is None or not steps[0] or steps[0] < 0:
        return None
    return max(0, -(-(stop - first) // steps[0]))


def _operand(where: Computation, of: Instruction, index: int) -> Instruction | None:
    """An operand of an instruction, past what only copies it."""
    operands = of.operands()
    found = where.by_name.get(operands[index]) if index < len(operands) else None
    while found is not None and found.op in _MOVES:
        found = where.by_name.get(found.operands()[0])
    return found


def _element(where: Computation, of: Instruction | None) -> int | None:
    """Which element of a computation's one parameter, a tuple, an instruction is."""
    if of is None or of.op != "get-tuple-element":
        return None
    source, index = _operand(where, of, 0), _INDEX.search(of.rest)
    if source is None or source.op != "parameter" or index is None:
        return None
    return int(index.group(1))


def _literal(of: Instruction | None) -> int | None:
    """The integer that a constant is."""
    value = _LITERAL.match(of.rest) if of is not None and of.op == "constant" else None
    return int(value.group(1)) if value else None
