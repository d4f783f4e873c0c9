"""The values that a lock is about, and the module, the pass and the parameter of each.

They are those that a result depends on: not prints, nor what only prints read.

Equations in a Linen module carry the module's path; those in a plain function or an NNX module do
not. A product without a path is named after the parameter it reads, and the product that computes
the parameter's gradient after the operand that the two share. After the backward pass, a value
belongs to the module whose gradient it is computed from.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.execute.annotations import contracts
from jaxmp._core.jaxprs.attributes import has_effects
from jaxmp._core.jaxprs.compat import closed, inner_jaxprs, jaxprs_run, shape_of
from jaxmp._core.jaxprs.dataflow import demanded
from jaxmp._core.jaxprs.follow import Follower
from jaxmp._core.jaxprs.higher_order import Inner, inside, steering
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.primitive_table import Flag, flagged
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.plan.primitives import LOW

# Primitives that only show values: a metric that is only printed is not part of the computation.
_PRINTS = frozenset({"debug_callback", "debug_print"})
# Primitives that return their first operand, or parts of it, in some dtype and layout.
_SAME = flagged(Flag.MOVING | Flag.CROSSING | Flag.IN_PARTS) - flagged(Flag.JOINING)
_SAME = (_SAME | {"convert_element_type", "name", "stop_gradient"}) - {"gather", "stack"}
# Scopes that JAX names after its own functions, `jnp.einsum`'s by its subscripts: not modules.
_FUNCTION = re.compile(r"->|\(")

GIVEN, FORWARD, BACKWARD, UPDATE = range(4)
PASSES = ("forward", "forward", "backward", "update")


def live_equations(program: Any) -> set[int]:
    """Returns the `id`s of a closed jaxpr's equations, at any depth, that a result or effect needs.

    Example:
      >>> import jax
      >>> jaxpr = jax.make_jaxpr(lambda x: (jax.debug.print("{}", x + 1), x * 2)[1])(1.0)
      >>> [eqn.primitive.name for eqn in jaxpr.eqns if id(eqn) in live_equations(jaxpr)]
      ['mul']
    """
    found: set[int] = set()

    @functools.cache
    def run(jaxpr: Any, wanted: tuple[bool, ...]) -> list[bool]:
        opened = closed(jaxpr).jaxpr
        live = {v for v, w in zip(opened.outvars, wanted, strict=True) if w and not _literal(v)}
        for eqn in reversed(opened.eqns):
            outs = [v in live for v in eqn.outvars]
            effect = has_effects(eqn) and eqn.primitive.name not in _PRINTS
            ins = demanded(eqn, outs, run_inside, operator.or_, nothing=False)
            needed = any(outs) or (effect and not inside(eqn)) or any(ins or ())
            if not needed:
                continue
            found.add(id(eqn))
            unknown = () if inside(eqn) else inner_jaxprs(eqn)
            found.update(id(e) for each in unknown for e in equations(closed(each).jaxpr.eqns))
            ins = ins or [True] * len(eqn.invars)
            for i in steering(eqn) if inside(eqn) else ():
                ins[i] = True
            live.update(v for v, w in zip(eqn.invars, ins, strict=True) if w and not _literal(v))
        return [v in live for v in opened.invars]

    def run_inside(inner: Inner, wanted: Sequence[bool]) -> list[bool]:
        steers = (w or r is None for w, r in zip(wanted, inner.results, strict=True))
        return run(inner.jaxpr, tuple(steers))

    run(program, (True,) * len(closed(program).jaxpr.outvars))
    return found


def _literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


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


class Seen(NamedTuple):
    """An equation's place, the facts about its operands, its pass and its module."""

    place: Place
    known: list[LockValue]
    stage: int
    module: str


def module_of(place: Place) -> str:
    """Returns the module path of an equation, without functions of JAX."""
    return "/".join(part for part in place.path.split("/") if not _FUNCTION.search(part))


class LockFollower(Follower[LockValue]):
    """A follower that calls `visit` for each equation that is not higher-order."""

    nothing = LockValue()

    def __init__(self, visit: Callable[[Seen], None]) -> None:
        self._visit = visit
        self._tokens = itertools.count()
        # Token of a value → the parameters that name the products of the forward pass that read
        # it → the sorted shape of each parameter.
        self._readers: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)

    def literal(self, _literal: Literal) -> LockValue:
        return LockValue(fixed=True)

    def operand(self, _at: Place, _var: Any, fact: LockValue) -> LockValue:
        return self._with_token(fact)

    def transfer(self, at: Place, ins: list[LockValue], *, last: bool) -> list[LockValue]:
        eqn, path = at.eqn, module_of(at)
        name, stage, main = eqn.primitive.name, _stage(ins, at), _main(eqn, ins)
        first = stage == FORWARD or at.again  # or rematerialized
        module = path or (self._product(eqn, ins, first) if name in LOW else "")
        module = module or (main.parameter if first else main.module)
        if name in _SAME and ins:
            out = ins[0]._replace(module=ins[0].module or module)
            if out.stage not in (GIVEN, UPDATE):  # a parameter, or the previous step's
                out = out._replace(stage=stage)
        else:
            fixed = all(value.fixed for value in ins) and not has_effects(eqn)
            out = LockValue(max(stage, FORWARD), module, fixed=fixed)
        if last:
            self._visit(Seen(at, ins, stage, module))
        # Looks into the jaxpr of a kernel, which has products, but not of a scatter,
        # which adds two numbers.
        for jaxpr in jaxprs_run(eqn) if contracts(eqn) and name not in LOW else ():
            given = [LockValue(stage)] * len(closed(jaxpr).jaxpr.invars)
            self.run(at.unknown(jaxpr), given, last=last)
        return [self._with_token(out) for _ in eqn.outvars]

    def join(self, a: LockValue, b: LockValue) -> LockValue:
        return LockValue(
            stage=max(a.stage, b.stage),
            module=a.module if a.module == b.module else "",
            parameter=a.parameter if a.parameter == b.parameter else "",
            token=a.token if a.token == b.token else None,
            fixed=a.fixed and b.fixed,
        )

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


def _stage(known: Sequence[LockValue], place: Place) -> int:
    if place.backward or place.again:
        return BACKWARD
    after = any(value.stage >= BACKWARD for value in known)
    return UPDATE if after and not place.first(lambda eqn: in_scope(eqn, "jvp(")) else FORWARD


def _main(eqn: JaxprEqn, known: Sequence[LockValue]) -> LockValue:
    """Returns the largest operand, the first of several; of those with a module, if any has one."""
    pairs = zip(known, eqn.invars, strict=True)
    sized = [(math.prod(getattr(v.aval, "shape", ())), value) for value, v in pairs]
    named = [pair for pair in sized if pair[1].module] or sized
    return max(named, key=lambda pair: pair[0], default=(0, LockValue()))[1]


def _common(paths: Sequence[str]) -> str:
    """Returns the longest path that contains all of `paths`."""
    split = [path.split("/") for path in paths]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    return "/".join(parts[0] for parts in same)
