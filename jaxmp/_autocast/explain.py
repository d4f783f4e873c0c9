"""`explain`: the plan as a table."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxmp._autocast import closures
from jaxmp._autocast.coverage_warnings import overruled
from jaxmp._autocast.execute import CustomCall
from jaxmp._autocast.nnx_calls import on_a_clone
from jaxmp._autocast.parameters import Argnums, by_position, read_argnums
from jaxmp._autocast.passes.rematerialize import residual
from jaxmp._autocast.plan import Plan, Step
from jaxmp._autocast.primitives import CALLED, LOW
from jaxmp._autocast.product_report import Product, Quantized, table
from jaxmp._autocast.products.derivative import QuantizedDot
from jaxmp._autocast.regions import check_callable
from jaxmp._autocast.rules import FLOAT32, Rules, governed
from jaxmp._autocast.transform import (
    is_identity,
    plan_program,
    trace_program,
)
from jaxmp._autocast.why import Kind, Residual, is_unknown, skipped, unfused
from jaxmp._jaxprs.source import is_backward, library_line
from jaxmp._quantize.calls import holds_quantized, opening, seal
from jaxmp.policy import Policy, PolicyLike, get_policy, single_policy


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One equation of the program.

    Attributes:
      op: the primitive's name.
      path: the Flax module path and named scopes around it, without transformations.
      source: ``file.py:line`` in the user's code.
      dtype: the dtype the op runs in.
      reason: why.
      count: how often it runs per call (lengths of scans around it multiplied; a while loop's body
        and each branch of a cond count once).
      why_not: of a contraction, why the policy's recipe does not multiply it; empty if it does.
      intended: whether that is as it should be: it is no layer, or the last one.
      residual: under ``residuals=recompute``, what becomes of the result until the backward pass:
        saved (if that reads it), rematerialized, or why that policy has no say; empty under others,
        and for what has no derivative.
      fused: of attention that a kernel computes, by which one, and on what; else empty.
      not_fused: of attention that none computes, though the policy asks for it: why not.
      unknown: whether autocast does not know the primitive, and leaves it as written.
    """

    op: str
    path: str
    source: str
    dtype: str
    reason: str
    count: int
    why_not: str = ""
    intended: bool = False
    residual: str = ""
    fused: str = ""
    not_fused: str = ""
    unknown: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What a policy does to a program. Print it for the whole table.

    Attributes:
      rows: one per equation, in order.
      policy: the policy that `explain` was given; empty if it was float32.
      differentiated: whether the program has backward passes in it.
      overruled: why the policy decides no product, if it does not; else empty.
    """

    rows: tuple[Row, ...]
    policy: str
    differentiated: bool = False
    overruled: str = ""

    @property
    def _asked(self) -> Policy:
        return get_policy(self.policy or "float32")

    def contractions(self) -> dict[str, int]:
        """How many contractions run per call in each dtype, most first."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            if row.op in LOW:
                counts[row.dtype] += row.count
        return dict(counts.most_common())

    def quantized(self) -> Quantized:
        """Every contraction: in 8 bits, or not and why."""
        products = []
        for r in self.rows:
            if r.op in LOW:
                why, intended = (r.why_not, r.intended) if r.why_not else (r.reason, True)
                product = Product(
                    r.path, r.source, r.dtype, r.count, why_not=why, intended=intended
                )
                products.append(product)
        return Quantized(tuple(products))

    def summary(self) -> str:
        """A few lines: ops by dtype, why any contraction is float32, what did not apply."""
        total: Counter[str] = Counter()
        for row in self.rows:
            total[row.dtype] += row.count
        lines = [
            *([f"policy        {self.policy}"] if self.policy else []),
            f"contractions  {_counts(self.contractions())}",
            f"all ops       {_counts(dict(total.most_common()))}",
            *([f"of no effect  {self.overruled}"] if self.overruled else []),
        ]
        by_reason: dict[str, list[Row]] = {}
        policy = self._asked
        full = governed(policy).name
        for row in self.rows:
            if row.op in LOW and row.dtype == full:
                by_reason.setdefault(row.reason, []).append(row)
        for reason, rows in by_reason.items():
            lines.append(f"  {full}: {_places(rows)}: {reason}")
        recipe = policy.matmul
        quantizes = recipe is not None and (isinstance(recipe, str) or recipe.quantizes)
        if quantizes or any(p.quantized for p in self.quantized().products):
            lines.append(self.quantized().summary())
        lines += self._attention()
        unknown = sorted({row.op for row in self.rows if row.unknown})
        if unknown:
            lines.append(f"not classified, run as written: {', '.join(unknown)}")
        met = {row.op for row in self.rows}
        unmet = [name for name, _ in policy.ops if met.isdisjoint((name, *CALLED.get(name, ())))]
        if unmet:
            lines.append(f"in the policy's ops, but met nowhere here: {', '.join(unmet)}")
        if policy.reduce_scatter_dtype != np.float32:
            gathered = {row.dtype for row in self.rows if row.op == "all_gather"}
            if not gathered - {FLOAT32.name}:
                lines.append(
                    "the policy's reduce_scatter_dtype: of no effect, no all_gather of weights here"
                )
        return "\n".join([*lines, *self._residuals()])

    def _residuals(self) -> Iterator[str]:
        """Lines on what ``residuals=recompute`` did, if a policy asks for it."""
        ops = Counter[str]()
        for row in self.rows:
            ops[row.residual] += row.count
        if ops[Residual.REMATERIALIZED]:
            yield (
                f"residuals     {ops[Residual.SAVED]} ops {Residual.SAVED}; "
                f"{ops[Residual.REMATERIALIZED]} {Residual.REMATERIALIZED}"
            )
        elif self._asked.residuals == "recompute":
            yield "residuals     recompute: of no effect, nothing here is computed again"
        if self.differentiated and ops.keys() - {""}:
            yield (
                "  differentiated within the program, where what is kept was decided: explain the "
                "loss itself, or see jaxmp.audit for what a whole step computes again"
            )
        for why in dict.fromkeys(row.residual for row in self.rows):
            if why not in ("", Residual.SAVED, Residual.REMATERIALIZED):
                rows = [row for row in self.rows if row.residual == why]
                yield f"  not computed again: {_places(rows)}: {why}"

    def _attention(self) -> Iterator[str]:
        """Which attention a kernel computes, and why all other is left as it is."""
        found = any(row.fused or row.not_fused for row in self.rows)
        if self._asked.attention is None and not found:
            return
        by: Counter[str] = Counter()
        for row in self.rows:
            by[row.fused] += row.count
        counts = [f"{n} by {kernel}" for kernel, n in by.items() if kernel and n]
        yield f"attention     {', '.join(counts) or 'none'} fused"
        for row in self.rows:
            if row.not_fused:
                yield f"  {row.count} not: {row.source} {row.path}".rstrip() + f": {row.not_fused}"

    def __str__(self) -> str:
        cells = [("op", "dtype", "times", "source", "path", "reason")]
        for r in self.rows:
            reason = f"{r.reason}; {r.residual}" if r.residual else r.reason
            cells.append((r.op, r.dtype, str(r.count), r.source, r.path, reason))
        return f"{table(cells, widest=48)}\n\n{self.summary()}"


def explain(
    fn: Callable[..., Any],
    policy: PolicyLike = "float32",
    argnums: Argnums = 0,
) -> Callable[..., Explanation]:
    """What `autocast(fn, policy)` would do, equation by equation, and why. Nothing is computed.

    Without a policy, what is done in `fn` itself: by the autocasts and wrapped modules it calls.

    Args:
      fn: a function of any pytrees, as for `autocast`.
      policy: anything `get_policy` takes.
      argnums: which arguments hold the parameters, as for `autocast`.

    Returns:
      A function with the arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) that returns an
      `Explanation`.

    Raises:
      TypeError: if `fn` is not callable, or is a Flax Linen module.
      ValueError: if the policy is malformed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def layer(w, x):
      ...     return jnp.mean(jax.nn.relu(x @ w) @ w)
      >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> jaxmp.explain(layer, "mixed_bfloat16")(w, w).contractions()
      {'bfloat16': 2}
    """
    asked = single_policy("explain", policy)
    check_callable("explain", fn)
    read_argnums("explain", argnums)

    def explain_fn(*args: Any, **kwargs: Any) -> Explanation:
        plan = _plan(fn, asked, argnums, args, kwargs)
        rows = tuple(_rows(plan))
        if closures.likely(plan):  # differentiated before it is planned
            rows = tuple(dataclasses.replace(row, residual="") for row in rows)
        differentiated = any(is_backward(visit.step.eqn) for visit in plan.walk())
        spelt = "" if is_identity(asked) else str(asked)
        return Explanation(rows, spelt, differentiated, spelt and overruled(plan))

    return explain_fn


def warn_overruled(
    tool: str, fn: Callable[..., Any], policy: Policy, args: Any, kwargs: dict[str, Any]
) -> str:
    """Warns that the policy which a tool was given decides nothing in a function, and says why."""
    said = overruled(_plan(fn, policy, 0, args, kwargs))
    if said:
        warnings.warn(f"{tool}: {said}.", UserWarning, stacklevel=3)
    return said


def _plan(
    fn: Callable[..., Any], policy: Policy, argnums: Argnums, args: Any, kwargs: dict[str, Any]
) -> Plan:
    parameters = by_position(fn, argnums)
    looked_at = on_a_clone(fn)
    if holds_quantized((args, kwargs)):
        (args, kwargs), looked_at = seal((args, kwargs)), opening(looked_at)
    traced = trace_program(looked_at, args, kwargs, policy)
    return plan_program(traced.jaxpr, policy, parameters(args, kwargs))


def _places(rows: list[Row]) -> str:
    """Where the first of some rows is, and how many more there are."""
    first = f"{rows[0].op} at {rows[0].source} {rows[0].path}".rstrip()
    return first + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {dtype}" for dtype, n in counts.items()) or "none"


def _rows(plan: Plan) -> Iterator[Row]:
    for visit in plan.walk():
        step, path, line, count, *_ = visit
        name = step.eqn.primitive.name
        if not step.plans:
            source = line or library_line(step.eqn)
            product = skipped(step.why)
            by = step.why.note(Kind.FUSED)
            yield Row(
                name,
                path,
                source,
                _dtype(step),
                _reason(step, plan.rules),
                count,
                product.why if product else "",
                product.intended if product else False,
                str(residual(visit) or ""),
                " on ".join(by.details) if by else "",
                unfused(step.why),
                is_unknown(step.why),
            )
        elif isinstance(step.op, CustomCall) and closures.closes_over(step):
            yield Row(name, path, line, _dtype(step), closures.REASON, count)
        elif visit.saves:
            reason = str(step.why)
            yield Row(name, path, line, _dtype(step), reason, count, residual=str(visit.saves))


def _reason(step: Step, rules: Rules) -> str:
    """Why a step is as it is; the reasons are those of policies about float32."""
    if rules.wide == FLOAT32:
        return str(step.why)
    low = str(rules.low or rules.wide)
    said = str(step.why).replace("float32", rules.wide.name)
    return said.replace("16-bit value", f"{low} value").replace("16 bits", low)


def _dtype(step: Step) -> str:
    """The dtype a first-order equation runs in."""
    if isinstance(step.op, QuantizedDot):
        return step.op.product.forward.name
    read = [dtype for dtype in step.ins if dtype is not None]
    if read:
        return str(min(read, key=lambda dtype: dtype.itemsize))
    atoms = [*step.eqn.outvars, *step.eqn.invars]
    dtypes = [v.aval.dtype for v in atoms if hasattr(v.aval, "dtype")]
    return str(dtypes[0] if dtypes else np.dtype("V"))
