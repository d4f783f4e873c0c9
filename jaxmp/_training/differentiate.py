"""Differentiating through a scaled loss: with respect to arrays, and to NNX modules."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmp._training.gradients import unscaled
from jaxmp._training.opt_state import find_scaler, the_scaler
from jaxmp._training.scale_rule import LossScaleState

__all__ = ["scaled", "scaled_value_and_grad"]


def scaled_value_and_grad(
    name: str,
    fun: Callable[..., Any],
    opt_state: Any,
    argnums: Any,
    has_aux: bool,  # noqa: FBT001
    *,
    genuine: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`value_and_grad`, under the name of the function that speaks in error messages.

    Args:
      name: That name.
      fun: As for `value_and_grad`.
      opt_state: As for `value_and_grad`.
      argnums: As for `value_and_grad`.
      has_aux: As for `value_and_grad`.
      genuine: Whether `opt_state` is known to be an optimizer's state.
    """
    state = the_scaler(name, opt_state) if genuine else find_scaler(name, opt_state)
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

    def scaled_fun(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        out = fun(*args, **kwargs)
        loss = _loss_of(name, out) if has_aux else out
        return scaled(name, loss, state), out

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        chosen = _chosen(args, argnums)
        if any(_is_nnx(value) for value in chosen.values()):
            (_, out), grads = _nnx_value_and_grad(scaled_fun, argnums, args, kwargs)
            return out, grads if state is None else unscaled(grads, state.loss_scale)
        for argnum, value in chosen.items():
            _check_arrays(name, argnum, value)
        if state is None:
            return jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)
        (_, out), grads = jax.value_and_grad(scaled_fun, argnums, has_aux=True)(*args, **kwargs)
        return out, unscaled(grads, state.loss_scale)

    return value_and_grad_fun


def scaled(name: str, value: Any, state: LossScaleState | None) -> jax.Array:
    """A loss times the scale of a scaler: float32 or wider; without one, the loss as it is.

    Raises:
      TypeError: If it is not a real floating number; for `scale_loss`, an array of them.
    """
    if not (isinstance(value, (float, int, complex)) or hasattr(value, "__array__")):
        hint = ""
        if isinstance(value, tuple) and len(value) == 2 and name != "scale_loss":
            hint = " If it is (loss, aux), say has_aux=True."
        raise TypeError(
            f"{name}: the loss must be a real floating number; got {type(value).__name__!r}.{hint}"
        )
    loss: jax.Array = jnp.asarray(value)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"{name}: the loss must be a real floating number; got {loss.dtype}.")
    if loss.ndim and name != "scale_loss":
        raise TypeError(
            f"{name}: the loss must be one number; got an array of shape {loss.shape}. Take its "
            "mean or its sum."
        )
    if state is None:
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


def _nnx_value_and_grad(
    fun: Callable[..., Any], argnums: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """`flax.nnx.value_and_grad` of a function with aux, which counts from the end, too.

    NNX takes only keyword arguments that stand for positional ones, so they travel as one of those.
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


def _chosen(args: tuple[Any, ...], argnums: Any) -> dict[int, Any]:
    """The arguments to differentiate, as far as they are there: JAX refuses the others."""
    several = argnums if isinstance(argnums, (tuple, list)) else [argnums]
    indices = [i.argnum if isinstance(i, nnx.DiffState) else i for i in several]
    return {i: args[i] for i in indices if isinstance(i, int) and -len(args) <= i < len(args)}


def _is_nnx(value: Any) -> bool:
    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Module)

    return any(is_module(leaf) for leaf in jax.tree.leaves(value, is_leaf=is_module))


def _check_arrays(name: str, argnum: int, value: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if callable(leaf) or isinstance(leaf, str):
            raise TypeError(
                f"{name}: argument {argnum} of the loss is differentiated, but has {leaf!r} at "
                f"{jax.tree_util.keystr(path) or 'the root'}, which is no array. An Equinox module "
                "is differentiated by eqx.filter_value_and_grad, around "
                "jaxmp.loss_scaling.scale_loss(loss, opt_state); or give "
                "eqx.partition's arrays, and eqx.combine them in the loss."
            )
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"{name}: argument {argnum} of the loss is differentiated, but has {dtype} at "
                f"{jax.tree_util.keystr(path) or 'the root'}; give it to the loss as another "
                "argument."
            )


def _loss_of(name: str, out: Any) -> Any:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            f"{name}: with has_aux=True the function must return a pair (loss, aux); got "
            f"{type(out).__name__!r}."
        )
    return out[0]
