"""A policy made ready for planning: the low dtype, and the class of each equation under it."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs.attributes import is_reference, name_stack
from jaxmp._core.jaxprs.compat import closed, dtype_of, kind
from jaxmp._core.jaxprs.equation_parameters import contracted, jitted_name, precision
from jaxmp._core.jaxprs.higher_order import HIGHER_ORDER
from jaxmp._core.jaxprs.scopes import KEY, OWN, REGION
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.plan.primitives import CALLED, LOOKING_UP, classify
from jaxmp._core.plan.why import Kind, Why
from jaxmp.policy import Policy, get_policy

FLOAT32 = np.dtype("float32")
FLOAT64 = np.dtype("float64")
FLOAT16 = np.dtype("float16")
LOW_DTYPES = (np.dtype("bfloat16"), FLOAT16)

FULL = get_policy("float32")
# Classes in which a higher-order primitive runs as a whole, in float32.
WHOLE = ("full_precision", "as_written")
_SCOPE = re.compile(rf"{REGION}([^/()]+)")
_REGION_OR_KEY = re.compile(rf"{REGION}[^/()]+|{KEY}([^/()]+)")


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """The rules of a policy for equations. One object per policy, compared by identity.

    Attributes:
      policy: the policy.
      wide: the dtype of the values that autocast may change: float64 if that is the policy's param
        dtype, else float32.
      low: the dtype contractions run in, or None if that is the wide one.
      wide_gradients: whether the products that compute parameters' gradients return float32.
      saturate: whether computed values are clipped to the finite range when they are narrowed.
      overrides: primitive name → class.
      backward: whether they are for what a loop or call of a backward pass runs: the equations
        inside do not say so.
      why_float32: the reason that a region under these rules gives for being float32.
    """

    policy: Policy
    wide: np.dtype[Any]
    low: np.dtype[Any] | None
    wide_gradients: bool
    saturate: bool
    overrides: dict[str, str]
    backward: bool = False
    why_float32: Kind = Kind.REGION

    @property
    def lower(self) -> tuple[np.dtype[Any], ...]:
        """The dtypes narrower than the wide one: values in them are the author's choice."""
        return LOW_DTYPES if self.wide == FLOAT32 else (*LOW_DTYPES, FLOAT32)

    def governs(self, atom: Any) -> bool:
        """Returns whether autocast may change a value's dtype: of wide arrays, not references."""
        return dtype_of(atom) == self.wide and not is_reference(atom)

    @property
    def as_written(self) -> bool:
        """Whether programs run as written under these rules."""
        return self.low is None and self.policy.matmul is None

    def op_class(self, eqn: JaxprEqn) -> str | None:
        """Returns the class of an equation, or None for a primitive that is not in the table."""
        name = kind(eqn)
        if name in self.overrides:
            return self.overrides[name]
        op_class = classify(name, eqn.params)
        if op_class == "compute" and contracted(eqn) == 1 and author_keeps(eqn, self) is None:
            return "promote"  # it sums nothing: a multiplication
        low_softmax = np.dtype(self.policy.softmax_dtype) != FLOAT32
        if name == "exp" and op_class == "full_precision" and low_softmax:
            # A softmax's exp is the one whose result reaches a contraction; exp in a loss does not,
            # and an exp without a low operand stays float32 like any other `promote` op.
            return "softmax"
        return op_class

    def looks_inside(self, eqn: JaxprEqn) -> bool:
        """Returns whether jaxprs inside an equation are planned: unless its class is overridden."""
        return kind(eqn) not in self.overrides


def governed(policy: Policy) -> np.dtype[Any]:
    """Returns the dtype of the values that a policy governs."""
    return FLOAT64 if np.dtype(policy.param_dtype) == FLOAT64 else FLOAT32


@functools.lru_cache(maxsize=256)
def rules_for(policy: Policy) -> Rules:
    """Returns the rules of a policy.

    Raises:
      ValueError: if the compute dtype is not float32, a 16-bit float or, for float64 parameters,
        float64; if a policy for float64 parameters has a recipe; or if `ops` gives a higher-order
        primitive a class other than those in which it runs as a whole (`WHOLE`).
    """
    wide, compute = governed(policy), np.dtype(policy.compute_dtype)
    overrides = {k: c for name, c in policy.ops or () for k in CALLED.get(name, ())}
    for name, op_class in policy.ops or ():
        if name in HIGHER_ORDER and op_class not in WHOLE:
            raise ValueError(
                f"autocast: the policy's ops give {name!r} the class {op_class!r}, but {name} runs "
                f"other operations: it may run {' or '.join(map(repr, WHOLE))}, as a whole. Leave "
                "it out, and give classes to what is inside"
            )
    if compute not in (wide, FLOAT32, *LOW_DTYPES):
        raise ValueError(
            f"autocast: compute_dtype is {compute.name}, but autocast computes in bfloat16, "
            "float16 or float32 only, or in float64 where param_dtype is float64; use e.g. "
            "get_policy('mixed_bfloat16')"
        )
    if wide == FLOAT64 and policy.matmul is not None:
        raise ValueError(
            f"autocast: matmul={policy.matmul} is for float32 parameters, and param_dtype is "
            "float64; leave matmul out, or store the parameters in float32"
        )
    return Rules(
        policy=policy,
        wide=wide,
        low=None if compute == wide else compute,
        # Products in float32 are summed and returned in it: their gradients need nothing else.
        wide_gradients=compute != FLOAT32 and np.dtype(policy.reduce_dtype) == FLOAT32,
        saturate=policy.saturate,
        overrides=overrides | dict(policy.ops or ()),
    )


@functools.lru_cache(maxsize=256)
def is_identity(policy: Policy) -> bool:
    """Returns whether a policy changes nothing: one wide dtype, no few bits, JAX's residuals."""
    if policy.matmul is not None or policy.weights is not None or policy.residuals != "save":
        return False
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    return all(np.dtype(d) == governed(policy) for d in dtypes)


def changed(rules: Rules, **fields: Any) -> Rules:
    """Returns the rules with some fields replaced."""
    return dataclasses.replace(rules, **fields)


@functools.lru_cache(maxsize=256)
def with_whole_tables(rules: Rules) -> Rules:
    """Returns the rules with table lookups in float32, unless the policy's `ops` override that."""
    return dataclasses.replace(
        rules, overrides=dict.fromkeys(LOOKING_UP, "full_precision") | rules.overrides
    )


def region_rules(eqn: JaxprEqn, around: Rules | None = None) -> Rules | None:
    """Returns the rules of the innermost region that `eqn` marks or is in, or None without one.

    A region around the whole jaxpr is not visible from inside: name stacks are relative to it. The
    rules of the enclosing program, `around`, determine the wide dtype.
    """
    name = jitted_name(eqn)
    marks = name.startswith(REGION)
    found = rules_for(get_policy(name.removeprefix(REGION))) if marks else None
    found = found or _scope_rules(name_stack(eqn))
    if found is not None and around is not None and around.backward:
        found = changed(found, backward=True)
    if found is None or around is None or found.wide == around.wide:
        return found
    above = found.low is not None and found.low.itemsize >= around.wide.itemsize
    return changed(found, wide=around.wide, low=None if above else found.low)


def region_key(eqn: JaxprEqn) -> str | None:
    """Returns the key of a `PolicyMap` that the innermost region of an equation comes from.

    Empty if it comes from no key; None outside of regions.
    """
    if jitted_name(eqn).startswith(REGION):
        return ""
    keys = _REGION_OR_KEY.findall(str(name_stack(eqn)))
    return str(keys[-1]).replace("|", "/") if keys else None


def runs_as_written(jaxpr: Any, rules: Rules) -> bool:
    """Returns whether a jaxpr runs as written under its rules: no region in it computes otherwise.

    A call of it with a derivative rule can then be left to JAX.
    """
    if not rules.as_written:
        return False
    found = map(region_rules, equations(closed(jaxpr).jaxpr.eqns))
    return all(inner is None or inner.as_written for inner in found)


@functools.lru_cache(maxsize=4096)
def _scope_rules(stack: Any) -> Rules | None:
    """Returns the rules of the last marker in a name stack, even one wrapped in `jvp(…)`."""
    policies = _SCOPE.findall(str(stack))
    if not policies:
        return None
    if policies[-1].startswith(OWN):
        own = rules_for(get_policy(policies[-1].removeprefix(OWN)))
        return changed(own, why_float32=Kind.LAYERS_OWN)
    return rules_for(get_policy(policies[-1]))


def author_keeps(eqn: JaxprEqn, rules: Rules | None = None) -> Why | None:
    """Returns why its author keeps a contraction as written, by precision or dtypes; or None."""
    rules = rules or rules_for(FULL)
    wide, low = rules.wide, rules.low
    asked = precision(eqn)
    for p in asked if isinstance(asked, tuple) else (asked,):
        name = str(getattr(p, "name", p))
        if p is not None and name.upper() != "DEFAULT" and not _means(name, low):
            return Kind.PRECISION.of(name)
    dtypes = {np.dtype(dtype_of(v)) for v in eqn.invars[:2]}
    if wide not in dtypes:
        return Kind.OPERANDS.of(" and ".join(sorted(d.name for d in dtypes)), wide.name)
    for dtype in dtypes - {wide}:
        if dtype not in rules.lower and not is_mask(dtype):
            return Kind.MIXED.of(wide.name, dtype.name)
    return None


def is_mask(dtype: np.dtype[Any] | None) -> bool:
    """Returns whether values of a dtype are masks or counts, which contractions read as numbers."""
    return dtype is not None and dtype.kind in "biu"


def _means(preset: str, low: Any) -> bool:
    """Returns whether a precision asks for the low dtype: ``BF16_BF16_F32``, but not ``…_X3``."""
    short = {FLOAT16: "F16", FLOAT32: "F32"}.get(low, "BF16")
    return preset.startswith(f"{short}_{short}_") and "_X" not in preset
