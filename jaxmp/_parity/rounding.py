"""Runs a program as it is, and with its roundings drawn at random: how far rounding moves it.

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
from jaxmp._jaxprs.aux_outputs import Extra, Extras
from jaxmp._jaxprs.compat import dtype_of
from jaxmp._jaxprs.equation_parameters import summed
from jaxmp._jaxprs.higher_order import inside
from jaxmp._jaxprs.primitive_table import Flag, flagged, of_kind
from jaxmp._numerics.probe import LOW, Probe, as_written, in_float32
from jaxmp._numerics.statistics import FLOAT32
from jaxmp._numerics.survey import WHOLE, looked_into

# How many runs. Each rounding is drawn once and turned by 1/8 of a step from run to run, so that
# of a number halfway between two others four runs round up and four down: of a constant that all
# else depends on, as a scale, no draw of luck hides the error.
RUNS = 8
_EXACT = of_kind("transparent") | flagged(
    Flag.UNMEASURED | Flag.CHOOSING | Flag.MOVING | Flag.EXACT
)
# Products are summed in float32, also those of 16 bits; other sums in their own dtype.
_PRODUCTS = of_kind("low")
_SUMS = frozenset({"reduce_sum", "cumsum", "scatter-add", "reduce_window_sum"})
# Functions that libraries compute to a unit in the last place, or two, and not to half of one.
_APPROXIMATED = of_kind("full") - _SUMS | {"tanh", "logistic", "erf", "erfc"}


@dataclasses.dataclass(frozen=True)
class AsWritten(Probe):
    """Runs a program and returns some of its values.

    Attributes:
      keep: the names of those values, as in `layers.LayerValue`.
    """

    whole: Any = frozenset().__contains__
    looks: bool = False
    keep: frozenset[str] = frozenset()

    def _equation(
        self, eqn: JaxprEqn, operands: list[Any], name: str
    ) -> tuple[list[Any], Extras, list[Any]]:
        if looked_into(eqn):
            results, extras, _ = super()._equation(eqn, operands, name)
        elif eqn.primitive.name in WHOLE:
            results, extras = self.run(inside(eqn)[0].jaxpr, operands, f"{name}/")
        else:
            results, extras = self.computed(eqn, operands, zlib.crc32(name.encode())), {}
        kept = {
            f"{name}:{k}": Extra(x) for k, x in enumerate(results) if f"{name}:{k}" in self.keep
        }
        return results, extras | kept, []

    def computed(self, eqn: JaxprEqn, operands: list[Any], draw: int) -> list[Any]:  # noqa: ARG002
        """The results of an equation without jaxprs inside; `draw` is one of its own."""
        return compat.bind(eqn, operands)


@dataclasses.dataclass(frozen=True)
class Rounded(AsWritten):
    """Runs a program in float32, and rounds each result to its own dtype: up or down by chance.

    Attributes:
      run_number: uint32[]: which of the runs.
      dtype: the dtype that everything is rounded to; None: its own.
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
        """uint32[...]: drawn from where a number stands and what it is, and turned by each run.

        The same number in the same place is rounded the same way, as it is in truth.
        """
        bits = lax.bitcast_convert_type(jnp.real(x).astype(FLOAT32), jnp.uint32)
        index = lax.iota(jnp.uint32, bits.size).reshape(bits.shape)
        mixed = (bits ^ index * np.uint32(0x85EBCA6B) ^ np.uint32(draw)) * np.uint32(0x9E3779B1)
        mixed = (mixed ^ mixed >> np.uint32(15)) * np.uint32(0x846CA68B)
        return (mixed ^ mixed >> np.uint32(16)) + self.run_number * np.uint32(2**32 // RUNS)


def _to(dtype: Any, x: Any, random: Any) -> Any:
    """float32 rounded to a dtype of fewer bits, up or down by chance; exact numbers stay."""
    dropped = np.uint32(23 - jnp.finfo(dtype).nmant)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (random >> (np.uint32(32) - dropped))
    rounded = lax.bitcast_convert_type(bits >> dropped << dropped, FLOAT32)
    # What is below the normal range, or beyond it, as the dtype has it.
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype).astype(FLOAT32)


def _noisy(op: str, x: Any, random: Any) -> Any:
    """A result in float32 or wider, a unit too large or too small in a quarter of cases each.

    An operation that is rounded to nearest is off by up to half a unit in the last place; by how
    much, there is no wider number to tell.
    """
    unit = float(jnp.finfo(x.dtype).eps) * (2 if op in _APPROXIMATED else 1)
    quarter = random >> np.uint32(30)
    factor = jnp.where(quarter == 0, -unit, jnp.where(quarter == 1, unit, 0))
    return x + (factor * jnp.abs(x)).astype(x.dtype)


def _summed(eqn: JaxprEqn, operands: Sequence[Any], x: Any, random: Any, dtype: Any) -> Any:
    """A sum, off by as much as one in another order may be.

    One after the other, n terms make n errors in units of partial sums, whose mean square is half
    of the last one's for terms of any sign, and a third for terms of one: a random walk of n / 2
    steps, in units of the sum or of the root of the sum of its terms' squares, the greater of both.
    """
    squares = [jnp.square(jnp.abs(y)) if _is_inexact(y) else y for y in operands]
    types = {"preferred_element_type": squares[0].dtype} if eqn.primitive.name in _PRODUCTS else {}
    [terms] = compat.bind(eqn, squares, **types)
    scale = jnp.maximum(jnp.abs(x), jnp.sqrt(terms))
    walk = (1 + summed(eqn) / 2) ** 0.5 * float(jnp.finfo(dtype).eps)
    by_chance = random.astype(FLOAT32) * np.float32(2.0**-32) - np.float32(0.5)
    return x + (walk * by_chance * scale).astype(x.dtype)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
