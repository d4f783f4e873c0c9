"""The layers whose `dtype=float32` is deliberate, and not just passed on to them.

A program that is float32 anyway does not show a layer's `dtype=float32`: only the module does.
Many models pass one `config.dtype` to every layer, which is what the policy replaces. A layer's
float32 is deliberate only where it differs from comparable layers, which takes the whole tree to
see. And it is not where it is the default of a field that it came from: of the layer, or, if most
layers have it, of a module or configuration around it, whatever the field is called there.

`interceptor` (Linen) and `nnx` find the modules.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxmp._core.flax import nnx
from jaxmp._core.flax_classes import authors_class
from jaxmp.policy import Policy, get_policy

FLOAT32 = get_policy("float32")

_NORMS = [
    "LayerNorm",
    "BatchNorm",
    "RMSNorm",
    "GroupNorm",
    "InstanceNorm",
    "WeightNorm",
    "SpectralNorm",
]

# The fields that have their default value, float32: their names, and the type that spells it.
Inherited = frozenset[tuple[str, type]]

_NO_DTYPE = np.dtype("V")  # of a module without a `dtype`; None is one of Flax's values


class ModuleInfo:
    """A module in the tree of the wrapped one. A layer is a module that takes a `dtype`.

    Attributes:
      cls: its class.
      path: its path from the wrapped module; None if it lies outside of that.
      around: the module that it is in; None for the wrapped one, whose dtype is what the policy
        replaces. `layer_around` is the nearest layer around it.
      policy: the policy that the user's map has for it.
      wrapped: whether it was wrapped by itself, or is inside a module that was.
      called: whether a method was called, other than `setup`, which may still set its dtype.
      dtype: its dtype; `float32` and `low` are whether that is float32, or has 16 bits or fewer.
      default: whether its dtype is the default of its class.
      by_default: whether its float32 may be the default of a field of a module around it.
      handed: whether it has the dtype of the layer around it, so that it was just passed on.
      silent: whether it has no dtype in a layer that is float32, and so does not differ from it.
      standing: the `_standing_at_float32` of it and of the modules around it.
      weighs: whether it, or a layer inside it, holds a weight of two or more dimensions.
    """

    def __init__(
        self,
        module: Any,
        path: tuple[str, ...] | None,
        around: ModuleInfo | None,
        policy: Policy | None = None,
        *,
        wrapped: bool = False,
        called: bool = True,
    ) -> None:
        self.cls, self.path, self.around = authors_class(type(module)), path, around
        self.policy, self.wrapped, self.called = policy, wrapped, called
        self.dtype = dtype = _dtype_of(module) if called and not wrapped else _NO_DTYPE
        self.is_layer = dtype != _NO_DTYPE
        self.float32 = dtype == np.float32
        floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        self.low = floating and np.dtype(dtype).itemsize <= 2
        above: Inherited = around.inherited if around else frozenset()
        self.default = self.is_layer and dtype == _default_of(module)
        self.by_default = self.float32 and _by_default(module, above)
        layer = around if around is None or around.is_layer else around.layer_around
        self.layer_around: ModuleInfo | None = layer
        self.passes_on = layer is not None and (self.float32, self.low) == (
            layer.float32,
            layer.low,
        )
        self.without_dtype = layer is not None and layer.float32 and not (self.float32 or self.low)
        self.inherited: Inherited = above if wrapped else above | _standing_at_float32(module)
        self.weighs = False

    def hold(self, weights: Iterable[Any]) -> None:
        """Sets `weighs`, here and in layers around, if a weight of the module is a matrix."""
        if _is_any(self.cls, _NORMS) or not any(np.ndim(w) > 1 for w in weights):
            return
        layer: ModuleInfo | None = self
        while layer is not None:
            layer.weighs, layer = True, layer.layer_around

    def own_policy(self, distinct: Collection[ModuleInfo]) -> Policy | None:
        """Returns the module's own policy: the user's, or float32 if it is among `distinct`."""
        return self.policy or (FLOAT32 if self in distinct else None)


def _dtype_of(module: Any) -> np.dtype[Any] | None:
    # A `__getattr__` of the author's is not called: it is a method, and would be intercepted too.
    # (Python 3.12's `getattr_static` would call none, but keeps the class forever.)
    if not any("dtype" in vars(holder) for holder in (module, *type(module).__mro__)):
        return _NO_DTYPE
    return _dtype(getattr(module, "dtype", _NO_DTYPE))


def _default_of(module: Any) -> np.dtype[Any] | None:
    is_table = isinstance(module, nnx.Embed)  # whose dtype defaults to its table's
    usual = module.embedding.dtype if is_table else _defaults(module).get("dtype", _NO_DTYPE)
    return _dtype(usual)


def _dtype(value: Any) -> np.dtype[Any] | None:
    """Returns the NumPy dtype of a `dtype` field, which a module that is not Flax's may misuse."""
    try:
        return None if value is None else np.dtype(value)
    except TypeError:
        return _NO_DTYPE


def _defaults(holder: Any) -> dict[str, Any]:
    """Returns the defaults, by name, of a dataclass's fields or else of an object's constructor."""
    if dataclasses.is_dataclass(holder):
        return {field.name: field.default for field in dataclasses.fields(holder)}
    parameters = inspect.signature(type(holder).__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _standing_at_float32(module: Any) -> Inherited:
    """Returns the fields of a module and of its configurations that are float32 by default.

    For a module that is not a dataclass, they are the constructor's arguments. One that it does
    not keep may have been given another value, which its layers then have.
    """
    found = set()
    holders = [module]
    for holder in holders:
        defaults = _defaults(holder)
        kept = getattr(holder, "__dict__", None)
        if kept is None:  # slots
            kept = {name: getattr(holder, name, None) for name in defaults}
        for name, default in defaults.items():
            kind = _spelling(kept.get(name, default))
            if kind and _spelling(default):
                found.add((name, kind))
        for name in defaults if dataclasses.is_dataclass(holder) else kept:
            value = kept.get(name)
            if _is_configuration(value) and not any(value is known for known in holders):
                holders.append(value)
    return frozenset(found)


def _is_configuration(value: Any) -> bool:
    no_instance = isinstance(value, (type, nn.Module, nnx.Module))
    return dataclasses.is_dataclass(value) and not no_instance


def _spelling(dtype: Any) -> type | None:
    """Returns the type that spells float32: `str`, `type` or `np.dtype`; None for other dtypes."""
    kind = next((kind for kind in (str, type, np.dtype) if isinstance(dtype, kind)), None)
    said = ("float32",) if kind is str else (jnp.float32, np.float32)
    return kind if kind is not None and dtype in said else None


def _by_default(module: Any, inherited: Inherited) -> bool:
    """Returns whether a layer's float32 may come from a field around it that has its default.

    The source of a value is not visible. It is spelled as in the field, or was converted; and a
    field that the layer has as well, such as `param_dtype`, is passed on to that one instead.
    """
    kind = _spelling(module.dtype)
    own = {*_defaults(module), *(() if dataclasses.is_dataclass(module) else vars(module))}
    others = (said for name, said in inherited if name == "dtype" or name not in own)
    return any(kind in (said, np.dtype) for said in others)


def distinguished(modules: Iterable[ModuleInfo]) -> frozenset[ModuleInfo]:
    """Returns the layers whose float32 is deliberate: it differs from comparable layers.

    A layer is compared, first, with those of its class: if one of them has another dtype, none or
    a default, its float32 is deliberate. (One that is its own default is not, unless others of the
    class were given 16 bits. A field's default that reaches the exception among all layers with
    weights, a router, is not a default in this sense: it was written for that one.) If all of its
    class are float32, it is compared with the layers with weights, and its float32 is deliberate
    where it is the exception among them, not the rule: a float32 head on convolutions without a
    dtype. Norms do not count there: they are float32 inside whatever their dtype. Nor do lookups:
    many models pass their dtype to every layer but those.

    Args:
      modules: all modules.
    """
    layers = [w for w in modules if w.is_layer and w.around is not None]
    candidates = [w for w in layers if w.float32 and not w.passes_on]
    if not candidates:
        return frozenset()
    others = [w for w in layers if not w.without_dtype]
    # A dtype that a layer passes on to those inside it counts once, and not for each.
    words = [w for w in others if w.weighs and not (w.passes_on and w.layer_around in layers)]
    words = [w for w in words if not _is_any(w.cls, ["Embed"])]
    rule = 2 * sum(w.float32 for w in words) > len(words)
    undecided = {w for w in others if w.default or (w.by_default and rule) or not w.float32}
    found = set()
    for layer in candidates:
        like = [w for w in undecided if _alike(w.cls, layer.cls)]
        is_exception = bool(like) or (layer.weighs and bool(words) and not rule)
        among_low = any(w.low for w in like)
        in_low = layer.layer_around is not None and layer.layer_around.low
        if among_low or (layer not in undecided and (is_exception or in_low)):
            found.add(layer)
    return frozenset(found)


def _is_any(cls: type, names: Iterable[str]) -> bool:
    """Returns whether a class is one of Flax's, Linen's or NNX's, of these names."""
    return issubclass(cls, tuple(getattr(flax, name) for name in names for flax in (nn, nnx)))


def _alike(a: type, b: type) -> bool:
    """Returns whether one class is the other, or a subclass of it, as a lifted class is."""
    return issubclass(a, b) or issubclass(b, a)
