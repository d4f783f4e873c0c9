"""`wrap` for Flax NNX: autocast lifted into a module, the way Flax lifts `nnx.remat`.

The wrapped module is a clone that shares the module's Variables, of a subclass of the same name
whose public methods are lifted. During a call, autocast sees a merged copy of it, private to the
trace; the modules of that copy that have a policy of their own are marked there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
from flax import nnx

from jaxmp._autocast.nnx_calls import (
    lift,
    map_arrays,
    on_copies,
    shown_as_float32,
)
from jaxmp._autocast.parameters import of_variables
from jaxmp._autocast.regions import policy_in_force, region
from jaxmp._autocast.transform import under_policy
from jaxmp._flax import is_registered
from jaxmp._modules.classes import one_per_key, public, subclass
from jaxmp._modules.explicit_dtypes import (
    Layer,
    Standing,
    distinguished,
    layer_of,
    standing_at_float32,
)
from jaxmp._modules.overrides import FLOAT32, Overrides
from jaxmp.policy import Policy, PolicyMap

Method = Callable[..., Any]

_UNBOUND = (staticmethod, classmethod, type)


def wrap_nnx(module: nnx.Module, policy: Policy | PolicyMap) -> nnx.Module:
    """The wrapped module; see `jaxmp.wrap`."""
    overrides = Overrides(policy)
    overrides.check(((_names(path), type(m)) for path, m in nnx.iter_modules(module)), whole=True)
    wrapped = nnx.clone(module, variables=False)
    object.__setattr__(wrapped, "__class__", _wrapped_class(type(module), policy))
    return wrapped


@one_per_key
def _wrapped_class(cls: Any, policy: Policy | PolicyMap) -> Any:
    """The subclass of `cls` that runs under a policy: one per class and policy, so they compare."""
    lifted = _Lifted(cls, policy)

    def wrapped(name: str, method: Method) -> Method:
        @functools.wraps(method)
        def wrapped_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            return lifted.call(name, self, args, kwargs)

        return wrapped_method

    members = {name: wrapped(name, method) for name, method in _methods(cls)}
    return subclass((_wrapped_class, cls, policy), members, pytree=is_registered(cls))


@one_per_key
def _marked_class(cls: Any, policy: Policy, scope: str | None) -> Any:
    """The subclass of a class whose methods enter the region of a policy.

    If that is the author's own word: in a named scope that says where, as Linen has for any module.
    """

    def marked(name: str, method: Method) -> Method:
        @functools.wraps(method)
        def marked_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            method = getattr(cls, name)  # now: `nnx.capture` replaces the methods of a class
            if policy_in_force() in (None, policy):
                return method(self, *args, **kwargs)
            named = nullcontext() if scope is None else jax.named_scope(scope)
            with named, region(policy, own=scope is not None):
                return method(self, *args, **kwargs)

        return marked_method

    members = {name: marked(name, method) for name, method in _methods(cls)}
    return subclass((_marked_class, cls, policy, scope), members, pytree=is_registered(cls))


def _methods(cls: type) -> Iterator[tuple[str, Method]]:
    """The public methods of the author: those that `nnx.Module` has are Flax's own."""
    flax = {name for base in nnx.Module.__mro__ for name in vars(base)}
    for name in public(cls):
        method = inspect.getattr_static(cls, name)
        # Not only functions: `nnx.jit` makes a method an object that binds as one.
        binds = callable(method) and hasattr(type(method), "__get__")
        if name not in flax and binds and not isinstance(method, _UNBOUND):
            yield name, method


class _Lifted:
    """The methods of a class under a policy. Pickled as what they were made from."""

    def __init__(self, cls: Any, policy: Policy | PolicyMap) -> None:
        self.overrides = Overrides(policy)
        self._made_from = cls, policy
        self._methods = dict(_methods(cls))
        self._called: dict[str, Method] = {}
        self._under_policy: dict[str, Method] = {}
        for name, method in self._methods.items():
            called = self._called[name] = self._marking(method)
            self._under_policy[name] = lift(self._planned, called)

    def __reduce__(self) -> Any:
        return _Lifted, self._made_from

    def _planned(self, method: Method) -> Method:
        overrides = self.overrides
        return under_policy(method, overrides.inner, of_variables, overrides.warn_of_kept)

    def call(self, name: str, module: nnx.Module, args: Any, kwargs: Any) -> Any:
        """Calls a method of a wrapped module."""
        overrides = self.overrides
        if policy_in_force() is not None:
            with region(overrides.default):
                if not overrides.stored and not _marks(module, overrides):
                    return self._methods[name](module, *args, **kwargs)
                # On a copy of this trace's own: others may be tracing the module as well.
                return on_copies(self._called[name])(module, args, kwargs)
        if overrides.is_identity:
            return self._methods[name](module, *args, **kwargs)
        out = self._under_policy[name](module, args, kwargs)
        return map_arrays(overrides.output, out)

    def _marking(self, method: Method) -> Method:
        overrides = self.overrides

        @functools.wraps(method)
        def called(self: nnx.Module, args: Any, kwargs: Any) -> Any:
            own = overrides.policy_at((), type(self))
            entered = nullcontext() if own is None else region(own)
            with shown_as_float32(self, overrides.stored), _marked(self, overrides), entered:
                return method(self, *args, **kwargs)

        return called


@contextmanager
def _marked(module: nnx.Module, overrides: Overrides) -> Iterator[None]:
    """While a method is traced: the modules inside that have a policy of their own enter it.

    Modules of this trace's own: what their classes are is seen by all who use them.
    """
    marks = [(inner, type(inner), *mark) for inner, *mark in _marks(module, overrides)]
    for inner, cls, policy, scope in marks:
        object.__setattr__(inner, "__class__", _marked_class(cls, policy, scope))
    try:
        yield
    finally:
        for inner, cls, *_ in marks:
            object.__setattr__(inner, "__class__", cls)


def _marks(module: nnx.Module, overrides: Overrides) -> list[tuple[Any, Policy, str | None]]:
    """The modules inside with a policy of their own, and where that is their author's own word."""
    found = sorted(((_names(p), m) for p, m in nnx.iter_modules(module)), key=lambda f: f[0])
    layers: dict[tuple[str, ...], Layer] = {}
    standing: dict[tuple[str, ...], Standing] = {}
    for path, inner in found:  # parents come first
        above = [path[:i] for i in range(len(path) - 1, -1, -1)]
        around = next((layers[p] for p in above if p in layers), None)
        given: Standing = next((standing[p] for p in above if p in standing), frozenset())
        standing[path] = given | standing_at_float32(inner)
        default = _default_dtype(inner)
        layer = layer_of(inner, default, around, path, root=not path, standing=given)
        if layer is not None:
            values = [v for v in vars(inner).values() if isinstance(v, nnx.Variable)]
            layer.hold(v.get_raw_value() for v in values)
            layers[path] = layer
    overrides.warn_of_other_dtypes(layers)
    own = distinguished([*layers.values()])
    marks: list[tuple[Any, Policy, str | None]] = []
    for path, inner in found:
        # The wrapped module is none of them: its method is being called, and its dtype overruled.
        policy = overrides.policy_at(path, type(inner)) if path else None
        if policy is not None:
            marks.append((inner, policy, None))
        elif path in own:
            marks.append((inner, FLOAT32, "/".join(path)))
    return marks


def _default_dtype(module: nnx.Module) -> Any:
    """The `dtype` that a module has if it is given none."""
    if isinstance(module, nnx.Embed):
        return module.embedding.dtype
    parameter = inspect.signature(type(module).__init__).parameters.get("dtype")
    return inspect.Parameter.empty if parameter is None else parameter.default


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in path)
