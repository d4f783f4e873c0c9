"""An optimizer's state, stored in 16 or 8 bits between the steps."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from jaxmp._training.checks import (
    as_transformation,
    check_arrays,
    check_count,
    check_state,
    update_inner,
)
from jaxmp._training.gradients import show
from jaxmp._training.master_weights import MasterWeightsState, RemainderState
from jaxmp._training.opt_state import the_scaler
from jaxmp._training.stored_array import (
    StoredArray,
    block_count,
    decode,
    encode,
    is_stored,
    keep_unchanged,
)
from jaxmp.tree import keys_of, select, widen_floating

__all__ = ["StoredState", "store_state"]

_DTYPES: Final = ("bfloat16", "int8", "float8_e4m3fn")
# bitsandbytes' bound. Biases and scales of norms are below it, and are most sensitive.
_SMALLEST: Final = 4096
# From 16 numbers on, a float32 scale for 8 bits of each takes less than bfloat16.
_SHORTEST: Final = 16


class StoredState(NamedTuple):
    """State of `store_state`.

    Attributes:
      key: The PRNG key of the next step.
      inner_state: The state of the transformation inside, large float32 arrays as `StoredArray`s.
    """

    key: jax.Array
    inner_state: Any

    def to_float32(self) -> Any:
        """Returns the state of the transformation inside, its arrays in float32.

        Example:
          >>> params = jnp.ones((64, 64))
          >>> state = store_state(optax.adam(1e-3), "int8").init(params)
          >>> jax.tree.structure(state.to_float32()) == jax.tree.structure(
          ...     optax.adam(1e-3).init(params)
          ... )
          True
        """
        return jax.tree.map(
            lambda x: decode(x) if is_stored(x) else x, self.inner_state, is_leaf=is_stored
        )

    def from_float32(self, inner_state: Any) -> StoredState:
        """Returns this state with that of the transformation inside replaced: restored, say.

        Args:
          inner_state: Of the structure and the shapes of `to_float32()`; what is stored in this
            state is rounded as it is here.

        Raises:
          ValueError: If the structure or a shape is another.

        Example:
          >>> params = jnp.ones((64, 64))
          >>> old = optax.adam(1e-3).init(params)
          >>> state = store_state(optax.adam(1e-3), "bfloat16").init(params).from_float32(old)
          >>> str(state.inner_state[0].mu.values.dtype)
          'bfloat16'
        """
        got: Any = jax.tree.structure(inner_state)
        if got != (want := jax.tree.structure(self.inner_state, is_leaf=is_stored)):
            raise ValueError(
                f"StoredState.from_float32: inner_state is {got}, and that of this state {want}; "
                "give the state of the same optimizer without store_state around it."
            )
        next_key, now = jax.random.split(self.key)

        def one(path: tuple[Any, ...], old: Any, new: Any, key: jax.Array) -> Any:
            if (shape := jnp.shape(old.values if is_stored(old) else old)) != jnp.shape(new):
                raise ValueError(
                    f"StoredState.from_float32: the array at {show(path)} has shape "
                    f"{jnp.shape(new)}, and that of this state {shape}; give the state of the same "
                    "parameters."
                )
            return _encode_like(old, new, key) if is_stored(old) else new

        keys = keys_of(inner_state, now)
        stored = jax.tree_util.tree_map_with_path(
            one, self.inner_state, inner_state, keys, is_leaf=is_stored
        )
        return StoredState(next_key, stored)


def store_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: DTypeLike,
    *,
    block_size: int = 256,
    key: ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """Stores an optimizer's state in 16 or 8 bits a number; the optimizer itself sees float32.

    Use it where moments take the memory: weights, gradients' moments and all, Adam takes 12 bytes a
    parameter in float32, 8 with its moments in bfloat16, 6 in 8 bits. Around the optimizer, inside
    `master_weights`, inside or around `dynamic_loss_scale`: a step that it skips leaves no trace.

    float32 arrays of 4096 numbers or more are stored as a `StoredArray`; smaller ones, counters and
    keys stay as they are. Every number is rounded up or down at random, so that what is stored is
    right on average and small changes of an average add up. In 8 bits, blocks along the last axis
    share a float32 scale (arrays whose last axis is below 16 stay as they are), and

    * `"int8"` stores the square root of a magnitude over the block's largest, with 127 steps and a
      sign or, in blocks without negative numbers, 255 steps. Second moments are such blocks, and
      linear steps would round most of them to 0;
    * `"float8_e4m3fn"` stores the magnitude over the block's largest.

    No positive number of a block without negative ones becomes 0, as Adam divides by it. A NaN or
    an infinity makes its block NaN.

    What keeps parameters or sums of gradients, instead of moments, belongs around it and not
    inside: `optax.MultiSteps(store_state(tx, dtype), n)`, `optax.contrib.schedule_free` and the
    like lose more than moments do. `inner` sees parameters and gradients of 16 bits as float32, and
    the updates are float32.

    Every array keeps its shape, and a scale's last axis counts the blocks, so the state is sharded
    as the parameters are. Where the last axis is sharded, let `block_size` divide a shard.

    Args:
      inner: The optimizer.
      dtype: bfloat16, int8 or float8_e4m3fn, or the name of one.
      block_size: How many numbers of the last axis share a scale, in 8 bits.
      key: PRNG key, or the seed of one, for the rounding.

    Returns:
      A transformation whose state is a `StoredState`. `state.to_float32()` is the state of `inner`,
      `state.from_float32(inner_state)` puts one in.

    Raises:
      TypeError: If `inner` is not an optax transformation, or from `update`, if the state is not a
        `StoredState`.
      ValueError: If the dtype is another, or `block_size` below 1; from `init`, if
        `master_weights` is inside; from `update`, if the state was stored in another dtype, is not
        stored at all, or is corrupted.

    Example:
      >>> params = {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
      >>> tx = store_state(optax.adam(1e-3), "int8")
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> mu = state.inner_state[0].mu
      >>> str(mu["w"].values.dtype), mu["w"].scale.shape, str(mu["b"].dtype)
      ('int8', (64, 1), 'float32')

    References:
      Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization",
      https://arxiv.org/abs/2110.02861 (blocks); Zamirai et al., 2020,
      https://arxiv.org/abs/2010.06192 (stochastic rounding).
    """
    wrapped = as_transformation("store_state", inner)
    stored_dtype = _parse(dtype)
    check_count("store_state", "block_size", block_size)

    def init(params: Any) -> StoredState:
        check_arrays("store_state", "the parameter", params)
        inner_state = wrapped.init(widen_floating(params))
        _check_inside(inner_state)
        # A copy: a step that donates its state must not take the caller's key with it.
        first = jax.random.key(key) if isinstance(key, int) else jnp.array(key, copy=True)
        next_key, now = jax.random.split(first)

        def one(x: Any, key: jax.Array) -> Any:
            if not _is_large(x, stored_dtype):
                return x
            return encode(x, stored_dtype, block_count(x.shape[-1], block_size), key)

        return StoredState(next_key, jax.tree.map(one, inner_state, keys_of(inner_state, now)))

    def update(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, StoredState]:
        check_state("store_state", state, StoredState)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.inner_state, is_leaf=is_stored):
            _check_leaf(path, leaf, stored_dtype)
        full, grads = widen_floating(params), widen_floating(updates)
        updates, new = update_inner(
            "store_state", wrapped, grads, state.to_float32(), full, extra_args
        )
        next_key, now = jax.random.split(state.key)
        keys = keys_of(new, now)

        def one(old: Any, x: Any, key: jax.Array) -> Any:
            return keep_unchanged(_encode_like(old, x, key), x, old) if is_stored(old) else x

        stored = jax.tree.map(one, state.inner_state, new, keys, is_leaf=is_stored)
        finite = the_scaler("store_state", new).finite
        return updates, StoredState(select(finite, next_key, state.key), stored)

    return optax.GradientTransformationExtraArgs(init, update)


def _parse(dtype: DTypeLike) -> Any:
    try:
        name = jnp.dtype("bfloat16" if dtype == "bf16" else dtype).name
    except TypeError:
        name = ""
    if name not in _DTYPES:
        raise ValueError(
            f"store_state: dtype must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}; got {dtype!r}."
        )
    return jnp.dtype(name)


def _is_large(x: Any, dtype: Any) -> bool:
    if not isinstance(x, (jax.Array, np.ndarray)) or x.dtype != jnp.float32 or x.size < _SMALLEST:
        return False
    return dtype == jnp.bfloat16 or x.shape[-1] >= _SHORTEST


def _encode_like(old: StoredArray, x: Any, key: jax.Array) -> StoredArray:
    blocks = 1 if old.scale is None else old.scale.shape[-1]
    return encode(jnp.asarray(x, jnp.float32), old.values.dtype, blocks, key)


def _check_inside(inner_state: Any) -> None:
    kinds = (MasterWeightsState, RemainderState)
    nodes = jax.tree.leaves(inner_state, is_leaf=lambda x: isinstance(x, kinds))
    if any(isinstance(node, kinds) for node in nodes):
        raise ValueError(
            "store_state: master_weights is inside, whose float32 parameters would be rounded to "
            "what is stored; write master_weights(store_state(inner, dtype))."
        )


def _check_leaf(path: tuple[Any, ...], leaf: Any, dtype: Any) -> None:
    where = f"store_state: the state at inner_state{jax.tree_util.keystr(path)} is"
    if not is_stored(leaf):
        if _is_large(leaf, dtype):
            raise ValueError(
                f"{where} float32{list(leaf.shape)}, which is not stored; a state of the optimizer "
                "inside is put into one by tx.init(params).from_float32(inner_state)."
            )
        return
    values, scale = leaf
    if values.dtype != dtype:
        raise ValueError(
            f"{where} stored in {values.dtype}, and this one stores {dtype}; write "
            "tx.init(params).from_float32(state.to_float32())."
        )
    given = None if scale is None else (scale.dtype, scale.shape[:-1])
    blocks = 1 if scale is None or not scale.ndim else scale.shape[-1]
    want = None if dtype == jnp.bfloat16 else (jnp.float32, values.shape[:-1])
    if given != want or not 1 <= blocks <= values.shape[-1]:
        has = "no scale" if scale is None else f"a scale {scale.dtype}{list(scale.shape)}"
        raise ValueError(
            f"{where} {values.dtype}{list(values.shape)} with {has}: corrupted, or not from this "
            "optimizer's init. Use the state that init or update returned."
        )
