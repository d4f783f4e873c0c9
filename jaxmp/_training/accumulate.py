"""Gradient accumulation: one step from several microbatches, summed in float32."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs.attributes import explicit_sharding, filled, is_inexact, with_dtype
from jaxmp._core.jaxprs.source import level_of_user
from jaxmp._training.checks import check_arrays, check_count, check_gradients
from jaxmp._training.leaves import factor_for, is_overwrite, is_typed

__all__ = ["accumulate_gradients"]


def accumulate_gradients(
    grad_fn: Callable[..., tuple[Any, Any]],
    microbatches: int,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    key_argnums: int | Sequence[int] | None = None,
    reduce: Literal["mean", "sum"] = "mean",
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that goes through a batch in pieces and returns one loss and gradient.

    Activations take the memory of one piece. The pieces run in a `lax.scan`, with one loss scale,
    and their gradients are added in float32 (16-bit ones too): to the optimizer this is one step of
    the whole batch, which is skipped as a whole if any piece overflows. (The alternative,
    `dynamic_loss_scale(optax.MultiSteps(optimizer, k))`, is k calls of the step, each with its own
    scale; an overflow costs one piece.)

    With "mean" the result equals the large batch's, to float32 rounding, if the loss is a mean over
    examples. If it divides by something counted in its batch, such as tokens that are not masked,
    return sums, accumulate with "sum", and divide by the count of the whole batch.

    Of Flax NNX modules among the arguments, BatchNorm's averages and Dropout's keys go from one
    piece to the next, and the modules have the last ones afterwards.

    Args:
      grad_fn: What `jaxmp.value_and_grad` or `jax.value_and_grad` returns: a function to
        `(loss, grads)`, or to `((loss, aux), grads)`.
      microbatches: The number of pieces; it divides the leading axis of every array in the batch.
      batch_argnums: Which positional arguments to cut along their leading axis, as `(1, 2)` for
        `loss_fn(params, x, y)`. By default argument 1, if no other after it is as long. The others
        go to each piece whole. The pieces are interleaved, every `microbatches`-th example, so that
        a batch sharded over devices stays where it is.
      key_argnums: Which positional arguments are PRNG keys, or trees of them such as Linen's
        ``rngs``, of which each piece gets its own: `jax.random.fold_in(key, i)` for piece i. A key
        that is not named goes to each piece whole, so that all have the same dropout masks. By
        default that warns; ``()`` says that it is meant.
      reduce: How the losses and gradients are combined: by their "mean" or their "sum".

    Returns:
      A function of `grad_fn`'s arguments. The loss and the gradients are float32 where they were 16
      bits; `aux` has a new leading axis, int[microbatches, ...] for an int[...]. float0 gradients
      pass, and of those under Flax's `_overwrite_with_gradient` the largest is kept. Over explicit
      mesh axes gradients are typed as `grad_fn` types them; unreduced ones are added up unreduced.

    Raises:
      ValueError: If `microbatches` is less than 1 or `reduce` is unknown; when called, if
        `microbatches` does not divide a leading axis, or over a mesh of explicit axes the devices
        do not divide a piece, an argument of `batch_argnums` or `key_argnums` is missing, several
        arguments may be the batch and `batch_argnums` is not given, or a piece gives an NNX module
        new variables.
      TypeError: If an argument is of the wrong kind; when called, if `grad_fn` does not return a
        pair, its loss or a gradient is not a floating number, or an argument of `key_argnums` has
        no PRNG keys.

    Warns:
      UserWarning: When called, if all pieces get the same PRNG key and `key_argnums` is not given.

    Example:
      >>> import jaxmp
      >>> params, batch = jnp.array([1.0, 2.0]), jnp.arange(8.0).reshape(4, 2)
      >>> loss_fn = lambda params, batch: jnp.mean(batch @ params)
      >>> grad_fn = jaxmp.accumulate_gradients(jax.value_and_grad(loss_fn), 2)
      >>> grad_fn(params, batch)
      (Array(11., dtype=float32), Array([3., 4.], dtype=float32))
    """
    check_count("accumulate_gradients", "microbatches", microbatches)
    if reduce not in ("mean", "sum"):
        raise ValueError(f"accumulate_gradients: reduce must be 'mean' or 'sum'; got {reduce!r}.")
    argnums = _positions("batch_argnums", 1 if batch_argnums is None else batch_argnums)
    keys = _positions("key_argnums", () if key_argnums is None else key_argnums)
    if not callable(grad_fn):
        raise TypeError(
            "accumulate_gradients: grad_fn must be a function such as jaxmp.value_and_grad makes; "
            f"got {type(grad_fn).__name__!r}."
        )
    factor = np.float32(1 / microbatches if reduce == "mean" else 1)

    @functools.wraps(grad_fn)
    def accumulated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        pieces = (np.arange(microbatches), *_split(args, argnums, microbatches))
        if batch_argnums is None and microbatches > 1:
            _check_others_are_whole(args, kwargs)
        if key_argnums is None and microbatches > 1:
            _warn_of_one_key(args, kwargs, argnums)
        _check_keys(args, keys)
        modules, state, put_back = _take_out_modules((args, kwargs))

        def run(piece: tuple[Any, ...], state: Any) -> tuple[Any, Any, Any]:
            (arguments, keywords), fresh = put_back(state)
            arguments = list(arguments)
            number, *values = piece
            for argnum, value in zip(argnums, values, strict=True):
                arguments[argnum] = value
            for argnum in keys:
                arguments[argnum] = jax.tree.map(
                    lambda key: jax.random.fold_in(key, number), arguments[argnum]
                )
            loss_and_grads = _loss_and_grads(grad_fn(*arguments, **keywords))
            return *loss_and_grads, nnx.state(fresh) if modules else state

        # `jax.eval_shape` would lose the sharding over a mesh that has an explicit axis.
        first = jax.tree.map(lambda x: x[0], pieces)
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(first, state)
        like, aux, after = jax.tree.unflatten(jax.tree.structure(shapes), traced.out_avals)
        _check_types(like, state, after)

        def body(carry: tuple[Any, Any], piece: Any) -> tuple[Any, Any]:
            totals, state = carry
            values, aux, state = run(piece, state)
            return (jax.tree_util.tree_map_with_path(_add, values, totals), state), aux

        start = jax.tree_util.tree_map_with_path(_start, like)
        (totals, state), aux = lax.scan(body, (start, state), pieces)
        if modules:
            nnx.update(modules, state)
        finish = functools.partial(_finish, factor=factor)
        loss, grads = jax.tree_util.tree_map_with_path(finish, like, totals)
        return ((loss, *aux) if aux else loss), grads

    return accumulated


def _positions(name: str, given: Any) -> tuple[int, ...]:
    several = [given] if isinstance(given, int) else given
    if not (isinstance(several, (tuple, list)) and all(isinstance(i, int) for i in several)):
        raise TypeError(
            f"accumulate_gradients: {name} must be the position of an argument, or several; "
            f"got {given!r}."
        )
    return tuple(several)


def _is_key(leaf: Any) -> bool:
    return is_typed(leaf) or (getattr(leaf, "dtype", None) == np.uint32 and leaf.ndim == 1)


def _check_keys(args: tuple[Any, ...], argnums: tuple[int, ...]) -> None:
    """Raises unless the arguments at `argnums` are PRNG keys, or trees of them."""
    for argnum in argnums:
        if not -len(args) <= argnum < len(args):
            raise ValueError(
                f"accumulate_gradients: key_argnums has {argnum}, but there are {len(args)} "
                "positional arguments; give the key as one of them."
            )
        leaves = jax.tree.leaves(args[argnum])
        if not leaves or not all(map(_is_key, leaves)):
            raise TypeError(
                f"accumulate_gradients: key_argnums has {argnum}, but that argument is no PRNG key "
                "such as jax.random.key(0), nor a tree of them."
            )


def _warn_of_one_key(
    args: tuple[Any, ...], kwargs: dict[str, Any], argnums: tuple[int, ...]
) -> None:
    """Warns if an argument that is not cut has a PRNG key: all pieces would draw the same."""
    cut = {i % len(args) for i in argnums if -len(args) <= i < len(args)}
    whole = {f"argument {i}": arg for i, arg in enumerate(args) if i not in cut}
    for name, arg in {**whole, **kwargs}.items():
        modules = [node for node in jax.tree.leaves(arg, is_leaf=_is_module) if _is_module(node)]
        if not modules and any(map(is_typed, jax.tree.leaves(arg))):
            warnings.warn(
                f"accumulate_gradients: {name} has a PRNG key, and every microbatch gets the same: "
                "all have the same dropout masks. key_argnums=(its position) gives each its own, "
                "and key_argnums=() says that it is meant.",
                UserWarning,
                stacklevel=level_of_user(),
            )


def _is_module(node: Any) -> bool:
    return isinstance(node, nnx.Module)


def _check_others_are_whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises if another argument is as long as argument 1, the batch: it may belong to it.

    If not cut, it would not fit a piece, or a piece of one example would be broadcast against it.
    """
    length = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(args[1])), None)

    def is_long(arg: Any) -> bool:
        leaves = jax.tree.leaves(arg)
        return bool(leaves) and all(jnp.shape(leaf)[:1] == (length,) for leaf in leaves)

    long = [i for i in range(2, len(args)) if is_long(args[i])]
    named = [name for name, arg in kwargs.items() if is_long(arg)]
    every = (1, *long, *range(len(args), len(args) + len(named)))
    if len(every) > 1:
        which = f"argument {long[0]}" if long else f"{named[0]}="
        by_position = f" ({', '.join(named)} given by position)" if named else ""
        raise ValueError(
            f"accumulate_gradients: {which} is as long as the batch (argument 1), {length}. If it "
            f"belongs to the batch, say batch_argnums={every}{by_position}; if every "
            "microbatch needs all of it, batch_argnums=1."
        )


def _loss_and_grads(out: Any) -> tuple[Any, tuple[Any, ...]]:
    """Checks the result of a gradient function; returns `(loss, grads)`, and `(aux,)` or `()`."""
    value, grads = out if isinstance(out, tuple) and len(out) == 2 else (None, None)
    loss: Any
    loss, *aux = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    is_number = isinstance(loss, (int, float, complex)) or hasattr(loss, "dtype")
    if not is_number or jnp.ndim(loss):
        raise TypeError(
            "accumulate_gradients: grad_fn must return (loss, grads) or ((loss, aux), grads), as "
            "what jaxmp.value_and_grad(loss_fn, opt_state) makes does; got a "
            f"{type(out).__name__!r}."
        )
    check_arrays("accumulate_gradients", "the aux of a microbatch", aux[0] if aux else None)

    def array(leaf: Any) -> Any:  # a Python number, such as a loss that depends on nothing
        return jnp.asarray(leaf) if isinstance(leaf, (int, float, complex)) else leaf

    return jax.tree.map(array, (loss, grads)), tuple(aux)


def _check_types(like: Any, state: Any, after: Any) -> None:
    """Checks the types of a loss and its gradients, and that NNX modules keep their variables."""
    loss, grads = like
    if not jnp.issubdtype(loss.dtype, jnp.inexact):
        raise TypeError(
            "accumulate_gradients: the loss must be a real floating-point number; got "
            f"{loss.dtype}."
        )
    check_gradients("accumulate_gradients", grads)
    got: Any = jax.tree.structure(after)
    if got != jax.tree.structure(state):
        raise ValueError(
            "accumulate_gradients: a microbatch adds variables to the NNX module, with which the "
            "next one would start; call the module once before training, and remove what is sown "
            "with nnx.pop."
        )


def _take_out_modules(tree: Any) -> tuple[list[nnx.Module], Any, Callable[[Any], Any]]:
    """Returns the NNX modules among arguments, their state, and a function from state to arguments.

    The caller's Variables cannot be set inside a scan, so it carries their values.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_module)
    modules = [leaf for leaf in leaves if _is_module(leaf)]
    if not modules:
        return [], None, lambda _: (tree, [])
    graphdef, state = nnx.split(modules)

    def put_back(state: Any) -> tuple[Any, list[nnx.Module]]:
        fresh = nnx.merge(graphdef, state)
        remaining = iter(fresh)
        filled = [next(remaining) if _is_module(leaf) else leaf for leaf in leaves]
        return treedef.unflatten(filled), fresh

    return modules, state, put_back


def _split(args: tuple[Any, ...], argnums: tuple[int, ...], count: int) -> tuple[Any, ...]:
    """Cuts each argument's leading axis [n] into [count, n / count], interleaved."""

    def split(path: tuple[Any, ...], leaf: Any) -> Any:
        size = jnp.shape(leaf)[0] if jnp.ndim(leaf) else None
        if not size or size % count:
            axis = "no leading axis" if size is None else f"a leading axis of {size}"
            wrong = (
                f"{axis}, which microbatches={count} does not divide; batch_argnums says which "
                "arguments are cut."
            )
        elif parts := _parts(leaf, size // count):
            wrong = (
                f"a leading axis of {size}, sharded {parts} ways over an explicit mesh, which does "
                f"not divide the pieces of {size // count} that microbatches={count} makes; take "
                "fewer pieces or a larger batch."
            )
        else:
            # Row i of the result is every count-th example from the i-th on: a reshape to
            # [count, n / count] would move the examples of a sharded batch between devices.
            return jnp.swapaxes(leaf.reshape(size // count, count, *leaf.shape[1:]), 0, 1)
        where = f"argument {argnum}{jax.tree_util.keystr(path)}"
        raise ValueError(f"accumulate_gradients: the batch ({where}) has {wrong}")

    pieces = []
    for argnum in argnums:
        if not -len(args) <= argnum < len(args):
            raise ValueError(
                f"accumulate_gradients: batch_argnums has {argnum}, but there are {len(args)} "
                "positional arguments; give the batch as one of them."
            )
        pieces.append(jax.tree_util.tree_map_with_path(split, args[argnum]))
    return tuple(pieces)


def _parts(leaf: Any, size: int) -> int | None:
    """Returns the number of shards in a batch's type if it does not divide `size`, else None."""
    sharding = explicit_sharding(leaf)
    axes = sharding.spec[0] if sharding is not None and len(sharding.spec) else None
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    parts = math.prod(sharding.mesh.shape[name] for name in names) if sharding is not None else 1
    return parts if size % parts else None


# The sum over pieces of one loss or gradient; None for a float0, which has none. For values that
# Flax overwrites it is the largest.


def _start(path: tuple[Any, ...], like: Any) -> jax.Array | None:
    if not is_inexact(like):
        return None
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    total: jax.Array = filled(with_dtype(like, dtype), -np.inf if is_overwrite(path) else 0)
    return total


def _add(path: tuple[Any, ...], leaf: Any, total: jax.Array | None) -> jax.Array | None:
    if total is None:
        return None
    return jnp.maximum(total, leaf) if is_overwrite(path) else total + leaf


def _finish(path: tuple[Any, ...], like: Any, total: Any, *, factor: np.float32) -> Any:
    if total is None:
        return np.zeros(like.shape, jax.dtypes.float0)
    return total.astype(like.dtype) if is_overwrite(path) else total * factor_for(like, factor)
