"""A program that is compared: its layers, and how far rounding moves them.

The model is that of Higham & Mary (A new approach to probabilistic rounding error analysis, SIAM J.
Sci. Comput. 41 (5), 2019): rounding errors are independent and have mean zero, so that they add up
like a random walk. Stochastic rounding makes that true (Connolly, Higham & Mary, Stochastic
rounding and its probabilistic backward error analysis, SIAM J. Sci. Comput. 43 (1), 2021), so the
program is run a few times with each of its roundings drawn up or down: the spread of the runs is
what rounding does to this program on these numbers, its condition included.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxmp._core.autocast.nnx_calls import on_scoped_copies
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import is_inexact, is_tracer
from jaxmp._core.jaxprs.aux_outputs import Extra, Out
from jaxmp._core.jaxprs.compat import dtype_of, shape_of
from jaxmp._core.jaxprs.equation_parameters import summed
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.jaxprs.primitive_table import Flag, flagged, of_kind
from jaxmp._core.jaxprs.trace import Traced, trace
from jaxmp._core.plan.regions import check_callable
from jaxmp._tools.numerics.measurements import FLOAT32
from jaxmp._tools.numerics.probe import LOW, as_written, in_float32, run_by_name, run_inside
from jaxmp._tools.numerics.survey import WHOLE, looked_into
from jaxmp._tools.parity.layers import INPUT, LayerValue, values_of

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
OUTPUT = "output"
# The most bytes of layers that a run may return; the host keeps a few times as many.
_LIMIT = 2**31
# If all values of a program have fewer elements than this, they are returned together.
_SMALL = 2**24
Arrange = Callable[[Any], Any]


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


class Spread(NamedTuple):
    """A value, and how far rounding moves it.

    Attributes:
      value: the array.
      variance: float64: over runs with randomly drawn roundings, the mean of all elements.
      freedom: the number of elements whose errors are independent of one another.
      reach: float64[...]: of a result, the largest difference between two runs in each element.
    """

    value: Any
    variance: float
    freedom: float
    reach: Any = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program that can be run with and without random roundings.

    Attributes:
      tool: the function that runs it, for messages.
      call: the traced program, and the arrays that it is called with.
      values: all of its values, in the order in which they run.
      results: its results: their names, dtypes and shapes.
    """

    tool: str
    call: Traced
    values: tuple[LayerValue, ...]
    results: tuple[LayerValue, ...]

    @functools.cached_property
    def layers(self) -> dict[str, LayerValue]:
        """The values that modules pass to one another, and the results, by name."""
        named = {layer: value for value in self.values for layer in value.layers}
        return named | {result.name: result for result in self.results if result.dtype != "None"}

    @functools.cached_property
    def modules(self) -> list[str]:
        """The names of the modules' outputs, as a `match` takes them."""
        return [name for value in self.values for name in value.layers if INPUT not in name]

    def run(
        self,
        keep: Mapping[str, Arrange | None],
        arrays: Sequence[Any] | None = None,
        dtype: Any = None,
    ) -> dict[str, Spread]:
        """Runs the program, as written and with random roundings.

        Args:
          keep: the values and results to return, by name; each with a function of its array, or
            None.
          arrays: the arguments, instead of those of the call.
          dtype: the dtype to round every result to; None: each to its own.
        """
        names = self._small or frozenset(keep)
        as_it_is, rounded = self._compiled(names, None if dtype is None else np.dtype(dtype))
        arrays = self.call.arrays if arrays is None else arrays

        def arranged(found: dict[str, Any]) -> dict[str, Any]:
            return {
                name: np.asarray(array if keep[name] is None else keep[name](array))  # type: ignore[misc]
                for name, array in found.items()
                if name in keep
            }

        values = arranged(as_it_is(*arrays))
        if dtype == np.float64:
            return {
                name: Spread(value, 0.0, 1.0, np.zeros(value.shape))
                for name, value in values.items()
            }

        def moving(number: int) -> dict[str, Any]:
            try:
                return arranged(rounded(jnp.uint32(number), *arrays))
            except Exception as error:
                error.add_note(
                    f"{self.tool}: this was in a run whose results are rounded up or down at "
                    "random, to measure what rounding does; as written, the program ran without it"
                )
                raise

        runs = map(moving, range(RUNS))
        before = first = next(runs)
        moved: dict[str, list[float]] = {name: [] for name in values}
        ends = {r.name: [first[r.name]] * 2 for r in self.results if r.name in first}
        for run in (*runs, first):
            for name, array in run.items():
                moved[name].append(_half_square(array, before[name]))
            for name, (least, most) in ends.items():
                ends[name] = [np.fmin(least, run[name]), np.fmax(most, run[name])]
            before = run
        with np.errstate(invalid="ignore"):
            reach = {name: np.abs(wide(most) - wide(least)) for name, (least, most) in ends.items()}
        return {
            name: Spread(value, *_moments(moved[name]), reach.get(name))
            for name, value in values.items()
        }

    @functools.cached_property
    def _small(self) -> frozenset[str]:
        """The names of all values, if small: one compiled program then serves every choice."""
        several = [*self.values, *(result for result in self.results if result.dtype != "None")]
        size = sum(math.prod(value.shape) for value in several)
        return frozenset(value.name for value in several) if size < _SMALL else frozenset()

    @functools.cached_property
    def _compiled(self) -> Callable[[frozenset[str], Any], tuple[Any, Any]]:
        """The program as written and with roundings, compiled once for each choice of values."""

        @functools.lru_cache(maxsize=16)
        def compiled(names: frozenset[str], dtype: Any) -> tuple[Any, Any]:
            options: Any = {
                "xla_backend_optimization_level": 0,
                "xla_llvm_disable_expensive_passes": True,
            }
            on_cpu = jax.default_backend() == "cpu"

            def as_it_is(*arrays: Any) -> Any:
                return self._collected(AsWritten(keep=names), names, arrays)

            def rounded(number: Any, *arrays: Any) -> Any:
                how = Rounded(keep=names, run_number=number, dtype=dtype)
                return self._collected(how, names, arrays)

            number = jnp.uint32(0)
            lowered = (
                jax.jit(as_it_is).lower(*self.call.arrays),
                jax.jit(rounded).lower(number, *self.call.arrays),
            )
            kept = jax.tree.leaves(lowered[0].out_info)
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
            if size > _LIMIT:
                raise ValueError(
                    f"{self.tool}: the layers take up {size / 2**30:.1f} GiB, more than "
                    f"{_LIMIT / 2**30:g}: give a smaller batch (or parity a match of fewer layers)"
                )
            first, second = (
                one.compile(compiler_options=options if on_cpu else None) for one in lowered
            )
            return first, second

        return compiled

    def _collected(self, how: AsWritten, names: Collection[str], arrays: Any) -> dict[str, Any]:
        results, extras = how.run(self.call.jaxpr, arrays)
        found = {name: extra.value for name, extra in extras.items()}
        found |= {r.name: x for r, x in zip(self.results, results, strict=True)}
        return {name: found[name] for name in names if name in found}


def _half_square(x: Any, y: Any) -> float:
    """Estimates the variance of a value's elements from two runs, where both are finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(wide(x) - wide(y)) ** 2 / 2
    return float(np.mean(np.nan_to_num(apart, nan=0, posinf=0))) if apart.size else 0.0


def wide(array: Any) -> Any:
    """Converts an array to double precision."""
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _moments(several: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of such estimates, and how many independent elements each averages."""
    mean, variance = float(np.mean(several)), float(np.var(several, ddof=1))
    freedom = 2 * mean**2 / variance if variance else float(RUNS) ** 2
    return mean, freedom


def program_of(
    tool: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Program:
    """Traces a program.

    Raises:
      TypeError: if `fn` is not callable, or an argument is a shape or traced instead of an array.
      ValueError: if it returns no array.
    """
    check_callable(tool, fn)
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct) or is_tracer(leaf):
            name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise TypeError(
                f"{tool}: runs the program, so its arguments are arrays, and it is called outside "
                f"jit; {name} is {'traced' if is_tracer(leaf) else leaf}"
            )
    call = trace(on_scoped_copies(fn), args, kwargs)
    opened, _ = compat.closed(call.jaxpr)
    values = {value.name: value for value in values_of(call.jaxpr)}
    made_by = {
        var: values.get(f"{i}:{k}")
        for i, eqn in enumerate(opened.eqns)
        for k, var in enumerate(eqn.outvars)
    }
    unknown = LayerValue("", "", "", OUTPUT, "", ())
    results = tuple(
        dataclasses.replace(
            (None if isinstance(var, Literal) else made_by.get(var)) or unknown,
            name=OUTPUT + jax.tree_util.keystr(path),
            dtype=str(dtype_of(var)),
            shape=shape_of(var),
            layers=(),
        )
        for path, var in zip(call.structure.paths, opened.outvars, strict=True)
    )
    if all(dtype_of(var) is None for var in opened.outvars):
        raise ValueError(f"{tool}: fn returns no arrays, so there is nothing to compare")
    return Program(tool, call, tuple(values.values()), results)
