"""The interceptor of a wrapped Linen module, which runs where the modules inside it are entered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxmp._core.flax import InterceptorContext
from jaxmp._core.plan.regions import is_lost_in_rule, policy_in_force, region
from jaxmp._core.quantize.store import trained_as_stored
from jaxmp._core.weight_format import WeightFormat
from jaxmp._modules.explicit_dtypes import ModuleInfo, distinguished
from jaxmp._modules.overrides import Found, Overrides
from jaxmp._modules.unbound import UNKNOWN, Names, names_of, place_of, policy_past, warn_of_unknown
from jaxmp.policy import Policy

# Part of the key of every jit cache, `nn.jit`'s included: the kind of call that is traced, and the
# layers that mark regions of their own. A trace with other marks is not reused. Nor is one of
# another kind of call, though it may have the same marks: modules are discovered by tracing, and a
# trace that is found in a cache enters none.
_MARKING = jax.make_user_context(default_value=None)


class Entered:
    """The modules that calls of one kind enter, known once such a call was traced.

    Attributes:
      modules: by path, class, and whether they were entered in one that was wrapped by itself.
      distinct: the layers whose float32 is deliberate; None before a trace has ended.
    """

    def __init__(self) -> None:
        self.modules: dict[Hashable, ModuleInfo] = {}
        self.distinct: frozenset[ModuleInfo] | None = None

    def by_path(self) -> dict[Any, ModuleInfo]:
        """Returns the modules by path, of several with one, as under `nn.scan`, the outermost."""
        found: dict[Any, ModuleInfo] = {}
        for module in self.modules.values():
            found.setdefault(module.path, module)
        return found


def kind_of_call(self: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Hashable:
    """Returns a key that determines the modules a call enters; None if it is not hashable."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    try:
        given = tree, tuple(map(_plain, leaves))
        # Of a function, which may be made for each call: its code. Methods share Flax's.
        name = getattr(method, "__name__", None), getattr(method, "__code__", None)
        kind = (name, self.is_initializing(), self.path, _plain(self), given)
        hash(kind)
    except (TypeError, RecursionError):
        return None
    return kind


def own_parameters(module: nn.Module) -> list[Any]:
    """Returns the parameters that a module holds itself; none of one that is not bound."""
    params = {} if module.scope is None else module.variables.get("params", {})
    return jax.tree.leaves([v for v in params.values() if not isinstance(v, Mapping)])


def _plain(value: Any) -> Any:
    """Returns a value that may be kept: without the arrays, and the scopes of modules, in it."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return value.shape, str(value.dtype)
    inside: Any
    if isinstance(value, nn.Module):
        names = (field.name for field in dataclasses.fields(value))
        inside = [(name, getattr(value, name, None)) for name in names if name != "parent"]
    elif inspect.ismethod(value):
        inside = value.__func__, value.__self__
    elif isinstance(value, Mapping):
        inside = value.items()
    elif type(value) in (list, tuple):
        inside = value
    else:
        try:
            hash(value)
        except TypeError:  # a configuration, perhaps, which may change later
            inside = vars(value).items()
        else:
            return type(value), value
    return type(value), tuple(map(_plain, inside))


@dataclasses.dataclass(eq=False)
class Interceptor:
    """An interceptor of Linen methods that enters the region of a module with its own policy.

    Attributes:
      overrides: the policies.
      root: the path of the wrapped module.
      entered: the modules that calls of this kind are known to enter.
      initializing: whether the call is one of `init`.
      rehearses: whether it is traced only to learn which layers it enters.
    """

    overrides: Overrides
    root: tuple[str, ...]
    entered: Entered
    initializing: bool
    rehearses: bool

    def __post_init__(self) -> None:
        # A call inside another program is part of that already, and could not be repeated.
        self.learns = self.initializing or self.rehearses or policy_in_force() is None
        self._marked = self.entered.distinct or frozenset()
        self._around: ModuleInfo | None = None  # the module that is being called
        self._holders: tuple[tuple[Names, nn.Module], ...] = ()  # the bound modules around it
        self._applied: Names | None = None  # the path of an unbound module that is applied in one
        self._outside: Policy | None = None  # the policy in force around a SpectralNorm
        self._in_layers = False  # where some layers have policies that are not in force yet
        self._formats: dict[tuple[str, ...], WeightFormat | None] = {}  # that weights were shown in

    def marking(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that adds this call's kind and marks to the key of every jit cache."""
        key = (self.entered, self._marked)
        return _MARKING(key)  # type: ignore[no-any-return]

    def learn(self) -> bool:
        """Decides which layers' float32 is deliberate; returns whether to make the call again."""
        if not self.learns:
            return False
        modules = self.entered.modules.values()
        self.entered.distinct = distinguished(modules)
        self.overrides.warn_of_other_dtypes(modules)
        as_marked = self.entered.distinct == self._marked
        known = self.entered.by_path()
        as_shown = all(
            fmt == self.overrides.format_at(path, known) for path, fmt in self._formats.items()
        )
        return self.rehearses or not (self.initializing or (as_marked and as_shown))

    def trained_as_stored(self, path: Any, leaf: Any) -> Any:
        """Returns a parameter, at a path into Flax's groups, as it will be stored."""
        collection, *below = names_of(path)
        if self.initializing or not self.overrides.trains_few_bits or collection != "params":
            return leaf
        names = tuple(below)
        fmt = self._formats[names] = self.overrides.format_at(names, self._known)
        return trained_as_stored(names, leaf, fmt)

    @functools.cached_property
    def _known(self) -> dict[Any, ModuleInfo]:
        return self.entered.by_path()

    def policy_of(self, path: Any) -> Policy | None:
        """Returns the policy of the module that owns the variable at a path into Flax's groups.

        None if that module is wrapped by itself, and has cast its variables.
        """
        names = names_of(path)[1:]
        above = (names[:i] for i in range(len(names), -1, -1))
        module = next((self._by_path[n] for n in above if n in self._by_path), None)
        if module is not None and module.wrapped:
            return None
        while module is not None:
            policy = module.own_policy(self.entered.distinct or ())
            if policy is not None:
                return policy
            module = module.around
        return self.overrides.default

    @functools.cached_property
    def _by_path(self) -> dict[Any, ModuleInfo]:
        return {module.path: module for module in self.entered.modules.values()}

    def __call__(
        self,
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: InterceptorContext,
    ) -> Any:
        called = context.method_name != "setup"
        around, applied, holders = self._around, self._applied, self._holders
        self._applied = self._place_of(context.module)
        module = self._info(context.module, called=called)
        policy, outside = module.own_policy(self._marked), self._outside
        own = policy is not module.policy  # the layer's deliberate float32
        if policy is None and isinstance(context.module, nn.SpectralNorm):
            # Its own products estimate a norm by iteration; the layer inside is as around it.
            policy, self._outside = self.overrides.exact, policy_in_force()
        elif policy is None and around is not None and issubclass(around.cls, nn.SpectralNorm):
            policy, self._outside = outside, None
        elif policy is None and around is not None and not module.wrapped:
            policy = policy_past(self.overrides, module.path, around.path, self.entered.by_path)
        marked: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        in_force, in_layers, layers = policy_in_force(), self._in_layers, None
        if in_force is not None and module.path is not None and not module.wrapped:
            layers = self.overrides.layers_at(module.path, module.cls)
        # Flax runs a lifted module's methods again on a clone, which must not be marked twice.
        if policy is not None and in_force is not None and (in_layers or policy != in_force):
            marked = region(policy, own=own, key=self.overrides.key_of(module))
        elif in_force is not None and is_lost_in_rule(in_force) and not (in_layers or layers):
            marked = region(in_force, own=own)
        self._around, self._in_layers = module, in_layers or layers is not None
        if module.path is not None:
            self._holders = (*holders, (module.path, context.module))
        # Flax's own caches tell modules apart by their paths, which those applied do not have.
        known = _MARKING((self.entered, self._marked, self._applied)) if self._applied else None
        try:
            with marked, layers or contextlib.nullcontext(), known or contextlib.nullcontext():
                out = next_fun(*args, **kwargs)
        finally:
            self._around, self._outside, self._in_layers = around, outside, in_layers
            self._applied, self._holders = applied, holders
        # Only after `setup` is it known where a module that shares a scope has its variables.
        if module.is_layer and called:
            module.hold(own_parameters(context.module))
        return out

    def _place_of(self, module: nn.Module) -> Names | None:
        """Returns the path to put before a module's own: of the unbound one it is, or is in."""
        if module.path or not self._holders or self.overrides.is_single:
            return self._applied
        _, root = self._holders[0]
        if type(module) is type(root):
            return self._applied
        place = place_of(module, self._holders)
        if place is not None:
            return place
        warn_of_unknown(self.overrides, module, self._holders)
        return UNKNOWN

    def _info(self, module: nn.Module, *, called: bool) -> ModuleInfo:
        """Returns the info of an entered module; one wrapped by itself keeps its own policies."""
        cls, around, full = type(module), self._around, tuple(module.path)
        count = len(self.root)
        if self._applied is not None:
            full = (*self.root, *self._applied, *full)
        known = full[:count] == self.root and self._applied is not UNKNOWN
        path = full[count:] if known else None
        wrapped = around is not None and around.wrapped
        wrapped = wrapped or (path != () and hasattr(module, "_jaxmp_policy"))
        key = (full, cls, wrapped)
        info = self.entered.modules.get(key)
        if info is None or (called and not info.called):
            said = not wrapped and (known or self._applied is UNKNOWN)
            policy = self.overrides.policy_at(path, cls) if said else None
            info = ModuleInfo(module, path, around, policy, wrapped=wrapped, called=called)
            self.entered.modules[key] = info
        return info

    def found(self, module: nn.Module) -> tuple[list[Found], Hashable]:
        """Returns the modules entered or holding variables, and a key of the model's structure."""
        holders = {
            (collection, tuple(names[:i]))
            for collection, *names in flatten_dict(module.variables)
            for i in range(len(names))
        }
        params = frozenset(names for collection, names in holders if collection == "params")
        entered = [(info.path, info.cls) for info in self.entered.modules.values()]
        return [*entered, *((names, None) for _, names in holders)], params
