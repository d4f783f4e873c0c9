"""`wrap` for Flax NNX: autocast lifted into a module, the way Flax lifts `nnx.remat`.

The wrapped module is a clone that shares the module's Variables, of a subclass of the same name
whose public methods are lifted. During a call, autocast sees a merged copy of it, private to the
trace; the modules of that copy that have a policy of their own are marked there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax

from jaxmp._core.autocast.nnx_calls import lift, map_arrays, methods_of, on_copies, shown_as_float32
from jaxmp._core.autocast.transform import under_policy
from jaxmp._core.flax import is_registered, nnx
from jaxmp._core.flax_classes import one_per_key, subclass, without_part
from jaxmp._core.plan.parameters import of_variables
from jaxmp._core.plan.regions import policy_in_force, region
from jaxmp._core.weight_format import WeightFormat
from jaxmp._modules.explicit_dtypes import ModuleInfo, distinguished
from jaxmp._modules.overrides import Overrides, Part
from jaxmp.policy import Policy, PolicyMap

Method = Callable[..., Any]

_PARAMETERS = "In a wrapped NNX module parameters are nnx.Params, and Variables of its subclasses."


def wrap_nnx(module: nnx.Module, policy: Policy | PolicyMap) -> nnx.Module:
    """Returns the wrapped module; see `jaxmp.wrap`."""
    cls = without_part(type(module))
    overrides = Overrides(cls, policy)
    overrides.refuse_layers()
    overrides.check(((_names(path), type(m)) for path, m in nnx.iter_modules(module)), whole=True)
    wrapped = nnx.clone(module, variables=False)
    if not hasattr(wrapped, "_jaxmp_policy"):  # else what is inside keeps its policies
        _make_parts(wrapped, policy, overrides)
        if overrides.is_identity:  # else its calls warn
            overrides.warn_of_other_dtypes(_infos(wrapped, overrides))
    object.__setattr__(wrapped, "__class__", _wrapped_class(cls, policy, None))
    return wrapped


def _make_parts(module: nnx.Module, policy: Policy | PolicyMap, overrides: Overrides) -> None:
    """Makes the modules inside one parts, which have its policies when they are called alone."""
    infos = _infos(module, overrides)
    parts = overrides.parts(infos)
    others: set[tuple[str, ...]] = set()
    for path, inner in infos.values():
        if not path:
            continue
        if any(path[:i] in others for i in range(len(path))) or not overrides.takes(inner, module):
            others.add(path)
            continue
        part_class = _wrapped_class(without_part(type(inner)), policy, parts[path])
        object.__setattr__(inner, "__class__", part_class)


@one_per_key
def _wrapped_class(cls: Any, policy: Policy | PolicyMap, part: Part | None) -> Any:
    """Returns the subclass of `cls` for a policy: always the same, so that instances compare."""
    calls = _Calls(cls, policy, part)

    def wrapped(name: str, method: Method) -> Method:
        @functools.wraps(method)
        def wrapped_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            return calls[name](self, args, kwargs)

        return wrapped_method

    def set_attribute(self: nnx.Module, name: str, value: Any) -> None:
        cls.__setattr__(self, name, value)
        if isinstance(value, nnx.Module) and not calls.overrides.is_called():
            _make_parts(self, policy, calls.overrides)

    members: dict[str, Any] = {
        name: wrapped(name, method) for name, method in methods_of(cls) if name in calls
    }
    members |= {"__setattr__": set_attribute}
    members |= {"_jaxmp_policy": policy} if part is None else {"_jaxmp_part": part}
    return subclass((_wrapped_class, cls, policy, part), members, pytree=is_registered(cls))


class _Calls(dict[str, Method]):
    """The methods of a class under a policy, by name. Pickled as what they are made from."""

    def __init__(self, cls: Any, policy: Policy | PolicyMap, part: Part | None) -> None:
        self.overrides = overrides = Overrides(cls, policy, part=part)
        # A list's or dict's own methods (`append`) compute nothing.
        is_container = part is not None and issubclass(cls, (nnx.List, nnx.Dict))
        methods = () if is_container else methods_of(cls)
        super().__init__({name: _lifted(method, overrides) for name, method in methods})
        self._made_from = cls, policy, part

    def __reduce__(self) -> Any:
        return _Calls, self._made_from


def _lifted(method: Method, overrides: Overrides) -> Method:
    """Returns a method under a policy, as a function of a module, its arguments and keywords."""

    @functools.wraps(method)
    def called(self: nnx.Module, args: Any, kwargs: Any) -> Any:
        own = overrides.policy_at((), type(self))
        entered = nullcontext() if own is None else region(own)
        shown = shown_as_float32(self, overrides.stored, _format_of(self, overrides))
        with shown, _marked(self, overrides), entered:
            return method(self, *args, **kwargs)

    def planned(fn: Method) -> Method:
        return under_policy(
            fn, overrides.inner, of_variables, overrides.warn_of_kept, advice=_PARAMETERS
        )

    # On a copy private to this trace: others may be tracing the module as well.
    in_region, in_program = on_copies(called), lift(planned, called)

    @functools.wraps(method)
    def call(self: nnx.Module, args: Any, kwargs: Any) -> Any:
        if overrides.is_called():
            return method(self, *args, **kwargs)
        with overrides.calling():
            return from_outside(self, args, kwargs)

    def from_outside(self: nnx.Module, args: Any, kwargs: Any) -> Any:
        if policy_in_force() is not None:
            with region(overrides.default):
                if overrides.stored or overrides.trains_few_bits or _marks(self, overrides):
                    return in_region(self, args, kwargs)
                return method(self, *args, **kwargs)
        if overrides.is_identity:
            return method(self, *args, **kwargs)
        return map_arrays(overrides.output, in_program(self, args, kwargs))

    return call


def _format_of(
    module: nnx.Module, overrides: Overrides
) -> Callable[[tuple[str, ...]], WeightFormat | None]:
    """Returns which format the weight at a path is trained for."""
    if not overrides.trains_few_bits:
        return lambda _: None
    infos = {info.path or (): info for info in _infos(module, overrides)}
    for path, inner in nnx.iter_modules(module):
        infos[_names(path)].wrapped = bool(path) and hasattr(type(inner), "_jaxmp_policy")
    return lambda path: overrides.format_at(path, infos)


# The modules with keys that are being called: the map, and the path. A part of the key of jit
# caches: what is inside them marks nothing of its own then.
_INSIDE = jax.make_user_context(default_value=())


class _Mark(NamedTuple):
    """The region that the methods of a module inside enter.

    Attributes:
      policy: its policy.
      key: the key of the user's map that it comes from, or nothing.
      scope: of a deliberate float32, the path, a named scope as Linen has for any module.
      of: the map, and the path of the module that has the key.
      inherited: whether that is a module around it, which it may be called past.
    """

    policy: Policy
    key: str = ""
    scope: str | None = None
    of: Hashable = None
    inherited: bool = False


@one_per_key
def _marked_class(cls: Any, mark: _Mark) -> Any:
    """Returns the subclass of a class whose methods enter a region."""
    policy, scope = mark.policy, mark.scope

    def marked(name: str, method: Method) -> Method:
        @functools.wraps(method)
        def marked_method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            method = getattr(cls, name)  # at each call: `nnx.capture` replaces methods
            in_force, inside = policy_in_force(), _INSIDE.value
            if in_force is None or (mark.inherited and mark.of in inside):
                return method(self, *args, **kwargs)
            named = nullcontext() if scope is None else jax.named_scope(scope)
            marked = region(policy, own=scope is not None, key=mark.key)
            with (
                _INSIDE((*inside, mark.of)),
                named,
                nullcontext() if policy == in_force else marked,
            ):
                return method(self, *args, **kwargs)

        return marked_method

    members: dict[str, Any] = {name: marked(name, method) for name, method in methods_of(cls)}
    members["_jaxmp_policy"] = policy
    return subclass((_marked_class, cls, mark), members, pytree=is_registered(cls))


@contextmanager
def _marked(module: nnx.Module, overrides: Overrides) -> Iterator[None]:
    """Makes the modules inside that have a policy of their own enter it, during a trace.

    The modules must be private to the trace: it changes their classes, for all their users.
    """
    marks = [(inner, type(inner), mark) for inner, mark in _marks(module, overrides)]
    for inner, cls, mark in marks:
        object.__setattr__(inner, "__class__", _marked_class(cls, mark))
    try:
        yield
    finally:
        for inner, cls, _ in marks:
            object.__setattr__(inner, "__class__", cls)


def _marks(module: nnx.Module, overrides: Overrides) -> list[tuple[Any, _Mark]]:
    """Returns the inner modules with policies of their own."""
    infos = _infos(module, overrides)
    overrides.warn_of_other_dtypes(infos)
    distinct = distinguished(infos)
    marks: list[tuple[Any, _Mark]] = []
    in_norms: dict[int, Policy] = {}  # the layers inside SpectralNorms
    for info, (_, inner) in infos.items():
        if isinstance(inner, nnx.SpectralNorm):
            policies = (each.own_policy(distinct) for each in _from(info))
            in_norms[id(inner.layer_instance)] = next(filter(None, policies), overrides.default)
    for info, (path, inner) in infos.items():
        policy = info.own_policy(distinct)
        if policy is None and isinstance(inner, nnx.SpectralNorm):
            # Its own products estimate a norm by iteration; the layer inside is as around it.
            marks.append((inner, _Mark(overrides.exact)))
            continue
        scope = None if info.policy or policy is None else "/".join(path)
        policy = policy or in_norms.get(id(inner))
        inherited = policy is None and not isinstance(inner, (nnx.List, nnx.Dict))
        keyed = info if info.policy else None
        if inherited:
            keyed = next((each for each in _from(info) if each.own_policy(distinct)), None)
        if keyed is not None and keyed.policy is not None:
            of = overrides.map, keyed.path
            key = overrides.key_of(keyed)
            marks.append((inner, _Mark(keyed.policy, key, None, of, inherited)))
        elif policy is not None:
            marks.append((inner, _Mark(policy, scope=scope)))
    return marks


def _infos(
    module: nnx.Module, overrides: Overrides
) -> dict[ModuleInfo, tuple[tuple[str, ...], nnx.Module]]:
    """Returns what is known of a module and of those inside it, with their paths; itself first."""
    found = sorted(((_names(p), m) for p, m in nnx.iter_modules(module)), key=lambda f: f[0])
    infos: dict[tuple[str, ...], ModuleInfo] = {}
    for path, inner in found:  # parents come first
        above = (path[:i] for i in range(len(path) - 1, -1, -1))
        around = next((infos[p] for p in above if p in infos), None)
        # The wrapped module has none: the policy of the call overrules its dtype.
        policy = overrides.policy_at(path, type(inner)) if path else None
        info = infos[path] = ModuleInfo(inner, path, around, policy)
        if info.is_layer:
            values = [v for v in vars(inner).values() if isinstance(v, nnx.Variable)]
            info.hold(v.get_raw_value() for v in values)
    return dict(zip(infos.values(), found, strict=True))


def _from(info: ModuleInfo | None) -> Iterator[ModuleInfo]:
    """Yields a module and those around it, outwards."""
    while info is not None:
        yield info
        info = info.around


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in path)
