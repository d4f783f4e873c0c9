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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import varying_axes
from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.jaxprs.equation_parameters import product_axes
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.trace import trace
from jaxmp._core.plan.flops import contraction_flops
from jaxmp._core.plan.primitives import LOW
from jaxmp._core.plan.rules import LOW_DTYPES
from jaxmp._core.products.derivative import quantize
from jaxmp._core.products.four_bits import quantize_four, read_four
from jaxmp._core.products.scaled import dequantize
from jaxmp._tools.explain.explanation import Explanation, Row
from jaxmp._tools.tune.paths import Path, Places, PreparedLoss, ProductFormat, run_placed
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
    exact: Callable[[Any, Any], Any]  # the loss and its gradients in float32, compiled

    def __call__(self, batch: Any, number: int) -> np.ndarray[Any, Any]:
        """Returns the scores of a batch: float64[modules, ways], the increase of 1 - cosine."""
        value, *g = jax.tree.leaves(jax.device_get(self.exact(self.loss.params, batch)))
        g = [np.asarray(x, np.float32) for x in g]
        check_exact(value, g, number)
        try:
            found = [
                self._step(self.loss.params, batch, _probe(g, (number, i)))
                for i in range(self.probes)
            ]
        except Exception as error:
            error.add_note(
                "tune: the gradients of the loss are differentiated: it must be twice "
                "differentiable. Replace a fused kernel by the same computation in jax.numpy."
            )
            raise

        def score(together: list[Any], apart: list[Any]) -> float:
            with np.errstate(invalid="ignore", over="ignore"):
                error = max(np.mean(np.square(together, dtype=np.float64)), np.mean(apart)) / 2
            return float(error) if np.isfinite(error) else np.inf

        scores: Any = jax.tree.map(
            lambda *sums: score(*map(list, zip(*sums, strict=True))),
            *jax.device_get(found),
            is_leaf=lambda node: isinstance(node, _Sums),
        )
        return np.array(
            [
                [scores[i][self._tried[path].index(way)] if way.is_low else 0.0 for way in ways]
                for i, (path, ways) in enumerate(self.ways.items())
            ]
        )

    @functools.cached_property
    def _tried(self) -> dict[Path, tuple[ProductFormat, ...]]:
        """The distinct formats of each module."""
        return {path: tuple(dict.fromkeys(ways)) for path, ways in self.ways.items()}

    @functools.cached_property
    def _step(self) -> Callable[..., Any]:
        return compiled(self._sums)

    def _sums(self, params: Any, batch: Any, v: Any) -> Any:
        """Returns, for each module and format, the sums of u e and of (u e)^2."""
        zero = jnp.zeros(())
        sums = [[_Sums(zero, zero) for _ in ways] for ways in self._tried.values()]
        program = gradients(self.loss.loss, self.loss_scale)
        traced = trace(program, (params, batch), {})

        def along(sums: Any) -> Any:
            tapped = _tapped(self.loss.places, self._tried, traced.jaxpr, traced.arrays, sums)
            return _dot(v, jax.tree.leaves(traced.rebuild(tapped)[1]))

        return jax.grad(along)(sums)


class _Sums(NamedTuple):
    """The sums, over the elements of products' results, of u e and of (u e)^2."""

    together: Any
    apart: Any


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that runs a few times: on a CPU without the slowest optimizations."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(fn, compiler_options=options)


def _probe(g: Sequence[Any], seed: tuple[int, int]) -> list[Any]:
    """Draws a vector of signs; returns its part that is orthogonal to `g`, over the norm of `g`.

    In NumPy: a program that draws an array of each shape takes longer to compile than a step.
    """
    draw = np.random.default_rng(seed)
    v = [np.float32(2) * draw.integers(0, 2, x.shape, np.int8) - 1 for x in g]
    square = sum(float(np.vdot(x, x)) for x in g)
    along = sum(float(np.vdot(a, x)) for a, x in zip(v, g, strict=True)) / square
    return [
        (a - np.float32(along) * x) / np.float32(square**0.5) for a, x in zip(v, g, strict=True)
    ]


def check_exact(value: Any, gradients: Sequence[Any], number: int) -> None:
    """Raises unless float32's loss and gradients are finite, and some gradient is not 0."""
    what = None
    if not all(np.isfinite(x).all() for x in (value, *gradients)):
        what = "not finite"
    elif not any(x.any() for x in gradients):
        what = "all 0"
    if what:
        raise ValueError(
            f"tune: in float32 the loss of batch {number}, or its gradients, are {what}, so "
            "there is nothing to compare with"
        )


def gradients(loss: Callable[[Any, Any], Any], scale: float) -> Callable[[Any, Any], Any]:
    """Returns a function that computes the loss, multiplied by `scale`, and its gradients."""
    return jax.value_and_grad(lambda params, batch: loss(params, batch) * scale)


def _dot(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return sum(jnp.sum(x * y) for x, y in zip(a, b, strict=True))


def _tapped(
    places: Places,
    ways: dict[Path, tuple[ProductFormat, ...]],
    jaxpr: Any,
    arrays: Sequence[Any],
    sums: Any,
) -> list[Any]:
    """Runs a program with a `_tap` on each product, which adds to its module's `sums`."""
    index = {path: i for i, path in enumerate(ways)}
    flat, tree = jax.tree.flatten(sums)

    def tapped(
        eqn: JaxprEqn, operands: list[Any], at: Place, extra: Sequence[Any]
    ) -> Sequence[Any]:
        results = compat.bind(eqn, operands)
        place = places.of(at.path) if is_product(eqn) else None
        if place not in index:
            return results
        roundings = tuple(_rounding(eqn, how, backward=at.backward) for how in ways[place])
        [y] = results
        return [_tap(eqn, roundings, y, jax.tree.unflatten(tree, extra)[index[place]], operands)]

    return run_placed(jaxpr, arrays, tapped, flat)


def is_product(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a float32 product."""
    return contraction_flops(eqn) > 0 and all(
        dtype_of(atom) == np.float32 for atom in eqn.invars[:2]
    )


_Rounding = tuple[Callable[..., Any], Callable[..., Any]] | None


def _tap(
    eqn: JaxprEqn, roundings: tuple[_Rounding, ...], y: Any, sums: Any, operands: list[Any]
) -> Any:
    """Returns `y`; its cotangent u makes the sums of u e and (u e)^2 the gradient of `sums`."""

    @jax.custom_vjp
    def tap(y: Any, sums: Any, *operands: Any) -> Any:  # noqa: ARG001
        return y

    def forward(y: Any, sums: Any, *operands: Any) -> Any:
        return y, (y, sums, operands)

    def backward(kept: Any, u: Any) -> Any:
        y, sums, operands = kept
        found = []
        for zeros, rounding in zip(sums, roundings, strict=True):
            if rounding is None:
                found.append(jax.tree.map(jnp.zeros_like, zeros))
                continue
            of_operand, of_result = rounding
            rounded = [of_operand(x, side) for side, x in enumerate(operands[:2])]
            [low] = compat.bind(eqn, [*rounded, *operands[2:]])
            weighed = u * (of_result(low) - y)
            found.append(_Sums(jnp.sum(weighed), jnp.sum(weighed**2)))
        return (u, found, *[None] * len(operands))

    tap.defvjp(forward, backward)
    # Under shard_map the sums are of each device: the transpose of this pcast adds them up.
    axes = tuple(sorted(set(varying_axes(jax.typeof(y)))))

    def varying(total: Any) -> Any:
        more = tuple(axis for axis in axes if axis not in varying_axes(jax.typeof(total)))
        return lax.pcast(total, more, to="varying") if more else total

    return tap(y, jax.tree.map(varying, sums), *operands)


def _rounding(eqn: JaxprEqn, how: ProductFormat, *, backward: bool) -> _Rounding:
    """Returns functions that round an operand, by its index, and the result; None if none does."""
    if not how.is_low:
        return None
    fmt = how.format_of(backward=backward)

    def of_operand(x: Any, side: int) -> Any:
        if not fmt.scaled or how.recipe is None or eqn.primitive.name != "dot_general":
            return _nearest(x, how.dtype if fmt.scaled else fmt.name)
        axes = product_axes(eqn)[0][side]
        return _in_few_bits(_nearest(x, how.dtype), fmt, axes, how.recipe.granularity)

    return of_operand, lambda y: _nearest(y, how.dtype)


def _nearest(x: Any, dtype: str) -> Any:
    """Rounds to a dtype's values, in float32: XLA might drop a conversion to it and back."""
    if dtype == "float32":
        return x
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _in_few_bits(x: Any, fmt: Format, summed: Sequence[int], granularity: str) -> Any:
    """Rounds an operand to few bits and scales it back; blocks lie along the axes `summed`.

    4 bits are rounded to nearest in blocks along rows, and not rotated.
    """
    every = tuple(range(x.ndim))
    if granularity == "tensor":
        return dequantize(quantize(x, fmt, every))
    size = _SIZES.get(granularity, 0)
    axis = summed[-1] if summed else None
    if granularity == "nv" and axis is not None:
        rows = jnp.moveaxis(x, axis, -1)
        matrix = rows.reshape(1, -1, x.shape[axis])
        copy = quantize_four(matrix, (1, 16), e4m3=True, stochastic=False)
        return jnp.moveaxis(read_four(copy, (1, 16)).reshape(rows.shape), -1, axis)
    if size and axis is not None and x.shape[axis] % size == 0:
        split = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
        return dequantize(quantize(x.reshape(split), fmt, (axis + 1,))).reshape(x.shape)
    return dequantize(quantize(x, fmt, tuple(summed)))


def formats_of(
    places: Places, plans: Mapping[Policy, Explanation], paths: Sequence[Path]
) -> dict[Path, tuple[ProductFormat, ...]]:
    """Returns the formats of each module's products, one for each candidate, given their plans.

    If a policy treats some products of a module differently, as those of a layer and of attention
    inside it, the format of the fewest bits is taken.
    """
    ways: dict[Path, list[ProductFormat]] = {path: [] for path in paths}
    for policy, plan in plans.items():
        found: dict[Path, ProductFormat] = {}
        for row in plan.rows:
            path = places.of(row.path) if row.op in LOW else None
            if path is None:
                continue
            how = _multiplied(row, policy)
            if path in ways and (path not in found or how.bits < found[path].bits):
                found[path] = how
        for path in paths:
            ways[path].append(found.get(path, ProductFormat()))
    return {path: tuple(several) for path, several in ways.items()}


def _multiplied(row: Row, policy: Policy) -> ProductFormat:
    """Returns the format that a planned product multiplies."""
    if row.recipe is not None:
        return ProductFormat(np.dtype(policy.compute_dtype).name, row.recipe)
    return ProductFormat(row.dtype) if np.dtype(row.dtype) in LOW_DTYPES else ProductFormat()
