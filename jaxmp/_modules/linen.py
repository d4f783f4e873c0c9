"""`wrap` for Flax Linen: autocast lifted into a module, the way Flax lifts `jax.remat`.

The wrapped module is an instance of a subclass of the same name, whose public methods are lifted.
Its fields, variable tree and names are those of the module itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxmp._core.autocast.transform import under_policy
from jaxmp._core.flax import (
    call_of_methods,
    is_managed,
    key_counters,
    lifted_class,
    lifted_function,
    lifted_scopes,
)
from jaxmp._core.flax_classes import one_per_key, public, subclass, without_part
from jaxmp._core.jaxprs.scopes import PARAMETER
from jaxmp._core.jaxprs.trace import is_array
from jaxmp._core.plan.regions import policy_in_force, region, widen
from jaxmp._core.quantize.calls import for_float32
from jaxmp._core.quantized_array import is_quantized
from jaxmp._modules.interceptor import Entered, Interceptor, kind_of_call
from jaxmp._modules.linen_parts import Wrapping, fields_of_parts, runs_as_written, setup_of_parts
from jaxmp._modules.overrides import Overrides, Part
from jaxmp.policy import Policy, PolicyMap
from jaxmp.tree import cast_floating

Method = Callable[..., Any]


# The attributes that Flax, and `subclass`, set on every class of modules.
_OF_FLAX = frozenset(vars(subclass((type, nn.Module, None), {})))


def wrap_linen(module: nn.Module, policy: Policy | PolicyMap, params: tuple[str, ...]) -> nn.Module:
    """Returns the wrapped module; see `jaxmp.wrap`."""
    cls = without_part(type(module))
    wrapped_class = _wrapped_class(cls, policy, params, None)
    wrapping: Wrapping = wrapped_class._jaxmp_linen  # noqa: SLF001
    if isinstance(module.parent, nn.Module):
        # Created in a parent's setup or compact method, and registered there: it is not cloned.
        wrapped = module
    elif module.scope is not None:
        raise ValueError(
            f"wrap: the {type(module).__name__} is bound to variables already. Wrap the unbound "
            "module and bind the result: jaxmp.wrap(module, policy).bind(variables)."
        )
    else:
        wrapped = module.clone(parent=None, **fields_of_parts(wrapping, module, {}))
    object.__setattr__(wrapped, "__class__", wrapped_class)
    return wrapped


@one_per_key
def _wrapped_class(
    cls: Any, policy: Policy | PolicyMap, params: tuple[str, ...], part: Part | None
) -> Any:
    """Returns the subclass of `cls` for a policy: always the same, so that instances compare."""
    overrides = Overrides(cls, policy, params, part)
    methods = dict(_methods(cls))
    entered_by = functools.lru_cache(maxsize=64)(lambda _: Entered())

    def call(fn: Method, *args: Any) -> Any:
        return fn(*args)

    call.__name__ = cls.__name__  # it appears in messages
    # One for all calls: it caches their plans.
    parameters = functools.partial(_parameters, params)
    planned = under_policy(
        call,
        overrides.inner,
        parameters,
        overrides.warn_of_kept,
        advice=f"In this wrapped module parameters are the collections {', '.join(params)}: name "
        "others as in jaxmp.wrap(module, policy, params=('params', 'lora')).",
    )

    def autocast(fn: Method) -> Method:
        return _lift(fn, planned)

    wrapped_method = functools.partial(_wrapped_method, overrides=overrides, entered_by=entered_by)
    lifted = lifted_class(autocast, cls, methods)
    members: dict[str, Any] = {
        name: wrapped_method(method, vars(lifted)[name]) for name, method in methods.items()
    }
    # Flax would generate one from the fields; the author may have decorated it.
    members["__init__"] = cls.__init__
    # `init` and `lazy_init` call the second.
    members |= {name: _of_any_function(cls, name) for name in ("apply", "init_with_output")}
    members |= {"setup": setup_of_parts(cls), **call_of_methods(cls, _call_of_any_method)}
    members["_jaxmp_linen"] = Wrapping(
        overrides,
        lambda fn, called: wrapped_method(called, lifted_function(autocast, fn)),
        functools.lru_cache(maxsize=256)(
            lambda inner, place: _wrapped_class(inner, policy, params, place)
        ),
    )
    members |= {"_jaxmp_policy": policy} if part is None else {"_jaxmp_part": part}
    made_class = subclass((_wrapped_class, cls, policy, params, part), members)
    for name in vars(made_class).keys() - members.keys() - _OF_FLAX:
        # Set by the author's metaclass or `__init_subclass__`, which has set it on `cls` already.
        if hasattr(cls, name):
            delattr(made_class, name)
    return made_class


def _methods(cls: type) -> Iterator[tuple[str, Method]]:
    """Yields the author's public methods that Flax manages: not `setup`, nor `nn.nowrap`'s."""
    for name in public(cls):
        method: Any = getattr(cls, name, None)
        if name != "setup" and is_managed(method):
            yield name, method


def _of_any_function(cls: type[nn.Module], name: str) -> Method:
    """Wraps `apply` or `init_with_output`, whose `method` may be any function of the module."""
    original = getattr(cls, name)

    @nn.nowrap  # it is not a method of the author's: `tabulate` must not list it
    @functools.wraps(original)
    def entry(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        function = getattr(method, "__func__", method)
        called = getattr(function, "__name__", "")
        if callable(function) and getattr(cls, called, None) is function:
            method = getattr(self, called)
        elif callable(function) and getattr(type(self), called, None) is not function:
            method = Wrapping.of(self).function(function, function)
        if method is not None:
            kwargs["method"] = method
        return original(self, *args, **kwargs)

    return entry


def _call_of_any_method(cls: type[nn.Module], original: Method) -> Method:
    """Wraps Flax's call of a managed method: one may be called as ``Model.encode(bound, x)``."""

    @nn.nowrap
    @functools.wraps(original)
    def call(self: nn.Module, fun: Method, args: Any, kwargs: Any) -> Any:
        wrapping, name = Wrapping.of(self), getattr(fun, "__name__", "")
        mine = name != "setup" and getattr(getattr(cls, name, None), "__wrapped__", None) is fun
        if not mine or self.scope is None or runs_as_written(self, wrapping.overrides):
            return original(self, fun, args, kwargs)

        @functools.wraps(fun)
        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return original(self, fun, args, kwargs)

        return wrapping.function(fun, called)(self, *args, **kwargs)

    return call


def _wrapped_method(
    method: Method, lifted: Method, overrides: Overrides, entered_by: Callable[[Any], Entered]
) -> Method:

    @functools.wraps(method)
    def wrapped_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None or runs_as_written(self, overrides):
            inspects = self.scope and overrides.is_identity and overrides.part is None
            return (inspected if inspects else method)(self, *args, **kwargs)
        with overrides.calling(self.path):
            return called(self, *args, **kwargs)

    def inspected(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls the method as written; the first such call warns of layers in 16 bits."""
        kind, init = kind_of_call(self, method, args, kwargs), self.is_initializing()
        entered = Entered() if kind is None else entered_by(kind)
        if kind is None or entered.modules:
            return method(self, *args, **kwargs)
        interceptor = Interceptor(overrides, tuple(self.path), entered, init, rehearses=False)
        with nn.intercept_methods(interceptor):
            out = method(self, *args, **kwargs)
        overrides.warn_of_other_dtypes(entered.modules.values())
        return out

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        init = self.is_initializing()
        nested = policy_in_force() is not None and not init
        as_written = init or (overrides.is_identity and not nested)
        is_lifted = overrides.stored or overrides.others or not (nested or as_written)
        is_lifted = is_lifted or (overrides.trains_few_bits and not init)
        kind = kind_of_call(self, method, args, kwargs)
        entered = Entered() if kind is None else entered_by(kind)

        def call(*, rehearses: bool) -> Any:
            interceptor = Interceptor(overrides, tuple(self.path), entered, init, rehearses)
            with nn.intercept_methods(interceptor), interceptor.marking():
                if is_lifted or rehearses:
                    out = lifted(self, interceptor, *args, **kwargs)
                else:
                    with region(overrides.default) if nested else contextlib.nullcontext():
                        out = method(self, *args, **kwargs)
            overrides.check_collections(self.variables)
            whole = getattr(method, "__name__", None) == "__call__"
            if not init or whole:
                found, structure = interceptor.found(self)
                overrides.check(found, structure, whole=whole)
            return out

        try:
            unknown = entered.distinct is None and not overrides.is_identity
            # A call inside another program is part of that already: it cannot be run again.
            return call(rehearses=nested and unknown)
        except _SeenEnoughError:
            return call(rehearses=False)

    return wrapped_method


class _SeenEnoughError(Exception):
    """The signal that ends a trace: its layers are known now, and it marked the wrong ones."""


# Lifting, as `flax.core.lift.checkpoint` does it: every variable and random key goes in and out.


def _lift(fn: Method, planned: Method) -> Method:
    """Returns a function of Flax scopes lifted to run under autocast.

    Args:
      fn: the function.
      planned: calls its first argument with the others, under the policy.
    """

    def inner(
        scope_fn: Method,
        repack_fn: Method,
        variables: Any,
        rngs: Any,
        interceptor: Interceptor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        overrides = interceptor.overrides

        def run(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            """Runs the call; raises `_SeenEnoughError` if it must be repeated with other marks."""
            shown = _shown(variables, interceptor)
            scopes = scope_fn(shown, rngs)
            # Flax's counters of random keys are shared with the scopes outside.
            counters = [(counter, dict(counter)) for counter in key_counters(scopes)]
            out = fn(scopes, *args, **kwargs)
            if interceptor.learn():
                for counter, before in counters:
                    counter.clear()
                    counter.update(before)
                raise _SeenEnoughError
            return out, _unless_shown(repack_fn(scopes), shown, variables)

        if interceptor.initializing:
            out, created = run(variables, rngs, args, kwargs)
            return out, _as_created(created, variables, interceptor)
        if interceptor.learns:
            out, changed = planned(run, variables, rngs, args, kwargs)
            out = overrides.output(out)
        else:
            with region(overrides.default):
                out, changed = run(
                    _mark_parameters(variables, overrides.others), rngs, args, kwargs
                )
        return out, _as_before(changed, variables, overrides)

    return lifted_scopes(inner)


def _map_parameters(fn: Callable[[Any, Any], Any], params: Collection[str], variables: Any) -> Any:
    """Applies `fn(path, leaf)` to those variables that are parameters."""

    def changed(path: Any, leaf: Any) -> Any:
        return fn(path, leaf) if _is_param(path, params) else leaf

    return jax.tree_util.tree_map_with_path(changed, variables, is_leaf=is_quantized)


def _shown(variables: Any, interceptor: Interceptor) -> Any:
    """Returns variables as the module sees them.

    Parameters stored in 16 bits are float32, and those that are trained for few as they will be
    stored.
    """
    overrides = interceptor.overrides

    def show(path: Any, leaf: Any) -> Any:
        stored = getattr(leaf, "dtype", None) in overrides.stored
        return interceptor.trained_as_stored(path, widen(leaf, leaf.dtype) if stored else leaf)

    return _map_parameters(show, overrides.params, for_float32(variables))


def _unless_shown(changed: Any, shown: Any, variables: Any) -> Any:
    """Returns changed variables, those that are as they were shown as they were."""
    paths = jax.tree_util.tree_leaves_with_path
    shows = dict(paths(shown, is_leaf=is_quantized))
    before = dict(paths(variables, is_leaf=is_quantized))

    def restore(path: Any, leaf: Any) -> Any:
        return before[path] if path in shows and leaf is shows[path] else leaf

    return jax.tree_util.tree_map_with_path(restore, changed, is_leaf=is_quantized)


@jax.named_scope(PARAMETER)
def _mark_parameters(variables: Any, others: Collection[str]) -> Any:
    """Returns variables, those in `others` marked as parameters for the program around."""
    return _map_parameters(lambda _, leaf: jnp.squeeze(leaf[None], 0), others, variables)


def _parameters(params: Collection[str], args: Any, kwargs: Any) -> list[bool]:
    """Returns whether each array of a call is a parameter: one of the variables, argument 1."""
    return [
        path[0].idx == 0 and path[1].idx == 1 and _is_param(path[2:], params)
        for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs))
        if is_array(leaf)
    ]


def _as_before(changed: Any, variables: Any, overrides: Overrides) -> Any:
    """Returns changed variables, parameters in the dtypes that they had."""
    before = dict(jax.tree_util.tree_leaves_with_path(variables, is_leaf=is_quantized))

    def restore(path: Any, leaf: Any) -> Any:
        dtype = getattr(before.get(path), "dtype", None)
        if dtype is None or leaf.dtype == dtype:
            return leaf
        return leaf.for_dtype(dtype) if is_quantized(leaf) else leaf.astype(dtype)

    return _map_parameters(restore, overrides.params, changed)


def _as_created(created: Any, variables: Any, interceptor: Interceptor) -> Any:
    """Returns new parameters in the dtype that the policy of their module stores them in."""
    before = dict(jax.tree_util.tree_leaves_with_path(variables))

    def store(path: Any, leaf: Any) -> Any:
        policy = None if path in before else interceptor.policy_of(path)
        return leaf if policy is None else cast_floating(leaf, policy.param_dtype)

    return _map_parameters(store, interceptor.overrides.params, created)


def _is_param(path: Any, params: Collection[str]) -> bool:
    """Returns whether a path into Flax's groups (one per filter, per scope) is a parameter's."""
    return any(isinstance(k, jax.tree_util.DictKey) and k.key in params for k in path[:3])
