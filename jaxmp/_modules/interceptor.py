"""What a wrapped Linen module does where the modules inside it are entered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxmp._autocast.regions import policy_in_force, region
from jaxmp._flax import InterceptorContext
from jaxmp._modules.explicit_dtypes import (
    LayerDtypes,
    LayerVerdict,
    LayerVisit,
    Standing,
    distinguished,
    layer_of,
    standing_at_float32,
)
from jaxmp._modules.overrides import FLOAT32, Found, Overrides
from jaxmp.policy import Policy

# Part of the key of every jit cache, `nn.jit`'s among them: the `LayerVerdict` by which modules
# mark regions of their own while a function is traced. A trace with other marks is not used
# again. Calls of one kind have one verdict, and no others have it, though theirs may say the
# same: which modules there are is learned from a trace, and one that is found in a cache enters
# none.
_MARKING = jax.make_user_context(default_value=None)


def kind_of_call(self: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Hashable:
    """What the modules that a call enters depend on; None if that has no hash."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    try:
        given = tree, tuple(map(_plain, leaves))
        kind = (method.__name__, self.is_initializing(), self.path, _plain(self), given)
        hash(kind)
    except (TypeError, RecursionError):
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
    try:
        hash(value)
    except TypeError:  # a configuration, perhaps: what it says, as it may say another thing later
        if hasattr(value, "__dict__"):
            return type(value), _plain(vars(value))
    return type(value), value


class Interceptor:
    """Interceptor: enters the region of a module that brings a policy of its own."""

    def __init__(
        self,
        overrides: Overrides,
        root: Sequence[str],
        seen: LayerDtypes,
        *,
        initializing: bool = False,
        rehearses: bool = False,
    ) -> None:
        self.overrides = overrides
        self.initializing = initializing
        self.rehearses = rehearses  # traces for the sake of the layers only
        self.root = tuple(root)
        self.seen = seen
        self.verdict = seen.verdict or LayerVerdict()
        self._around: list[LayerVisit] = []  # the modules around the current one
        self._wrapped = 0  # how many modules, wrapped by themselves, are around the current one

    def marking(self) -> contextlib.AbstractContextManager[None]:
        """While this interceptor is at work: what the traces that are made depend on."""
        marking: contextlib.AbstractContextManager[None] = _MARKING(self.verdict)
        return marking

    def learn(self) -> bool:
        """Decides which layers have a word of their own; whether that is what it went by."""
        before, found = self.verdict, distinguished([*self.seen.layers.values()])
        if found != before.distinct:
            self.verdict = LayerVerdict(found)
        self.seen.verdict = self.verdict
        visits = self.seen.visits.items()
        self.overrides.warn_of_other_dtypes({p: v.layer for p, v in visits if v.layer})
        return found == before.distinct

    def policy_of(self, path: Any) -> Policy | None:
        """The policy of the module that the variable at a path into Flax's groups belongs to.

        None if that is in a module wrapped by itself, which has seen to its variables.
        """
        names = tuple(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))[1:]
        above = (names[:i] for i in range(len(names), -1, -1))
        visit = next((self.seen.visits[n] for n in above if n in self.seen.visits), None)
        if visit is None:
            return self.overrides.default
        return None if visit.wrapped else self._policy(visit)

    def _policy(self, visit: LayerVisit) -> Policy:
        """The policy that a module runs under."""
        at: LayerVisit | None = visit
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
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: InterceptorContext,
    ) -> Any:
        module = context.module
        path = self.relative(module.path)
        call = functools.partial(next_fun, *args, **kwargs)
        wrapped = bool(self._wrapped) or (path != () and hasattr(module, "_jaxmp_policy"))
        visit = LayerVisit(type(module), wrapped=True) if wrapped else self._visit(module, path)
        if path is not None:
            self.seen.visits[path] = visit
        if wrapped:
            return self._wrapped_by_itself(call)
        policy = visit.policy
        own = policy is None and visit.key in self.verdict.distinct
        if own:
            policy = FLOAT32
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
        # Only after `setup` is it known where a module that shares a scope has its variables.
        if visit.layer is not None and context.method_name != "setup":
            params = module.variables.get("params", {})
            held = [v for v in params.values() if not isinstance(v, Mapping)]
            visit.layer.hold(jax.tree.leaves(held))
            self.seen.layers[visit.key] = visit.layer
        return out

    def _visit(self, module: nn.Module, path: tuple[str, ...] | None) -> LayerVisit:
        around = self._around[-1] if self._around else None
        layers = (v.layer for v in reversed(self._around) if v.layer is not None)
        key = (module.path, type(module))
        default = next((f.default for f in dataclasses.fields(module) if f.name == "dtype"), None)
        above: Standing = around.standing if around else frozenset()
        layer = layer_of(
            module, default, next(layers, None), key, root=around is None, standing=above
        )
        policy = self.overrides.policy_at(path, type(module))
        standing = above | standing_at_float32(module)
        return LayerVisit(type(module), around, key, layer, policy, standing)

    def _wrapped_by_itself(self, call: Callable[[], Any]) -> Any:
        """Calls a module that was wrapped, or is inside one that was: it keeps its policies."""
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
        entered = [(path, visit.cls) for path, visit in self.seen.visits.items()]
        return [*entered, *((names, None) for _, names in holders)], params
