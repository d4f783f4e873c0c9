"""The sites of a program: operations to measure, in execution order, and what each reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import short_type
from jaxmp._jaxprs.compat import dtype_of, shape_of
from jaxmp._jaxprs.higher_order import Inner, inside, steering
from jaxmp._jaxprs.primitive_table import Flag, flagged
from jaxmp._jaxprs.scopes import SEED
from jaxmp._jaxprs.source import in_scope
from jaxmp._jaxprs.walk import Place
from jaxmp._screen import Printed
from jaxmp.policy import key_matches

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
    def elements(self) -> int:
        """The number of elements of the results of all iterations of its loops."""
        return self.size * math.prod(loop.length for loop in self.loops)

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
class _SitePlace(Place):
    """The place of a jaxpr in a program, with the loops and branches around it."""

    prefix: str = ""
    loops: tuple[Loop, ...] = ()
    branch: bool = False


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
    env: dict[Any, Refs] = {}
    for i, (var, const) in enumerate(zip(opened.constvars, consts, strict=True)):
        refs = _given(sites, f"constant {i}", "constant", short_type(var), var, "activation")
        if refs and bool(jnp.isinf(const).any()):
            sites[refs[0]] = dataclasses.replace(sites[refs[0]], endless=True)
        env[var] = refs
    results = _inside(program, opened, given, _SitePlace(), env)
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
        turns = [n for loop, i in zip(site.loops, at, strict=True) for n in (firsts[loop], i)]
        return (*turns, order[site.name])

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
    dtype = dtype_of(var)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


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


def _inside(
    program: SurveyedProgram,
    jaxpr: Any,
    given: Sequence[Refs],
    place: _SitePlace,
    env: dict[Any, Refs] | None = None,
) -> list[Refs]:
    """Adds the sites of a jaxpr; returns the sources of its results."""
    env = dict(env or {})
    opened, _ = compat.closed(jaxpr)
    env.update(zip(opened.invars, given, strict=True))

    def refs(atom: Any) -> Refs:
        if not isinstance(atom, Literal):
            return env.get(atom, ())
        return (INFINITY,) if is_measured(atom) and bool(np.isinf(atom.val).any()) else ()

    for i, eqn in enumerate(opened.eqns):
        name = f"{place.prefix}{i}"
        reads = [refs(atom) for atom in eqn.invars]
        inner = looked_into(eqn)
        if inner:
            outs = _into(program, eqn, inner, name, reads, place)
        else:
            outs = _site(program, eqn, name, _union(reads), place)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [refs(atom) for atom in opened.outvars]


def _site(
    program: SurveyedProgram, eqn: JaxprEqn, name: str, reads: Refs, place: _SitePlace
) -> list[Refs]:
    outs: list[Refs] = []
    here, sites = place.at(eqn), program.sites
    for var, site in zip(eqn.outvars, site_names(eqn, name), strict=True):
        if site is None:
            moved = (*reads, SEED) if in_scope(eqn, SEED) else reads
            outs.append(moved if is_measured(var) else ())
            continue
        of_weights = reads and all(ref in sites and sites[ref].kind == "weight" for ref in reads)
        gradient = here.backward and not here.again
        kind = "gradient" if gradient else "weight" if of_weights else "activation"
        sites[site] = Site(
            name=site,
            op=compat.called(eqn),
            path=here.path,
            line=here.source,
            backward=here.backward,
            kind=kind,
            dtype=str(dtype_of(var)),
            shape=shape_of(var),
            loops=place.loops,
            branch=place.branch,
            reads=tuple(ref for ref in reads if ref not in (INFINITY, SEED)),
            endless=INFINITY in reads,
            scaled=any(_is_scaled(program, ref) for ref in reads),
        )
        outs.append((site,))
    return outs


def _is_scaled(program: SurveyedProgram, ref: str) -> bool:
    if ref in program.carries:
        return any(_is_scaled(program, start) for start in program.carries[ref].start)
    return ref == SEED or (ref in program.sites and program.sites[ref].scaled)


def _into(
    program: SurveyedProgram,
    eqn: JaxprEqn,
    inner: Sequence[Inner],
    name: str,
    reads: Sequence[Refs],
    place: _SitePlace,
) -> list[Refs]:
    """Adds the sites inside an equation; returns the sources of its results."""
    found: list[Refs] = [()] * len(eqn.outvars)
    here = place.at(eqn)
    for k, one in enumerate(inner):
        given = [reads[i] for i in one.operands]
        loops = place.loops
        carries: list[Carry] = []
        if one.loops:
            loop = None
            if not one.open_ended:
                loop = Loop(name, one.reverse, int(one.trips))
                loops = (*loops, loop)
            for i in one.carries:
                carries.append(Carry(loop, given[i]))
                given[i] = (f"{name}.{k} carry {i}",)
                program.carries[given[i][0]] = carries[-1]
        inside_place = dataclasses.replace(
            here, prefix=f"{name}.{k}/", loops=loops, branch=place.branch or one.chance < 1
        )
        outs = _inside(program, one.jaxpr, given, inside_place)
        for carry, out in zip(carries, outs, strict=False):
            if one.results[0] is not None:
                carry.back = out
        for result, out in zip(one.results, outs, strict=True):
            if result is not None:
                found[result] = _union([found[result], out])
    if not inner[0].loops and steering(eqn):
        chosen = _union([reads[i] for i in steering(eqn)])
        found = [_union([refs, chosen]) for refs in found]
    return found


def _union(several: Iterable[Refs]) -> Refs:
    return tuple(dict.fromkeys(ref for refs in several for ref in refs))
