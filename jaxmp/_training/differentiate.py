"""Differentiating through a scaled loss: with respect to arrays, and to NNX modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs.attributes import is_inexact
from jaxmp._core.jaxprs.scopes import UNSCALE
from jaxmp._core.passes.watch_overflow import overflow_watched
from jaxmp._training.checks import check_floating
from jaxmp._training.leaves import factor_for, is_overwrite, widened
from jaxmp._training.scale_rule import IDENTITY, LossScaleState

__all__ = ["scaled", "scaled_value_and_grad", "unscaled"]


def scaled_value_and_grad(
    name: str,
    fun: Callable[..., Any],
    state: LossScaleState,
    argnums: Any,
    has_aux: bool,  # noqa: FBT001
    *,
    skip_overflow: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Implements `jaxmp.value_and_grad`, given a scaler's state; `name` is for error messages."""
    if skip_overflow and state is IDENTITY:
        raise ValueError(
            f"{name}: skip_overflow=True, but the optimizer has no loss scaler, which skips steps; "
            "make it jaxmp.dynamic_loss_scale(tx)."
        )
    if not callable(fun):
        raise TypeError(
            f"{name}: loss_fn, which comes first, must be a function that returns a loss; got "
            f"{type(fun).__name__!r}."
        )
    several = argnums if isinstance(argnums, (tuple, list)) else [argnums]
    if not all(hasattr(i, "__index__") or isinstance(i, nnx.DiffState) for i in several):
        raise TypeError(
            f"{name}: argnums must be the position of an argument, or several; got {argnums!r}."
        )
    positions = [i.argnum if isinstance(i, nnx.DiffState) else i for i in several]

    def scaled_fun(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        out = fun(*args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"{name}: with has_aux=True the function must return a pair (loss, aux); got "
                f"{type(out).__name__!r}."
            )
        return scaled(name, out[0] if has_aux else out, state), out

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with overflow_watched() if skip_overflow else contextlib.nullcontext():
            return differentiated(*args, **kwargs)

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # The positions that exist: JAX refuses the others.
        chosen = {i: args[i] for i in positions if -len(args) <= i < len(args)}
        if _has_module(chosen):
            (_, out), grads = _nnx_value_and_grad(scaled_fun, argnums, args, kwargs)
            return out, unscaled(grads, state)
        for argnum, value in chosen.items():
            check_floating(name, f"argument {argnum} of the loss", value)
        if state is IDENTITY:
            return jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)
        (_, out), grads = jax.value_and_grad(scaled_fun, argnums, has_aux=True)(*args, **kwargs)
        return out, unscaled(grads, state)

    return value_and_grad_fun


def scaled(name: str, value: Any, state: LossScaleState) -> jax.Array:
    """Returns a loss times the scale, float32 or wider; without a scaler, the loss unchanged."""
    is_number = isinstance(value, (float, int, complex)) or hasattr(value, "__array__")
    dtype = jnp.asarray(value).dtype if is_number else None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = repr(type(value).__name__) if dtype is None else dtype
        is_pair = isinstance(value, tuple) and len(value) == 2 and name != "scale_loss"
        hint = " If it is (loss, aux), say has_aux=True." if is_pair else ""
        raise TypeError(f"{name}: the loss must be a real floating-point number; got {got}.{hint}")
    loss: jax.Array = jnp.asarray(value)
    if loss.ndim and name != "scale_loss":
        raise TypeError(
            f"{name}: the loss must be one number; got an array of shape {loss.shape}. Take its "
            "mean or its sum."
        )
    if state is IDENTITY:
        return loss
    if loss.dtype == jnp.float16:
        warnings.warn(
            f"{name}: the loss is float16, so the scale becomes float16 on its way back into the "
            "model, where 2**16 is infinite. Compute the loss in float32: "
            "logits.astype(jnp.float32), or an output_dtype of float32.",
            stacklevel=3,
        )
    # The scale is float32 and strongly typed, so the product is, whatever the loss.
    return loss * jnp.asarray(state.loss_scale)


def unscaled(grads: Any, state: LossScaleState) -> Any:
    """Divides the gradients of a scaled loss by its scale, in float32; leaves others as they are.

    Elements that are not finite become NaN: an elementwise clip would make an infinity finite.
    float64 and complex gradients keep their dtype.
    """
    if state is IDENTITY:
        return grads

    def divide(path: tuple[Any, ...], grad: Any) -> Any:
        if is_overwrite(path) or not is_inexact(grad):
            return grad
        wide = widened(path, grad)
        factor = factor_for(wide, inverse)
        if factor is not inverse:  # unreduced parts of a sum, which cannot be tested
            return wide * factor
        return jnp.where(jnp.isfinite(wide), wide * inverse, jnp.nan)

    with jax.named_scope(UNSCALE):
        # A product with the reciprocal: exact for powers of two, and what GradScaler does.
        inverse = np.float32(1) / state.loss_scale
        return jax.tree_util.tree_map_with_path(divide, grads)


def _nnx_value_and_grad(
    fun: Callable[..., Any], argnums: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Runs `flax.nnx.value_and_grad` of a function with aux; argnums may count from the end.

    NNX takes only keyword arguments that stand for positional ones, so all are passed as one of
    those.
    """

    def positional(*args: Any) -> Any:
        *others, keywords = args
        return fun(*others, **keywords)

    def index(argnum: Any) -> Any:
        if isinstance(argnum, nnx.DiffState):
            return dataclasses.replace(argnum, argnum=index(argnum.argnum))
        return argnum % len(args)

    several = isinstance(argnums, (tuple, list))
    indices = tuple(index(i) for i in argnums) if several else index(argnums)
    differentiate = nnx.value_and_grad(positional, argnums=indices, has_aux=True)
    result: tuple[Any, Any] = differentiate(*args, kwargs)
    return result


def _has_module(tree: Any) -> bool:
    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Module)

    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))
