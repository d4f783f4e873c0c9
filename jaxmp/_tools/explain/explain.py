"""`explain`: the plan as a table."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.autocast import closures
from jaxmp._core.autocast.coverage_warnings import overruled
from jaxmp._core.autocast.nnx_calls import on_scoped_copies
from jaxmp._core.autocast.program import plan_program, run_program, trace_program
from jaxmp._core.autocast.trained_weights import reading_as_stored
from jaxmp._core.jaxprs.attributes import is_inexact
from jaxmp._core.jaxprs.compat import dtype_of, variables
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.scopes import CAST, DEQUANTIZE
from jaxmp._core.jaxprs.source import in_scope, is_backward
from jaxmp._core.passes.rematerialize import residual
from jaxmp._core.passes.stored_weights import StoredDot
from jaxmp._core.plan.flops import contraction_flops, known_size, sizes
from jaxmp._core.plan.parameters import Argnums, by_position, read_argnums
from jaxmp._core.plan.plan import Plan, Step, Visit
from jaxmp._core.plan.primitives import LOW
from jaxmp._core.plan.regions import check_callable
from jaxmp._core.plan.rules import FLOAT32, Rules, governed, is_identity, region_rules
from jaxmp._core.plan.why import Kind, Residual, is_unknown, skipped, unfused
from jaxmp._core.policy_keys import key_matches
from jaxmp._core.products.derivative import QuantizedDot
from jaxmp._core.quantize.calls import holds_quantized, opening, seal
from jaxmp._tools.explain.explanation import Explanation, Row
from jaxmp._tools.speed.target import on_target, parse_target
from jaxmp.dtypes import short_dtype_name
from jaxmp.policy import Policy, PolicyLike, get_policy, single_policy
from jaxmp.recipes import Recipe, products

__all__ = ["Explanation", "Row", "explain", "planned", "warn_overruled"]


def explain(
    fn: Callable[..., Any],
    policy: PolicyLike = "float32",
    argnums: Argnums = 0,
    *,
    only: str | None = None,
    target: str | None = None,
) -> Callable[..., Explanation]:
    """Shows what `autocast(fn, policy)` would do, operation by operation, and why. Nothing runs.

    Without a policy, it shows what `fn` itself does: the autocasts and wrapped modules it calls.

    Args:
      fn: a function of any pytrees, as for `autocast`.
      policy: anything `get_policy` takes.
      argnums: which arguments hold the parameters, as for `autocast`.
      only: the rows to show: "matmul" (and convolutions), a dtype such as "float32", or a module's
        path, with all that is inside it: ``"Model/Block_*/attention"``, where ``**`` stands for
        any number of modules, and the outermost may be omitted.
      target: the chip that the program is for, as in `jaxmp.preflight`: recipes and kernels are
        chosen by it. By default the device that JAX runs on here.

    Returns:
      A function with the arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) that returns an
      `Explanation`: `print` it, or read its `rows`.

    Raises:
      TypeError: if `fn` is not callable, or is a Flax Linen module.
      TypeError: if `only` is no string.
      ValueError: if the policy is malformed, or the target unknown; at a call, if `only` is the
        path of no module.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def layer(w, x):
      ...     return jnp.mean(jax.nn.relu(x @ w) @ w)
      >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> jaxmp.explain(layer, "mixed_bfloat16")(w, w).products()
      {'bfloat16': 2}
    """
    asked = single_policy("explain", policy)
    check_callable("explain", fn)
    read_argnums("explain", argnums)
    if not isinstance(only, str | None):
        raise TypeError(f"explain: only must be a string such as 'matmul'; got {only!r}.")
    chip = None if target is None else parse_target(target, "explain")

    def explain_fn(*args: Any, **kwargs: Any) -> Explanation:
        plan, arrays, parameters = planned(fn, asked, argnums, args, kwargs)
        spelt = "" if is_identity(asked) else str(asked)
        overruled_by = spelt and overruled(plan)
        used = asked
        if spelt and closures.closing(plan):
            used = get_policy(governed(asked).name)
            plan, arrays, parameters = planned(fn, used, argnums, args, kwargs)
        rows = tuple(_rows(plan, _outside(plan) if is_identity(asked) else frozenset()))
        if used is not asked:
            why = str(Kind.CLOSES_OVER.of())
            rows = tuple(dataclasses.replace(row, reason=why) for row in rows)
        differentiated = any(is_backward(visit.step.eqn) for visit in plan.walk())
        if only is not None:
            rows = _only(rows, only)
        avals = map(jax.typeof, arrays)  # in which NumPy's float64 is JAX's float32
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        saved = functools.partial(on_target(chip, _residual_bytes), plan, used, shapes, parameters)
        return Explanation(
            rows, spelt, differentiated, overruled_by, dict if differentiated else saved
        )

    return on_target(chip, explain_fn)


def warn_overruled(tool: str, plan: Plan) -> str:
    """Warns if the policy of a tool decides no product of a program, and returns the sentence."""
    said = overruled(plan)
    if said:
        warnings.warn(f"{tool}: {said}.", UserWarning, stacklevel=3)
    return said


def planned(
    fn: Callable[..., Any], policy: Policy, argnums: Argnums, args: Any, kwargs: dict[str, Any]
) -> tuple[Plan, list[Any], list[bool]]:
    """Returns the plan of a call, its arrays, and which of them are parameters."""
    parameters = by_position(fn, argnums)
    looked_at = on_scoped_copies(fn)
    if holds_quantized((args, kwargs)):
        (args, kwargs), looked_at = seal((args, kwargs)), opening(looked_at)
    looked_at = reading_as_stored(looked_at, policy, argnums)
    traced = trace_program(looked_at, args, kwargs, policy)
    chosen = parameters(args, kwargs)
    return plan_program(traced.jaxpr, policy, chosen), traced.arrays, chosen


def _residual_bytes(
    plan: Plan, policy: Policy, arrays: Sequence[Any], parameters: Sequence[bool]
) -> dict[str, int]:
    """Returns the bytes that the parameters' gradient saves, by dtype; none if there is none."""
    by = [i for i, p in enumerate(parameters) if p and is_inexact(arrays[i])]

    def pullback(*arrays: Any) -> Any:
        def outs(*chosen: Any) -> list[Any]:
            given = list(arrays)
            for i, array in zip(by, chosen, strict=True):
                given[i] = array
            return list(filter(is_inexact, run_program(plan, given, policy)))

        return jax.vjp(outs, *(arrays[i] for i in by))[1]

    if not by:
        return {}
    try:
        jaxpr = jax.make_jaxpr(pullback)(*arrays).jaxpr
    except Exception:  # noqa: BLE001 (what has no derivative is refused by errors of any type)
        return {}
    saved = Counter[str]()
    for var in {*variables(jaxpr.outvars)}.difference(jaxpr.invars, jaxpr.constvars):
        saved[str(dtype_of(var))] += _nbytes(var)
    return dict(saved.most_common())


def _only(rows: Sequence[Row], only: str) -> tuple[Row, ...]:
    """Selects the rows of matmuls and convolutions, of a dtype, or of a module and all in it."""
    if only == "matmul":
        return tuple(row for row in rows if row.op in LOW)
    try:
        dtype = str(jnp.dtype(only))
    except TypeError:
        found = tuple(row for row in rows if _is_in(row.path, only))
    else:
        return tuple(row for row in rows if row.dtype == dtype)
    if not found:
        paths = sorted({row.path for row in rows if row.path})
        near = difflib.get_close_matches(only, paths, n=3, cutoff=0.3) or paths[:3]
        raise ValueError(
            f"explain: only={only!r} is neither 'matmul', nor a dtype, nor the path of a module in "
            f"the program; paths there are {', '.join(map(repr, near)) or 'none'}."
        )
    return found


def _is_in(path: str, pattern: str) -> bool:
    parts = path.split("/")
    inside = [parts[start : end + 1] for start in (0, 1) for end in range(start, len(parts))]
    return any(key_matches(pattern, part) for part in inside)


def _outside(plan: Plan) -> frozenset[int]:
    """Returns the identities of the steps in no region, if some are: a wrapped model is one."""
    found: set[int] = set()
    has_regions = False

    def enter(plan: Plan) -> None:
        nonlocal has_regions
        for step in plan.steps:
            if region_rules(step.eqn) is not None:
                has_regions = True
                continue
            found.add(id(step))
            for _, inner in step.inner_plans:
                enter(inner)

    enter(plan)
    return frozenset(found if has_regions else ())


def _rows(plan: Plan, outside: frozenset[int]) -> Iterator[Row]:
    for visit in plan.walk():
        step = visit.step
        if _is_cast(visit.place):
            continue
        if not step.plans and id(step) in outside and step.why.kind == Kind.REGION:
            yield _row(visit, str(Kind.OUTSIDE.of()))
        elif not step.plans:
            yield _row(visit, _reason(step, plan.rules), residual(visit))
        elif visit.saves:
            yield _row(visit, str(step.why), visit.saves)


def _is_cast(place: Place) -> bool:
    """Returns whether jaxmp rounds a weight there that is trained for few bits."""

    def within(scope: str) -> bool | None:
        return place.first(lambda eqn: in_scope(eqn, scope))

    return bool(within(CAST) and not within(DEQUANTIZE))


def _row(visit: Visit, reason: str, kept: Residual | None = None) -> Row:
    eqn, place, why, op = visit.step.eqn, visit.place, visit.step.why, visit.step.op
    times, product, by = known_size(place.times), skipped(why), why.note(Kind.FUSED)
    results = zip(eqn.outvars, visit.step.outs, strict=True)
    return Row(
        op=eqn.primitive.name,
        path=place.path,
        source=place.source,
        dtype=_dtype(visit.step),
        reason=reason,
        count=place.times,
        flops=contraction_flops(eqn) * times,
        bytes=sum(_nbytes(var, dtype) for var, dtype in results) * times,
        recipe=op.product.recipe if isinstance(op, QuantizedDot) else _of_stored(visit.step),
        why_not=product.why if product else "",
        intended=product is not None and product.intended,
        residual=str(kept or ""),
        fused=" on ".join(by.details) if by else "",
        not_fused=unfused(why),
        unknown=is_unknown(why),
    )


def _of_stored(step: Step) -> Recipe | None:
    """Returns the recipe of a product of stored weights and rounded activations."""
    fmt = step.op.activations if isinstance(step.op, StoredDot) else None
    low = short_dtype_name(step.rules.policy.compute_dtype)
    return fmt and products(fmt.short, low, granularity="row")


def _reason(step: Step, rules: Rules) -> str:
    """Returns the sentence for a step, in terms of the policy's dtypes."""
    if rules.wide == FLOAT32:
        return str(step.why)
    low = str(rules.low or rules.wide)
    return step.why.said(rules.wide.name, low, low)


def _dtype(step: Step) -> str:
    """Returns the dtype a first-order equation runs in."""
    if isinstance(step.op, QuantizedDot):
        return step.op.product.forward.name
    if isinstance(step.op, StoredDot) and step.op.activations:
        return step.op.activations.name
    read = [dtype for dtype in step.ins if dtype is not None]
    if read:
        return str(min(read, key=lambda dtype: dtype.itemsize))
    atoms = [*step.eqn.outvars, *step.eqn.invars]
    dtypes = [v.aval.dtype for v in atoms if hasattr(v.aval, "dtype")]
    return str(dtypes[0] if dtypes else np.dtype("V"))


def _nbytes(var: Any, dtype: Any = None) -> int:
    dtype = getattr(var.aval, "dtype", None) if dtype is None else dtype
    return math.prod(sizes(var)) * int(getattr(dtype, "itemsize", 0))
