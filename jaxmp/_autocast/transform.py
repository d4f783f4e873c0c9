"""`autocast`: trace, plan, execute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import jmp
import numpy as np

from jaxmp._autocast import jaxpr_compat
from jaxmp._autocast.demand import CONTRACTION, FULL, ours
from jaxmp._autocast.equations import cast
from jaxmp._autocast.execute import execute
from jaxmp._autocast.flat import FlatFunction, Flattened
from jaxmp._autocast.licences import GIVEN
from jaxmp._autocast.plan import Plan, Value
from jaxmp._autocast.planner import Planner
from jaxmp._autocast.region import in_region, inside_autocast, policy_in_force
from jaxmp._autocast.rules import FLOAT32, rules_for
from jaxmp.policy import Policy, single_policy

F = TypeVar("F", bound=Callable[..., Any])


def autocast(fn: F, policy: str | Policy | jmp.Policy) -> F:
    """Runs a float32 function in mixed precision, decided with the whole function in view.

    Contractions (matmuls, convolutions) multiply in ``policy.compute_dtype`` and accumulate in
    float32; softmax, normalisation statistics, losses and everything else that is sensitive stay
    float32; what lies between follows whichever side needs it. Differentiate the result, and the
    backward pass follows too.

    It is a pure function transformation like `jax.grad`: it composes with jit, grad, vmap, scan,
    remat, shard_map, in any order, and keeps no state. Like `jax.jit`, it traces `fn` once per
    shapes and static arguments, so `fn` should have no side effects in Python.

    Args:
      fn: a function of any pytrees. Arrays are traced; every other leaf (Python numbers, booleans,
        strings, callables, None) is passed on as it is.
      policy: anything `get_policy` takes.

    Returns:
      A function with the signature of `fn`. Only float32 values are autocast's to change:

      * float32 arguments are stored in ``param_dtype`` before they are used (float32 in the "mixed"
        policies: as they are). Arguments in any other dtype are used as they are.
      * results that `fn` returns in float32 are returned in ``output_dtype``. All others keep the
        dtype `fn` gives them.
      * a float32 policy returns `fn`'s own results, bitwise.

      Inside another autocast the inner policy wins: the region runs under it, and its result stays
      in whichever dtype the enclosing program wants.

    Raises:
      ValueError: if the policy is malformed or computes in anything but 16 bits or float32.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def loss(w, x):
      ...     return jnp.mean(jax.nn.softmax(x @ w))
      >>> fast = jaxmp.autocast(loss, "mixed_bfloat16")
      >>> grads = jax.jit(jax.grad(fast))(jnp.ones((4, 4)), jnp.ones((2, 4)))
      >>> grads.dtype
      dtype('float32')

    Source: Micikevicius et al., "Mixed Precision Training" (2018); torch.amp.autocast.
    """
    policy = single_policy("autocast", policy)
    if not callable(fn):
        raise TypeError(f"autocast: fn must be callable, got {type(fn).__name__}")
    planned = under_policy(fn, policy)
    marked = in_region(fn, policy)

    @functools.wraps(fn)
    def autocast_fn(*args: Any, **kwargs: Any) -> Any:
        if policy_in_force() is not None:
            return marked(*args, **kwargs)
        if is_identity(policy):
            return fn(*args, **kwargs)
        return planned(*args, **kwargs)

    return autocast_fn  # type: ignore[return-value]


def under_policy(fn: F, policy: Policy) -> F:
    """`fn` traced, planned and executed: `autocast` where no other autocast is around it.

    Also under a float32 policy, which may have regions of other policies in it.

    Raises:
      ValueError: if the policy computes in anything but 16 bits or float32.
    """
    rules_for(policy)  # a policy that cannot be computed in is refused here, not at the first call
    flattened = Flattened(fn)
    plans = functools.lru_cache(maxsize=64)(functools.partial(plan_program, policy=policy))

    @functools.wraps(fn)
    def planned_fn(*args: Any, **kwargs: Any) -> Any:
        flat, arrays = flattened(args, kwargs)
        jaxpr, reusable = trace_program(flat, arrays, policy)
        plan = (plans if reusable else plans.__wrapped__)(jaxpr)
        outs = flat.rebuild(jaxpr, run_program(plan, arrays, policy))
        if not reusable:
            flattened.forget()
        return outs

    return planned_fn  # type: ignore[return-value]


def is_identity(policy: Policy) -> bool:
    """Whether a policy is float32 throughout."""
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    return all(np.dtype(d) == FLOAT32 for d in dtypes)


def trace_program(flat: FlatFunction, arrays: Sequence[Any], policy: Policy) -> tuple[Any, bool]:
    """The program as written, and whether its trace may be used again."""
    with inside_autocast(policy):
        return flat.trace(arrays)


def plan_program(jaxpr: Any, policy: Policy) -> Plan:
    """The plan of a whole program under a policy."""
    rules = rules_for(policy)
    planner = Planner()
    stored, output = np.dtype(policy.param_dtype), np.dtype(policy.output_dtype)
    open_jaxpr = jaxpr_compat.closed(jaxpr).jaxpr
    ins = [
        None
        if not ours(var)
        else Value(rules.low, frozenset({planner.fresh()}), argument=True, licence=GIVEN)
        if stored == rules.low
        else Value(argument=True, licence=GIVEN)
        for var in open_jaxpr.invars
    ]
    low_output = output == rules.low
    wanted = [CONTRACTION if low_output else FULL] * len(open_jaxpr.outvars)
    outs = [rules.low if low_output and ours(var) else None for var in open_jaxpr.outvars]
    return planner.plan(jaxpr, ins, wanted, rules, outs)


def run_program(plan: Plan, arrays: Sequence[Any], policy: Policy) -> list[Any]:
    """The planned program on concrete or traced arrays, with the dtypes at its boundary."""
    stored, output = np.dtype(policy.param_dtype), np.dtype(policy.output_dtype)
    args = []
    for var, array, dtype in zip(plan.jaxpr.invars, arrays, plan.ins, strict=True):
        if ours(var):
            # What was given is kept finite, as a literal is; what is computed is not.
            array = _as(jnp.asarray(array), stored, saturate=True)
            array = _as(array, dtype or FLOAT32, saturate=True)
        args.append(array)
    outs = execute(plan, args)
    clip = plan.rules.saturate
    return [
        _as(x, output, saturate=clip) if ours(v) else x
        for v, x in zip(plan.jaxpr.outvars, outs, strict=True)
    ]


def _as(array: Any, dtype: np.dtype[Any], *, saturate: bool) -> Any:
    return array if array.dtype == dtype else cast(array, dtype, saturate=saturate)
