"""Assertions about precision and about devices, for your own test suite.

Example:
  >>> import jax, jax.numpy as jnp, jaxmp
  >>> step = jaxmp.autocast(jax.grad(lambda w, x: jnp.sum(x @ w)), "mixed_bfloat16")
  >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  >>> jaxmp.testing.assert_products_in(step, "bfloat16")(w, w)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxmp._core.jaxprs.attributes import is_tracer
from jaxmp._core.printable import printable
from jaxmp._tools.audit.audit import audit
from jaxmp._tools.audit.report import PrecisionError
from jaxmp._tools.lock.check import check as check_lock
from jaxmp._tools.parity.tolerance import tolerance
from jaxmp._training.replicas_equal import copies_in
from jaxmp.dtypes import parse_dtype
from jaxmp.policy import PolicyLike
from jaxmp.recipes import FORMATS

__all__ = [
    "PrecisionError",
    "assert_precision_locked",
    "assert_products_in",
    "assert_replicas_equal",
    "tolerance",
]

_RENAMED = {
    "assert_contractions_in": "assert_products_in",
    "assert_in_step": "assert_replicas_equal",
}

if not TYPE_CHECKING:  # a type checker knows what is there

    def __getattr__(name: str) -> object:
        hint = f"; it is {_RENAMED[name]}" if name in _RENAMED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)


def assert_products_in(fn: Callable[..., Any], dtype: DTypeLike) -> Callable[..., None]:
    """Raises unless all matmuls and convolutions of a function, backward too, multiply in a dtype.

    Those that autocast itself keeps in float32 because they are geometry or signal processing,
    which gain no speed, do not count. For an 8-bit dtype, neither do those that no recipe is meant
    to multiply: attention's own products, the logits.

    Args:
      fn: a function of any pytrees, as for `jaxmp.audit`; it is traced, not run.
      dtype: the dtype, or its name.

    Returns:
      A function with the arguments of `fn`: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      PrecisionError: (an AssertionError) that names the lines of those that do not, or says that
        there is none.
    """
    name = _dtype_name(dtype)
    audited = audit(fn)

    def check(*args: Any, **kwargs: Any) -> None:
        report = audited(*args, **kwargs)
        products = [op for op in report.operations if op.flops and not op.kept]
        if products and np.dtype(name).itemsize == 1:
            products = [op for op in products if not (op.skipped and op.skipped.intended)]
            if not products:
                why = report.quantized().summary()
                raise PrecisionError(f"assert_products_in: no matmul is for {name}:\n{why}")
        if not products:
            raise PrecisionError("assert_products_in: there is no matmul or convolution.")
        dtypes = [(op.source, op.emulates or op.dtype) for op in products]
        wrong = {f"{source} multiplies {dtype}": None for source, dtype in dtypes if dtype != name}
        if wrong:
            lines = printable("\n".join(f"  {line}" for line in wrong))
            raise PrecisionError(f"assert_products_in: not all products are {name}:\n{lines}")

    return check


def assert_replicas_equal(tree: Any) -> None:
    """Raises unless all devices that are to hold the same values do, bit by bit.

    Where a sharding says that an array, or a part of it, is on several devices, each has a copy of
    its own. Under `jax.shard_map(..., check_vma=False)` nothing keeps them equal: a gradient that
    was not averaged over devices, a step that one of them skipped, a random key of its own, and
    they train apart. Call it outside of jit, on a state after a few steps. It compares the devices
    of this process; `jax.experimental.multihost_utils.assert_equal` compares processes.

    Args:
      tree: A pytree, such as a train state; of a Flax NNX module, `nnx.state(module)`.

    Raises:
      AssertionError: If copies differ; it names the arrays, and how many elements on which device.
      ValueError: If no array is on several devices, so that there is nothing to compare.
      TypeError: If an array is traced.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> state = jax.device_put({"w": jnp.ones(8)}, NamedSharding(mesh, PartitionSpec()))
      >>> if jax.device_count() > 1:
      ...     jaxmp.testing.assert_replicas_equal(state)
    """
    if any(map(is_tracer, jax.tree.leaves(tree))):
        raise TypeError(
            "assert_replicas_equal: reads values, so call it outside jit, on the new state."
        )
    compared, apart = 0, list[str]()
    for copies in copies_in(tree):
        compared += 1
        if copies.differ:
            apart.append(f"  {copies.path or 'the array'}: {copies.elements()}")
    if not compared:
        raise ValueError(
            "assert_replicas_equal: no array in it is on several devices of this process, so there "
            "is nothing to compare."
        )
    if apart:
        more = [f"  and {len(apart) - 8} more"] if len(apart) > 8 else []
        lines = "\n".join([*apart[:8], *more])
        raise AssertionError(
            f"assert_replicas_equal: devices that are to hold the same values do not:\n{lines}\n"
            "Under jax.shard_map, average gradients over devices (jax.lax.pmean) before the "
            "optimizer's update, leave axis_name out of dynamic_loss_scale, and let JAX check "
            "(check_vma=True)."
        )


def assert_precision_locked(
    fn: Callable[..., Any],
    path: str | os.PathLike[str],
    policy: PolicyLike | None = None,
    *,
    update: bool = False,
) -> Callable[..., None]:
    """Raises unless a function computes in the dtypes that a lock file says.

    A lock records for each module, forward and backward, the dtypes that its products multiply and
    return, its casts, and the dtypes of all else; the residuals saved for the backward pass; and
    the dtypes of arguments. It has no sizes and no lines. `python -m jaxmp lock` writes it as well.

    Args:
      fn: a function of any pytrees, as for `jaxmp.audit`: best a whole training step, jaxmp's or
        not; it is traced, not run.
      path: the file, which a repository keeps.
      policy: if given, `jaxmp.autocast(fn, policy)` is compared; by default the policy that the
        file says, if it says one.
      update: writes the file, and raises nothing.

    Returns:
      A function with the arguments of `fn`: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      PrecisionError: (an AssertionError) that names the modules, what has changed, and lines.
      ValueError: if there is no such file, it is not a lock, or another version of jaxmp wrote it.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, jaxmp
      >>> x = jnp.ones((8, 8), jnp.bfloat16)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = f"{folder}/precision.lock"
      ...     jaxmp.testing.assert_precision_locked(lambda x: x @ x, file, update=True)(x)
      ...     jaxmp.testing.assert_precision_locked(lambda y: jnp.dot(y, y), file)(x)
    """
    checked = check_lock(fn, path, policy, update=update)

    def check(*args: Any, **kwargs: Any) -> None:
        found = checked(*args, **kwargs)
        if found.differences and not update:
            raise PrecisionError(f"assert_precision_locked: {found}")

    return check


def _dtype_name(dtype: DTypeLike) -> str:
    spelled = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    for fmt in FORMATS.values():
        if fmt.scaled and spelled in (fmt.short, fmt.name):
            return fmt.name
    return str(np.dtype(parse_dtype(dtype, "assert_products_in: dtype")).name)
