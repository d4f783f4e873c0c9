"""Gradient accumulation: one step from several microbatches, summed in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxmp._jaxprs.attributes import explicit_sharding, varying_axes
from jaxmp._training.gradients import check_floating, factor_for, is_inexact, is_overwrite, show

__all__ = ["accumulate_gradients"]


def accumulate_gradients(
    grad_fn: Callable[..., tuple[Any, Any]],
    microbatches: int,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    reduce: Literal["mean", "sum"] = "mean",
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that goes through a batch in pieces and returns one loss and gradient.

    The memory of activations is one piece's. The pieces run in a `lax.scan`, their gradients
    are added in float32 (16-bit ones too), and all of them are made with the same loss scale: to
    the optimizer this is one step of the whole batch, which is skipped as a whole if any piece
    overflows. (`dynamic_loss_scale(optax.MultiSteps(optimizer, k))` is the other way: k calls of
    the step, each with its own scale, an overflow costing one piece.)

    Of Flax NNX modules among the arguments, BatchNorm's averages and Dropout's keys go from one
    piece to the next, and the modules have the last ones afterwards.

    With "mean" the result equals the large batch's, to float32 rounding, if the loss is a
    mean over examples. A loss that divides by something counted in its batch, such as tokens that
    are not masked, is not: return sums, accumulate with "sum", and divide by the count of the whole
    batch.

    Args:
      grad_fn: What `jaxmp.value_and_grad` or `jax.value_and_grad` returns: a function to
        `(loss, grads)`, or to `((loss, aux), grads)`.
      microbatches: How many pieces; it divides the leading axis of every array in the batch.
      batch_argnums: Which positional arguments to cut along their leading axis, as `(1, 2)` for
        `loss_fn(params, x, y)`. By default argument 1, if no other after it is as long. The others
        go to each piece whole, a PRNG key too: give `jax.random.split(key, microbatches)` as part
        of the batch for a key each. The pieces are interleaved, every `microbatches`-th example, so
        that a batch sharded over devices stays where it is.
      reduce: What is made of the losses and gradients: their "mean" or their "sum".

    Returns:
      A function of `grad_fn`'s arguments. The loss and the gradients are float32 where they were 16
      bits; `aux` has a new leading axis, int[microbatches, ...] for an int[...]. float0 gradients
      pass, and of those under Flax's `_overwrite_with_gradient` the largest is kept. Over explicit
      mesh axes gradients are typed as `grad_fn` types them; unreduced ones are added up unreduced.

    Raises:
      ValueError: If `microbatches` is less than 1 or `reduce` is unknown; when called, if a leading
        axis does not divide, or over a mesh of explicit axes the pieces do not divide over the
        devices, an argument of `batch_argnums` is not there, several arguments may be the batch and
        `batch_argnums` does not say, or a piece gives an NNX module new variables.
      TypeError: If an argument is of the wrong kind; when called, if `grad_fn` does not return a
        pair, or its loss or a gradient is no floating number.

    Example:
      >>> import jaxmp
      >>> params, batch = jnp.array([1.0, 2.0]), jnp.arange(8.0).reshape(4, 2)
      >>> loss_fn = lambda params, batch: jnp.mean(batch @ params)
      >>> grad_fn = jaxmp.accumulate_gradients(jax.value_and_grad(loss_fn), 2)
      >>> grad_fn(params, batch)
      (Array(11., dtype=float32), Array([3., 4.], dtype=float32))
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise TypeError(
            f"accumulate_gradients: microbatches must be an integer; got {microbatches!r}."
        )
    if microbatches < 1:
        raise ValueError(
            f"accumulate_gradients: microbatches must be at least 1; got {microbatches}."
        )
    if reduce not in ("mean", "sum"):
        raise ValueError(f"accumulate_gradients: reduce must be 'mean' or 'sum'; got {reduce!r}.")
    by_default = batch_argnums is None
    several = 1 if batch_argnums is None else batch_argnums
    several = [several] if isinstance(several, int) else several
    if not (isinstance(several, (tuple, list)) and all(isinstance(i, int) for i in several)):
        raise TypeError(
            "accumulate_gradients: batch_argnums must be the position of an argument, or several; "
            f"got {batch_argnums!r}."
        )
    if not callable(grad_fn):
        raise TypeError(
            "accumulate_gradients: grad_fn must be a function such as jaxmp.value_and_grad makes; "
            f"got {type(grad_fn).__name__!r}."
        )
    argnums = tuple(several)
    factor = np.float32(1 / microbatches if reduce == "mean" else 1)

    @functools.wraps(grad_fn)
    def accumulated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        pieces = _split(args, argnums, microbatches)
        if by_default and microbatches > 1:
            _check_others_are_whole(args, kwargs)
        modules, state, put_back = _take_out_modules((args, kwargs))

        def run(piece: tuple[Any, ...], state: Any) -> tuple[tuple[Any, Any], Any]:
            (arguments, keywords), fresh = put_back(state)
            arguments = list(arguments)
            for argnum, value in zip(argnums, piece, strict=True):
                arguments[argnum] = value
            return _pair(grad_fn(*arguments, **keywords)), nnx.state(fresh)

        # `jax.eval_shape` would lose the sharding over a mesh that has an explicit axis.
        first = jax.tree.map(lambda x: x[0], pieces)
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(first, state)
        (value, grads), after = jax.tree.unflatten(jax.tree.structure(shapes), traced.out_avals)
        has_aux = isinstance(value, tuple)
        like = (value[0] if has_aux else value, grads)
        _check(like, state, after)

        def body(carry: tuple[list[jax.Array], Any], piece: Any) -> tuple[Any, Any]:
            totals, state = carry
            (value, grads), state = run(piece, state)
            loss, aux = value if has_aux else (value, None)
            return (_add(totals, (loss, grads)), state), aux

        (totals, state), aux = lax.scan(body, (_start(like), state), pieces)
        nnx.update(modules, state)
        loss, grads = _finish(totals, like, factor)
        return ((loss, aux) if has_aux else loss), grads

    return accumulated


def _check_others_are_whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises if another argument is as long as argument 1, the batch: it may belong to it.

    Were it not cut, a piece would not fit it, or, of one example, be broadcast against all of it.
    """
    length = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(args[1])), None)

    def is_long(arg: Any) -> bool:
        leaves = jax.tree.leaves(arg)
        return bool(leaves) and all(jnp.shape(leaf)[:1] == (length,) for leaf in leaves)

    long = [i for i in range(2, len(args)) if is_long(args[i])]
    named = [name for name, arg in kwargs.items() if is_long(arg)]
    if long or named:
        which = f"argument {long[0]}" if long else f"{named[0]}="
        by_position = f" ({', '.join(named)} given by position)" if named else ""
        every = (1, *long, *range(len(args), len(args) + len(named)))
        raise ValueError(
            f"accumulate_gradients: {which} is as long as the batch (argument 1), {length}. If it "
            f"belongs to the batch, say batch_argnums={every}{by_position}; if each piece is to "
            "have the whole of it, batch_argnums=1."
        )


def _pair(out: Any) -> tuple[Any, Any]:
    """Checks that a gradient function returned `(loss, grads)` or `((loss, aux), grads)`."""
    if isinstance(out, tuple) and len(out) == 2:
        value, grads = out
        has_aux = isinstance(value, tuple) and len(value) == 2
        loss = value[0] if has_aux else value
        if _is_scalar(loss):
            _check_aux(value[1] if has_aux else None)
            # Python numbers, such as a loss that depends on nothing, have no dtype.
            loss, grads = jax.tree.map(_array, (loss, grads))
            return ((loss, value[1]) if has_aux else loss), grads
    raise TypeError(
        "accumulate_gradients: grad_fn must return (loss, grads) or ((loss, aux), grads), as what "
        f"jaxmp.value_and_grad(loss_fn, opt_state) makes does; got a {type(out).__name__!r}."
    )


def _is_scalar(loss: Any) -> bool:
    is_number = isinstance(loss, (bool, int, float, complex)) or hasattr(loss, "dtype")
    return is_number and jnp.ndim(loss) == 0


def _check_aux(aux: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if callable(leaf) or isinstance(leaf, str):
            raise TypeError(
                f"accumulate_gradients: the aux of a piece has {leaf!r} at {show(path)}, which is "
                "no array and cannot be stacked; leave it out of what the loss returns."
            )


def _check(like: Any, state: Any, after: Any) -> None:
    """Checks the types of a loss and its gradients, and that NNX modules keep their variables."""
    loss, grads = like
    if not jnp.issubdtype(loss.dtype, jnp.inexact):
        raise TypeError(
            f"accumulate_gradients: the loss must be a real floating number; got {loss.dtype}."
        )
    check_floating("accumulate_gradients", "gradient", grads)
    got: Any = jax.tree.structure(after)
    had: Any = jax.tree.structure(state)
    if got != had:
        raise ValueError(
            "accumulate_gradients: a piece of the batch gives the NNX module variables that it did "
            "not have, which the next piece would start with; call it once before training, and "
            "take what is sown out with nnx.pop."
        )


def _take_out_modules(tree: Any) -> tuple[list[nnx.Module], Any, Callable[[Any], Any]]:
    """The NNX modules among arguments, their state, and how to make the arguments of a state.

    Variables of the caller cannot be set inside a scan, so it carries their values.
    """

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Module)

    treedef: Any
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_module)
    modules = [leaf for leaf in leaves if is_module(leaf)]
    graphdef, state = nnx.split(modules)

    def put_back(state: Any) -> tuple[Any, list[nnx.Module]]:
        fresh = nnx.merge(graphdef, state)
        remaining = iter(fresh)
        filled = [next(remaining) if is_module(leaf) else leaf for leaf in leaves]
        return treedef.unflatten(filled), fresh

    return modules, state, put_back


def _split(args: tuple[Any, ...], argnums: tuple[int, ...], count: int) -> tuple[Any, ...]:
    """Cuts each argument's leading axis [n] into [count, n / count], interleaved."""

    def split(path: tuple[Any, ...], leaf: Any) -> Any:
        size = jnp.shape(leaf)[0] if jnp.ndim(leaf) else None
        if not size or size % count:
            axis = "no leading axis" if size is None else f"a leading axis of {size}"
            raise ValueError(
                f"accumulate_gradients: the batch (argument {argnum}"
                f"{jax.tree_util.keystr(path)}) has {axis}, which microbatches={count} does not "
                "divide; batch_argnums says which arguments are cut."
            )
        if parts := _parts(leaf, size // count):
            raise ValueError(
                f"accumulate_gradients: the batch (argument {argnum}"
                f"{jax.tree_util.keystr(path)}) has a leading axis of {size}, sharded {parts} "
                f"ways over an explicit mesh, which does not divide the pieces of {size // count} "
                f"that microbatches={count} makes; take fewer pieces or a larger batch."
            )
        # Row i of the result is every count-th example from the i-th on: a reshape to
        # [count, n / count] would move the examples of a sharded batch between devices.
        return jnp.swapaxes(leaf.reshape(size // count, count, *leaf.shape[1:]), 0, 1)

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
    """How many ways the type of a batch says that it is sharded, where that divides no `size`."""
    sharding = explicit_sharding(leaf)
    axes = sharding.spec[0] if sharding is not None and len(sharding.spec) else None
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    parts = math.prod(sharding.mesh.shape[name] for name in names) if sharding is not None else 1
    return parts if size % parts else None


def _summable(tree: Any) -> list[tuple[bool, Any]]:
    """The leaves that are added up; of those marked True the largest is taken."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(is_overwrite(path), leaf) for path, leaf in leaves if is_inexact(leaf)]


def _array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf


def _start(like: Any) -> list[jax.Array]:
    totals = []
    for overwrites, leaf in _summable(like):
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        total = jnp.full(leaf.shape, -np.inf if overwrites else 0, dtype)
        # A scan's carry must begin with the type that it will have: over an explicit mesh with the
        # sharding of the gradient, under shard_map with the axes that it varies over.
        sharding = explicit_sharding(leaf)
        if sharding is not None and not jax.sharding.get_abstract_mesh().empty:
            total = jax.sharding.reshard(total, sharding)
        varying = varying_axes(leaf)
        totals.append(lax.pcast(total, varying, to="varying") if varying else total)
    return totals


def _add(totals: list[jax.Array], tree: Any) -> list[jax.Array]:
    pairs = zip(totals, _summable(tree), strict=True)
    return [
        jnp.maximum(total, leaf) if overwrites else total + leaf
        for total, (overwrites, leaf) in pairs
    ]


def _finish(totals: list[jax.Array], like: Any, factor: np.float32) -> Any:
    remaining = iter(totals)

    def leaf(path: tuple[Any, ...], shape: Any) -> Any:
        if not is_inexact(shape):
            return np.zeros(shape.shape, jax.dtypes.float0)
        total = next(remaining)
        return (
            total.astype(shape.dtype) if is_overwrite(path) else total * factor_for(shape, factor)
        )

    return jax.tree_util.tree_map_with_path(leaf, like)
