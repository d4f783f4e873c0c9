"""`wrap` for Flax Linen: autocast lifted into a module, the way Flax lifts `jax.remat`.

The wrapped module is an instance of a subclass of the same name, whose public methods are lifted.
Its fields, variable tree and names are those of the module itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core import lift
from flax.linen import transforms

from jaxmp._autocast.region import policy_in_force, region, widen
from jaxmp._autocast.transform import under_policy
from jaxmp._modules.overrides import FLOAT32, Found, Overrides
from jaxmp._modules.words import Layer, Seen, Verdict, layer_of
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
        nested = policy_in_force() is not None and not init
        seen = Seen() if init else overrides.seen(_kind_of_call(self, method, args, kwargs))
        if nested and seen.verdict is None and not overrides.is_identity:
            # What is run here is part of another program already: it cannot be run again.
            rehearsal = _Entering(overrides, self.path, seen, rehearses=True)
            done = contextlib.suppress(_SeenEnoughError)
            with done, nn.intercept_methods(rehearsal), rehearsal.marking():
                lifted(self, rehearsal, *args, **kwargs)
        entering = _Entering(overrides, self.path, seen, initializing=init)
        with nn.intercept_methods(entering), entering.marking():
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


def _kind_of_call(self: nn.Module, method: Method, args: Any, kwargs: Any) -> Hashable:
    """What the modules that a call enters depend on; None if that has no hash."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    kind = (method.__name__, self.path, _plain(self), tree, tuple(map(_plain, leaves)))
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _plain(value: Any) -> Any:
    """A value that may be kept: without the arrays, and the scopes of modules, in it."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return value.shape, str(value.dtype)
    if isinstance(value, nn.Module):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        del fields["parent"]
        return type(value), _plain(fields)
    if inspect.ismethod(value):
        return value.__func__, _plain(value.__self__)
    if isinstance(value, Mapping):
        return type(value), tuple((key, _plain(v)) for key, v in value.items())
    if type(value) in (list, tuple):
        return type(value), tuple(map(_plain, value))
    return type(value), value


class _SeenEnoughError(Exception):
    """Ends a trace whose layers are known now, and which marked others than it should."""


class _Entering:
    """Interceptor: enters the region of a module that brings a policy of its own."""

    def __init__(
        self,
        overrides: Overrides,
        root: Sequence[str],
        seen: Seen,
        *,
        initializing: bool = False,
        rehearses: bool = False,
    ) -> None:
        self.overrides = overrides
        self.initializing = initializing
        self.rehearses = rehearses  # traces for the sake of the layers only
        self.root = tuple(root)
        self.seen = seen
        self.verdict = seen.verdict or Verdict()
        self.classes: dict[tuple[str, ...], type] = {}
        self.visits: list[_Visit] = []
        self._around: list[_Visit] = []  # the modules around the one at hand
        self._wrapped = 0  # how many modules, wrapped by themselves, are around the one at hand

    def marking(self) -> contextlib.AbstractContextManager[None]:
        """While this interceptor is at work: what the traces that are made depend on."""
        single_init = self.initializing and self.overrides.is_single
        return _MARKING(None if single_init else self.verdict)

    def learn(self) -> bool:
        """Decides which layers have a word of their own; whether that is what it went by."""
        before, self.verdict = self.verdict, self.seen.judge()
        return self.verdict.distinct == before.distinct

    def policy_of(self, path: Any) -> Policy | None:
        """The policy of the module that the variable at a path into Flax's groups belongs to.

        None if that is in a module wrapped by itself, which has seen to its variables.
        """
        names = tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))[1:]
        visits = {visit.path: visit for visit in self.visits if visit.path is not None}
        visit = next(
            (visits[n] for i in range(len(names), -1, -1) if (n := names[:i]) in visits), None
        )
        if visit is None:
            return self.overrides.default
        return None if visit.wrapped else self._policy(visit)

    def _policy(self, visit: _Visit) -> Policy:
        """The policy that a module runs under."""
        at: _Visit | None = visit
        while at is not None:
            if at.policy is not None:
                return at.policy
            if at.key in self.verdict.distinct:
                return FLOAT32
            at = at.around
        return self.overrides.default

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
        call = functools.partial(next_fun, *args, **kwargs)
        if path is not None:
            self.classes[path] = type(module)
        if self._wrapped or (path != () and hasattr(module, "_jaxmp_made")):
            return self._wrapped_by_itself(path, call)
        visit = self._visit(module, path)
        policy = visit.policy
        own = policy is None and visit.key in self.verdict.distinct
        if own:
            policy = FLOAT32
        self.visits.append(visit)
        self._around.append(visit)
        try:
            # Flax runs a lifted module's methods again on a clone: nothing to mark twice.
            if policy is None or policy_in_force() in (None, policy):
                out = call()
            else:
                with region(policy, own=own):
                    out = call()
        finally:
            self._around.pop()
        if visit.layer is not None:
            params = module.variables.get("params", {})
            held = [v for v in params.values() if not isinstance(v, Mapping)]
            visit.layer.hold(jax.tree.leaves(held))
            self.seen.layers[visit.key] = visit.layer
        return out

    def _visit(self, module: nn.Module, path: tuple[str, ...] | None) -> _Visit:
        around = self._around[-1] if self._around else None
        layers = (v.layer for v in reversed(self._around) if v.layer is not None)
        key = (module.path, type(module))
        default = next((f.default for f in dataclasses.fields(module) if f.name == "dtype"), None)
        layer = layer_of(module, default, next(layers, None), key, root=around is None)
        policy = self.overrides.policy_at(path, type(module))
        return _Visit(path, around, key, layer, policy)

    def _wrapped_by_itself(self, path: tuple[str, ...] | None, call: Callable[[], Any]) -> Any:
        """Calls a module that was wrapped, or is inside one that was: it keeps its policies."""
        self.visits.append(_Visit(path, wrapped=True))
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Visit:
    """A call of a module.

    Attributes:
      path: its path from the wrapped module; None if it lies outside of that.
      around: the call that it is part of.
      key: what tells the module from others.
      layer: the module, if it takes a `dtype`.
      policy: what the user's map has for it.
      wrapped: whether it was wrapped by itself, or is inside a module that was.
    """

    path: tuple[str, ...] | None
    around: _Visit | None = None
    key: Hashable = None
    layer: Layer | None = None
    policy: Policy | None = None
    wrapped: bool = False


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

        def attempt(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            """`run`, to its end if the layers that it marked are those to be marked."""
            scopes = scope_fn(_shown(variables, overrides), rngs)
            # Flax's counters of random keys are shared with the scopes outside.
            counters = [(s.rng_counters, dict(s.rng_counters)) for s in jax.tree.leaves(scopes)]
            out = fn(scopes, *args, **kwargs)
            if entering.learn() and not entering.rehearses:
                return out, repack_fn(scopes)
            for counter, before in counters:
                counter.clear()
                counter.update(before)
            raise _SeenEnoughError

        if entering.initializing:
            out, created = run(variables, rngs, args, kwargs)
            entering.learn()
            return out, _as_created(created, variables, entering)
        if policy_in_force() is not None and not entering.rehearses:
            with region(overrides.default):
                out, changed = run(variables, rngs, args, kwargs)
            return out, _as_before(changed, variables)
        traced = under_policy(attempt, overrides.inner, overrides.warn_of_kept)
        try:
            out, changed = traced(variables, rngs, args, kwargs)
        except _SeenEnoughError:
            if entering.rehearses:
                raise
            with entering.marking():
                out, changed = traced(variables, rngs, args, kwargs)
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
