"""`wrap` for Flax Linen: autocast lifted into a module, the way Flax lifts `jax.remat`.

The wrapped module is an instance of a subclass of the same name, whose public methods are lifted.
Its fields, variable tree and names are those of the module itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen import transforms

from jaxmp._autocast.region import policy_in_force, region, widen
from jaxmp._autocast.transform import under_policy
from jaxmp._modules.overrides import Found, Overrides
from jaxmp.policy import Policy, PolicyMap
from jaxmp.tree import cast_floating

Method = Callable[..., Any]

# Part of the key of every jit cache, `nn.jit`'s among them: which modules mark regions of their own
# while a function is traced. A trace that other marks were made in is not used again.
_MARKING = jax.make_user_context(default_value=None)


def wrap_linen(module: nn.Module, policy: Policy | PolicyMap) -> nn.Module:
    """The wrapped module; see `jaxmp.wrap`."""
    cls: Any = type(module)
    wrapped_class = _wrapped_class(cls, policy)
    if isinstance(module.parent, nn.Module):
        # Created in a parent's setup or compact method, and registered there: it stays itself.
        wrapped = module
    elif module.scope is not None:
        raise ValueError(
            f"wrap: the {type(module).__name__} is bound to variables already. Wrap the unbound "
            "module and bind the result: jaxmp.wrap(module, policy).bind(variables)."
        )
    else:
        wrapped = module.clone(parent=None)
    object.__setattr__(wrapped, "__class__", wrapped_class)
    return wrapped


@functools.cache
def _wrapped_class(cls: Any, policy: Policy | PolicyMap) -> Any:
    """The subclass of `cls` that runs under a policy: one per class and policy, so they compare."""
    overrides = Overrides(policy)
    methods = dict(_methods(cls))
    lifted = transforms.module_class_lift_transform(_lift, cls, methods=list(methods))
    members: dict[str, Any] = {
        name: _wrapped_method(method, vars(lifted)[name], overrides)
        for name, method in methods.items()
    }
    # What this class was made from: its name is that of another.
    made = (*getattr(cls, "_jaxmp_made", (cls,)), policy)
    members |= {
        "_jaxmp_made": made,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": nn.nowrap(lambda self: (_unpickle, (made, _fields(self)))),
        "apply": _by_name(cls, "apply"),
        "init_with_output": _by_name(cls, "init_with_output"),
        "init": _by_name(cls, "init"),
        "lazy_init": _by_name(cls, "lazy_init"),
    }
    return type(cls)(cls.__name__, (cls,), members)


def _fields(module: nn.Module) -> dict[str, Any]:
    return {
        f.name: getattr(module, f.name)
        for f in dataclasses.fields(module)
        if f.init and f.name != "parent"
    }


def _unpickle(made: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    return functools.reduce(_wrapped_class, made)(parent=None, **fields)


def _methods(cls: type) -> Iterator[tuple[str, Method]]:
    """The public methods that Flax manages: those of the author, without `setup` and `nowrap`."""
    for name in dir(cls):
        public = name == "__call__" or not name.startswith("_")
        method: Any = getattr(cls, name, None)
        if public and name != "setup" and hasattr(method, "method_handler_wrapped"):
            yield name, method


def _by_name(cls: type[nn.Module], name: str) -> Method:
    """`apply` or `init` that takes `method=Model.encode` or `model.encode`, as written."""
    original = getattr(cls, name)

    @nn.nowrap  # it is no method of the author's: `tabulate` must not list it
    @functools.wraps(original)
    def entry(self: nn.Module, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        function = getattr(method, "__func__", method)
        called = getattr(function, "__name__", None)
        if called is not None and getattr(cls, called, None) is function:
            method = getattr(self, called)
        if method is not None:
            kwargs["method"] = method
        return original(self, *args, **kwargs)

    return entry


def _wrapped_method(method: Method, lifted: Method, overrides: Overrides) -> Method:

    @functools.wraps(method)
    def wrapped_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None:
            return method(self, *args, **kwargs)
        init = self.is_initializing()
        entering = _Entering(overrides, self.path, initializing=init)
        nested = policy_in_force() is not None and not init
        with nn.intercept_methods(entering), _MARKING(entering.marking()):
            if overrides.stored or not (nested or init or overrides.is_identity):
                out = lifted(self, entering, *args, **kwargs)
            elif nested:
                with region(overrides.default):
                    out = method(self, *args, **kwargs)
            else:
                out = method(self, *args, **kwargs)
        if not init or method.__name__ == "__call__":
            found, structure = entering.found(self)
            overrides.check(found, structure, whole=method.__name__ == "__call__")
        return out

    return wrapped_method


class _Entering:
    """Interceptor: enters the region of a module that brings a policy of its own."""

    def __init__(self, overrides: Overrides, root: Sequence[str], *, initializing: bool) -> None:
        self.overrides = overrides
        self.initializing = initializing
        self.root = tuple(root)
        self.classes: dict[tuple[str, ...], type] = {}
        self.policies: dict[tuple[str, ...], Policy | None] = {}
        self._wrapped = 0  # how many modules, wrapped by themselves, are around the one at hand
        self._dtypes: list[Any] = []  # of the modules around the one at hand
        self._policies = [overrides.default]

    def marking(self) -> Any:
        """What a trace made while this interceptor is at work depends on."""
        if not self.overrides.is_single:
            # `init` needs to see every module: it never uses a trace again.
            return self if self.initializing else (self.overrides, self.root)
        return None if self.initializing else True

    def policy_of(self, path: Any) -> Policy | None:
        """The policy of the module that the variable at a path into Flax's groups belongs to.

        None if that is in a module wrapped by itself, which has seen to its variables.
        """
        names = tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))[1:]
        return next(
            (
                self.policies[names[:i]]
                for i in range(len(names), -1, -1)
                if names[:i] in self.policies
            ),
            self.overrides.default,
        )

    def relative(self, path: Sequence[str]) -> tuple[str, ...] | None:
        """A path from the wrapped module; None outside of it."""
        path = tuple(path)
        inside = path[: len(self.root)] == self.root
        return path[len(self.root) :] if inside else None

    def __call__(
        self,
        next_fun: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        module = context.module
        path = self.relative(module.path)
        if path is not None:
            self.classes[path] = type(module)
        if self._wrapped or (path != () and hasattr(module, "_jaxmp_made")):
            return self._wrapped_by_itself(path, functools.partial(next_fun, *args, **kwargs))
        enclosing = self._dtypes[-1] if self._dtypes else None
        policy = self.overrides.policy_at(
            path,
            type(module),
            _own_dtype(module) if self._dtypes else None,  # the wrapped module's is overruled
            enclosing,
        )
        self._dtypes.append(getattr(module, "dtype", enclosing))
        self._policies.append(policy or self._policies[-1])
        if path is not None:
            self.policies[path] = self._policies[-1]
        try:
            # Flax runs a lifted module's methods again on a clone: nothing to mark twice.
            if policy is None or policy_in_force() in (None, policy):
                return next_fun(*args, **kwargs)
            with region(policy):
                return next_fun(*args, **kwargs)
        finally:
            self._dtypes.pop()
            self._policies.pop()

    def _wrapped_by_itself(self, path: tuple[str, ...] | None, call: Callable[[], Any]) -> Any:
        """Calls a module that was wrapped, or is inside one that was: it keeps its policies."""
        if path is not None:
            self.policies[path] = None
        self._wrapped += 1
        try:
            return call()
        finally:
            self._wrapped -= 1

    def found(self, module: nn.Module) -> tuple[list[Found], Hashable]:
        """The modules entered or holding variables of the wrapped one, and what tells it apart."""
        holders = set()
        for keys, _ in jax.tree_util.tree_leaves_with_path(module.variables):
            names = tuple(str(k.key) for k in keys[1:] if isinstance(k, jax.tree_util.DictKey))
            holders |= {(keys[0], names[:i]) for i in range(len(names))}
        params = frozenset(names for key, names in holders if key.key == "params")
        return [*self.classes.items(), *((names, None) for _, names in holders)], params


def _own_dtype(module: nn.Module) -> Any:
    """The `dtype` that a module was given, unless it is what its class says anyway."""
    dtype = getattr(module, "dtype", None)
    for field in dataclasses.fields(module):
        if field.name == "dtype" and field.default is dtype:
            return None
    return dtype


# Lifting, as `flax.core.lift.checkpoint` does it: every variable and random key goes in and out.


def _lift(fn: Method) -> Method:
    """A function of Flax scopes under autocast."""

    def inner(
        scope_fn: Method,
        repack_fn: Method,
        variables: Any,
        rngs: Any,
        entering: _Entering,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        overrides = entering.overrides

        def run(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            scopes = scope_fn(_shown(variables, overrides), rngs)
            out = fn(scopes, *args, **kwargs)
            return out, repack_fn(scopes)

        if entering.initializing:
            out, created = run(variables, rngs, args, kwargs)
            return out, _as_created(created, variables, entering)
        if policy_in_force() is not None:
            with region(overrides.default):
                out, changed = run(variables, rngs, args, kwargs)
            return out, _as_before(changed, variables)
        run = under_policy(run, overrides.inner)
        out, changed = run(variables, rngs, args, kwargs)
        return overrides.output(out), _as_before(changed, variables)

    packed: Method = lift.pack(
        inner, (True,), (True,), (True,), name="autocast", enable_kwargs=True
    )
    return packed


def _shown(variables: Any, overrides: Overrides) -> Any:
    """Variables as the module sees them: parameters stored in 16 bits are float32 to it."""

    def show(path: Any, leaf: Any) -> Any:
        stored = _is_param(path) and getattr(leaf, "dtype", None) in overrides.stored
        return widen(leaf, leaf.dtype) if stored else leaf

    return jax.tree_util.tree_map_with_path(show, variables)


def _as_before(changed: Any, variables: Any) -> Any:
    """Changed variables in the dtypes they had."""
    before = dict(jax.tree_util.tree_leaves_with_path(variables))

    def restore(path: Any, leaf: Any) -> Any:
        dtype = getattr(before.get(path), "dtype", None)
        differs = _is_param(path) and dtype is not None and leaf.dtype != dtype
        return leaf.astype(dtype) if differs else leaf

    return jax.tree_util.tree_map_with_path(restore, changed)


def _as_created(created: Any, variables: Any, entering: _Entering) -> Any:
    """New parameters in the dtype that the policy of their module stores them in."""
    before = dict(jax.tree_util.tree_leaves_with_path(variables))

    def store(path: Any, leaf: Any) -> Any:
        if path in before or not _is_param(path):
            return leaf
        policy = entering.policy_of(path)
        return leaf if policy is None else cast_floating(leaf, policy.param_dtype)

    return jax.tree_util.tree_map_with_path(store, created)


def _is_param(path: Any) -> bool:
    """Whether a path into Flax's groups (one per filter, one per scope) is a parameter's."""
    return any(isinstance(k, jax.tree_util.DictKey) and k.key == "params" for k in path[:3])
