"""What a test may allow the results of a program under a policy to differ by from float32's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmp._autocast import autocast
from jaxmp._autocast.nnx_calls import with_module
from jaxmp._autocast.regions import check_callable
from jaxmp._parity.runs import Program, program_of
from jaxmp.policy import PolicyLike, single_policy

# A result may be off by so many times what the farthest two of the runs were apart.
_FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class PreparedTolerance:
    """A program under a policy and in float32, ready to be run."""

    low: Program
    full: Program

    def run(self, arrays: Sequence[Any] | None = None) -> Any:
        """The tolerances, in the structure of the results."""
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
    """Derives what a test may allow the results of a function under a policy to differ by.

    Each result gets an `rtol` and an `atol` for `numpy.testing.assert_allclose`, to be compared
    with the float32 result: `atol` for elements near zero, where errors are those of what
    cancelled, `rtol` times the magnitude for large ones. Both programs run eight times with their
    roundings drawn by chance, as in `jaxmp.parity`; 1.5 times the farthest that two runs are apart,
    over all elements, is allowed. A tolerance holds for these arguments, and for others of their
    kind.

    ``benchmarks/parity.py`` counts the seeds of five models of which a result is outside, and the
    planted mistakes that are: a tolerance finds those which a result shows.

    Args:
      fn: a function, or a method of an NNX module; not a Linen module: its `apply`.
      policy: as for `jaxmp.autocast`; None: what another order of sums may change.

    Returns:
      A function of the arguments of `fn` that gives {"rtol": float, "atol": float} in the place of
      each array that `fn` returns.

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
