"""The statistics of `monitor`, and the paths of the parameters that they are of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jax import lax

from jaxmp._core.flax import AxisMetadata, nnx
from jaxmp._core.jaxprs.attributes import varying_axes
from jaxmp._core.printable import keys_of, show
from jaxmp._training.leaves import is_overwrite
from jaxmp.tree import all_finite

_SMALLEST_NORMAL: Final = 2.0**-14  # of float16


class MonitorStatistics(NamedTuple):
    """The statistics of the gradients of one step.

    Attributes:
      grad_norm: float32[modules], the Euclidean norm of the gradients.
      underflow: float32[modules], the share of elements that are not 0, but would be 0 or subnormal
        in float16 at the loss scale that the gradients were computed with.
      zeros: float32[modules], the share of elements that are exactly 0.
    """

    grad_norm: jax.Array
    underflow: jax.Array
    zeros: jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Paths:
    """The paths of parameters: a static part of a state's structure, without buffers.

    Empty paths are equal to any others: `optax.tree_utils.tree_map_params` compares a state with
    that of no parameters. (Arrays of the state then differ in shape.)

    Attributes:
      paths: one for each parameter, in the order of the tree: ``("Dense_0", "kernel")``. The box or
        the NNX variable around an array is not part of it.

    Example:
      >>> Paths.of({"params": {"Dense_0": {"bias": 1.0, "kernel": 1.0}, "heads": [2.0]}}).names
      ('Dense_0/bias', 'Dense_0/kernel', 'heads/0')
    """

    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, params: Any) -> Paths:
        """Returns the paths of a pytree of parameters."""
        params = params.fast if isinstance(params, optax.LookaheadParams) else params
        nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_boxed)
        return cls(tuple(keys_of(path) for path, _ in nodes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Paths):
            return NotImplemented
        return self.paths == other.paths or not self.paths or not other.paths

    def __hash__(self) -> int:
        return hash(Paths)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each parameter, without a leading ``params``, Linen's collection."""
        return tuple("/".join(_shown(path)) for path in self.paths)

    @property
    def tops(self) -> tuple[str, ...]:
        """The name of each parameter's top-level module."""
        return tuple(_shown(path)[0] for path in self.paths)

    @property
    def modules(self) -> tuple[str, ...]:
        """The top-level modules, in order."""
        return tuple(dict.fromkeys(self.tops))


# Checkpoints of Flax do not store it: a restored state has that of the state restored into.
serialization.register_serialization_state(
    Paths, ty_to_state_dict=lambda _: {}, ty_from_state_dict=lambda paths, _: paths
)


class MonitoredLeaf(NamedTuple):
    """A gradient: its path in the tree, the index of its parameter, and the array."""

    path: tuple[Any, ...]
    parameter: int
    array: Any


def leaves_of(grads: Any, paths: Paths) -> list[MonitoredLeaf]:
    """Returns the gradients, each with its parameter.

    Raises:
      ValueError: If the parameter of one does not exist.
    """
    index = {path: i for i, path in enumerate(paths.paths)}
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(grads, is_leaf=_is_boxed):
        if keys_of(path) not in index:
            raise ValueError(
                f"monitor: no parameter at {show(path)}, but a gradient; the state was made by "
                "init of other parameters. Differentiate with respect to those."
            )
        found += [
            MonitoredLeaf(path, index[keys_of(path)], array) for array in jax.tree.leaves(node)
        ]
    return found


def measure(
    leaves: Sequence[MonitoredLeaf], paths: Paths, scale: jax.Array | None, step_count: jax.Array
) -> tuple[jax.Array, MonitorStatistics]:
    """Measures gradients: their statistics, and the first that is not finite.

    Every number is a float32 sum over one gradient, as the scaler's own test is, so XLA computes
    all of them in one pass. (On TPU that is the pass that writes the gradient. Sums of integers are
    passes of their own; so is a `lax.cond` around the sums, taken or not, because a branch reads
    gradients as float32 arrays, which are otherwise never written.)

    Returns int32[], the index of the first parameter whose gradient is not finite, or the number of
    parameters; and the statistics. Devices between which `step_count` differs are kept apart.
    """
    known, own = _varying(leaf.array for leaf in leaves), _varying([step_count])
    # Where JAX does not say what differs (jax.pmap, check_vma=False), devices must agree as well.
    unknown = () if known else tuple(jax.sharding.get_abstract_mesh().manual_axes)
    first = jnp.asarray(np.int32(len(paths.paths)))
    if leaves:
        flags = [jnp.asarray(all_finite(leaf.array)) for leaf in leaves]
        indices = np.array([leaf.parameter for leaf in leaves], np.int32)
        first = jnp.min(jnp.where(jnp.stack(flags), np.int32(len(paths.paths)), indices))
    if axes := _sorted(known - own) or unknown:
        first = lax.pmin(first, axes)

    modules, tops = paths.modules, paths.tops
    totals = {name: [jnp.zeros([], jnp.float32)] * 3 for name in modules}
    sizes = dict.fromkeys(modules, 0)
    for leaf in leaves:
        if not _is_measured(leaf):
            continue
        parts = _sums(leaf.array, scale)
        if axes := _sorted(_varying([leaf.array]) - own):  # the devices have parts of one array
            parts = lax.psum(parts, axes)
        elif unknown:  # right if all have the same gradients
            parts = lax.pmean(parts, unknown)
        name = tops[leaf.parameter]
        totals[name] = [total + part for total, part in zip(totals[name], parts, strict=True)]
        sizes[name] += np.size(leaf.array) * math.prod(lax.axis_size(axis) for axis in axes)
    # Without the barrier XLA on CPU would repeat the sums wherever they are read.
    first, totals = lax.optimization_barrier((first, totals))
    size = np.array([max(sizes[name], 1) for name in modules], np.float32)
    squares, small, zero = (
        jnp.stack([totals[name][i] for name in modules]) if modules else jnp.zeros(0, jnp.float32)
        for i in range(3)
    )
    return first, MonitorStatistics(jnp.sqrt(squares), small / size, zero / size)


def _sums(grad: Any, scale: jax.Array | None) -> list[jax.Array]:
    """Returns a gradient's sum of squares, and its counts of float16 underflow and of zeros."""
    grad = jnp.asarray(grad)
    size = jnp.abs(grad.astype(jnp.float32) if grad.dtype.itemsize < 4 else grad)
    smallest = np.float32(_SMALLEST_NORMAL) / (np.float32(1) if scale is None else scale)
    lost = (size > 0) & (size < smallest)
    return [
        jnp.sum(jnp.square(size)).astype(jnp.float32),
        jnp.sum(lost, dtype=jnp.float32),
        jnp.sum(size == 0, dtype=jnp.float32),
    ]


def _is_measured(leaf: MonitoredLeaf) -> bool:
    # The overwrites of Flax's float8 layers are new scales, not gradients.
    inexact = jnp.issubdtype(jnp.result_type(leaf.array), jnp.inexact)
    return bool(inexact) and not is_overwrite(leaf.path)


def _varying(arrays: Iterable[Any]) -> frozenset[Any]:
    """Returns the mapped axes along which JAX knows some of the arrays to differ."""
    return frozenset(axis for array in arrays for axis in varying_axes(jax.typeof(array)))


def _sorted(axes: frozenset[Any]) -> tuple[Any, ...]:
    return tuple(sorted(axes, key=str))


def _is_boxed(node: Any) -> bool:
    return isinstance(node, (AxisMetadata, nnx.Variable))


def _shown(path: tuple[str, ...]) -> tuple[str, ...]:
    return (path[1:] if len(path) > 1 and path[0] == "params" else path) or ("params",)
