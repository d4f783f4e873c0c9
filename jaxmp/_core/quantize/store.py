"""One weight in few bits: stored, or rounded to what will be stored."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.products.scaled import Scaled, block_sizes, round_to
from jaxmp._core.quantize.calibrate import Calibrated, ToRound
from jaxmp._core.quantize.scale_axes import scale_shape
from jaxmp._core.quantize.select import why_not
from jaxmp._core.quantized_array import QuantizedArray, array_of
from jaxmp._core.weight_format import WeightFormat
from jaxmp.formats import Format

UNKNOWN: Final = Calibrated(None, None)
MIN_SIZE: Final = 4096


def selected_weight(
    path: tuple[str, ...], leaf: Any, fmt: WeightFormat, activations: Format | None = None
) -> ToRound:
    """Describes what a weight, at a path in the tree of parameters, is rounded to."""
    name = path[-1] if path else ""
    counts = scale_shape(name, np.shape(leaf), fmt.granularity, fmt.block_size)
    return ToRound("/".join(path), leaf, fmt.format, tuple(counts), activations)


def store_weight(weight: ToRound, known: Calibrated = UNKNOWN) -> QuantizedArray:
    """Stores a weight in few bits: to the nearest, or as values and scales that are known."""
    x = weight.array
    still = lax.stop_gradient(x) if is_tracer(x) else x
    return _quantized(weight._replace(array=still), known)


def round_weight(weight: ToRound) -> jax.Array:
    """Returns a weight as it will be stored, with the derivative of the identity."""
    with jax.named_scope(CAST):
        few = store_weight(weight)
    return array_of(dataclasses.replace(few, master=weight.array))


def trained_as_stored(path: tuple[str, ...], leaf: Any, fmt: WeightFormat | None) -> Any:
    """Returns a parameter as a model reads it under ``weights``: itself if it is not a matrix."""
    if fmt is None or why_not(path, leaf, MIN_SIZE):
        return leaf
    return round_weight(selected_weight(path, leaf, fmt))


def _quantized(weight: ToRound, known: Calibrated) -> QuantizedArray:
    path, x, fmt, shape, _ = weight
    input_scale = known.input_scale
    if known.rounded is not None:
        values, scale = known.rounded
    elif isinstance(x, jax.ShapeDtypeStruct):
        values, scale = jax.eval_shape(functools.partial(_rounded, fmt=fmt, scale_shape=shape), x)
    else:
        values, scale = _rounded(x if isinstance(x, jax.Array) else jnp.asarray(x), fmt, shape)
    if not (is_tracer(values) or isinstance(values, jax.ShapeDtypeStruct)):
        if not bool(jnp.isfinite(scale).all()):
            raise ValueError(
                f"quantize: {path or 'the leaf'} holds an infinity, a NaN, or a number beyond "
                "float32's range, which no scale can bring into range."
            )
        values, scale, input_scale = _as_sharded(x, values, scale, input_scale)
    # NumPy's float64 is float32 to JAX, unless x64 is enabled.
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return QuantizedArray(values, scale, dtype, input_scale=input_scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
@jax.named_scope(CAST)
def _rounded(x: Any, fmt: Format, scale_shape: tuple[int, ...]) -> Scaled:
    # float64 keeps its range: a weight beyond float32's makes its scale NaN.
    wide = x if x.dtype == np.float64 else x.astype(jnp.float32)
    return round_to(wide, fmt, block_sizes(x.shape, scale_shape), exact=True)


def _as_sharded(x: Any, values: Any, *scales: Any) -> tuple[Any, ...]:
    """Shards values and scales like their array; scales along those axes that can be sharded."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return values, *scales
    each = (None if scale is None else _scale_as_sharded(x, sharding, scale) for scale in scales)
    return jax.device_put(values, sharding), *each


def _scale_as_sharded(x: Any, sharding: NamedSharding, scale: Any) -> Any:
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    for i, names in enumerate(spec):
        axes = names if isinstance(names, tuple) else (names,)
        devices = int(np.prod([sharding.mesh.shape[n] for n in axes if n is not None]))
        if scale.shape[i] % devices:
            spec[i] = None
    of_scale = NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
    return jax.device_put(scale, of_scale)
