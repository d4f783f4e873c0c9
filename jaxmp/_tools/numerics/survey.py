"""The sites of a program: operations to measure, in execution order, and what each reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_inexact, short_type
from jaxmp._core.jaxprs.compat import dtype_of, shape_of
from jaxmp._core.jaxprs.follow import Follower
from jaxmp._core.jaxprs.higher_order import Inner, inside, steering
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.primitive_table import Flag, flagged
from jaxmp._core.jaxprs.scopes import SEED
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.policy_keys import key_matches
from jaxmp._tools.screen import Printed

_UNMEASURED = flagged(Flag.UNMEASURED)
# Primitives of jaxmp that are one operation: their inner jaxprs only implement a product.
WHOLE = frozenset({"product_by_parameter", "product_in_float32"})
# Primitives that no user wrote.
_IN_WORDS = {"one_minus_square": "1 - y**2 of a derivative"}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of known length that a site is in; in reverse, its last iteration runs first."""

    name: str
    reverse: bool = False
    length: int = 1


# The sources of a value: names of sites and carries, an infinity written in the program, or
# `SEED`, the cotangent of the loss.
Refs = tuple[str, ...]
INFINITY = "infinity"


@dataclasses.dataclass
class Carry:
    """A carry of a loop, and its sources."""

    loop: Loop | None  # None: of unknown length, its iterations are measured together
    start: Refs  # its sources before the first iteration
    back: Refs = ()  # its sources after each iteration


@dataclasses.dataclass(frozen=True)
class Site(Printed):
    """An operation whose result is measured, or an argument of the program.

    Attributes:
      name: its place in the program.
      op: the primitive; "argument" or "constant".
      path: the path of the modules around it, or the name of the argument.
      line: ``file.py:line``.
      kind: "activation", "gradient" or "weight".
      dtype: of the result.
      shape: of the result.
      backward: whether it belongs to a backward pass.
      loops: the loops around it, outermost first.
      branch: whether it is in one of several branches.
      reads: the sources of its operands.
      endless: whether it reads an infinity that was written in the program.
      scaled: whether it is a multiple of the cotangent of the loss, and so of the loss scale:
        values that a backward pass rematerializes are not.
    """

    name: str
    op: str
    path: str
    line: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    backward: bool = False
    loops: tuple[Loop, ...] = ()
    branch: bool = False
    reads: Refs = ()
    endless: bool = False
    scaled: bool = False

    @property
    def size(self) -> int:
        """The number of elements of one result."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def iterations(self) -> int:
        """The number of iterations of its loops."""
        return math.prod(loop.length for loop in self.loops)

    @property
    def elements(self) -> int:
        """The number of elements of the results of all iterations of its loops."""
        return self.size * self.iterations

    def is_in(self, pattern: str) -> bool:
        """Returns whether a pattern is the path, or matches it by the rules of a `PolicyMap`."""
        return pattern == self.path or key_matches(pattern, self.path.split("/"))

    @property
    def where(self) -> str:
        """The module and the line, as far as they are known."""
        return " at ".join(filter(None, (self.path, self.line)))

    def __str__(self) -> str:
        """Describes the operation in one line."""
        direction = "backward" if self.backward else "forward"
        op = _IN_WORDS.get(self.op, self.op)
        return f"{op} ({self.dtype}, {direction}) in {self.where or 'no module'}"


@dataclasses.dataclass(frozen=True)
class SurveyedProgram:
    """A program's sites.

    Attributes:
      sites: the sites by name, in the order in which they run.
      results: the sources of each result of the program.
      carries: the carries of its loops, by name.
    """

    sites: dict[str, Site]
    results: tuple[Refs, ...] = ()
    carries: dict[str, Carry] = dataclasses.field(default_factory=dict)


def survey(jaxpr: Any, labels: Sequence[str], weights: Iterable[int] = ()) -> SurveyedProgram:
    """Finds the sites of a closed jaxpr; `labels` names its arguments, `weights` are parameters."""
    opened, consts = compat.closed(jaxpr)
    program = SurveyedProgram({})
    sites = program.sites
    weights = frozenset(weights)
    given = []
    for i, (var, label) in enumerate(zip(opened.invars, labels, strict=True)):
        kind = "weight" if i in weights else "activation"
        given.append(_given(sites, f"argument {i}", "argument", label, var, kind))
    constants: dict[Any, Refs] = {}
    for i, (var, const) in enumerate(zip(opened.constvars, consts, strict=True)):
        refs = _given(sites, f"constant {i}", "constant", short_type(var), var, "activation")
        if refs and bool(jnp.isinf(const).any()):
            sites[refs[0]] = dataclasses.replace(sites[refs[0]], endless=True)
        constants[var] = refs
    results = _Surveyor(program, constants).run(Place(jaxpr), given)
    return dataclasses.replace(program, results=tuple(results))


def running_order(
    sites: Mapping[str, Site],
) -> Callable[[Site, Sequence[int]], tuple[int, ...]]:
    """Returns a sort key of sites in iterations of their loops, by the order of execution."""
    order = {name: i for i, name in enumerate(sites)}
    # Sites of a loop's body are neighbors: the first of them stands for the loop.
    firsts: dict[Loop, int] = {}
    for name, i in order.items():
        for loop in sites[name].loops:
            firsts.setdefault(loop, i)

    def when(site: Site, at: Sequence[int]) -> tuple[int, ...]:
        positions = [n for loop, i in zip(site.loops, at, strict=True) for n in (firsts[loop], i)]
        return (*positions, order[site.name])

    return when


def site_names(eqn: JaxprEqn, name: str) -> list[str | None]:
    """Returns the site name of each result of an equation; None for one that is not measured."""
    if eqn.primitive.name in _UNMEASURED or _widens(eqn):
        return [None] * len(eqn.outvars)
    return [f"{name}:{k}" if is_measured(var) else None for k, var in enumerate(eqn.outvars)]


def looked_into(eqn: JaxprEqn) -> tuple[Inner, ...]:
    """Returns the jaxprs inside an equation, if their sites belong to the program."""
    return () if eqn.primitive.name in WHOLE else inside(eqn)


def is_measured(var: Any) -> bool:
    """Returns whether a variable is a floating or complex array."""
    return is_inexact(var.aval)


def _widens(eqn: JaxprEqn) -> bool:
    """Returns whether an equation converts floating-point numbers exactly."""
    if eqn.primitive.name != "convert_element_type":
        return False
    if not all(map(is_measured, (*eqn.invars, *eqn.outvars))):
        return False
    before, after = (jnp.finfo(dtype_of(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    return bool(after.nmant >= before.nmant and after.maxexp >= before.maxexp)


def _given(sites: dict[str, Site], name: str, op: str, label: str, var: Any, kind: str) -> Refs:
    if not is_measured(var):
        return ()
    dtype, shape = str(dtype_of(var)), shape_of(var)
    sites[name] = Site(name, op, label, "", kind=kind, dtype=dtype, shape=shape)
    return (name,)


class _Surveyor(Follower[Refs]):
    """The follower of values' sources, which adds the sites that it passes to a program."""

    nothing = ()

    def __init__(self, program: SurveyedProgram, constants: Mapping[Any, Refs]) -> None:
        self._program = program
        self._constants = constants

    def literal(self, literal: Literal) -> Refs:
        endless = is_measured(literal) and bool(np.isinf(literal.val).any())
        return (INFINITY,) if endless else ()

    def constant(self, var: Any, _value: Any) -> Refs:
        return self._constants.get(var, ())

    def inners(self, eqn: JaxprEqn) -> tuple[Inner, ...]:
        return looked_into(eqn)

    def transfer(self, at: Place, ins: list[Refs], *, last: bool) -> list[Refs]:  # noqa: ARG002
        outs: list[Refs] = []
        eqn, sites, reads = at.eqn, self._program.sites, _union(ins)
        loops = tuple(filter(None, map(_loop, at.chain())))[::-1]
        branch = any(place.inner and place.inner.chance < 1 for place in at.chain())
        for var, site in zip(eqn.outvars, site_names(eqn, at.name), strict=True):
            if site is None:
                moved = (*reads, SEED) if in_scope(eqn, SEED) else reads
                outs.append(moved if is_measured(var) else ())
                continue
            kinds = {sites[ref].kind if ref in sites else "" for ref in reads}
            gradient = at.backward and not at.again
            kind = "gradient" if gradient else "weight" if kinds == {"weight"} else "activation"
            sites[site] = Site(
                name=site,
                op=compat.called(eqn),
                path=at.path,
                line=at.source,
                backward=at.backward,
                kind=kind,
                dtype=str(dtype_of(var)),
                shape=shape_of(var),
                loops=loops,
                branch=branch,
                reads=tuple(ref for ref in reads if ref not in (INFINITY, SEED)),
                endless=INFINITY in reads,
                scaled=any(map(self._is_scaled, reads)),
            )
            outs.append((site,))
        return outs

    def inner(self, at: Place, ins: list[Refs], *, last: bool) -> list[Refs]:
        """Follows an inner jaxpr, in which a carry is a source of its own."""
        given = [ins[i] for i in at.inner.operands]
        carries = [Carry(_loop(at), given[i]) for i in at.inner.carries]
        for i, carry in zip(at.inner.carries, carries, strict=True):
            given[i] = (f"{at.name[:-1]} carry {i}",)
            self._program.carries[given[i][0]] = carry
        outs = self.run(at, given, last=last)
        for carry, out in zip(carries, outs, strict=False):
            carry.back = out
        return outs

    def equation(self, at: Place, ins: list[Refs], *, last: bool) -> Sequence[Refs]:
        outs, inners = super().equation(at, ins, last=last), looked_into(at.eqn)
        if not inners or inners[0].loops:
            return outs
        chosen = [ins[i] for i in steering(at.eqn)]
        return [_union([refs, *chosen]) for refs in outs]

    def join(self, a: Refs, b: Refs) -> Refs:
        return _union([a, b])

    def _is_scaled(self, ref: str) -> bool:
        if ref in self._program.carries:
            return any(map(self._is_scaled, self._program.carries[ref].start))
        sites = self._program.sites
        return ref == SEED or (ref in sites and sites[ref].scaled)


def _loop(place: Place) -> Loop | None:
    """Returns the loop of known length whose body is at a place; None if it is not of one."""
    inner = place.inner
    if inner is None or not inner.loops or inner.open_ended:
        return None
    return Loop(place.around.name, inner.reverse, int(inner.trips))


def _union(several: Iterable[Refs]) -> Refs:
    return tuple(dict.fromkeys(ref for refs in several for ref in refs))
