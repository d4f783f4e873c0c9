"""`autocast`: trace, plan, execute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, overload

import numpy as np

from jaxmp._core.autocast import closures, nnx_calls
from jaxmp._core.autocast.coverage_warnings import COVERAGE, warn_overlooked
from jaxmp._core.autocast.eager import EagerPrograms
from jaxmp._core.autocast.leaked_tracers import refuse_leaked_tracers, with_held_tracers
from jaxmp._core.autocast.program import plan_program, run_program, runner, trace_program
from jaxmp._core.autocast.trained_weights import reading_as_stored
from jaxmp._core.decide.planning import Pass, plans_of_jits
from jaxmp._core.execute.environment import cast
from jaxmp._core.execute.program_key import comparable
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.trace import holds_modules, is_array, name_of
from jaxmp._core.passes.order import PASSES
from jaxmp._core.passes.watch_overflow import is_overflow_watched
from jaxmp._core.plan.parameters import Argnums, Parameters, by_position, place_of
from jaxmp._core.plan.plan import Plan
from jaxmp._core.plan.regions import (
    Transformed,
    check_callable,
    in_region,
    note_traced,
    policy_in_force,
    widen,
)
from jaxmp._core.plan.rules import governed, is_identity, rules_for
from jaxmp._core.quantize.calls import holds_quantized, opening, seal
from jaxmp._core.speed import traced_for
from jaxmp.policy import Policy, PolicyLike, single_policy

F = TypeVar("F", bound=Callable[..., Any])


@overload
def autocast(fn: F, policy: PolicyLike, argnums: Argnums = 0) -> F: ...
@overload
def autocast(policy: PolicyLike, /, *, argnums: Argnums = 0) -> Callable[[F], F]: ...
@overload
def autocast(*, policy: PolicyLike, argnums: Argnums = 0) -> Callable[[F], F]: ...
def autocast(fn: Any = None, policy: Any = None, argnums: Argnums = 0) -> Any:
    """Runs a float32 function in mixed precision, decided with the whole function in view.

    Products (matmuls, convolutions) multiply in ``policy.compute_dtype`` and accumulate in
    float32; softmax, normalization statistics, losses and everything else that is sensitive stay
    float32; what lies between follows whichever side needs it. Differentiate the result, and the
    backward pass follows too.

    It is a pure function transformation like `jax.grad`: it composes with jit, grad, vmap, scan,
    remat, shard_map, in any order, and keeps no state. Like `jax.grad`, it traces `fn` at every
    call: put `jax.jit` around it in order to trace once. Called outside of every transformation, it
    runs what was compiled for the first call with an equal trace.

    Given a policy alone, it is a decorator: ``@jaxmp.autocast("mixed_bfloat16")``.

    Args:
      fn: a function of any pytrees. JAX and NumPy arrays are traced; every other leaf (Python and
        NumPy numbers, booleans, strings, callables, None) is passed on as it is. NNX modules may be
        among its arguments: what `fn` changes in them (averages, random streams) is written back,
        as by `flax.nnx.jit`, and their Variables stay in the dtypes they have.
      policy: anything `get_policy` takes but a `PolicyMap`.
      argnums: which positional arguments hold the parameters, as in `jax.grad`; all others are
        data. Next to 16-bit values a parameter (a bias, a table) is narrowed, and data (a mean, a
        time) is not. Of an argument that holds Flax variables, those in "params" are parameters;
        of NNX modules, every `nnx.Param` is, whichever argument holds it.

    Returns:
      A function with the signature of `fn`. autocast changes only float32 values (float64 values,
      if ``param_dtype`` is float64):

      * float32 arguments are stored in ``param_dtype`` before they are used (float32 in the "mixed"
        policies: as they are). Arguments in any other dtype are used as they are.
      * results that `fn` returns in float32 are returned in ``output_dtype``. All others keep the
        dtype `fn` gives them.
      * a float32 policy returns `fn`'s own results, bitwise.

      Inside another autocast the inner policy wins: the region runs under it, and its result stays
      in whichever dtype the enclosing program wants.

    Raises:
      TypeError: if `fn` is not callable, or is a Flax Linen module; at a call, if its result holds
        traced arrays that JAX does not see, in an object that is not a pytree or in a function's
        closure; if `argnums` are not integers.
      ValueError: if the policy is malformed, or its compute dtype is not supported.

    Warns:
      UserWarning: at a call, where the policy does less than it says: JAX's default precision keeps
        most products float32, or a precision of their own keeps all; most products of layers are
        not in the 8 bits of a recipe, or most attention is not fused; most products are float64,
        and the policy is for float32; float32 products are inside a primitive that is not looked
        into; a name in ``ops`` is not a primitive's; most weights of layers are in no argument of
        `argnums`; a derivative rule closes over a traced value.

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
    if policy is None:
        return Decorator(fn, argnums)
    if fn is None:
        return Decorator(policy, argnums)
    policy = single_policy("autocast", policy)
    check_callable(
        "autocast", fn, "Use jaxmp.wrap(module, policy), or jaxmp.autocast(module.apply, policy)."
    )
    return watched(fn, policy, argnums)


def watched(
    fn: F, policy: Policy, argnums: Argnums, watch: Callable[[Plan], None] | None = None
) -> F:
    """Returns `autocast` of `fn`, which passes each plan of the whole program to `watch`.

    No plan is made under a policy that changes nothing.
    """
    method, modules = nnx_calls.with_module(fn)
    reading = reading_as_stored(method, policy, argnums)
    planned = under_policy(reading, policy, by_position(fn, argnums), watch)
    of_modules = functools.cache(lambda: _under_policy_of_modules(reading, policy, argnums, watch))
    marked = in_region(reading, policy)
    on_sealed = functools.cache(lambda: watched(opening(method), policy, argnums, watch))

    def autocast_fn(*args: Any, **kwargs: Any) -> Any:
        if holds_quantized((args, kwargs)):
            args, kwargs = seal((args, kwargs))
            return on_sealed()(*modules, *args, **kwargs)
        if policy_in_force() is not None:
            return marked(*modules, *args, **kwargs)
        if is_identity(policy):
            return fn(*args, **kwargs)
        if modules or holds_modules((args, kwargs)):
            return of_modules()((*modules, *args), kwargs)
        return planned(*args, **kwargs)

    return Transformed(autocast_fn, autocast, fn, policy, argnums)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Decorator:
    """A decorator: `autocast` with its policy, without its function.

    Attributes:
      policy: the policy.
      argnums: which arguments of the function hold the parameters.
    """

    policy: Policy
    argnums: Argnums

    def __post_init__(self) -> None:
        if callable(self.policy) and not isinstance(self.policy, type):
            raise TypeError(
                "autocast: takes a function and a policy: jaxmp.autocast(fn, 'mixed_bfloat16')."
            )
        object.__setattr__(self, "policy", single_policy("autocast", self.policy))

    def __call__(self, fn: F) -> F:
        return autocast(fn, self.policy, self.argnums)

    def __enter__(self) -> NoReturn:
        name = str(self.policy)
        policy = f"mixed_{name}" if name in ("bfloat16", "float16") else name  # as torch's does
        raise TypeError(
            "autocast: is a transformation of functions, not a context manager as in PyTorch: "
            f"write jaxmp.autocast(fn, {policy!r}), or jaxmp.wrap(model, {policy!r}) once, where "
            "the model is made."
        )

    def __exit__(self, *_: object) -> None: ...


def under_policy(
    fn: F,
    policy: Policy,
    parameters: Parameters,
    watch: Callable[[Plan], None] | None = None,
    passes: Sequence[Pass] = PASSES,
    advice: str = "",
) -> F:
    """Returns `fn` traced, planned and executed: an `autocast` that is in no other autocast.

    Under a float32 policy as well, in which there may be regions of other policies.

    Args:
      fn: the function.
      policy: the policy.
      parameters: from the `(args, kwargs)` of a call to which of their arrays are parameters.
      watch: is called with each plan that is made.
      passes: see `plan_program`.
      advice: how the caller says what is a parameter, for a warning; empty: by `argnums`.

    Raises:
      ValueError: if autocast does not support the policy's compute dtype.
    """
    rules_for(policy)  # an unsupported policy is refused here, not at the first call
    holding = with_held_tracers(fn)
    name = name_of(fn)

    def make(jaxpr: Any, given: tuple[bool, ...], setting: tuple[Any, ...]) -> Plan:
        plan = plan_program(jaxpr, policy, given, passes, jits(setting))
        if watch is not None:
            watch(plan)
        return plan

    # Keyed by what passes depend on: the device, by which a recipe multiplies products or does not,
    # and whether overflow is watched.
    jits = functools.lru_cache(maxsize=8)(lambda _setting: plans_of_jits())
    plans = functools.lru_cache(maxsize=64)(
        lambda program, given, setting: make(program.jaxpr, given, setting)
    )

    eager = EagerPrograms()
    warned: set[str] = set()  # each eager call of a program that has no key plans it again

    @functools.wraps(fn)
    def planned_fn(*args: Any, **kwargs: Any) -> Any:
        note_traced(policy)
        traced = trace_program(holding, args, kwargs, policy)
        refuse_leaked_tracers(traced, name)
        given = tuple(parameters(args, kwargs))
        setting = traced_for().device_kind, is_overflow_watched()

        def planned() -> Plan:
            program = comparable(traced.jaxpr)
            plan = (
                make(traced.jaxpr, given, setting)
                if program is None
                else plans(program, given, setting)
            )
            for warn in COVERAGE:
                warn(plan, warned)
            place = functools.partial(place_of, args, kwargs)
            warn_overlooked(plan, given, place, name, warned, advice)
            return plan

        if (program := eager.find(traced, (given, setting))) is not None:
            run = program.run or program.compile(runner(planned(), policy))
            outs = run(traced.arrays, compat.closed(traced.jaxpr).consts)
        else:
            plan = planned()
            outs = closures.run(
                traced.as_written,
                plan,
                lambda run: run_program(plan, traced.arrays, policy, run),
                warned,
            )
        out, _ = traced.rebuild(outs)
        return out

    return planned_fn  # type: ignore[return-value]


def _under_policy_of_modules(
    fn: Callable[..., Any],
    policy: Policy,
    argnums: Argnums,
    watch: Callable[[Plan], None] | None,
) -> Callable[..., Any]:
    """Returns `under_policy` as a function of `(args, kwargs)`, which may hold NNX modules.

    Their Variables stay in the dtypes they have: param and output dtype are for everything else.
    """
    wide = governed(policy)
    stored, output = np.dtype(policy.param_dtype), np.dtype(policy.output_dtype)
    inner = dataclasses.replace(policy, param_dtype=wide, output_dtype=wide)

    def given(x: Any) -> Any:
        mine = is_array(x) and x.dtype == wide and stored != wide
        return widen(cast(x, stored, saturate=True), stored) if mine else x

    def returned(x: Any) -> Any:
        mine = is_array(x) and x.dtype == wide
        return cast(x, output, saturate=policy.saturate) if mine else x

    @functools.wraps(fn)
    def called(args: Any, kwargs: Any) -> Any:
        args, kwargs = nnx_calls.map_arrays(given, (args, kwargs))
        with nnx_calls.shown_as_float32((args, kwargs), {stored} - {wide}):
            return fn(*args, **kwargs)

    parameters = by_position(fn, argnums)

    planned = nnx_calls.lift(
        functools.partial(
            under_policy,
            policy=inner,
            parameters=lambda call, _kwargs: parameters(*call),
            watch=watch,
        ),
        called,
    )
    return lambda args, kwargs: nnx_calls.map_arrays(returned, planned(args, kwargs))
