"""Assertions about precision, for your own test suite.

Example:
  >>> import jax, jax.numpy as jnp, jaxmp
  >>> step = jaxmp.autocast(jax.grad(lambda w, x: jnp.sum(x @ w)), "mixed_bfloat16")
  >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  >>> jaxmp.testing.assert_contractions_in(step, w, w, dtype="bfloat16")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxmp._audit.audit import audit
from jaxmp._audit.report import PrecisionError
from jaxmp.dtypes import parse_dtype
from jaxmp.recipes import FORMATS

__all__ = ["PrecisionError", "assert_contractions_in"]


def assert_contractions_in(
    fn: Callable[..., Any], *args: Any, dtype: DTypeLike, **kwargs: Any
) -> None:
    """Raises unless every contraction of a function, forward and backward, multiplies in a dtype.

    Contractions that autocast itself keeps in float32 because they are geometry or signal
    processing, in which there is no speed, are not counted. For an 8-bit dtype, neither are those
    that are not for a recipe to multiply: attention's own products, the logits.

    Args:
      fn: a function of any pytrees, as for `jaxmp.audit`; it is traced, not run.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s.
      dtype: the dtype, or its name.
      **kwargs: keyword arguments of `fn`.

    Raises:
      PrecisionError: (an AssertionError) that names the lines of those that do not, or says that
        there is no contraction.
    """
    name = _dtype_name(dtype)
    report = audit(fn, *args, **kwargs)
    contractions = [op for op in report.operations if op.flops and not op.kept]
    if contractions and np.dtype(name).itemsize == 1:
        contractions = [op for op in contractions if not (op.skipped and op.skipped.intended)]
        if not contractions:
            why = report.quantised().summary()
            raise PrecisionError(f"assert_contractions_in: no contraction is for 8 bits:\n{why}")
    if not contractions:
        raise PrecisionError("assert_contractions_in: there is no contraction.")
    dtypes = [(op.source, op.emulates or op.dtype) for op in contractions]
    wrong = {f"{source} multiplies {dtype}": None for source, dtype in dtypes if dtype != name}
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise PrecisionError(f"assert_contractions_in: not all contractions are {name}:\n{lines}")


def _dtype_name(dtype: DTypeLike) -> str:
    spelled = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    for fmt in FORMATS.values():
        if fmt.scaled and spelled in (fmt.short, fmt.name):
            return fmt.name
    return str(np.dtype(parse_dtype(dtype, "assert_contractions_in: dtype")).name)
