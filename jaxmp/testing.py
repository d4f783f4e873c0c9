"""Assertions about precision and about devices, for your own test suite.

Example:
  >>> import jax, jax.numpy as jnp, jaxmp
  >>> step = jaxmp.autocast(jax.grad(lambda w, x: jnp.sum(x @ w)), "mixed_bfloat16")
  >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  >>> jaxmp.testing.assert_contractions_in(step, "bfloat16")(w, w)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxmp._audit.audit import audit
from jaxmp._audit.report import PrecisionError
from jaxmp._jaxprs.attributes import is_tracer
from jaxmp._parity.tolerance import tolerance
from jaxmp._training.replicas_equal import copies_in
from jaxmp.dtypes import parse_dtype
from jaxmp.recipes import FORMATS

__all__ = ["PrecisionError", "assert_contractions_in", "assert_in_step", "tolerance"]


def assert_contractions_in(fn: Callable[..., Any], dtype: DTypeLike) -> Callable[..., None]:
    """Raises unless every contraction of a function, forward and backward, multiplies in a dtype.

    Contractions that autocast itself keeps in float32 because they are geometry or signal
    processing, in which there is no speed, are not counted. For an 8-bit dtype, neither are those
    that are not for a recipe to multiply: attention's own products, the logits.

    Args:
      fn: a function of any pytrees, as for `jaxmp.audit`; it is traced, not run.
      dtype: the dtype, or its name.

    Returns:
      A function with the arguments of `fn`: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      PrecisionError: (an AssertionError) that names the lines of those that do not, or says that
        there is no contraction.
    """
    name = _dtype_name(dtype)
    audited = audit(fn)

    def check(*args: Any, **kwargs: Any) -> None:
        report = audited(*args, **kwargs)
        contractions = [op for op in report.operations if op.flops and not op.kept]
        if contractions and np.dtype(name).itemsize == 1:
            contractions = [op for op in contractions if not (op.skipped and op.skipped.intended)]
            if not contractions:
                why = report.quantized().summary()
                raise PrecisionError(
                    f"assert_contractions_in: no contraction is for 8 bits:\n{why}"
                )
        if not contractions:
            raise PrecisionError("assert_contractions_in: there is no contraction.")
        dtypes = [(op.source, op.emulates or op.dtype) for op in contractions]
        wrong = {f"{source} multiplies {dtype}": None for source, dtype in dtypes if dtype != name}
        if wrong:
            lines = "\n".join(f"  {line}" for line in wrong)
            raise PrecisionError(
                f"assert_contractions_in: not all contractions are {name}:\n{lines}"
            )

    return check


def assert_in_step(tree: Any) -> None:
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
      ...     jaxmp.testing.assert_in_step(state)
    """
    if any(map(is_tracer, jax.tree.leaves(tree))):
        raise TypeError("assert_in_step: reads values, so call it outside jit, on the new state.")
    compared, apart = 0, list[str]()
    for copies in copies_in(tree):
        compared += 1
        if copies.differ:
            apart.append(f"  {copies.path or 'the array'}: {copies.elements()}")
    if not compared:
        raise ValueError(
            "assert_in_step: no array in it is on several devices of this process, so there is "
            "nothing to compare."
        )
    if apart:
        more = [f"  and {len(apart) - 8} more"] if len(apart) > 8 else []
        lines = "\n".join([*apart[:8], *more])
        raise AssertionError(
            f"assert_in_step: devices that are to hold the same values do not:\n{lines}\nUnder "
            "jax.shard_map, average gradients over devices (jax.lax.pmean) before the optimizer's "
            "update, leave axis_name out of dynamic_loss_scale, and let JAX check (check_vma=True)."
        )


def _dtype_name(dtype: DTypeLike) -> str:
    spelled = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    for fmt in FORMATS.values():
        if fmt.scaled and spelled in (fmt.short, fmt.name):
            return fmt.name
    return str(np.dtype(parse_dtype(dtype, "assert_contractions_in: dtype")).name)
