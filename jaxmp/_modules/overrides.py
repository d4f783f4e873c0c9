"""The policy of a module inside a wrapped one: by its path, its class, or a deliberate float32.

It does not depend on Linen or NNX; these report the modules that are entered, and their paths.

A module inside may be called past the methods of the wrapped one: `net.encoder(x)`. So it is of a
class that knows where it is, a `Part`, and is wrapped as well; but not inside a call of the wrapped
module, which has its policies already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._core.jaxprs.source import level_of_user
from jaxmp._core.plan.flops import kept_by_layers
from jaxmp._core.plan.plan import Plan
from jaxmp._core.plan.regions import layers_region
from jaxmp._core.plan.rules import governed, is_identity
from jaxmp._core.policy_keys import key_matches, ranged, shadowed
from jaxmp._core.printable import printable
from jaxmp._core.weight_format import WeightFormat
from jaxmp._modules.explicit_dtypes import ModuleInfo, distinguished
from jaxmp.policy import Policy, PolicyMap

# The share of the products' FLOPs above which layers that stay float32 are warned about: the
# least at which a model is noticeably slower for it.
MUCH = 0.1

# A module's path from the wrapped one, or None if it lies outside of that; and its class, if known.
Found = tuple[Sequence[str] | None, type | None]

# What looks like an index or a slice of layers, and is a glob: one character of those between.
_NUMBERED = re.compile(r"\w\[[-\d:]+\]")
_RANGES = " For a layer of an nn.scan write a range without a step, as in 'layers[0:1]'."

# The wrapped modules that are being called. It is part of the key of every jit cache: what is
# traced inside such a call is as its parts were written.
_CALLED = jax.make_user_context(default_value=())


class Part(NamedTuple):
    """A place inside a wrapped module, with what holds there for a module that is called by itself.

    Attributes:
      root: the class of the wrapped module.
      path: the path from the wrapped module.
      policy: the policy that holds at the path.
    """

    root: type
    path: tuple[str, ...]
    policy: Policy


class Overrides:
    """A policy, or map of them, as it applies to the modules inside the wrapped one.

    Attributes:
      map: the user's map, which overrules a deliberate float32; `is_single` if it is empty.
      params: the collections of variables that are parameters (Linen's), and `others` those but
        "params", which every program recognizes.
      default: the policy of modules without one of their own.
      wide: the dtype of the values that it governs: float32, or float64.
      inner: `default`, but storing and returning `wide`: parameters and outputs are converted
        where they enter and leave the wrapped module, and its other state keeps its dtypes.
      exact: the policy of estimates, which compute in `wide` under any other.
      stored: the 16-bit dtypes that some policy stores parameters in.
      is_identity: whether every policy is float32 throughout.
      trains_few_bits: whether some policy has ``weights``.
      part: the place in the wrapped module, for a module that is a part of it.
    """

    def __init__(
        self,
        cls: type,
        policy: Policy | PolicyMap,
        params: tuple[str, ...] = ("params",),
        part: Part | None = None,
    ) -> None:
        self.params, self.others = params, frozenset(params) - {"params"}
        self.map = policy if isinstance(policy, PolicyMap) else PolicyMap({}, default=policy)
        self.is_single = not self.map.overrides
        # A part may lack what the keys are of.
        keys = frozenset(key for key, _ in self.map.overrides if part is None)
        self._unmatched: dict[Hashable, frozenset[str | type]] = defaultdict(lambda: keys)
        self._warned: set[frozenset[str]] = set()
        self.part, self._called = part, (part.root if part else cls, policy)
        self.default: Policy = part.policy if part else self.map.default
        self.wide = governed(self.default)
        self.inner = dataclasses.replace(
            self.default, param_dtype=self.wide, output_dtype=self.wide
        )
        policies = [self.default, *(policy for _, policy in self.map.overrides)]
        stored = {np.dtype(policy.param_dtype) for policy in policies}
        self.exact = Policy(self.wide, self.wide, self.wide, residuals=self.default.residuals)
        self.stored = frozenset(dtype for dtype in stored if dtype.itemsize == 2)
        self._computed = {np.dtype(policy.compute_dtype) for policy in policies}
        self.is_identity = all(map(is_identity, policies))
        self.trains_few_bits = any(policy.weights is not None for policy in policies)

    def is_called(self, path: tuple[str, ...] = ()) -> bool:
        """Returns whether this is inside a call of the wrapped module, which holds for its parts.

        Args:
          path: the path of the wrapped module; of a part, any.
        """
        if self.part is None:
            return (*self._called, path) in _CALLED.value
        return any((root, policy) == self._called for root, policy, _ in _CALLED.value)

    def calling(self, path: tuple[str, ...] = ()) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a call of the wrapped module at a path, or of a part of it."""
        return _CALLED((*_CALLED.value, (*self._called, path)))  # type: ignore[no-any-return]

    def policy_at(self, path: Sequence[str] | None, cls: type) -> Policy | None:
        """Returns the policy that the user's map has for a path from here and a class, or None.

        Args:
          path: the path; None if it is not known.
          cls: the class.
        """
        return self.map.policy_at(None if path is None else self.full_path(path), cls)

    def full_path(self, path: Sequence[str]) -> tuple[str, ...]:
        """Returns the path in the user's map of what is at a path from here."""
        return (*(self.part.path if self.part else ()), *path)

    def key_of(self, module: ModuleInfo) -> str:
        """Returns the key that a module's policy comes from, as a message shows it; or nothing."""
        if module.policy is None:
            return ""
        path = None if module.path is None else self.full_path(module.path)
        keys = (key for key, _ in self.map.overrides if key_matches(key, path, module.cls))
        return next((key if isinstance(key, str) else key.__name__ for key in keys), "")

    def layers_at(
        self, path: Sequence[str], cls: type
    ) -> contextlib.AbstractContextManager[None] | None:
        """Returns a context that marks layers with policies of their own at a path; or None."""
        full = self.full_path(path)
        found = self.map.layer_policies_at(full, cls)
        scan = "/".join(full) if self.map.has_layers(full) else ""
        return layers_region(scan, found) if scan or found else None

    def refuse_layers(self) -> None:
        """Raises if a key has a range of layers, which only Linen's scans have."""
        key = next((key for key, _ in self.map.overrides if ranged(key)), None)
        if key is not None:
            raise ValueError(
                f"wrap: the key {key!r} has a range of layers, which is supported for the nn.scan "
                "of Flax Linen; in an NNX model, keep those layers out of the scan, as modules "
                "with names of their own."
            )

    def format_at(
        self, path: tuple[str, ...], modules: Mapping[tuple[str, ...], ModuleInfo]
    ) -> WeightFormat | None:
        """Returns the format that a weight is trained for, which its modules' policies say.

        A layer's deliberate float32 is what it computes in, and says nothing of that.

        Args:
          path: the path of the weight.
          modules: those known, by path.
        """
        for at in (path[:i] for i in range(len(path) - 1, -1, -1)):
            module = modules.get(at)
            if at and module is not None and module.wrapped:
                return None  # it is wrapped by itself, and rounds its own
            policy = self.policy_at(at, module.cls if module else object)
            if policy is not None:
                return policy.weights  # type: ignore[no-any-return]
        return self.default.weights  # type: ignore[no-any-return]

    def takes(self, inner: Any, holder: Any) -> bool:
        """Returns whether a module inside one here is a part of the wrapped module.

        It is not where it is wrapped by itself, or is a part of another.

        Args:
          inner: the module.
          holder: the one here, which may have been a part of another itself.
        """
        part, above = (getattr(type(m), "_jaxmp_part", None) for m in (inner, holder))
        mine = part is None or part.root in (self._called[0], above and above.root)
        return mine and not hasattr(type(inner), "_jaxmp_policy")

    def parts(self, modules: Iterable[ModuleInfo]) -> dict[tuple[str, ...], Part]:
        """Returns the parts that modules are, by their paths from here.

        Args:
          modules: the module here, and those inside it, outer ones first.
        """
        here, *inside = modules
        at = self.part.path if self.part else ()
        policies = {here: self.policy_at((), here.cls) or self.default}
        distinct = distinguished((here, *inside))
        parts: dict[tuple[str, ...], Part] = {}
        for info in inside:
            inherited = policies[info.around or here]
            policy = policies[info] = info.own_policy(distinct) or inherited
            path = info.path or ()
            parts[path] = Part(self._called[0], (*at, *path), policy)
        return parts

    def warn_of_kept(self, plan: Plan) -> None:
        """Warns once if layers with a deliberate float32 have a large share of a plan's FLOPs."""
        kept, total = kept_by_layers(plan)
        share = kept.total() / (total or 1)
        if share <= MUCH:
            return
        policy = str(self.default)
        remedy = (
            f"jaxmp.wrap(model, jaxmp.PolicyMap({{'**': {policy!r}}}, default={policy!r}))"
            if self.is_single
            else f"their paths in the PolicyMap, before others, with {policy!r}"
        )
        self.warn(
            [path for path, _ in kept.most_common()],
            f"wrap: {len(kept)} layer{'s' * (len(kept) > 1)} with {share:.0%} of the "
            "FLOPs of products stay float32, because they were given dtype=float32 and other "
            "layers of their class were not",
            f"To override that: {remedy}.",
        )

    def warn_of_other_dtypes(self, modules: Iterable[ModuleInfo]) -> None:
        """Warns once if most layers were given a 16-bit dtype that no policy computes in."""
        layers = [m for m in modules if m.is_layer and m.weighs and m.path is not None]
        others = [m for m in layers if m.low and m.dtype not in self._computed]
        if 2 * len(others) > len(layers):
            self.warn(
                ["/".join(m.path or ()) or m.cls.__name__ for m in others],
                f"wrap: modules that were given dtype={others[0].dtype} compute in it, "
                f"under the policy {str(self.default)!r} as well",
                "Leave the dtype out for the policy to set it.",
            )

    def check_collections(self, variables: Mapping[str, Any]) -> None:
        """Raises if `params` names collections, and the module has none of them but others."""
        named = self.part is None and self.params != ("params",)
        if named and variables and not variables.keys() & set(self.params):
            raise ValueError(
                f"wrap: params={self.params!r} names no collection of the module, so none of its "
                f"variables would be parameters. Its collections are {', '.join(variables)}."
            )

    def warn(self, paths: list[str], fact: str, remedy: str) -> None:
        """Warns once about the same layers."""
        if frozenset(paths) not in self._warned:
            self._warned.add(frozenset(paths))
            shown = printable(", ".join(paths[:5])) + ", …" * (len(paths) > 5)
            warnings.warn(f"{fact}: {shown}. {remedy}", stacklevel=level_of_user())

    def output(self, out: Any) -> Any:
        """Casts the wide arrays that the wrapped module returns to the output dtype."""
        dtype = np.dtype(self.default.output_dtype)
        if dtype == self.wide:
            return out
        return jax.tree.map(
            lambda x: x.astype(dtype) if getattr(x, "dtype", None) == self.wide else x, out
        )

    def check(self, modules: Iterable[Found], structure: Hashable = None, *, whole: bool) -> None:
        """Raises if a key has never matched any module, or only those that others match before.

        Args:
          modules: the modules found.
          structure: a key of the model: what matches in one model of a class, another may lack.
          whole: whether these are all modules, with their classes; else no class raises.

        Raises:
          ValueError: naming the key and the paths nearest to it.
        """
        if not self._unmatched[structure]:
            return
        found = list(modules)
        by_module = [self.map.keys_of(*module) for module in found]
        in_force = {key for keys, _ in by_module for key in keys}
        unmatched = self._unmatched[structure] = self._unmatched[structure] - in_force
        for key, _ in self.map.overrides:
            if key not in unmatched:
                continue
            before = {keys[0]: None for keys, others in by_module if key in others}
            if before and whole:
                raise ValueError(f"wrap: {shadowed(key, before)}")
            if not before and (whole or isinstance(key, str)):
                raise ValueError(_unmatched(key, found))


def _unmatched(key: str | type, modules: list[Found]) -> str:
    if isinstance(key, type):
        classes = sorted({cls.__name__ for _, cls in modules if cls is not None})
        return (
            f"wrap: no module of the class {key.__name__} was found, so its policy would have no "
            f"effect. The classes there are: {', '.join(classes)}."
        )
    paths = sorted({"/".join(path) for path, _ in modules if path})
    nearest = difflib.get_close_matches(key, paths, n=5, cutoff=0.3)
    shown = ", ".join(repr(p) for p in nearest or paths[:10])
    inside = key.partition("/")[2]
    relative = " Paths begin below the wrapped module." if inside and inside in paths else ""
    return (
        f"wrap: the pattern {key!r} matches no module, so its policy would have no effect. "
        f"{'The nearest paths' if nearest else 'Paths there are'}: {shown or 'none but the root'}."
        f"{relative}{_RANGES if _NUMBERED.search(key) and not ranged(key) else ''}"
    )
