"""Plans: plain Python data, made by `planner` and run by `execute`.

Every float32 value of the program as written is *kept* either in float32 or in the low dtype. A
plan has for each equation the dtypes its operands are read in and its results kept in, and why.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.jaxprs.compat import dtype_of, variables
from jaxmp._core.jaxprs.higher_order import Inner, inside
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.plan.provenance import COMPUTED, DATA, LARGE, SHARED
from jaxmp._core.plan.roots import OTHER, WEIGHTS
from jaxmp._core.plan.rules import Rules
from jaxmp._core.plan.why import Kind, Residual, Why

DType = np.dtype[Any]
Made = TypeVar("Made")


class OriginId(NamedTuple):
    """The identity of a low value.

    Attributes:
      at: where its jaxpr makes it: at the number of an equation, followed by what distinguishes it
        from others that the equation makes; or at an operand, whose numbers are -1, -2, ...
      exponential: whether it is a softmax's exponential; divided by its own sum it is the softmax
        itself, and not a normalization.
    """

    at: tuple[int, ...]
    exponential: bool = False


NO_ORIGINS: frozenset[OriginId] = frozenset()


class Value(NamedTuple):
    """A float32 value of the program: the dtype it is kept in, and what decides its readers' casts.

    Attributes:
      dtype: the low dtype it is kept in, or None for float32.
      origins: identities of the low values it derives from since the last contraction; a low value
        counts itself.
      pinned: why contractions of it stay float32, if they do: the author upcast it from 16 bits,
        or it is the solution of a linear system.
      argument: whether it enters the jaxpr in float32; its readers narrow it one by one, so that
        their gradients are summed in float32.
      constant: whether it is a literal of the program, or one broadcast.
      mask: whether it is a bool, converted and moved: a factor that rounds nothing.
      tangent: whether it is a tangent or cotangent: narrowing it must stay linear.
      provenance: whether it may be narrowed next to low values; see `provenance`.
      root: what it is computed from; see `roots`.
    """

    dtype: DType | None = None
    origins: frozenset[OriginId] = NO_ORIGINS
    pinned: Why | None = None
    argument: bool = False
    constant: bool = False
    mask: bool = False
    tangent: bool = False
    provenance: str = COMPUTED
    root: str = OTHER

    @property
    def blocks_narrowing(self) -> bool:
        """Whether it is float32 and may not be narrowed: low values that meet it are widened."""
        return self.dtype is None and self.provenance in (DATA, LARGE)

    @property
    def is_weight(self) -> bool:
        """Whether it is a parameter, or computed from parameters alone (other than by a lookup)."""
        return self.root == WEIGHTS

    def stays_finite(self, rules: Rules) -> bool:
        """Returns whether a cast keeps it finite: a literal, a mask, or computed from inputs alone.

        A value computed from low ones overflows to infinity in float16, so that the training step
        is skipped, unless the policy saturates; and a tangent must stay linear.
        """
        written = not self.origins and self.provenance not in (COMPUTED, SHARED)
        return not self.tangent and (written or rules.saturate)


def dtypes_of(values: Iterable[Value | None]) -> tuple[DType | None, ...]:
    """Returns the low dtype each value is kept in; None for float32, and if not governed."""
    return tuple(v.dtype if v else None for v in values)


class OperandCast(NamedTuple):
    """The cast with which a step reads an operand.

    Attributes:
      dtype: the dtype to cast to; None for no cast, of values that are not governed.
      saturate: whether finite values stay finite in a narrower dtype.
      private_copy: whether no other step reads the copy, so that the gradients of all readers are
        summed in float32.
      shape: the shape to broadcast to before the cast, in float32, so that the gradient is summed
        in float32; None for no broadcast.
    """

    dtype: DType | None = None
    saturate: bool = False
    private_copy: bool = False
    shape: tuple[int, ...] | None = None


class Op:
    """The implementation of a step: it binds the equation, or runs what a pass replaces it with.

    A pass defines an op of its own, which holds all that it needs; nothing else in plans, and in
    `execute`, depends on passes.

    Attributes:
      parameters: the operands that are float32 parameters, whose gradients are float32.
      moves: whether it only moves values.
      as_is: whether it binds the equation as written, if all dtypes are those as written.
    """

    parameters: tuple[int, ...] = ()
    moves: bool = False
    as_is: bool = True

    def run(self, step: Step, env: Any) -> list[Any]:
        """Computes the results of a step, given an `Environment` of the arrays so far."""
        raise NotImplementedError

    def reads(self, step: Step) -> list[Any]:
        """Returns the variables that running a step reads."""
        return variables(step.eqn.invars)


class Segment(NamedTuple):
    """A run of steps whose values are, for the most part, rematerialized in the backward pass.

    Attributes:
      start: the first step.
      stop: the step after the last one.
      results: its variables that anything after it reads.
      offloads: whether what is saved of it is saved in host memory.
      copied: of the variables that it reads, those that it saves there.
    """

    start: int
    stop: int
    results: tuple[Any, ...]
    offloads: bool = False
    copied: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The plan of one equation.

    Attributes:
      eqn: the equation as written.
      op: the op that runs it.
      casts: the cast of each operand.
      outs: the dtype each result is kept in; None if it is not governed.
      why: the reason for these.
      rules: the policy in force.
      plans: the plans of the jaxprs inside, in the order of `higher_order.inside`.
      linear: whether an operand is a tangent: the step may be transposed.
      clips: whether results beyond the range of the low dtype are clipped to it, as policies ask
        with ``saturate``.
    """

    eqn: JaxprEqn
    op: Op
    casts: tuple[OperandCast, ...]
    outs: tuple[DType | None, ...]
    why: Why
    rules: Rules
    plans: tuple[Plan, ...] = ()
    linear: bool = False
    clips: bool = False

    @property
    def ins(self) -> tuple[DType | None, ...]:
        """The dtype each operand is read in."""
        return tuple(read.dtype for read in self.casts)

    @property
    def inner_plans(self) -> Iterator[tuple[Inner, Plan]]:
        """The jaxprs inside that are planned, and their plans."""
        return zip(inside(self.eqn) if self.plans else (), self.plans, strict=True)

    def run_in(self, dtype: DType, why: Kind) -> Step:
        """Returns the step with its governed operands and results in another dtype."""
        return dataclasses.replace(
            self,
            casts=tuple(r._replace(dtype=r.dtype and dtype) for r in self.casts),
            outs=tuple(d and dtype for d in self.outs),
            why=why.of(),
        )

    @property
    def unchanged(self) -> bool:
        """Whether the step binds its equation as written."""
        atoms, dtypes = (*self.eqn.invars, *self.eqn.outvars), (*self.ins, *self.outs)
        as_is = all(d in (None, dtype_of(v)) for v, d in zip(atoms, dtypes, strict=True))
        return self.op.as_is and as_is and all(plan.unchanged for plan in self.plans)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a jaxpr.

    Attributes:
      jaxpr: the open jaxpr as written, and `consts` its constants.
      rules: the policy in force.
      steps: one per equation.
      arguments: how each operand is kept; None if it is not governed.
      values: how each result is kept, for the plan of the caller; likewise.
      clip: which results are clipped to the finite range when they are returned narrower.
      segments: the runs of steps that are rematerialized in the backward pass, in order.
      saves: with ``residuals=recompute``, why each other step is in no segment; else empty.
      built: objects built once per plan, such as what `execute` traces; see `once`. Plans that
        differ only in origins share it; a plan with other steps starts with an empty one.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    rules: Rules
    steps: tuple[Step, ...]
    arguments: tuple[Value | None, ...]
    values: tuple[Value | None, ...]
    clip: tuple[bool, ...]
    segments: tuple[Segment, ...] = ()
    saves: tuple[Residual | None, ...] = ()
    built: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def ins(self) -> tuple[DType | None, ...]:
        """The dtype each operand is passed in: the low one, or None."""
        return dtypes_of(self.arguments)

    @functools.cached_property
    def outs(self) -> tuple[DType | None, ...]:
        """The dtype each result is returned in: the low one, or None."""
        return dtypes_of(self.values)

    @functools.cached_property
    def unchanged(self) -> bool:
        """Whether executing the plan is the same as evaluating the jaxpr."""
        low = any(dtype is not None for dtype in (*self.ins, *self.outs))
        return not low and not self.segments and all(step.unchanged for step in self.steps)

    def once(self, make: Callable[[Plan], Made]) -> Made:
        """Returns `make` of the plan, computed once."""
        if make not in self.built:
            self.built[make] = make(self)
        made: Made = self.built[make]
        return made

    @functools.cached_property
    def moved_by(self) -> dict[Any, Step]:
        """The step that moves a value to each variable that is a move's result."""
        return {v: s for s in self.steps if s.op.moves for v in s.eqn.outvars}

    def reads(self, step: Step) -> Iterator[Any]:
        """Yields the variables that running a step reads."""
        yield from step.op.reads(step)
        # Gradients of parameters go to the operands of the moves before it.
        way = [step.eqn.invars[i] for i in step.op.parameters]
        while way:
            atom = way.pop()
            if not isinstance(atom, Literal):
                yield atom
                way += self.moved_by[atom].eqn.invars if atom in self.moved_by else ()

    @functools.cached_property
    def last_reads(self) -> list[tuple[Any, ...]]:
        """For each step, the variables that nothing reads after it."""
        later = set(variables(self.jaxpr.outvars))
        found = []
        for step in reversed(self.steps):
            here = {*self.reads(step), *step.eqn.outvars} - later
            found.append(tuple(here))
            later |= here
        return found[::-1]

    def walk(self, around: Place | None = None, *, rematerialized: bool = False) -> Iterator[Visit]:
        """Yields every step at any depth, in order: one with plans inside, then the steps in it."""
        again = {i for segment in self.segments for i in range(segment.start, segment.stop)}
        for i, step in enumerate(self.steps):
            place = (around or Place()).at(step.eqn)
            covered = rematerialized or i in again
            yield Visit(step, place, covered, self.saves[i] if self.saves else None)
            for inner, plan in step.inner_plans:
                yield from plan.walk(place.inside(inner), rematerialized=covered)

    def tally(self) -> Collection[Tally]:
        """Returns every step at any depth, in order and once, with counts of repeated calls.

        It is computed once for all plans of the same steps.
        """
        if "tally" not in self.built:
            found: dict[int, Tally] = {}  # by the identity of the step
            for step in self.steps:
                found[id(step)] = Tally(step, 1, 1)
                for inner, called in step.inner_plans:
                    for each, places, runs in called.tally():
                        _, more_places, more_runs = found.get(id(each), (each, 0, 0))
                        runs = more_runs + inner.times * runs
                        found[id(each)] = Tally(each, places + more_places, runs)
            self.built["tally"] = found.values()
        return self.built["tally"]  # type: ignore[no-any-return]


class Tally(NamedTuple):
    """A step, and how often it is part of a program.

    Attributes:
      step: the step.
      places: in how many places of the program it is: each call of its function is one.
      runs: how often it runs per call of the program.
    """

    step: Step
    places: int
    runs: Any


class Visit(NamedTuple):
    """A step at one of its places in the program.

    Attributes:
      step: the step.
      place: the place.
      rematerialized: whether it is in a segment that is rematerialized in the backward pass.
      saves: with ``residuals=recompute``, why it is not; else None.
    """

    step: Step
    place: Place
    rematerialized: bool
    saves: Residual | None
