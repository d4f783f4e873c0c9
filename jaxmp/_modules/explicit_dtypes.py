"""Which layers' `dtype=float32` is their author's own word, and which was only handed around.

A program that is float32 already says nothing of a layer's `dtype=float32`: only the module does.
Many models hand one `config.dtype` to every layer, which is what the policy replaces. It is a word
of its own only where it tells a layer from its like, which needs a look at the whole tree. And it
is none where it is the default of a field that it came from: of the layer, or, if most layers have
it, of a module or configuration around it, whatever the field is called there.

Nothing here knows Linen or NNX; they say which modules there are.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp.policy import Policy

_NORMS = (
    *(nn.LayerNorm, nn.BatchNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm, nn.WeightNorm),
    *(nn.SpectralNorm, nnx.LayerNorm, nnx.BatchNorm, nnx.RMSNorm, nnx.GroupNorm),
    *(nnx.InstanceNorm, nnx.WeightNorm, nnx.SpectralNorm),
)
_LOOKUPS = (nn.Embed, nnx.Embed)

# The fields that stand at their default, which is float32: their names, and how they say it.
Standing = frozenset[tuple[str, type]]


@dataclasses.dataclass(slots=True)
class Layer:
    """A module that takes a `dtype`, as it stands in the tree of the wrapped one.

    Attributes:
      key: what tells it from the others.
      cls: its class.
      dtype: its dtype.
      around: the nearest module around it that takes a dtype; None for the outermost.
      default: whether it has the dtype that its class gives it anyway.
      by_default: whether its float32 may be the default of a field of a module around it.
      root: whether it is the wrapped module, whose dtype is what the policy replaces.
      weighs: whether it, or a module inside it, holds a weight of two or more dimensions.
    """

    key: Hashable
    cls: type
    dtype: np.dtype[Any] | None
    around: Layer | None
    default: bool
    by_default: bool
    root: bool
    weighs: bool = False

    @property
    def float32(self) -> bool:
        """Whether its dtype is float32."""
        return self.dtype == np.float32

    @property
    def low(self) -> bool:
        """Whether its dtype is one of 16 bits, or fewer."""
        dtype = self.dtype
        return dtype is not None and dtype.itemsize <= 2 and jnp.issubdtype(dtype, jnp.floating)

    @property
    def handed(self) -> bool:
        """Whether its dtype is the surrounding module's, and says nothing of its own."""
        around = self.around
        return around is not None and (self.float32, self.low) == (around.float32, around.low)

    @property
    def silent(self) -> bool:
        """Whether it was given no dtype in a module that is float32, which says nothing else."""
        around = self.around
        return around is not None and around.float32 and not (self.float32 or self.low)

    def hold(self, weights: Iterable[Any]) -> None:
        """Notes the weights that the module itself holds."""
        if issubclass(self.cls, _NORMS) or not any(np.ndim(w) > 1 for w in weights):
            return
        layer: Layer | None = self
        while layer is not None:
            layer.weighs, layer = True, layer.around


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerVisit:
    """A call of a module.

    Attributes:
      cls: its class.
      around: the call that it is part of.
      key: what tells the module from others.
      layer: the module, if it takes a `dtype`.
      policy: what the user's map has for it.
      standing: the `standing_at_float32` of it and of the modules around it.
      wrapped: whether it was wrapped by itself, or is inside a module that was.
    """

    cls: type
    around: LayerVisit | None = None
    key: Hashable = None
    layer: Layer | None = None
    policy: Policy | None = None
    standing: Standing = frozenset()
    wrapped: bool = False


class LayerDtypes:
    """What calls of one kind enter, known once such a call was traced.

    Attributes:
      visits: the last call of each module, by its path from the wrapped one.
      layers: the layers, by key.
      verdict: which of them have a word of their own; None before a trace has ended.
    """

    def __init__(self) -> None:
        self.visits: dict[tuple[str, ...], LayerVisit] = {}
        self.layers: dict[Hashable, Layer] = {}
        self.verdict: LayerVerdict | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LayerVerdict:
    """The keys of the layers that have a word of their own.

    It is a part of the key of what JAX caches of a trace that layers were marked in.
    """

    distinct: frozenset[Hashable] = frozenset()


def standing_at_float32(module: Any) -> Standing:
    """The fields of a module that stand at float32 by default, its configurations' included.

    Those of a module that is no dataclass are the arguments it is made with. One that it does not
    keep may have been given another value, which its layers then have.
    """
    found = set()
    holders = [module]
    for holder in holders:
        if dataclasses.is_dataclass(holder):
            defaults = {f.name: f.default for f in dataclasses.fields(holder)}
        else:
            parameters = inspect.signature(type(holder).__init__).parameters
            defaults = {name: parameter.default for name, parameter in parameters.items()}
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
    """How float32 is said: as text, a scalar type or a NumPy dtype; None if it is not float32."""
    kind = next((kind for kind in (str, type, np.dtype) if isinstance(dtype, kind)), None)
    said = ("float32",) if kind is str else (jnp.float32, np.float32)
    return kind if kind is not None and dtype in said else None


def _by_default(module: Any, standing: Standing) -> bool:
    """Whether a layer's float32 comes from a field around it which stands at its default.

    Where a value came from cannot be seen. It is said as the field says it, or was converted; and
    it is no field that the layer has as well, which is handed to that: `param_dtype`.
    """
    kind = _spelling(module.dtype)
    if dataclasses.is_dataclass(module):
        own = {f.name for f in dataclasses.fields(module)}
    else:
        own = {*inspect.signature(type(module).__init__).parameters, *vars(module)}
    own.discard("dtype")
    return any(name not in own and kind in (said, np.dtype) for name, said in standing)


def layer_of(
    module: Any,
    default: Any,
    around: Layer | None,
    key: Hashable,
    *,
    root: bool,
    standing: Standing,
) -> Layer | None:
    """The layer that a module is; None if it takes no `dtype` (`dtype=None` is one).

    Args:
      module: the module.
      default: the dtype that its class gives it anyway.
      around: the nearest layer around it.
      key: what tells it from others.
      root: whether it is the wrapped module.
      standing: the `standing_at_float32` of all modules around it.
    """
    # A `__getattr__` of the author's is not asked: it is a method, whose calls come here as well.
    # (Python 3.12's `getattr_static` would ask nobody, but keeps the class for ever.)
    if not any("dtype" in vars(holder) for holder in (module, *type(module).__mro__)):
        return None
    try:
        name = _name(module.dtype)
    except (AttributeError, TypeError):
        return None  # it may be anything, of a module that is not Flax's
    try:
        usual = _name(default)
    except TypeError:
        usual = np.dtype("V")  # none, which is another than None
    return Layer(
        key=key,
        cls=type(module),
        dtype=name,
        around=around,
        default=name == usual,
        by_default=name == np.float32 and _by_default(module, standing),
        root=root,
    )


def _name(dtype: Any) -> np.dtype[Any] | None:
    return None if dtype is None else np.dtype(dtype)


def distinguished(layers: Sequence[Layer]) -> frozenset[Hashable]:
    """The keys of the layers whose float32 tells them from their like.

    A layer's like are, first, those of its class: if one of them has another dtype, none or that of
    a default, its float32 is meant. (That its own is a default is no word, unless others of the
    class were given 16 bits. A field's default that reaches the exception among all layers with
    weights, a router, is no default in this sense: it was written for that one.) If all of its
    class are float32, its like are the layers with weights, and its float32 is meant where it is
    the exception among them, not the rule: a float32 head on convolutions without a dtype. Norms do
    not count there: they are float32 inside whatever they are told. Nor do lookups: many models
    hand their dtype to every layer but those.

    Args:
      layers: all that there are.
    """
    candidates = [w for w in layers if w.float32 and not w.handed and not w.root]
    if not candidates:
        return frozenset()
    others = [w for w in layers if not (w.root or w.silent)]
    # What a module inside has from the one around it is one word, and not one for each.
    words = [w for w in others if w.weighs and not (w.handed and w.around and not w.around.root)]
    words = [w for w in words if not issubclass(w.cls, _LOOKUPS)]
    rule = 2 * sum(w.float32 for w in words) > len(words)
    untold = {w.key for w in others if w.default or (w.by_default and rule) or not w.float32}
    found = set()
    for layer in candidates:
        like = [w for w in others if w.key in untold and _alike(w.cls, layer.cls)]
        is_exception = bool(like) or (layer.weighs and bool(words) and not rule)
        among_low = any(w.low for w in like)
        if among_low or (layer.key not in untold and (is_exception or _in_low(layer))):
            found.add(layer.key)
    return frozenset(found)


def _in_low(layer: Layer) -> bool:
    return layer.around is not None and layer.around.low


def _alike(a: type, b: type) -> bool:
    """Whether one class is the other, or made from it: lifting a class makes another."""
    return issubclass(a, b) or issubclass(b, a)
