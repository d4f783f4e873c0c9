"""The leaves of a tree that are quantized, and their formats: by patterns of paths."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.policy_keys import key_matches
from jaxmp._core.printable import keys_of
from jaxmp._core.weight_format import BLOCK_SIZE, WeightFormat, activation_format, parse_weights
from jaxmp.formats import Format
from jaxmp.policy import Policy, PolicyMap, get_policy

# Names of parameters that are not matrices; stacked by a scan, they have two axes.
_NO_MATRICES = ("bias", "b", "scale", "offset", "mean", "var")

Path = tuple[str, ...]


class Candidate(NamedTuple):
    """A leaf that a pattern may select.

    Attributes:
      path: its path, as patterns see it.
      shape: its shape.
      why_not: why it is not quantized even if selected, or ''.
    """

    path: Path
    shape: tuple[int, ...]
    why_not: str


class FormatRules:
    """Formats by path pattern, as `jaxmp.quantize` takes them.

    Args:
      formats: a format, or a mapping from patterns to formats or None.
      granularity: what shares a scale, where a format does not say.
      block_size: the size of blocks, likewise.

    Raises:
      ValueError: if a format is unknown, or the mapping is empty.
      TypeError: if something is neither.
    """

    def __init__(
        self, formats: Any, granularity: str | None = None, block_size: int = BLOCK_SIZE
    ) -> None:
        pairs = formats.items() if isinstance(formats, Mapping) else [("**", formats)]
        self.by_pattern: list[tuple[str, WeightFormat | None]] = []
        for pattern, fmt in pairs:
            if not isinstance(pattern, str) or not all(pattern.split("/")):
                raise TypeError(
                    "quantize: the keys of a mapping are patterns of paths, such as "
                    f"'**/kernel' or 'encoder/layers_*'; got {pattern!r}."
                )
            read = fmt
            if fmt is not None:
                hint = " For 16 bits, cast: policy.cast_to_param(params)."
                read = parse_weights(fmt, "quantize: format", granularity, block_size, hint)
            self.by_pattern.append((pattern, read))
        if not self.by_pattern:
            raise ValueError("quantize: the mapping from patterns to formats is empty.")

    def __call__(self, path: Path) -> WeightFormat | None:
        """Returns the format of a leaf: of the first pattern to match it or a node it is in."""
        for pattern, fmt in self.by_pattern:
            if matches(pattern, path):
                return fmt
        return None

    def activations(self, path: Path) -> Format | None:  # noqa: ARG002
        """Returns None: what has no policy asks for no ranges."""
        return None

    def check(self, leaves: Sequence[Candidate]) -> None:
        """Raises if a pattern has no effect.

        Args:
          leaves: all leaves.

        Raises:
          ValueError: naming the pattern, a leaf that it matches and why that is not quantized, or
            the paths nearest to it.
        """
        for pattern, _ in self.by_pattern:
            found = [leaf for leaf in leaves if matches(pattern, leaf.path)]
            if not any(not leaf.why_not for leaf in found):
                raise ValueError(_no_effect(pattern, found, leaves))


class PolicyRules:
    """Formats by path, as the ``weights`` of a policy or a map of them say.

    Args:
      policy: the policy or map.

    Raises:
      ValueError: if no policy in it has ``weights``.
      TypeError: if a key is a class, which trees do not have.
    """

    def __init__(self, policy: Policy | PolicyMap) -> None:
        if isinstance(policy, Policy):
            policy = PolicyMap({}, default=policy)
        self._map = policy
        policies = [policy.default, *(each for _, each in policy.overrides)]
        if all(each.weights is None for each in policies):
            raise ValueError(
                f"quantize: {policy.default if len(policies) == 1 else policy} does not say what "
                "weights are stored in: add weights=, as in 'mixed_bfloat16,weights=int4'."
            )
        for key, _ in policy.overrides:
            if isinstance(key, type):
                raise TypeError(
                    f"quantize: the PolicyMap has the class {key.__name__} as a key, and a tree of "
                    "parameters does not have the classes of its modules: say their paths."
                )

    def __call__(self, path: Path) -> WeightFormat | None:
        """Returns the format of a leaf, by the innermost module that a key matches."""
        return self._policy(path).weights  # type: ignore[no-any-return]

    def activations(self, path: Path) -> Format | None:
        """Returns the format of a leaf's inputs, if the policy asks for a stored range of them."""
        said = self._policy(path).activations
        fmt, static = activation_format(said) if said else (None, False)
        return fmt if static else None

    def _policy(self, path: Path) -> Policy:
        above = (path[:i] for i in range(len(path) - 1, -1, -1))
        policies = (self._map.policy_at(module) for module in above)
        return next((p for p in policies if p is not None), self._map.default)

    def check(self, leaves: Sequence[Candidate]) -> None:
        """Raises if nothing is quantized; see `FormatRules.check`."""
        if not any(not leaf.why_not and self(leaf.path) is not None for leaf in leaves):
            raise ValueError(_no_effect("**", leaves, leaves))


def rules_of(formats: Any, granularity: str | None, block_size: int) -> FormatRules | PolicyRules:
    """Returns the rules of what `jaxmp.quantize` is given as a format."""
    if isinstance(formats, str) and "weights=" in formats:
        formats = get_policy(formats)
    if not isinstance(formats, (Policy, PolicyMap)):
        return FormatRules(formats, granularity, block_size)
    if granularity is not None or block_size != BLOCK_SIZE:
        raise ValueError(
            "quantize: a policy says what shares a scale, as in weights=int4@32; leave granularity "
            "and block_size out."
        )
    return PolicyRules(formats)


def matches(pattern: str, path: Path) -> bool:
    """Returns whether a pattern matches a leaf, or a node that it is in.

    Example:
      >>> [matches(p, ("encoder", "Dense_0", "kernel")) for p in ("encoder", "**/kernel", "head")]
      [True, True, False]
    """
    return any(key_matches(pattern, path[:i]) for i in range(len(path), -1, -1))


def names_of(path: Sequence[Any]) -> Path:
    """Returns a path of JAX's keys as names; without the ``value`` of boxes and Variables."""
    last = path[-1] if path else None
    in_box = isinstance(last, jax.tree_util.GetAttrKey) and last.name == "value"
    return keys_of(path[:-1] if in_box else path)


def why_not(path: Path, leaf: Any, min_size: int) -> str:
    """Returns the reason why a leaf is never quantized, or ''."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return f"is {type(leaf).__name__!r}, not an array"
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        return f"is {dtype}, not a float of 16 bits or more"
    if len(leaf.shape) < 2:
        return f"has {len(leaf.shape)} axes, and a matrix has two or more"
    if path and path[-1] in _NO_MATRICES:
        return f"is called {path[-1]!r}, a name of parameters that are not matrices"
    size = int(np.prod(leaf.shape))
    if not size or size < min_size:
        return f"has {size} elements, fewer than min_size={min_size}"
    return ""


def _no_effect(pattern: str, found: Sequence[Candidate], leaves: Sequence[Candidate]) -> str:
    if found:
        leaf = max(found, key=lambda leaf: int(np.prod(leaf.shape)))
        what = (
            "nothing to quantize" if pattern == "**" else f"the pattern {pattern!r} has no effect"
        )
        count = f"{len(found)} leaves" if len(found) > 1 else "leaf"
        return (
            f"quantize: {what}: of the {count} that it could be, none is a large floating matrix; "
            f"{_shown(leaf)} {leaf.why_not}."
        )
    paths = sorted("/".join(leaf.path) for leaf in leaves if not leaf.why_not)
    nearest = difflib.get_close_matches(pattern, paths, n=5, cutoff=0.3)
    shown = ", ".join(map(repr, nearest or paths[:10]))
    return (
        f"quantize: the pattern {pattern!r} matches no leaf, so it would have no effect. "
        f"{'The nearest paths' if nearest else 'Paths there are'}: {shown or 'none'}."
    )


def _shown(leaf: Candidate) -> str:
    return f"{'/'.join(leaf.path) or 'the leaf'} {list(leaf.shape)}"
