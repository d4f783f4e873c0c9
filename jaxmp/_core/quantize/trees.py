"""`quantize` and `dequantize`, from trees to trees."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.typing import DTypeLike

from jaxmp._core.quantize.calibrate import Calibrated, ToRound, calibrated
from jaxmp._core.quantize.parameters import map_parameters
from jaxmp._core.quantize.select import Candidate, rules_of, why_not
from jaxmp._core.quantize.store import (
    MIN_SIZE,
    UNKNOWN,
    round_weight,
    selected_weight,
    store_weight,
)
from jaxmp._core.quantized_array import is_quantized
from jaxmp._core.weight_format import BLOCK_SIZE, STATIC, check_granularity
from jaxmp.policy import Policy, PolicyMap

T = TypeVar("T")


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
            selected[len(leaves) - 1] = selected_weight(path, leaf, fmt, rules.activations(path))
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
