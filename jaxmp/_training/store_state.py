"""An optimizer's state, stored in 16 or 8 bits between the steps."""

from __future__ import annotations

import warnings
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from jaxmp._core.printable import show
from jaxmp._core.products.scaled import Scaled
from jaxmp._training.checks import (
    as_transformation,
    check_arrays,
    check_count,
    check_state,
    update_inner,
)
from jaxmp._training.host_state import in_memory
from jaxmp._training.leaves import SMALLEST, check_key, first_key, next_key, strong
from jaxmp._training.master_weights import MasterWeightsState, RemainderState
from jaxmp._training.opt_state import the_scaler
from jaxmp._training.stored_array import (
    SHORTEST,
    block_axis,
    block_count,
    decode,
    encode,
    encode_onto,
    is_scale_of,
)
from jaxmp.tree import keys_of, select, widen_floating

__all__ = ["StoredState", "store_state"]

_DTYPES: Final = ("bfloat16", "int8", "float8_e4m3fn")

# The fields of optax's states that are sums of gradients, or parameters and differences of them.
_SUMS: Final = {
    *("acc_grads", "grad_acc", "avg_grad", "mean_grads", "grad_sum", "cumulative_gradients", "s"),
    *("z", "x0", "params0", "init_params", "init_particles", "cache", "params", "updates"),
    *("diff_params_memory", "diff_updates_memory"),
}


class StoredState(NamedTuple):
    """State of `store_state`.

    Attributes:
      key: The data of the PRNG key of the next step, uint32[2].
      scales: By the name of an 8-bit dtype, float32[..., blocks, ...] for each array that is stored
        in it, in their order: the largest magnitudes of blocks of one axis (see
        `stored_array.encode`). Its name is there so that a checkpoint is not read as another dtype.
      inner_state: The state of the transformation inside, its large float arrays in the dtype that
        they are stored in.
    """

    key: jax.Array
    scales: dict[str, tuple[jax.Array, ...]]
    inner_state: Any

    def to_float32(self) -> Any:
        """Returns the state of the transformation inside, with its stored arrays in float32.

        Example:
          >>> params = jnp.ones((64, 64))
          >>> state = store_state(optax.adam(1e-3), "int8").init(params)
          >>> print(state.inner_state[0].mu.dtype, state.to_float32()[0].mu.dtype)
          int8 float32
        """
        leaves, treedef = jax.tree.flatten(self.inner_state)
        pairs = zip(leaves, _with_scales(leaves, self.scales), strict=True)
        full = [x if stored is None else decode(stored) for x, stored in pairs]
        return jax.tree.unflatten(treedef, full)

    def from_float32(self, inner_state: Any) -> StoredState:
        """Returns this state with the inner transformation's state replaced: restored, say.

        Args:
          inner_state: A state of the structure and the shapes of `to_float32()`; the arrays that
            this state stores are rounded likewise.

        Raises:
          ValueError: If the structure or a shape differs.

        Example:
          >>> params = jnp.ones((64, 64))
          >>> old = optax.adam(1e-3).init(params)
          >>> state = store_state(optax.adam(1e-3), "bfloat16").init(params).from_float32(old)
          >>> str(state.inner_state[0].mu.dtype)
          'bfloat16'
        """
        got: Any = jax.tree.structure(inner_state)
        if got != (want := jax.tree.structure(self.inner_state)):
            raise ValueError(
                f"StoredState.from_float32: inner_state is {got}, and that of this state {want}; "
                "give the state of the same optimizer without store_state around it."
            )
        paths = jax.tree_util.tree_leaves_with_path(inner_state)
        for (path, new), old in zip(paths, jax.tree.leaves(self.inner_state), strict=True):
            if jnp.shape(new) != jnp.shape(old):
                raise ValueError(
                    f"StoredState.from_float32: the array at {show(path)} has shape "
                    f"{jnp.shape(new)}, and that of this state {jnp.shape(old)}; give the state of "
                    "the same parameters."
                )
        following, now = next_key(self.key)
        return _encoded(self, inner_state, now)._replace(key=following)


def store_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: DTypeLike,
    *,
    block_size: int | None = None,
    shards: int = 1,
    key: ArrayLike = 0,
    memory: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stores an optimizer's state in 16 or 8 bits a number; the optimizer itself sees float32.

    Use it where moments take the memory: weights, gradients' moments and all, Adam takes 12 bytes a
    parameter in float32, 8 with its moments in bfloat16, 6 in 8 bits. Around the optimizer, inside
    `master_weights`, inside or around `dynamic_loss_scale`: a step that it skips leaves no trace.

    Arrays of 4096 floats or more are stored; smaller ones, counters and keys stay as they are.
    Every number is rounded up or down at random, so that stored numbers are right on average and
    small changes of an average add up. In 8 bits, blocks along the longest axis but the last (of a
    vector, along it) share a float32 scale; arrays where it is shorter than 16 stay as they are.
    With the sign of a number,

    * `"int8"` stores the fourth root of its magnitude over the block's largest, in 127 steps.
      Linear steps would round most second moments to 0, and training would diverge;
    * `"float8_e4m3fn"` stores the magnitude over the block's largest.

    No number but 0 becomes 0, as Adam divides by it. A NaN or an infinity makes its block NaN.

    Sums of gradients and copies of parameters, which would lose more than moments do, stay float32:
    those of `optax.MultiSteps`, `optax.apply_every`, `optax.lbfgs` and of optax.contrib, such as
    `schedule_free`'s z. A transformation of your own that has them belongs around it:
    `my_sums(store_state(tx, dtype))`. `inner` sees parameters and gradients of 16 bits as float32,
    and the updates are float32.

    Arrays keep their shapes and the state of `inner` its structure, so that it is sharded as the
    parameters are. Where the axis of the blocks is sharded over devices, give their number as
    `shards`: then no block is on two of them, and nothing is communicated.

    With `memory="pinned_host"`, arrays of 4096 elements or more are in the memory of the host, in
    the dtype that they are stored in. A compiled step moves them to the device in turn, when the
    update of a parameter is computed, and back: that takes time on the host's link
    (`jaxmp.preflight`). This is then the outermost transformation, but for `master_weights` and
    `monitor`; a loss scaler goes inside.

    Args:
      inner: The optimizer.
      dtype: bfloat16, int8 or float8_e4m3fn, or the name of one; with `memory` also float32, in
        which nothing is rounded.
      block_size: The largest number of elements that share a scale in 8 bits; by default 256.
      shards: The number of parts that the axis of the blocks is sharded into.
      key: PRNG key, or the seed of one, for the rounding.
      memory: "pinned_host", or None for the memory of the device.

    Returns:
      A transformation whose state is a `StoredState`: `state.to_float32()` is the state of `inner`,
      `state.from_float32(inner_state)` puts one in. With float32, its state is `inner`'s.

    Raises:
      TypeError: If `inner` is not an optax transformation, or from `update`, if the state is not a
        `StoredState`.
      NotImplementedError: From `init`, if the device has no memory of its host.
      ValueError: If the dtype or the memory is none of these, `block_size` or `shards` below 1, or
        a block size is given for 16 bits, which have no scales; from `init`, if `master_weights` is
        inside; from `update`, if the state was stored in another dtype, is not stored at all, or is
        corrupted.

    Warns:
      UserWarning: From `init`, if no array is stored: then it changes nothing.

    Example:
      >>> params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
      >>> tx = store_state(optax.adam(1e-3), "int8")
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> jax.tree.map(lambda x: f"{x.dtype}{x.shape}", state.inner_state[0].mu)
      {'b': 'float32(128,)', 'w': 'int8(64, 128)'}

    References:
      Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization",
      https://arxiv.org/abs/2110.02861 (blocks); Zamirai et al., 2020,
      https://arxiv.org/abs/2010.06192 (stochastic rounding).
    """
    wrapped = as_transformation("store_state", inner)
    stored_dtype = _parse(dtype, memory)
    if block_size is None:
        block_size = 256
    elif stored_dtype.itemsize > 1:
        raise ValueError(
            f"store_state: block_size={block_size!r} is of 8 bits, whose blocks share a scale; "
            f"{stored_dtype} has none: leave it out."
        )
    check_count("store_state", "block_size", block_size)
    check_count("store_state", "shards", shards)
    check_key("store_state", key)
    if stored_dtype == jnp.float32:
        return in_memory("store_state", wrapped, memory)

    def init(params: Any) -> StoredState:
        check_arrays("store_state", "the parameter", params)
        inner_state = wrapped.init(widen_floating(params))
        _check_inside(inner_state)
        following, now = next_key(first_key(key))

        leaves, treedef = jax.tree.flatten(inner_state)
        made: list[Any] = []
        leaf_keys, kept = jax.tree.leaves(keys_of(leaves, now)), _kept(inner_state)
        for x, leaf_key, is_kept in zip(leaves, leaf_keys, kept, strict=True):
            if not is_kept and _is_stored(x, stored_dtype, (*_DTYPES[:1], "float16", "float32")):
                blocks = block_count(x.shape[block_axis(x.shape)], block_size, shards)
                made.append(encode(x.astype(jnp.float32), stored_dtype, blocks, leaf_key))
            else:
                made.append(strong(x))
        if jax.tree.leaves(params):
            _warn_if_useless(made, stored_dtype)
        return _state(following, treedef, made)

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, StoredState]:
        check_state("store_state", state, StoredState)
        _check_stored(state, stored_dtype)
        full, grads = widen_floating(params), widen_floating(updates)
        updates, new = update_inner(
            "store_state", wrapped, grads, state.to_float32(), full, extra_args
        )
        following, now = next_key(state.key)
        finite = the_scaler("store_state", new).finite
        following = select(finite, following, state.key)
        return updates, _encoded(state, new, now)._replace(key=following)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return in_memory("store_state", tx, memory)


def _parse(dtype: DTypeLike, memory: str | None) -> Any:
    try:
        name = jnp.dtype("bfloat16" if dtype == "bf16" else dtype).name
    except TypeError:
        name = ""
    if name == "float32" and memory is None:
        raise ValueError(
            "store_state: dtype=float32 stores what is there, and changes nothing without memory=; "
            f"give one of {', '.join(_DTYPES)}."
        )
    if name not in (*_DTYPES, "float32"):
        raise ValueError(
            f"store_state: dtype must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}; got {dtype!r}."
        )
    return jnp.dtype(name)


def _is_stored(x: Any, dtype: Any, dtypes: tuple[str, ...]) -> bool:
    """Returns whether an array has one of some dtypes, and is large enough to store in `dtype`."""
    if not isinstance(x, (jax.Array, np.ndarray)) or x.dtype.name not in dtypes:
        return False
    if x.size < SMALLEST:
        return False
    return dtype == jnp.bfloat16 or x.shape[block_axis(x.shape)] >= SHORTEST


def _kept(node: Any, is_kept: bool = False) -> list[bool]:  # noqa: FBT001, FBT002
    """Returns for each leaf of a state whether it is in a sum or a copy that stays float32."""
    if _is_of_optax(node):
        fields = zip(node._fields, node, strict=True)
        return [flag for name, x in fields for flag in _kept(x, is_kept or name in _SUMS)]
    inside = jax.tree.leaves(node, is_leaf=_is_of_optax)
    return [flag for x in inside for flag in (_kept(x, is_kept) if _is_of_optax(x) else [is_kept])]


def _is_of_optax(node: Any) -> bool:
    is_named = isinstance(node, tuple) and hasattr(node, "_fields")
    return is_named and type(node).__module__.partition(".")[0] == "optax"


def _warn_if_useless(made: list[Any], dtype: Any) -> None:
    floats = [x for x in made if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    if not any(isinstance(x, Scaled) for x in made):
        largest = max((x.size for x in floats), default=0)
        warnings.warn(
            f"store_state: no array of the optimizer's state is stored in {dtype}, so it changes "
            f"nothing: arrays below {SMALLEST} elements (the largest has {largest}) stay as they "
            f"are, in 8 bits also those without an axis of {SHORTEST} for blocks, and sums of "
            "gradients and copies of parameters. Leave store_state out for this model.",
            stacklevel=3,
        )


def _with_scales(leaves: list[Any], scales: Any) -> list[Scaled | None]:
    """Returns each leaf with its scale, as a `Scaled`; None for those that are not stored."""
    rest = iter(jax.tree.leaves(scales))
    return [
        Scaled(x, None if x.dtype == jnp.bfloat16 else next(rest))
        if _is_stored(x, getattr(x, "dtype", None), _DTYPES)
        else None
        for x in leaves
    ]


def _encoded(old: StoredState, new: Any, key: jax.Array) -> StoredState:
    """Returns the state `new`, stored as `old` is; numbers that did not change keep their bits."""
    leaves, treedef = jax.tree.flatten(new)
    keys = jax.tree.leaves(keys_of(leaves, key))
    stored = _with_scales(jax.tree.leaves(old.inner_state), old.scales)
    made = [
        x if was is None else encode_onto(was, x, leaf_key)
        for x, was, leaf_key in zip(leaves, stored, keys, strict=True)
    ]
    return _state(old.key, treedef, made)


def _state(key: jax.Array, treedef: Any, made: list[Any]) -> StoredState:
    stored = [x for x in made if isinstance(x, Scaled)]
    leaves = [x.values if isinstance(x, Scaled) else x for x in made]
    scaled = [x for x in stored if x.scale is not None]
    scales = {x.values.dtype.name: tuple(x.scale for x in scaled) for x in scaled[:1]}
    return StoredState(key, scales, treedef.unflatten(leaves))


def _check_inside(inner_state: Any) -> None:
    kinds = (MasterWeightsState, RemainderState, StoredState)
    nodes = jax.tree.leaves(inner_state, is_leaf=lambda x: isinstance(x, kinds))
    if any(isinstance(node, StoredState) for node in nodes):
        raise ValueError("store_state: there is a store_state inside; keep one of them.")
    if any(isinstance(node, kinds) for node in nodes):
        raise ValueError(
            "store_state: master_weights is inside, whose float32 parameters would be rounded to "
            "what is stored; write master_weights(store_state(inner, dtype))."
        )


def _check_stored(state: StoredState, dtype: Any) -> None:
    """Raises unless the large arrays of a state are stored in a dtype, each with its scale."""
    fix = "tx.init(params).from_float32({}) stores it as this optimizer does."
    scales = jax.tree.leaves(state.scales)
    leaves = jax.tree_util.tree_leaves_with_path(state.inner_state)
    for (path, x), is_kept in zip(leaves, _kept(state.inner_state), strict=True):
        if is_kept and getattr(x, "dtype", None) != dtype:
            continue
        if not _is_stored(x, dtype, (*_DTYPES, "float32")):
            continue
        where = f"store_state: the array at inner_state{jax.tree_util.keystr(path)} is"
        if x.dtype == jnp.float32:
            raise ValueError(f"{where} float32, and not stored; {fix.format('inner_state')}")
        if is_kept:
            raise ValueError(
                f"{where} stored in {dtype}, and is a sum or a copy that stays float32; "
                + fix.format("state.to_float32()")
            )
        if x.dtype != dtype:
            raise ValueError(
                f"{where} stored in {x.dtype}, and this optimizer stores {dtype}; "
                + fix.format("state.to_float32()")
            )
        if dtype == jnp.bfloat16:
            continue
        scale = scales.pop(0) if scales else None
        if scale is None or not is_scale_of(scale, x.shape):
            has = "no scale" if scale is None else f"scale {scale.dtype}{list(scale.shape)}"
            raise ValueError(
                f"{where} {x.dtype}{list(x.shape)} with {has}: corrupted, or of other parameters. "
                "Use what this optimizer's init or update returned."
            )
    if scales:
        raise ValueError(
            f"store_state: the state has {len(scales)} scales more than arrays stored in {dtype}: "
            "corrupted, or of other parameters. Use what this optimizer's init or update returned."
        )
