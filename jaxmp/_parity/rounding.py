"""Runs a program as written, and with randomly drawn roundings: how far does rounding move it?

The model is that of Higham & Mary (A new approach to probabilistic rounding error analysis, SIAM J.
Sci. Comput. 41 (5), 2019): rounding errors are independent and have mean zero, so that they add up
like a random walk. Stochastic rounding makes that true (Connolly, Higham & Mary, Stochastic
rounding and its probabilistic backward error analysis, SIAM J. Sci. Comput. 43 (1), 2021), so the
program is run a few times with each of its roundings drawn up or down: the spread of the runs is
what rounding does to this program on these numbers, its condition included.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import is_inexact
from jaxmp._jaxprs.aux_outputs import Extra, Out
from jaxmp._jaxprs.compat import dtype_of
from jaxmp._jaxprs.equation_parameters import summed
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.primitive_table import Flag, flagged, of_kind
from jaxmp._numerics.probe import LOW, as_written, in_float32, run_by_name, run_inside
from jaxmp._numerics.statistics import FLOAT32
from jaxmp._numerics.survey import WHOLE, looked_into

# The number of runs. Each rounding is drawn once and shifted by 1/8 of a step from run to run, so
# that four runs round a number halfway between two others up, and four down: a lucky draw cannot
# hide the error of a constant that everything else depends on, such as a scale.
RUNS = 8
_EXACT = of_kind("move") | flagged(Flag.UNMEASURED | Flag.CHOOSING | Flag.MOVING | Flag.EXACT)
# Products are summed in float32, also those of 16 bits; other sums in their own dtype.
_PRODUCTS = of_kind("compute")
_SUMS = frozenset({"reduce_sum", "cumsum", "scatter-add", "reduce_window_sum"})
# Functions that libraries compute to one or two units in the last place, not to half of one.
_APPROXIMATED = of_kind("full_precision") - _SUMS | {"tanh", "logistic", "erf", "erfc"}


@dataclasses.dataclass(frozen=True)
class AsWritten:
    """A run of a program as written that returns some of its values.

    Attributes:
      keep: the names of those values, as in `layers.LayerValue`.
      wide: whether it computes in float32 instead of 16 bits.
    """

    keep: frozenset[str] = frozenset()
    wide: bool = False

    def run(self, jaxpr: Any, arrays: Sequence[Any], prefix: str = "") -> Out:
        """Runs a program; returns its results, and the values to return by name."""
        return run_by_name(jaxpr, arrays, self._equation, prefix, wide=self.wide)

    def _equation(self, eqn: JaxprEqn, operands: list[Any], name: str) -> Out:
        if looked_into(eqn):
            results, extras = run_inside(eqn, operands, name, self.run)
        elif eqn.primitive.name in WHOLE:
            results, extras = self.run(inside(eqn)[0].jaxpr, operands, f"{name}/")
        else:
            results, extras = self.computed(eqn, operands, zlib.crc32(name.encode())), {}
        kept = {
            f"{name}:{k}": Extra(x) for k, x in enumerate(results) if f"{name}:{k}" in self.keep
        }
        return results, extras | kept

    def computed(self, eqn: JaxprEqn, operands: list[Any], draw: int) -> list[Any]:  # noqa: ARG002
        """Computes the results of an equation without inner jaxprs; `draw` hashes its name."""
        return compat.bind(eqn, operands)


@dataclasses.dataclass(frozen=True)
class Rounded(AsWritten):
    """A run in float32 that rounds each result to its own dtype, up or down at random.

    Attributes:
      run_number: uint32[]: the number of the run, below `RUNS`.
      dtype: the dtype that every result is rounded to; None: its own.
    """

    wide: bool = True
    run_number: Any = 0
    dtype: Any = None

    def computed(self, eqn: JaxprEqn, operands: list[Any], draw: int) -> list[Any]:
        results = in_float32(eqn, operands)
        if results is None:
            results = compat.bind(eqn, as_written(eqn, operands))
        rounded = []
        for var, x in zip(eqn.outvars, results, strict=True):
            own = dtype_of(var)
            if own is None or not jnp.issubdtype(own, jnp.inexact):
                rounded.append(x)
                continue
            random = self._random(x, draw)
            dtype = own if self.dtype is None else self.dtype
            low = np.dtype(dtype).itemsize < 4 and not jnp.iscomplexobj(x)
            if eqn.primitive.name in (_SUMS if low else _SUMS | _PRODUCTS):
                x = _summed(eqn, operands, x, random, dtype if low else x.dtype)
            elif not low and not (eqn.primitive.name in _EXACT and own == x.dtype):
                x = _noisy(eqn.primitive.name, x, random)
            if low:
                x = _to(dtype, x.astype(FLOAT32), random)
            rounded.append(x if own in LOW else x.astype(own))
        return rounded

    def _random(self, x: Any, draw: int) -> Any:
        """Draws uint32[...] from the numbers and their places, and shifts it in each run.

        The same number in the same place is rounded the same way, as in a real run.
        """
        bits = lax.bitcast_convert_type(jnp.real(x).astype(FLOAT32), jnp.uint32)
        index = lax.iota(jnp.uint32, bits.size).reshape(bits.shape)
        mixed = (bits ^ index * np.uint32(0x85EBCA6B) ^ np.uint32(draw)) * np.uint32(0x9E3779B1)
        mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0x846CA68B)
        return (mixed ^ mixed >> np.uint32(16)) + self.run_number * np.uint32(2**32 // RUNS)


def _to(dtype: Any, x: Any, random: Any) -> Any:
    """Rounds float32 to a dtype of fewer bits, up or down at random; exact numbers stay."""
    dropped = np.uint32(23 - jnp.finfo(dtype).nmant)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (random >> (np.uint32(32) - dropped))
    rounded = lax.bitcast_convert_type(bits >> dropped << dropped, FLOAT32)
    # The conversion makes subnormal numbers and infinities as the dtype has them.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype).astype(FLOAT32)


def _noisy(op: str, x: Any, random: Any) -> Any:
    """Makes a result in float32 or wider one unit too large or small, in 1/4 of the cases each.

    An operation that is rounded to nearest is off by up to half a unit in the last place; by how
    much is not known without a wider result.
    """
    unit = float(jnp.finfo(x.dtype).eps) * (2 if op in _APPROXIMATED else 1)
    quarter = random >> np.uint32(30)
    factor = jnp.where(quarter == 0, -unit, jnp.where(quarter == 1, unit, 0))
    return x + (factor * jnp.abs(x)).astype(x.dtype)


def _summed(eqn: JaxprEqn, operands: Sequence[Any], x: Any, random: Any, dtype: Any) -> Any:
    """Adds an error to a sum that is as large as that of another order of the terms.

    Adding n terms one by one makes n errors, in units of the partial sums. The mean square of those
    is half that of the last for terms of any sign, and a third for terms of one sign: a random walk
    of n / 2 steps, in units of the sum or the root of the sum of squares, the greater of the two.
    """
    squares = [jnp.square(jnp.abs(y)) if is_inexact(y) else y for y in operands]
    types = {"preferred_element_type": squares[0].dtype} if eqn.primitive.name in _PRODUCTS else {}
    [terms] = compat.bind(eqn, squares, **types)
    scale = jnp.maximum(jnp.abs(x), jnp.sqrt(terms))
    walk = (1 + summed(eqn) / 2) ** 0.5 * float(jnp.finfo(dtype).eps)
    by_chance = random.astype(FLOAT32) * np.float32(2.0**-32) - np.float32(0.5)
    return x + (walk * by_chance * scale).astype(x.dtype)
