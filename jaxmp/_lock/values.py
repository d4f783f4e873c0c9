"""Follows values through a program: the module that computes each, the pass, and the parameter.

Equations in a Linen module carry the module's path; those in a plain function or an NNX module do
not. A product without a path is named after the parameter it reads, and the product that computes
the parameter's gradient after the operand that the two share. After the backward pass, a value
belongs to the module whose gradient it is computed from.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from jax.extend.core import JaxprEqn, Literal

from jaxmp._audit.place import AuditPlace
from jaxmp._autocast.annotations import contracts
from jaxmp._autocast.primitives import LOW
from jaxmp._jaxprs.attributes import has_effects
from jaxmp._jaxprs.compat import closed, jaxprs_run, shape_of
from jaxmp._jaxprs.dataflow import settled
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.primitive_table import Flag, flagged
from jaxmp._jaxprs.source import in_scope

# Primitives that return their first operand, or parts of it, in some dtype and layout.
_SAME = flagged(Flag.MOVING | Flag.CROSSING | Flag.IN_PARTS) - flagged(Flag.JOINING)
_SAME = (_SAME | {"convert_element_type", "name", "stop_gradient"}) - {"gather", "stack"}
# Scopes that JAX names after its own functions, `jnp.einsum`'s by its subscripts: not modules.
_FUNCTION = re.compile(r"->|\(")

GIVEN, FORWARD, BACKWARD, UPDATE = range(4)
PASSES = ("forward", "forward", "backward", "update")


class LockValue(NamedTuple):
    """The facts about a value.

    Attributes:
      stage: the pass it is computed in; GIVEN for an argument, also one that was moved or cast.
      module: the path of the module that computes it.
      parameter: the path of the argument that it is, possibly moved or cast; else empty.
      token: identifies the value; moved and cast copies have the same one. None if unknown.
      fixed: whether it is computed from literals alone.
    """

    stage: int = GIVEN
    module: str = ""
    parameter: str = ""
    token: int | None = None
    fixed: bool = False


@dataclasses.dataclass(frozen=True)
class LockPlace(AuditPlace):
    """The place of an equation, and whether it is differentiated.

    Attributes:
      differentiated: whether it is in the forward pass of a differentiated function.
    """

    differentiated: bool = False

    def at(self, eqn: JaxprEqn) -> Self:
        """See `Place.at`."""
        differentiated = self.differentiated or in_scope(eqn, "jvp(")
        place = super().at(eqn)
        path = "/".join(part for part in place.path.split("/") if not _FUNCTION.search(part))
        return dataclasses.replace(place, path=path, differentiated=differentiated)


_LITERAL = LockValue(fixed=True)


class Seen(NamedTuple):
    """An equation, its place, the facts about its operands, its pass and its module."""

    eqn: JaxprEqn
    place: LockPlace
    known: list[LockValue]
    stage: int
    module: str


class Follower:
    """A walk that follows values; calls `visit` for each equation that is not higher-order."""

    def __init__(self, visit: Callable[[Seen], None]) -> None:
        self._visit = visit
        self._tokens = itertools.count()
        # Token of a value → the parameters that name the products of the forward pass that read
        # it → the sorted shape of each parameter.
        self._readers: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)

    def run(
        self, jaxpr: Any, known: Sequence[LockValue], around: LockPlace, *, silent: bool = False
    ) -> list[LockValue]:
        """Returns the facts about the results of a jaxpr, given those about its operands."""
        opened = closed(jaxpr).jaxpr
        env = dict(zip(opened.invars, map(self._with_token, known), strict=True))

        def read(atom: Any) -> LockValue:
            return _LITERAL if isinstance(atom, Literal) else env.get(atom, LockValue())

        for eqn in opened.eqns:
            place, ins = around.at(eqn), [read(v) for v in eqn.invars]
            outs = (self._inside if inside(eqn) else self._visited)(eqn, ins, place, silent=silent)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in opened.outvars]

    def _inside(
        self, eqn: JaxprEqn, known: list[LockValue], place: LockPlace, *, silent: bool
    ) -> list[LockValue]:
        found: dict[int, LockValue] = {}
        for inner in inside(eqn):
            quiet = lambda jaxpr, ins: self.run(jaxpr, ins, place, silent=True)  # noqa: E731
            facts = settled(inner, known, quiet, _either)
            outs = self.run(inner.jaxpr, facts, place.inside(inner), silent=silent)
            for result, out in zip(inner.results, outs, strict=True):
                if result is not None:
                    found[result] = _either(found[result], out) if result in found else out
        return [found[i] for i in range(len(eqn.outvars))]

    def _visited(
        self, eqn: JaxprEqn, known: list[LockValue], place: LockPlace, *, silent: bool
    ) -> list[LockValue]:
        name, stage, main = eqn.primitive.name, _stage(known, place), _main(eqn, known)
        first = stage == FORWARD or place.again  # or rematerialized
        module = place.path or (self._product(eqn, known, first) if name in LOW else "")
        module = module or (main.parameter if first else main.module)
        fixed = all(value.fixed for value in known) and not has_effects(eqn)
        if name in _SAME and known:
            out = known[0]._replace(module=known[0].module or module)
            if out.stage not in (GIVEN, UPDATE):  # a parameter, or the previous step's
                out = out._replace(stage=stage)
        else:
            out = LockValue(max(stage, FORWARD), module, fixed=fixed)
        if not silent:
            self._visit(Seen(eqn, place, known, stage, module))
        # Looks into the jaxpr of a kernel, which has products, but not into that of a scatter,
        # which adds two numbers.
        for jaxpr in jaxprs_run(eqn) if contracts(eqn) and name not in LOW else ():
            given = [LockValue(stage)] * len(closed(jaxpr).jaxpr.invars)
            self.run(jaxpr, given, place.unknown(eqn), silent=silent)
        return [self._with_token(out) for _ in eqn.outvars]

    def _with_token(self, value: LockValue) -> LockValue:
        return value if value.token is not None else value._replace(token=next(self._tokens))

    def _product(self, eqn: JaxprEqn, known: list[LockValue], first: bool) -> str:  # noqa: FBT001
        """Returns the path of the parameter that a product reads, or whose gradient it computes."""
        named = [(v, shape_of(x)) for v, x in zip(known, eqn.invars, strict=False) if v.parameter]
        if named:
            # Of two arguments, the one that is deeper in its tree, or comes first.
            parameter, shape = max(named, key=lambda pair: pair[0].parameter.count("/"))
            if first:
                for value in known[:2]:
                    if value is not parameter and value.token is not None:
                        self._readers[value.token][parameter.parameter] = tuple(sorted(shape))
            return parameter.parameter
        found: dict[str, tuple[int, ...]] = {}
        for value in known[:2]:
            found |= self._readers.get(value.token, {}) if value.token is not None else {}
        shape = tuple(sorted(shape_of(eqn.outvars[0])))
        return _common([name for name, of in found.items() if of == shape] or list(found))


def _stage(known: Sequence[LockValue], place: LockPlace) -> int:
    if place.backward or place.again:
        return BACKWARD
    after = not place.differentiated and any(value.stage >= BACKWARD for value in known)
    return UPDATE if after else FORWARD


def _main(eqn: JaxprEqn, known: Sequence[LockValue]) -> LockValue:
    """Returns the largest operand, the first of several; of those with a module, if any has one."""
    pairs = zip(known, eqn.invars, strict=True)
    sized = [(math.prod(getattr(v.aval, "shape", ())), value) for value, v in pairs]
    named = [pair for pair in sized if pair[1].module] or sized
    return max(named, key=lambda pair: pair[0], default=(0, LockValue()))[1]


def _either(a: LockValue, b: LockValue) -> LockValue:
    """Joins the facts about a value that is one of two."""
    return LockValue(
        stage=max(a.stage, b.stage),
        module=a.module if a.module == b.module else "",
        parameter=a.parameter if a.parameter == b.parameter else "",
        token=a.token if a.token == b.token else None,
        fixed=a.fixed and b.fixed,
    )


def _common(paths: Sequence[str]) -> str:
    """Returns the longest path that contains all of `paths`."""
    split = [path.split("/") for path in paths]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    return "/".join(parts[0] for parts in same)
