"""`quantize` and `dequantize`, from trees to trees; which weights of a matrix share a scale."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.jaxprs.scopes import CAST
from jaxmp._core.products.scaled import Scaled, block_sizes, round_to
from jaxmp._core.quantize.calibrate import Calibrated, ToRound, calibrated
from jaxmp._core.quantize.select import Candidate, names_of, rules_of, why_not
from jaxmp._core.quantized_array import QuantizedArray, array_of, is_quantized
from jaxmp._core.weight_format import BLOCK_SIZE, STATIC, WeightFormat, check_granularity
from jaxmp.formats import Format
from jaxmp.policy import Policy, PolicyMap

T = TypeVar("T")
MIN_SIZE: Final = 4096
UNKNOWN: Final = Calibrated(None, None)

# Tables are looked up and, in a tied head, multiplied row by row: their rows end in the last axis.
_TABLES = ("embedding", "embeddings")
# Equinox's and PyTorch's: outputs first.
_OUTPUTS_FIRST = ("weight",)


def quantize(
    params: T,
    format: (  # noqa: A002
        str | DTypeLike | Mapping[str, str | DTypeLike | None] | Policy | PolicyMap
    ) = "int8",
    *,
    granularity: str | None = None,
    block_size: int = BLOCK_SIZE,
    min_size: int = MIN_SIZE,
    straight_through: bool = False,
    calibrate: tuple[Callable[[T, Any], Any], Iterable[Any]] | None = None,
) -> T:
    """Stores the matrices among parameters in few bits: for serving, and as a frozen base.

    The tree stays what it is, with a `QuantizedArray` in place of each large matrix. Give it to a
    module under `jaxmp.wrap`, or to a function under `jaxmp.autocast`: each weight is multiplied by
    its scales in float32 and rounded once, to the compute dtype, where a product reads it. XLA
    makes that one pass, with the product where the compiler can. Flax modules that are not wrapped
    take them as well, and get each weight in the dtype that it had. A scan over stacked layers, of
    Flax or written by hand, dequantizes them in its body, layer by layer; loops, branches and
    checkpoints likewise.

    Floating leaves of two or more axes and at least `min_size` elements are quantized. All others
    stay as they are, and so do leaves called ``bias``, ``b``, ``scale``, ``offset``, ``mean`` and
    ``var`` (stacked by a scan, they have two axes), NNX Variables other than `nnx.Param`,
    `nnx.LoRAParam`, and, in a dict of Linen's variables, all but its ``params``.

    Derivatives treat them as constants. Differentiate with respect to the other parameters (LoRA):
    `jax.grad` with respect to integers fails with JAX's own error, and with respect to float8
    values or scales with jaxmp's. To train the weights themselves for the numbers that they will be
    stored in (quantization-aware training), say ``weights`` in the policy, or call this in the loss
    function, with `straight_through`.

    Args:
      params: a pytree of parameters, or of Linen variables, `nnx.State`, or an NNX module, of which
        a copy is returned. Arrays may be NumPy's, `jax.ShapeDtypeStruct`, or traced.
      format: ``"int8"``, ``"int4"``, ``"float8_e4m3fn"`` or ``"e2m1"`` (in blocks of 32 it is
        MXFP4, whose scales are powers of two), also with what shares a scale: ``"int4@row"``,
        ``"int4@32"``; or a mapping from patterns of paths to formats, or to None to leave weights
        as they are: the first that matches decides, and leaves that none matches stay. Patterns are
        those of `PolicyMap`, over the path of a leaf: ``"**/kernel"``, ``"encoder"``. Or a policy
        with ``weights``, or a map of them: what a model was trained for. int8 and float8 take half
        the memory of 16 bits; int4, with its scales, 0.31 of it in blocks of 32 and 0.28 in blocks
        of 64.
      granularity: what shares a scale. ``"row"``: all weights that are summed in one result, one
        scale per output channel; the axis is inferred from names and shapes (a table named
        ``embedding``: a row; else the longest axis but the last). ``"block"``: `block_size` of
        those. ``"tensor"``: a matrix, the last two axes. None: ``"block"`` for int4, ``"row"`` for
        the others.
      block_size: the number of weights that share a scale in ``"block"``; where it does not divide
        the axis, the nearest divisor.
      min_size: the number of elements that a matrix must have to be quantized.
      straight_through: whether weights are to be trained: they stay arrays of the dtypes that they
        have, which hold the numbers that would be stored, with the derivative of the identity.
        Under `jaxmp.autocast` around the loss, also of a wrapped model, the forward pass is, to the
        bit, that of the model served with what `quantize` returns without it. (Where a wrapped
        module is called by itself, the last bit of products may differ, by row or tensor.)
      calibrate: a pair of a function and batches, ``(fn, batches)``: weights are rounded so that
        the products in `fn(params, batch)` change least, by GPTQ and a search for scales. `fn` is
        best a loss (one number): its gradients then tell which errors matter in a tied table's
        rows. Or it returns a model's results. It runs once on each of a few batches of one shape,
        which are pytrees; wrapped models will do. A warning names weights that are rounded to the
        nearest, since `fn` reads them by no matmul or convolution, or multiplies them along
        several axes. For each product, float32 [in, in] is in memory meanwhile. Where the policy
        has ``activations=int8@static`` (or ``float8@static``), the largest magnitude that a weight
        is multiplied by is stored as well, as the `input_scale` of the weight.

    Returns:
      A tree of the same structure but for those leaves. With concrete arrays, values and scales are
      sharded as the weight was, scales along the axes where they can be.

    Raises:
      ValueError: if a format or granularity is unknown, a pattern has no effect, a weight is
        quantized already or not finite (unless it is traced: its products are then NaN), or of
        `calibrate`, batches are missing or of several shapes, inputs are not finite, `fn`
        multiplies by no quantized weight, or it is given with `straight_through`, or missing
        where the policy has stored scales of activations.
      TypeError: if an argument is of another type.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxmp
      >>> model = jaxmp.wrap(nn.Dense(64), "mixed_bfloat16")
      >>> params = model.init(jax.random.key(0), jnp.ones((1, 64)))
      >>> small = jaxmp.quantize(params, "int8")
      >>> small["params"]["kernel"]
      QuantizedArray(int8[64,64] for float32, scale float32[1,64])
      >>> model.apply(small, jnp.ones((1, 64))).shape
      (1, 64)

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference" (2018), symmetric, also for `straight_through`; blocks:
    Dettmers and Zettlemoyer, "The case for 4-bit precision" (2023); `calibrate`: Frantar et al.,
    "GPTQ" (2023).
    """
    check_granularity(granularity, block_size)
    if isinstance(min_size, bool) or not isinstance(min_size, (int, np.integer)):
        raise TypeError(f"quantize: min_size is a number of elements; got {min_size!r}.")
    if straight_through and calibrate is not None:
        raise ValueError(
            "quantize: straight_through trains the weights for the nearest numbers of the format, "
            "and calibrate chooses others: give one of them."
        )
    if hasattr(params, "opt_state"):
        raise TypeError(
            f"quantize: takes parameters, and {type(params).__name__!r} holds an optimizer's state "
            "too, which must stay as it is: give it state.params."
        )
    rules = rules_of(format, granularity, block_size)
    leaves: list[Candidate] = []
    selected: dict[int, ToRound] = {}

    def look(path: tuple[str, ...], leaf: Any) -> Any:
        if is_quantized(leaf):
            raise ValueError(
                f"quantize: {'/'.join(path) or 'the leaf'} is quantized already: {leaf}. Rounding "
                "twice adds its errors: quantize the weights as they were, or "
                "jaxmp.dequantize(tree) first."
            )
        reason = why_not(path, leaf, min_size)
        shape = _shape(leaf) if reason else tuple(np.shape(leaf))
        leaves.append(Candidate(path, shape, reason))
        if not reason and (fmt := rules(path)) is not None:
            selected[len(leaves) - 1] = _selected(path, leaf, fmt, rules.activations(path))
        return leaf

    def replace(_: tuple[str, ...], leaf: Any) -> Any:
        number = next(numbers)
        if (weight := selected.get(number)) is None:
            return leaf
        if straight_through:
            return round_weight(weight)
        return store_weight(weight, known.get(number, UNKNOWN))

    def placed(arrays: Sequence[Any]) -> T:
        by_number = dict(zip(selected, arrays, strict=True))
        numbers = itertools.count()
        whole: T = map_parameters(lambda _, leaf: by_number.get(next(numbers), leaf), params)
        return whole

    map_parameters(look, params)
    rules.check(leaves)
    known: dict[int, Calibrated] = {}
    if calibrate is None:
        _check_no_ranges(selected.values())
    else:
        known = dict(
            zip(selected, calibrated(calibrate, [*selected.values()], placed), strict=True)
        )
    numbers = itertools.count()
    out: T = map_parameters(replace, params)
    return out


def _selected(
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
    return round_weight(_selected(path, leaf, fmt))


def dequantize(tree: T) -> T:
    """Returns a tree with its quantized weights as arrays again, in the dtypes that they had.

    Args:
      tree: a pytree, `nnx.State` or NNX module (a copy is returned).

    Returns:
      A tree of the structure that `quantize` was given. Other leaves are returned as they are.

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> small = jaxmp.quantize({"kernel": jnp.ones((64, 64))}, "int4")
      >>> jaxmp.dequantize(small)["kernel"].shape
      (64, 64)
    """
    out: T = map_parameters(lambda _, leaf: leaf.dequantize() if is_quantized(leaf) else leaf, tree)
    return out


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def map_parameters(
    fn: Callable[[tuple[str, ...], Any], Any], tree: Any, above: tuple[str, ...] = ()
) -> Any:
    """Applies `fn(path, leaf)` to each leaf of a tree that may be a parameter."""
    # Linen's variables: only one of the collections holds parameters.
    collections = not above and isinstance(tree, Mapping) and "params" in tree

    def of_node(keys: Any, node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return _of_variable(fn, (*above, *names_of(keys)), node)
        path = names_of(keys)
        if isinstance(node, nnx.Module):
            graphdef, state = nnx.split(node)
            return nnx.merge(graphdef, map_parameters(fn, state, (*above, *path)))
        if collections and path[0] != "params":
            return node
        return fn((*above, *(path[1:] if collections else path)), node)

    return jax.tree_util.tree_map_with_path(of_node, tree, is_leaf=_is_node)


def _is_node(node: Any) -> bool:
    return isinstance(node, (QuantizedArray, nnx.Variable, nnx.Module))


def holds_weight(variable: Any) -> bool:
    """Returns whether the matrix in an NNX Variable is quantized: not an adapter's."""
    return isinstance(variable, nnx.Param) and not isinstance(variable, nnx.LoRAParam)


def _of_variable(fn: Callable[..., Any], path: tuple[str, ...], variable: Any) -> Any:
    if not holds_weight(variable):
        return variable
    value = variable.get_raw_value()
    new = fn(path, value)
    if new is value:
        return variable
    hooks = variable.get_metadata().get("on_get_value", ())
    hooks = hooks if isinstance(hooks, tuple) else (hooks,)
    others = tuple(hook for hook in hooks if hook is not read)
    # Readers of the Variable get an array, by Flax's hook.
    hooks = (read, *others) if is_quantized(new) else others
    copied = variable.copy(new, on_get_value=hooks)
    if not hooks:
        copied.del_metadata("on_get_value")
    return copied


def read(variable: Any, value: Any) -> Any:  # noqa: ARG001
    """Dequantizes the `QuantizedArray` of an NNX Variable that is read: its hook `on_get_value`."""
    abstract = is_quantized(value) and isinstance(value.values, jax.ShapeDtypeStruct)
    return value.dequantize() if is_quantized(value) and not abstract else value


def _check_no_ranges(weights: Iterable[ToRound]) -> None:
    """Raises if the ranges of inputs are to be stored, which only calibration knows."""
    for weight in weights:
        if weight.activations is not None:
            raise ValueError(
                f"quantize: the policy of {weight.path or 'the leaf'} has activations="
                f"{weight.activations.short}@{STATIC}, scales that are stored: give batches to "
                "find them from, calibrate=(fn, batches); or say activations="
                f"{weight.activations.short}, for scales of rows as they come."
            )


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


def input_axis(name: str, shape: Sequence[int]) -> int:
    """Returns the axis of a weight that is summed over in the product, counted from the end.

    Scales are shared along it alone, so a product may be scaled after it is summed. It is inferred
    from names and shapes:

    * a table (``embedding``): the last, the features.
    * a matrix ``[in, out]``: ``in``.
    * more axes: the longest but the last; of several, the last of them. That is ``in`` of
      convolutions ``[…, in, out]``, of stacked layers and experts ``[layers, in, out]``, of
      attention's ``[in, heads, size]``, and ``size`` of ``[heads, size, out]``.
    * ``weight``, as Equinox calls it, has its outputs first: the longest but the first.

    Args:
      name: the last name in the path of the weight.
      shape: its shape, of two or more axes.

    Example:
      >>> [input_axis("kernel", s) for s in ((64, 256), (4, 64, 256), (64, 4, 16), (4, 16, 64))]
      [-2, -2, -3, -2]
      >>> input_axis("embedding", (32000, 64)), input_axis("weight", (256, 64))
      (-1, -1)
    """
    ndim = len(shape)
    if name in _TABLES:
        return -1
    axes = range(1, ndim) if name in _OUTPUTS_FIRST else range(ndim - 1)
    return max(axes, key=lambda i: (shape[i], i)) - ndim


def scale_shape(name: str, shape: Sequence[int], granularity: str, block_size: int) -> list[int]:
    """Returns the shape of a weight's scales: each axis as long as the weight's, or dividing it.

    Args:
      name: the last name in the path of the weight.
      shape: its shape, of two or more axes.
      granularity: ``"tensor"``: one for each matrix, the last two axes; ``"row"``: one for each
        sum; ``"block"``: one for each `block_size` weights of a sum.
      block_size: how many share a scale in ``"block"``. Where that does not divide the axis, the
        divisor nearest to it by ratio, the larger of two.

    Example:
      >>> scale_shape("kernel", (64, 256), "row", 32), scale_shape("kernel", (64, 256), "block", 32)
      ([1, 256], [2, 256])
      >>> scale_shape("kernel", (4, 64, 256), "tensor", 32)
      [4, 1, 1]
    """
    if granularity == "tensor":
        return [*shape[:-2], 1, 1]
    axis = input_axis(name, shape)
    scales = list(shape)
    scales[axis] = 1 if granularity == "row" else shape[axis] // _nearest(shape[axis], block_size)
    return scales


def _nearest(size: int, block: int) -> int:
    """Returns the divisor of a size that is nearest by ratio to the size of a block.

    Example:
      >>> _nearest(1024, 32), _nearest(784, 128), _nearest(257, 32)
      (32, 112, 257)
    """
    divisors = {d for i in range(1, math.isqrt(size) + 1) if size % i == 0 for d in (i, size // i)}
    return min(divisors, key=lambda d: (max(d / block, block / d), -d))
