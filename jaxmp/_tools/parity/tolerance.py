"""Tolerances for tests that compare a program's results under a policy with float32's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmp._core.autocast import autocast
from jaxmp._core.autocast.nnx_calls import with_module
from jaxmp._core.plan.regions import check_callable
from jaxmp._tools.parity.runs import Program, program_of
from jaxmp.policy import PolicyLike, single_policy

# The tolerance is this many times the largest difference between two runs.
_FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class PreparedTolerance:
    """A program under a policy and in float32, ready to be run."""

    low: Program
    full: Program

    def run(self, arrays: Sequence[Any] | None = None) -> Any:
        """Returns the tolerances, in the structure of the results."""
        keep = {result.name: None for result in self.low.results}
        lows, fulls = (one.run(keep, arrays) for one in (self.low, self.full))
        found = [_tolerance(lows[name], fulls[name]) for name in keep]
        return self.low.call.rebuild(found)


def prepare_tolerance(
    fn: Callable[..., Any],
    policy: PolicyLike | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> PreparedTolerance:
    """Traces the programs; the arguments are explained at `tolerance`."""
    method, modules = with_module(fn)
    args = (*modules, *args)
    low = method if policy is None else autocast(method, policy)
    programs = (program_of("tolerance", one, args, kwargs or {}) for one in (low, method))
    return PreparedTolerance(*programs)


def _tolerance(low: Any, full: Any) -> dict[str, float]:
    size = np.abs(np.asarray(full.value).astype(np.float64))
    rms = float(np.sqrt(np.mean(size**2))) if size.size else 0.0
    reach, scale = np.nan_to_num(low.reach + full.reach, posinf=0), rms + size
    ratio = np.divide(reach, scale, out=np.zeros_like(scale), where=scale > 0)
    rtol = _FACTOR * float(np.max(ratio, initial=0))
    return {"rtol": rtol, "atol": rtol * rms}


def tolerance(fn: Callable[..., Any], policy: PolicyLike | None = None) -> Callable[..., Any]:
    """Derives the tolerances of a test that compares a function under a policy with float32.

    Each result gets an `rtol` and an `atol` for `numpy.testing.assert_allclose`, to be compared
    with the float32 result: `atol` for elements near zero, whose errors are those of the terms that
    cancelled, `rtol` times the magnitude for large ones. Both programs run eight times with their
    roundings drawn at random, as in `jaxmp.parity`; 1.5 times the largest difference between two
    runs, over all elements, is allowed. A tolerance holds for these arguments, and for similar
    ones.

    ``benchmarks/parity.py`` counts, for five models, the seeds and the planted mistakes with which
    a result is outside its tolerance: it finds the mistakes that show in a result.

    Args:
      fn: a function, or a method of an NNX module; for a Linen module, its `apply`.
      policy: as for `jaxmp.autocast`; None: allows for sums in another order only.

    Returns:
      A function of the arguments of `fn` that returns {"rtol": float, "atol": float} in the place
      of each array that `fn` returns.

    Raises:
      TypeError: if `fn` is not callable.
      ValueError: if the policy is unknown, or `fn` returns no array.

    Example:
      >>> import jax.numpy as jnp, jaxmp, numpy as np
      >>> product = lambda w, x: x @ w
      >>> w, x = jnp.linspace(0, 1, 256).reshape(16, 16), jnp.linspace(0, 1, 16)
      >>> allowed = jaxmp.testing.tolerance(product, "mixed_bfloat16")(w, x)
      >>> low = jaxmp.autocast(product, "mixed_bfloat16")(w, x)
      >>> np.testing.assert_allclose(low, product(w, x), **allowed)
      >>> 1e-3 < allowed["rtol"] < 1e-1
      True
    """
    check_callable("tolerance", fn)
    if policy is not None:
        single_policy("tolerance", policy)

    def found(*args: Any, **kwargs: Any) -> Any:
        return prepare_tolerance(fn, policy, args, kwargs).run()

    return found
