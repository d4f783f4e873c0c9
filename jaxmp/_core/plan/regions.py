"""Regions of a program with a policy of their own, and the policy in force while it is traced.

The functions that mark them are `Transformed`, as those of `autocast` are, and can be pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import flax.linen as nn
import jax
import numpy as np

from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs.scopes import CAST, KEY, LAYERS, OWN, REGION
from jaxmp._core.jaxprs.trace import holds_modules, is_array
from jaxmp._core.plan.rules import FLOAT32
from jaxmp._core.policy_keys import LayerRange
from jaxmp.dtypes import multiplies_natively
from jaxmp.policy import Policy, get_policy

F = TypeVar("F", bound=Callable[..., Any])

# Part of JAX's trace context and so of the key of every jit cache: what is traced inside an
# autocast (where an inner autocast only leaves a marker) is never reused outside of one.
_POLICY = jax.make_user_context(default_value=None)

# The own policy of the derivative rule that is being traced, or `_SEVERAL`; None outside of rules.
# A part of the key of jit caches, too: modules mark more regions in a rule.
_RULE = jax.make_user_context(default_value=None)
_SEVERAL = "several policies"


# The policies that something was traced under, where `policies_traced` collects them.
_TRACED: ContextVar[list[Policy] | None] = ContextVar("jaxmp policies traced", default=None)


class Transformed:
    """A transformed function, pickled as the transformation and what it was applied to.

    It looks like the function it was made from: it has its name, documentation, signature and
    `__wrapped__`, and binds as a method.

    Args:
      call: the function that it calls.
      make: the transformation of `fn` and `arguments`, a module-level function.
      fn: the function that was transformed.
      arguments: the other arguments of `make`.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        make: Callable[..., Any],
        fn: Callable[..., Any],
        *arguments: Any,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.__call = call
        self.__made = (make, (fn, *arguments))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the transformed function."""
        return self.__call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        make, (fn, *arguments) = self.__made
        name = getattr(fn, "__qualname__", repr(fn))
        return f"{make.__name__}({', '.join([name, *map(str, arguments)])})"

    def __reduce__(self) -> Any:
        # A decorated function replaces the original in its module: it is pickled by its name.
        name = getattr(self, "__qualname__", "")
        try:
            found = operator.attrgetter(name)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            found = None
        return name if found is self and self.__module__ != "__main__" else self.__made


@contextmanager
def policies_traced() -> Iterator[list[Policy]]:
    """Collects the policies of autocasts and regions that are traced in this context.

    A function that `jax.jit` traced before is not traced again: its policies are not among them.
    """
    policies: list[Policy] = []
    token = _TRACED.set(policies)
    try:
        yield policies
    finally:
        _TRACED.reset(token)


def note_traced(policy: Policy) -> None:
    """Adds a policy that something is traced under to those that `policies_traced` collects."""
    if (policies := _TRACED.get()) is not None:
        policies.append(policy)


def inside_autocast(policy: Policy) -> AbstractContextManager[Any]:
    """Enters the trace of a function to be planned: an autocast within it only marks its region."""
    return _POLICY(policy)  # type: ignore[no-any-return]


def policy_in_force() -> Policy | None:
    """Returns the policy that the current trace will be planned under; None outside an autocast."""
    policy: Policy | None = _POLICY.value
    return policy


@contextmanager
def inside_rule(policy: Policy, *, mark_all: bool = False) -> Iterator[None]:
    """Enters the trace of a derivative rule, whose own equations have a policy.

    With `mark_all` every module marks its region, so that what is in none is in no module.
    """
    with inside_autocast(policy), _RULE(_SEVERAL if mark_all else policy):
        yield


def is_lost_in_rule(policy: Policy) -> bool:
    """Returns whether a region with a policy around a module may not hold for its gradient.

    A rule may call `jax.vjp` in one region and the pullback in none: the equations of the backward
    pass are in the regions entered inside `jax.vjp` alone.
    """
    return _RULE.value not in (None, policy)


@contextmanager
def region(policy: Policy, *, own: bool = False, key: str = "") -> Iterator[None]:
    """Enters a region with its own policy, while a function is traced to be planned.

    `own` marks the author's choice, the `dtype` of a layer. That does not include residuals, which
    stay those of the enclosing policy. `key` is the key of a `PolicyMap` that the policy is for.
    """
    if own:
        policy = _keeping_as_around(policy)
    note_traced(policy)
    with _POLICY(policy), ExitStack() as scopes:
        scopes.enter_context(jax.named_scope(f"{REGION}{OWN if own else ''}{policy}"))
        if key:
            scopes.enter_context(jax.named_scope(f"{KEY}{key.replace('/', '|')}"))
        yield


@contextmanager
def layers_region(scan: str, policies: Iterable[tuple[str, LayerRange, Policy]]) -> Iterator[None]:
    """Enters a region in which some layers of scans have policies of their own.

    Until the scans are split (`split_layers`), the policy in force is the enclosing one.

    Args:
      scan: the path of the module entered, if it is one that scans the layers; else empty.
      policies: the path of the scanning module, the layers and their policy, innermost last.
    """
    with ExitStack() as stack:
        if scan:
            stack.enter_context(jax.named_scope(f"{LAYERS}{_dotted(scan)}"))
        for path, layers, policy in policies:
            note_traced(policy)
            stack.enter_context(jax.named_scope(f"{LAYERS}{_dotted(path)}|{layers}|{policy}"))
        yield


def _dotted(path: str) -> str:
    """Returns a path without slashes, which separate the scopes in a name stack's text."""
    return path.replace("/", ".")


def _keeping_as_around(policy: Policy) -> Policy:
    """Returns the policy with the ``residuals`` of the enclosing one."""
    around = policy_in_force()
    return policy if around is None else dataclasses.replace(policy, residuals=around.residuals)


def in_region(fn: F, policy: Policy, *, keep_outer: bool = False) -> F:
    """Returns `fn` with its body marked as a region, where it is traced to be planned; else `fn`.

    With `keep_outer`, the enclosing policy decides what is saved for the backward pass.
    """

    @functools.wraps(fn)
    def region_fn(*args: Any, **kwargs: Any) -> Any:
        if policy_in_force() is None:
            return fn(*args, **kwargs)
        with region(_keeping_as_around(policy) if keep_outer else policy):
            return fn(*args, **kwargs)

    return region_fn  # type: ignore[return-value]


def full_precision(fn: F) -> F:
    """Marks a function whose body stays float32 under any autocast around it.

    The mark survives jit, grad, vmap, scan, remat and custom derivative rules, and holds for the
    backward pass as well. Outside an autocast the function is unchanged.

    Args:
      fn: a function of any pytrees, as for `autocast`.

    Returns:
      A function with the signature of `fn`. Values that are kept in 16 bits where it is called
      reach it in float32.

    Raises:
      TypeError: if `fn` is not callable, or is a Flax Linen module.

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> router = jaxmp.full_precision(lambda x, w: x @ w)
      >>> fn = jaxmp.autocast(lambda x, w: router(x, w), "mixed_bfloat16")
      >>> jaxmp.explain(fn, "float32")(jnp.ones((2, 4)), jnp.ones((4, 8))).products()
      {'float32': 1}
    """
    check_callable("full_precision", fn)
    marked = in_region(fn, get_policy("float32"), keep_outer=True)
    return Transformed(marked, full_precision, fn)  # type: ignore[return-value]


def reduced_precision(fn: F) -> F:
    """Marks a function that takes its floating arguments in the compute dtype and runs as written.

    For kernels that bring their own mixed precision: fused attention, which multiplies 16-bit q, k
    and v, keeps its softmax in float32, and may refuse float32 arguments altogether. It is the
    counterpart of `full_precision`. Under an autocast the float32 arguments of `fn` are narrowed to
    the compute dtype, nothing inside `fn` or its derivative rule is touched, and its results in the
    compute dtype go on as float32 values of the program. Gradients, vmap, scan and
    `jax.checkpoint` go through.

    Outside an autocast, in a float32 region, and where the default device does not multiply the
    compute dtype natively (float16 on TPU, bfloat16 on NVIDIA GPUs before compute capability 8.0),
    `fn` is called as it is, in float32; a kernel that cannot do that raises its own error.

    Args:
      fn: a function of any pytrees.

    Returns:
      A function with the signature of `fn`.

    Raises:
      TypeError: if `fn` is not callable, or is a Flax Linen module.

    Example:
      >>> import functools, jax, jax.numpy as jnp, jaxmp
      >>> @jaxmp.reduced_precision
      ... def attention(q, k, v):  # on a GPU: implementation="cudnn"
      ...     assert q.dtype == k.dtype == v.dtype == jnp.bfloat16
      ...     return jax.nn.dot_product_attention(q, k, v)
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> jaxmp.autocast(attention, "mixed_bfloat16")(x, x, x).dtype
      dtype('float32')
    """
    check_callable("reduced_precision", fn)
    as_written = in_region(fn, get_policy("float32"), keep_outer=True)

    def reduced_fn(*args: Any, **kwargs: Any) -> Any:
        policy = policy_in_force()
        low = FLOAT32 if policy is None else np.dtype(policy.compute_dtype)
        if low == FLOAT32 or not multiplies_natively(low):
            return fn(*args, **kwargs)
        if holds_modules((args, kwargs)):
            raise TypeError(
                "reduced_precision: takes arrays, and an NNX module is among the arguments. Mark "
                "the kernel that the module calls with its arrays."
            )
        args, kwargs = _converted((args, kwargs), FLOAT32, low)
        return widen(as_written(*args, **kwargs), low)

    return Transformed(reduced_fn, reduced_precision, fn)  # type: ignore[return-value]


def widen(tree: Any, low: np.dtype[Any]) -> Any:
    """Casts arrays of a 16-bit dtype to float32 values, which autocast may narrow again.

    An author's upcast, in contrast, pins them to float32.
    """
    return _converted(tree, low, FLOAT32)


@jax.named_scope(CAST)
def _converted(tree: Any, old: np.dtype[Any], new: np.dtype[Any]) -> Any:
    return jax.tree.map(lambda x: x.astype(new) if is_array(x) and x.dtype == old else x, tree)


def check_callable(name: str, fn: Any, instead: str = "") -> None:
    """Raises unless `fn` can be called with arrays, which a Linen module alone cannot.

    Args:
      name: the function that the message names.
      fn: its argument.
      instead: what to write if that is a Linen module.
    """
    if not callable(fn):
        raise TypeError(f"{name}: fn must be callable, got {type(fn).__name__}")
    if isinstance(fn, type) and issubclass(fn, (nn.Module, nnx.Module)):
        raise TypeError(
            f"{name}: fn is the class {fn.__name__}, and making an instance computes nothing: give "
            "a function that calls one, or an instance's method."
        )
    if isinstance(fn, nn.Module) and fn.scope is None:
        raise TypeError(
            f"{name}: fn is the Flax module {type(fn).__name__!r}, which is called through its "
            f"apply. {instead or 'Give module.apply, and its variables as the first argument.'}"
        )
