"""Cache keys of traced programs, so that a program equal to an earlier one is not planned again.

Every call traces the function again. Its plan, and what JAX compiled for the jits inside, are
reused if the trace is the same, equation by equation.

Inside a program, the planner and JAX's caches compare jaxprs by identity. Layers are traced one by
one, to jaxprs that differ only in the name of the layer; that name is moved to the equation that
calls them, and equal jaxprs become one object.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import (
    context,
    has_effects,
    holds_jaxprs,
    is_reference,
    is_tracer,
    moves_between_devices,
    name_stack,
    names_around,
    scoped,
    traceback,
    without_names,
)
from jaxmp._core.jaxprs.compat import closed

# NumPy arrays of at most so many bytes are compared by their contents.
_COMPARED = 2**20


@dataclasses.dataclass(frozen=True)
class ComparableProgram:
    """A jaxpr that is compared by what it computes.

    Objects in it that are compared by identity (a rule traced again, a callback) make it differ.
    """

    jaxpr: Any = dataclasses.field(compare=False)
    key: Hashable


def comparable(jaxpr: Any, *, lines: bool = False) -> ComparableProgram | None:
    """Returns a jaxpr as a `ComparableProgram`; None for one that is not compared.

    A program with constants is not: they may be tracers, or large. With `lines`, programs are equal
    only if they were written in the same source lines.
    """
    if closed(jaxpr).jaxpr.constvars:
        return None
    key = _Key(lines=lines)
    try:
        key.of_jaxpr(jaxpr)
        hash(programs := tuple(key.programs))
    except TypeError:  # something in it has no hash
        return None
    return ComparableProgram(jaxpr, programs)


def run_key(jaxpr: Any) -> Hashable | None:
    """Returns the key of what running a program computes; None if it does not run as one.

    Derivative rules are not part of it. Its constants are, and it keeps none of them.
    """
    opened, consts = closed(jaxpr)
    variables = (*opened.invars, *opened.constvars)
    if has_effects(opened) or any(map(is_reference, variables)):
        return None
    key = _RunKey(lines=False)
    try:
        constants = tuple(map(_constant_key, consts))
        key.of_jaxpr(compat.without_values(opened))
        programs = _Hashed((constants, tuple(key.programs)))
    except TypeError:
        return None
    return programs


class _Hashed:
    """A large key, whose hash is computed once."""

    def __init__(self, key: Hashable) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and self._hash == other._hash and self._key == other._key


class _Identity:
    """The key of an array, which cannot change: equal for the same array, while it lives."""

    def __init__(self, array: Any) -> None:
        self._id, self._array = id(array), weakref.ref(array)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        array = self._array()
        return isinstance(other, _Identity) and array is not None and array is other._array()


def _constant_key(const: Any) -> Hashable:
    """Returns the key of a constant: a NumPy array, which may be changed in place, by contents."""
    if isinstance(const, jax.Array):
        return _Identity(const)
    array = np.asarray(const)
    if array.nbytes > _COMPARED:
        raise TypeError("its contents are not compared at each call")
    return array.dtype, array.shape, hashlib.sha256(array.tobytes()).digest()


class Bodies:
    """A cache of the latest jaxprs, in which equal ones are one object.

    They are equal if they compute the same, and were written in the same lines and modules.
    """

    def __init__(self) -> None:
        self._first = functools.lru_cache(maxsize=256)(lambda program: program.jaxpr)

    def one(self, jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns the first open jaxpr equal to one but for its enclosing names, and its names."""
        names = names_around(jaxpr)
        program = comparable(without_names(jaxpr, len(names)), lines=True)
        return (jaxpr, ()) if program is None else (self._first(program), names)


def with_equal_bodies(jaxpr: Any) -> Any:
    """Returns a program in which equal functions under `jax.checkpoint` are one jaxpr."""
    bodies = Bodies()

    def shared(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name != "remat2":
            return eqn
        one, names = bodies.one(compat.call_jaxpr(eqn))
        return scoped(eqn, names, jaxpr=one)

    opened = closed(jaxpr).jaxpr
    if not any(eqn.primitive.name == "remat2" for eqn in opened.eqns):
        return jaxpr
    return compat.with_equations(jaxpr, list(map(shared, opened.eqns)))


class _Key:
    """The key of a program: its jaxprs in the order they are met, inner ones by their numbers."""

    def __init__(self, *, lines: bool) -> None:
        self._lines = lines
        self.programs: list[Hashable] = []
        self._numbers: dict[Any, int] = {}

    def of_jaxpr(self, jaxpr: Any) -> int:
        """Returns the number of a jaxpr, adding it if it is new."""
        known = self._numbers.get(jaxpr)
        if known is not None:
            return known
        opened, consts = closed(jaxpr)
        self.check(opened, consts)
        number = self._numbers[jaxpr] = len(self.programs)
        self.programs.append(None)  # those inside come after it
        names: dict[Any, int] = {}
        for var in (*opened.constvars, *opened.invars):
            names[var] = len(names)
        avals = tuple(var.aval for var in names)
        eqns = []
        for eqn in opened.eqns:
            operands = tuple(self._atom(atom, names) for atom in eqn.invars)
            for var in eqn.outvars:
                names[var] = len(names)
            eqns.append(
                (
                    eqn.primitive,
                    operands,
                    tuple(var.aval for var in eqn.outvars),
                    tuple((name, self._value(eqn.params[name])) for name in self.names(eqn)),
                    str(name_stack(eqn)),  # it names regions
                    context(eqn),
                    traceback(eqn) if self._lines else None,
                )
            )
        outs = tuple(self._atom(atom, names) for atom in opened.outvars)
        self.programs[number] = (avals, tuple(map(id, consts)), tuple(eqns), outs)
        return number

    def check(self, _jaxpr: Any, consts: Sequence[Any]) -> None:
        """Raises `TypeError` for a jaxpr that has no key."""
        if not all(isinstance(const, jax.Array) and not is_tracer(const) for const in consts):
            raise TypeError("a NumPy array may be changed in place, and a tracer must not be kept")

    def names(self, eqn: JaxprEqn) -> Iterable[str]:
        """Returns the names of the parameters that are part of the key."""
        return eqn.params

    def _atom(self, atom: Any, names: dict[Any, int]) -> Hashable:
        if not isinstance(atom, Literal):
            return names[atom]
        value = np.asarray(atom.val)
        return atom.aval, value.dtype, value.tobytes()

    def _value(self, value: Any) -> Hashable:
        """Returns the key of a parameter, with its type: 1 == 1.0 == True, and 0.0 == -0.0."""
        if value is None or type(value) in (bool, int, str):
            return type(value), value
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(self._value, value))
        if holds_jaxprs(value):
            return "jaxpr", self.of_jaxpr(value)
        return type(value), repr(value) if isinstance(value, (float, complex)) else value


class _RunKey(_Key):
    """The key of a program that nothing transforms."""

    def check(self, jaxpr: Any, consts: Sequence[Any]) -> None:
        if any(const is not None for const in consts):
            raise TypeError("what is compiled would keep them")
        for eqn in jaxpr.eqns:
            if "callback" in eqn.primitive.name or moves_between_devices(eqn):
                raise TypeError(f"{eqn.primitive} runs by itself")

    def names(self, eqn: JaxprEqn) -> Iterable[str]:
        rules = compat.TRANSFORMATION_RULES.get(eqn.primitive.name, ())
        return [name for name in eqn.params if name not in rules]
