"""Scores of how far each module's rounding turns the gradient, from one backward pass per batch.

Let d be the change of the gradients g by rounding, orthogonal to g: the cosine between g and the
rounded gradients falls to 1 - |d|^2 / (2 |g|^2). For the rounding errors e of one product, wherever
it is in the loss or in its backward pass, d is the derivative of g along e. With a random vector v
of unit variance, orthogonal to g, |d|^2 is the mean of <v, d>^2 = <u, e>^2, where u = d<v, g>/dy is
the cotangent of the product's result y when <v, g> is differentiated: one backward pass through the
gradients gives it for all products. e is the product's result in a format, less y.

<u, e>^2 for few v is a rough estimate of its mean. The sum of (u e)^2 over elements (as in Fisher's
information) is a good one if elements round independently, and too small if they do not, as when a
weight is rounded once for all tokens. The larger of the two is taken. Errors of modules are assumed
independent, so that scores add up.

Source: the scores of Model-Optimizer's AutoQuantize (first order, Fisher), of gradients instead of
the loss; Hutchinson, "A stochastic estimator of the trace" (1990).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._autocast.flops import contraction_flops
from jaxmp._autocast.parameters import by_position
from jaxmp._autocast.plan import Step
from jaxmp._autocast.primitives import LOW
from jaxmp._autocast.products.derivative import QuantizedDot
from jaxmp._autocast.products.quantize import dequantize, quantize
from jaxmp._autocast.rules import LOW_DTYPES
from jaxmp._autocast.transform import plan_program, trace_program
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import varying_axes
from jaxmp._jaxprs.compat import dtype_of
from jaxmp._jaxprs.equation_parameters import product_axes
from jaxmp._jaxprs.trace import trace
from jaxmp._jaxprs.walk import Place
from jaxmp._numerics.tune_costs import ProductFormat
from jaxmp._numerics.tune_paths import Path, Places, PreparedLoss, run_placed
from jaxmp.policy import Policy
from jaxmp.recipes import Format

_SIZES = {"block": 128, "mx": 32}


@dataclasses.dataclass(frozen=True)
class Scorer:
    """The scorer of the formats to try at each module, with `probes` random vectors."""

    loss: PreparedLoss
    ways: dict[Path, tuple[ProductFormat, ...]]
    loss_scale: float
    probes: int

    def __call__(self, batch: Any, number: int) -> np.ndarray[Any, Any]:
        """Returns the scores of a batch: float64[modules, ways], the increase of 1 - cosine."""
        key = jax.random.fold_in(jax.random.key(0), number)
        try:
            found = [
                np.asarray(self._step(self.loss.params, batch, k), np.float64)
                for k in jax.random.split(key, self.probes)
            ]
        except Exception as error:
            error.add_note(
                "tune: the gradients of the loss are differentiated: it must be twice "
                "differentiable. Replace a fused kernel by the same computation in jax.numpy."
            )
            raise
        together, apart = np.moveaxis(np.stack(found), -1, 0)
        with np.errstate(invalid="ignore", over="ignore"):
            scores = np.maximum(np.mean(together**2, axis=0), np.mean(apart, axis=0)) / 2
        scores = np.where(np.isfinite(scores), scores, np.inf)
        return np.array(
            [
                [scores[i, self._tried[path].index(way)] if way.is_low else 0.0 for way in ways]
                for i, (path, ways) in enumerate(self.ways.items())
            ]
        )

    @functools.cached_property
    def _tried(self) -> dict[Path, tuple[ProductFormat, ...]]:
        """The distinct formats of each module."""
        return {path: tuple(dict.fromkeys(ways)) for path, ways in self.ways.items()}

    @functools.cached_property
    def _step(self) -> Callable[..., Any]:
        return jax.jit(self._sums)

    def _sums(self, params: Any, batch: Any, key: Any) -> Any:
        """Returns, for each module and format, the sums of u e and of (u e)^2."""
        slots = max(map(len, self._tried.values()))
        taps = jnp.zeros((len(self._tried), slots, 2))
        program = gradients(self.loss.loss, self.loss_scale)
        traced = trace(program, (params, batch), {})
        tapped = _tapped(self.loss.places, self._tried)

        def across(taps: Any) -> Any:
            _, found = traced.rebuild(tapped(traced.jaxpr, traced.arrays, taps))
            g = jax.tree.leaves(found)
            here = lax.stop_gradient(g)
            keys = jax.random.split(key, len(g))
            v = [jax.random.normal(k, x.shape) for k, x in zip(keys, g, strict=True)]
            square = _dot(here, here)
            along = _dot(v, here) / square
            v = [a - along * b for a, b in zip(v, here, strict=True)]
            return _dot(v, g) / jnp.sqrt(square)

        return jax.grad(across)(taps)


def gradients(loss: Callable[[Any, Any], Any], scale: float) -> Callable[[Any, Any], Any]:
    """Returns a function that computes the loss, multiplied by `scale`, and its gradients."""
    return jax.value_and_grad(lambda params, batch: loss(params, batch) * scale)


def _dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return sum(jnp.sum(x * y) for x, y in zip(a, b, strict=True))


def _tapped(
    places: Places, ways: dict[Path, tuple[ProductFormat, ...]]
) -> Callable[[Any, Sequence[Any], Any], list[Any]]:
    """Returns a function that runs a program with a `_tap` on each product."""
    index = {path: i for i, path in enumerate(ways)}

    def tapped(
        eqn: JaxprEqn, operands: list[Any], at: Place, extra: Sequence[Any]
    ) -> Sequence[Any]:
        results = compat.bind(eqn, operands)
        place = places.of(at.path) if is_product(eqn) else None
        if place not in index:
            return results
        roundings = tuple(_rounding(eqn, how, backward=at.backward) for how in ways[place])
        [y], [taps] = results, extra
        return [_tap(eqn, roundings, y, taps[index[place]], operands)]

    return lambda jaxpr, arrays, taps: run_placed(jaxpr, arrays, tapped, [taps])


def is_product(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a float32 product."""
    return contraction_flops(eqn) > 0 and all(
        dtype_of(atom) == np.float32 for atom in eqn.invars[:2]
    )


_Rounding = tuple[Callable[..., Any], Callable[..., Any]] | None


def _tap(
    eqn: JaxprEqn, roundings: tuple[_Rounding, ...], y: Any, taps: Any, operands: list[Any]
) -> Any:
    """Returns `y`; its cotangent u makes the sums of u e and (u e)^2 the gradient of `taps`."""

    @jax.custom_vjp
    def tap(y: Any, taps: Any, *operands: Any) -> Any:  # noqa: ARG001
        return y

    def forward(y: Any, taps: Any, *operands: Any) -> Any:
        return y, (y, taps, operands)

    def backward(kept: Any, u: Any) -> Any:
        y, taps, operands = kept
        sums = jnp.zeros_like(taps)
        for i, rounding in enumerate(roundings):
            if rounding is None:
                continue
            of_operand, of_result = rounding
            rounded = [of_operand(x, side) for side, x in enumerate(operands[:2])]
            [low] = compat.bind(eqn, [*rounded, *operands[2:]])
            weighed = u * (of_result(low) - y)
            sums = sums.at[i].set(jnp.stack([jnp.sum(weighed), jnp.sum(weighed**2)]))
        return (u, sums, *[None] * len(operands))

    tap.defvjp(forward, backward)
    # Under shard_map the sums are of each device: the transpose of this pcast adds them up.
    axes = set(varying_axes(jax.typeof(y))) - set(varying_axes(jax.typeof(taps)))
    if axes:
        taps = lax.pcast(taps, tuple(sorted(axes)), to="varying")
    return tap(y, taps, *operands)


def _rounding(eqn: JaxprEqn, how: ProductFormat, *, backward: bool) -> _Rounding:
    """Returns functions that round an operand, by its index, and the result; None if none does."""
    if not how.is_low:
        return None
    fmt = how.format_of(backward=backward)

    def of_operand(x: Any, side: int) -> Any:
        if not fmt.scaled or how.recipe is None or eqn.primitive.name != "dot_general":
            return _nearest(x, how.dtype if fmt.scaled else fmt.name)
        axes = product_axes(eqn)[0][side]
        return _in_8_bits(_nearest(x, how.dtype), fmt, axes, how.recipe.granularity)

    return of_operand, lambda y: _nearest(y, how.dtype)


def _nearest(x: Any, dtype: str) -> Any:
    """Rounds to a dtype's values, in float32: XLA might drop a conversion to it and back."""
    if dtype == "float32":
        return x
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _in_8_bits(x: Any, fmt: Format, summed: Sequence[int], granularity: str) -> Any:
    """Rounds an operand to 8 bits and scales it back; blocks lie along the axes `summed`."""
    every = tuple(range(x.ndim))
    if granularity == "tensor":
        return dequantize(quantize(x, fmt, every))
    size = _SIZES.get(granularity, 0)
    axis = summed[-1] if summed else None
    if size and axis is not None and x.shape[axis] % size == 0:
        split = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
        return dequantize(quantize(x.reshape(split), fmt, (axis + 1,))).reshape(x.shape)
    return dequantize(quantize(x, fmt, tuple(summed)))


def ways_of(
    loss: PreparedLoss, batch: Any, candidates: Sequence[Policy], paths: Sequence[Path]
) -> dict[Path, tuple[ProductFormat, ...]]:
    """Returns the formats of each module's products, one for each candidate.

    If a policy treats some products of a module differently, as those of a layer and of attention
    inside it, the format of the fewest bits is taken.
    """
    ways: dict[Path, list[ProductFormat]] = {path: [] for path in paths}
    for policy in candidates:
        args = loss.params, batch
        traced = trace_program(loss.loss, args, {}, policy)
        given = by_position(loss.loss, 0)(args, {})
        found: dict[Path, ProductFormat] = {}
        for visit in plan_program(traced.jaxpr, policy, given).walk():
            if visit.step.eqn.primitive.name not in LOW:
                continue
            path = loss.places.of(visit.place.path)
            how = _multiplied(visit.step, policy)
            if path in ways and (path not in found or _bits(how) < _bits(found[path])):
                found[path] = how
        for path in paths:
            ways[path].append(found.get(path, ProductFormat()))
    return {path: tuple(several) for path, several in ways.items()}


def _multiplied(step: Step, policy: Policy) -> ProductFormat:
    """Returns the format that a planned product multiplies."""
    if isinstance(step.op, QuantizedDot):
        return ProductFormat(np.dtype(policy.compute_dtype).name, step.op.product.recipe)
    low = [dtype for dtype in step.ins if dtype in LOW_DTYPES]
    return ProductFormat(low[0].name) if low else ProductFormat()


def _bits(how: ProductFormat) -> int:
    return min(how.format_of(backward=backward).bits for backward in (False, True))
