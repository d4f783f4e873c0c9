"""`wrap` for Flax NNX: autocast lifted into a module, the way Flax lifts `nnx.remat`.

The wrapped module is a clone that shares the module's Variables, of a subclass of the same name
whose public methods are lifted. During a call, autocast sees a merged copy of it, private to the
trace; the modules of that copy that have a policy of their own are marked there.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
from flax import errors, nnx
from flax.nnx.graphlib import is_graph_node as _is_graph_node
from flax.nnx.transforms.general import merge_inputs, split_inputs

from jaxmp._autocast.region import policy_in_force, region, widen
from jaxmp._autocast.transform import under_policy
from jaxmp._modules.overrides import Overrides
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


@functools.cache
def _wrapped_class(cls: Any, policy: Policy | PolicyMap) -> Any:
    """The subclass of `cls` that runs under a policy: one per class and policy, so they compare."""
    overrides = Overrides(policy)
    members = {name: _wrapped_method(method, overrides) for name, method in _methods(cls)}
    return _subclass(cls, policy, members)


@functools.cache
def _marked_class(cls: Any, policy: Policy) -> Any:
    """The subclass of `cls` whose methods enter the region of a policy."""

    def marked(name: str, method: Method) -> Method:
        @functools.wraps(method)
        def marked_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            method = getattr(cls, name)  # now: `nnx.capture` replaces the methods of a class
            if policy_in_force() in (None, policy):
                return method(self, *args, **kwargs)
            with region(policy):
                return method(self, *args, **kwargs)

        return marked_method

    return _subclass(cls, policy, {name: marked(name, method) for name, method in _methods(cls)})


def _subclass(cls: Any, policy: Policy | PolicyMap, methods: dict[str, Method]) -> Any:
    """A subclass that to Flax, and to who prints it, is `cls`."""
    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    members |= {"__doc__": cls.__doc__, "_jaxmp_policy": policy, **methods}
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    meta: Any = type(cls)
    return _metaclass(meta)(cls.__name__, (cls,), members, pytree=is_pytree)


@functools.cache
def _metaclass(meta: Any) -> Any:
    """A metaclass whose classes pickle as what they were made from: their name is another's."""
    pickled = type(meta.__name__, (meta,), {"__module__": meta.__module__})
    copyreg.pickle(pickled, lambda cls: (_wrapped_class, (cls.__base__, cls._jaxmp_policy)))
    return pickled


def _methods(cls: type) -> Iterator[tuple[str, Method]]:
    """The public methods of the author: those that `nnx.Module` has are Flax's own."""
    flax = {name for base in nnx.Module.__mro__ for name in vars(base)}
    for name in dir(cls):
        public = name == "__call__" or not name.startswith("_")
        method = inspect.getattr_static(cls, name)
        # Not only functions: `nnx.jit` makes a method an object that binds as one.
        binds = callable(method) and hasattr(type(method), "__get__")
        if public and name not in flax and binds and not isinstance(method, _UNBOUND):
            yield name, method


def _wrapped_method(method: Method, overrides: Overrides) -> Method:

    @functools.wraps(method)
    def called(self: nnx.Module, args: Any, kwargs: Any) -> Any:
        own = overrides.policy_at((), type(self))
        entered = nullcontext() if own is None else region(own)
        with _shown_as_float32(self, overrides), _marked(self, overrides), entered:
            return method(self, *args, **kwargs)

    lifted = split_inputs(under_policy(merge_inputs(called), overrides.inner))

    @functools.wraps(method)
    def wrapped_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if policy_in_force() is not None:
            with region(overrides.default):
                if not overrides.stored:
                    return called(self, args, kwargs)
                return _updatable(called)(self, args, kwargs)
        if overrides.is_identity:
            return method(self, *args, **kwargs)
        out = _updatable(lifted)(self, args, kwargs)
        return jax.tree.map(
            lambda x: x if _is_graph_node(x) else overrides.output(x), out, is_leaf=_is_graph_node
        )

    return wrapped_method


def _updatable(fn: Method) -> Method:
    """`fn` on a copy of those modules that belong to another trace.

    JAX's own transformations may close over a module that is only read. Lifting writes all of its
    Variables back, changed or not, which Flax refuses in another trace.
    """

    @functools.wraps(fn)
    def updatable(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args, is_leaf=_is_graph_node)
        nodes = [leaf for leaf in leaves if _is_graph_node(leaf)]
        variables = _variables(nodes)
        if all(map(_can_update, variables)):
            return fn(*args)
        before = nnx.graphdef(nodes)
        copies = nnx.clone(nodes)
        copied = iter(copies)
        out = fn(
            *jax.tree.unflatten(tree, [next(copied) if _is_graph_node(x) else x for x in leaves])
        )
        if nnx.graphdef(copies) != before:
            raise errors.TraceContextError(
                "Cannot mutate a module from a different trace level: pass it as an argument"
            )
        for variable, copy in zip(variables, _variables(copies), strict=True):
            if copy.get_raw_value() is not variable.get_raw_value():
                variable.set_raw_value(copy.get_raw_value())  # Flax's own error, where it must be
        return out

    return updatable


def _variables(nodes: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(nodes) if isinstance(node, nnx.Variable)]


def _can_update(variable: Any) -> bool:
    """Whether Flax lets a Variable be changed in the trace at hand."""
    try:
        variable.set_raw_value(variable.get_raw_value())
    except errors.TraceContextError:
        return False
    return True


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
        if not path:
            continue  # the wrapped module: its method is being called, and its dtype overruled
        policy = overrides.policy_at(path, type(inner), _own_dtype(inner), enclosing)
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
        for param in (v for v in _variables(module) if isinstance(v, nnx.Param)):
            value = param.get_raw_value()
            if isinstance(value, jax.Array) and value.dtype in overrides.stored:
                shown = widen(value, value.dtype)
                stored.append((param, value, shown))
                param.set_raw_value(shown)
    try:
        yield
    finally:
        for param, value, shown in stored:
            new = param.get_raw_value()
            param.set_raw_value(value if new is shown else new.astype(value.dtype))


def _own_dtype(module: nnx.Module) -> Any:
    """The `dtype` that a module was given, unless it is what its class says anyway."""
    dtype = getattr(module, "dtype", None)
    if isinstance(module, nnx.Embed) and dtype == module.embedding.dtype:
        return None  # an Embed that is given none has that of its table
    parameter = inspect.signature(type(module).__init__).parameters.get("dtype")
    return None if parameter is not None and parameter.default is dtype else dtype


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in path)
