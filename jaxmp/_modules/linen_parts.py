"""The modules inside a wrapped Linen module as its parts: called past its methods they are wrapped.

They are parts where they can be reached from outside: in the fields of an unbound module, and what
`setup` makes in a bound one. Inside a call of the wrapped module they are as the author wrote them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmp._core.flax_classes import without_part
from jaxmp._core.plan.regions import policy_in_force
from jaxmp._modules.explicit_dtypes import ModuleInfo
from jaxmp._modules.interceptor import own_parameters
from jaxmp._modules.overrides import Overrides, Part

Method = Callable[..., Any]


class Wrapping(NamedTuple):
    """What the methods of a wrapped class read from it, which can be pickled for that.

    Attributes:
      overrides: the policies.
      function: wraps a function of a bound module, to be lifted, and called where it is not.
      part_class: from a class and a part to the wrapped class. What it returns lives as long as
        this does, and so does what a part has planned: from one `bind` to the next.
    """

    overrides: Overrides
    function: Callable[[Method, Method], Method]
    part_class: Callable[[Any, Part], Any]

    @classmethod
    def of(cls, module: nn.Module) -> Wrapping:
        """Returns what the class of a wrapped module has."""
        return type(module)._jaxmp_linen  # type: ignore[attr-defined,no-any-return] # noqa: SLF001


def setup_of_parts(cls: type[nn.Module]) -> Method:
    """Wraps `setup`: the modules that it makes are parts, where they can be called from outside."""

    @nn.nowrap
    @functools.wraps(cls.setup)
    def setup(self: nn.Module) -> None:
        cls.setup(self)
        if runs_as_written(self, Wrapping.of(self).overrides):
            return
        inside: list[nn.Module] = []
        for name, value in vars(self).items():
            _map_modules(lambda _, inner: inside.append(inner), value, name)
        bound = {inner.path[len(self.path) :]: inner for inner in inside if inner.parent is self}
        for path, part_class in _part_classes(Wrapping.of(self), self, bound).items():
            object.__setattr__(bound[path], "__class__", part_class)

    return setup


def fields_of_parts(
    wrapping: Wrapping, module: nn.Module, copies: dict[int, nn.Module]
) -> dict[str, Any]:
    """Returns the fields of an unbound module, with copies of the modules in them that are parts.

    Args:
      wrapping: what its class has.
      module: the module.
      copies: those made already, by the identity of what they are copies of.
    """
    names = [field.name for field in dataclasses.fields(module) if field.init]
    fields = {name: getattr(module, name, None) for name in names if name != "parent"}
    inside: dict[tuple[str, ...], nn.Module] = {}
    for name, value in fields.items():
        _map_modules(lambda place, inner: inside.setdefault((place,), inner), value, name)
    classes = _part_classes(wrapping, module, inside)

    def copy(name: str, inner: nn.Module) -> nn.Module:
        part_class = classes.get((name,))
        if part_class is None:
            return inner
        if id(inner) not in copies:
            fields = fields_of_parts(part_class._jaxmp_linen, inner, copies)  # noqa: SLF001
            copied = inner.clone(parent=None, **fields)
            object.__setattr__(copied, "__class__", part_class)
            copies[id(inner)] = copied
        return copies[id(inner)]

    return {name: _map_modules(copy, value, name) for name, value in fields.items()}


def _part_classes(
    wrapping: Wrapping, module: nn.Module, inside: Mapping[tuple[str, ...], nn.Module]
) -> dict[tuple[str, ...], Any]:
    """Returns the classes of the parts among the modules in a module, by path."""
    infos = [here := ModuleInfo(module, (), None)]
    for path, inner in inside.items():
        if wrapping.overrides.takes(inner, module) and inner.parent in (None, module):
            info = ModuleInfo(inner, path, here, wrapping.overrides.policy_at(path, type(inner)))
            info.hold(own_parameters(inner))
            infos.append(info)
    return {
        path: wrapping.part_class(without_part(type(inside[path])), part)
        for path, part in wrapping.overrides.parts(infos).items()
    }


def _map_modules(fn: Callable[[str, nn.Module], Any], value: Any, name: str) -> Any:
    """Maps `fn(name, module)` over the modules in the value of an attribute, named as by Flax."""
    if isinstance(value, nn.Module):
        return fn(name, value)
    tree = serialization.to_state_dict(value)
    leaves = flatten_dict(tree, keep_empty_nodes=True) if isinstance(tree, dict) else {}
    if not any(isinstance(leaf, nn.Module) for leaf in leaves.values()):
        return value
    mapped = {
        path: _map_modules(fn, leaf, "_".join((name, *path))) for path, leaf in leaves.items()
    }
    return serialization.from_state_dict(value, unflatten_dict(mapped))


def runs_as_written(self: nn.Module, overrides: Overrides) -> bool:
    """Returns whether a call of a bound module is as written, or inside one that is wrapped."""
    as_written = self.is_initializing() or (overrides.is_identity and policy_in_force() is None)
    idle = as_written and overrides.is_single and not overrides.stored
    return idle or overrides.is_called(self.path)
