"""`wrap` for Flax NNX: autocast lifted into a module, the way Flax lifts `nnx.remat`.

The wrapped module is a clone that shares the module's Variables, of a subclass of the same name
whose public methods are lifted. During a call, autocast sees a merged copy of it, private to the
trace; the modules of that copy that have a policy of their own are marked there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs

from jaxmp.autocast.region import policy_in_force, region, widen
from jaxmp.autocast.transform import is_identity, under_policy
from jaxmp.modules.overrides import Overrides
from jaxmp.policy import Policy, PolicyMap

Method = Callable[..., Any]


def wrap_nnx(module: nnx.Module, policy: Policy | PolicyMap) -> nnx.Module:
    """The wrapped module; see `jaxmp.wrap`."""
    overrides = Overrides(policy)
    overrides.check(((_names(path), type(m)) for path, m in nnx.iter_modules(module)), whole=True)
    wrapped = nnx.clone(module, variables=False)
    object.__setattr__(wrapped, "__class__", _wrapped_class(type(module), policy))
    return wrapped


@functools.cache
def _wrapped_class(cls: Any, policy: Policy | PolicyMap) -> Any:
    """The subclass of `cls` that runs under a policy: one per class and policy, so they compare."""
    overrides = Overrides(policy)
    members = {name: _wrapped_method(method, overrides) for name, method in _methods(cls)}
    members["__reduce__"] = lambda self: (_unpickle, (cls, policy, dict(vars(self))))
    return _subclass(cls, members)


@functools.cache
def _marked_class(cls: Any, policy: Policy) -> Any:
    """The subclass of `cls` whose methods enter the region of a policy."""

    def marked(method: Method) -> Method:
        @functools.wraps(method)
        def marked_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            if policy_in_force() in (None, policy):
                return method(self, *args, **kwargs)
            with region(policy):
                return method(self, *args, **kwargs)

        return marked_method

    return _subclass(cls, {name: marked(method) for name, method in _methods(cls)})


def _subclass(cls: Any, methods: dict[str, Method]) -> Any:
    """A subclass that to Flax, and to who prints it, is `cls`."""
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    members |= {"__doc__": cls.__doc__, **methods}
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(cls.__name__, (cls,), members, pytree=is_pytree)


def _methods(cls: type) -> Iterator[tuple[str, Method]]:
    """The public methods of the author: those that `nnx.Module` has are Flax's own."""
    flax = {name for base in nnx.Module.__mro__ for name in vars(base)}
    for name in dir(cls):
        public = name == "__call__" or not name.startswith("_")
        method = inspect.getattr_static(cls, name)
        if public and name not in flax and inspect.isfunction(method):
            yield name, method


def _unpickle(cls: type[nnx.Module], policy: Policy | PolicyMap, state: dict[str, Any]) -> Any:
    wrapped = object.__new__(_wrapped_class(cls, policy))
    vars(wrapped).update(state)
    return wrapped


def _wrapped_method(method: Method, overrides: Overrides) -> Method:
    identity = overrides.is_single and is_identity(overrides.default)

    @functools.wraps(method)
    def called(self: nnx.Module, args: Any, kwargs: Any) -> Any:
        with _shown_as_float32(self, overrides), _marked(self, overrides):
            return method(self, *args, **kwargs)

    lifted = split_inputs(under_policy(merge_inputs(called), overrides.inner))

    @functools.wraps(method)
    def wrapped_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if policy_in_force() is not None:
            with region(overrides.default):
                return called(self, args, kwargs)
        if identity:
            return method(self, *args, **kwargs)
        return overrides.output(lifted(self, args, kwargs))

    return wrapped_method


@contextmanager
def _marked(module: nnx.Module, overrides: Overrides) -> Iterator[None]:
    """While a method is traced: the modules inside that have a policy of their own enter it."""
    marked = []
    dtypes: dict[tuple[str, ...], Any] = {}
    found = sorted(((_names(p), m) for p, m in nnx.iter_modules(module)), key=lambda f: f[0])
    for path, inner in found:  # parents come first
        enclosing = next(
            (dtypes[path[:i]] for i in range(len(path) - 1, -1, -1) if path[:i] in dtypes), None
        )
        dtypes[path] = getattr(inner, "dtype", enclosing)
        own = _own_dtype(inner) if path else None  # the wrapped module's is overruled
        policy = overrides.policy_at(path, type(inner), own, enclosing)
        if policy is not None:
            marked.append((inner, type(inner)))
            object.__setattr__(inner, "__class__", _marked_class(type(inner), policy))
    try:
        yield
    finally:
        for inner, cls in marked:
            object.__setattr__(inner, "__class__", cls)


@contextmanager
def _shown_as_float32(module: nnx.Module, overrides: Overrides) -> Iterator[None]:
    """While a method is traced: parameters stored in 16 bits are float32 values to it."""
    stored = []
    if overrides.stored:
        for _, node in nnx.iter_graph(module):
            value = node.get_raw_value() if isinstance(node, nnx.Param) else None
            if isinstance(value, jax.Array) and value.dtype in overrides.stored:
                stored.append((node, value.dtype))
                node.set_raw_value(widen(value, value.dtype))
    try:
        yield
    finally:
        for node, dtype in stored:
            node.set_raw_value(node.get_raw_value().astype(dtype))


def _own_dtype(module: nnx.Module) -> Any:
    """The `dtype` that a module was given, unless it is what its class says anyway."""
    dtype = getattr(module, "dtype", None)
    if isinstance(module, nnx.Embed) and dtype == module.embedding.dtype:
        return None  # an Embed that is given none has that of its table
    parameter = inspect.signature(type(module).__init__).parameters.get("dtype")
    return None if parameter is not None and parameter.default is dtype else dtype


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in path)
