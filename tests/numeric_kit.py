"""Numeric programs, and what 16-bit products may do to each of them.

A program is a function `loss(kit, *args)` written once. Its layers multiply through the kit
(`kit.mm`, `kit.einsum`, `kit.conv`) and its loops carry through it (`kit.scan`, `kit.fori`); all
else is plain `jax.numpy`, products that no one would give to a matrix unit among them: outer
products of positions, rotations, a matrix of kernel values. Four kits make four programs of it:

* *plain*: float32. This is what `autocast` is given. In float64 it is the oracle.
* *hand*: what one writes by hand. `kit.mm(a, b)` is `a.astype(low) @ b.astype(low)`, accumulated in
  float32 and returned low, and JAX's promotion does the rest. A carry keeps the dtype that it
  starts with, or float32 if its update is that.
* *floor*: the plain program's gradient, forward and backward, with the operands of every
  contraction rounded and nothing else. `contraction_floor.py` does that to its jaxpr.

A fifth, *everything*, has every value rounded: a program that tests something shows that.

Errors are relative, in the 2-norm, of the loss and of the gradient by every floating argument, and
root mean squares over `DRAWS` draws of the inputs: one scalar's error can be small by luck.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from accuracy import MEANINGLESS, NEGLIGIBLE, TIMES_FLOOR
from contraction_floor import rounded_contractions, rounded_everywhere
from jax import lax
from numpy_reference import reference

import jaxmp

DRAWS = 3
# Otherwise a compiler may leave out a conversion to 16 bits and back; and JAX 0.12's library of
# products for CPUs sums some of them in 16 bits.
EXACT: dict[str, Any] = {"xla_allow_excess_precision": False}
if jax.__version_info__ >= (0, 12):
    EXACT["xla_cpu_experimental_ynn_fusion_type"] = ""
if jax.__version_info__ < (0, 11):  # `conftest` turns them off; their erf is the one that users get
    EXACT["xla_cpu_use_fusion_emitters"] = True


class Plain:
    """Products and loops in the dtype of their operands: float32, and float64 for the oracle."""

    real = property(lambda self: jnp.result_type(float))  # float64 where that is enabled

    def _product(self, fn: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        return fn(*operands)

    def up(self, x: Any) -> jax.Array:
        """`x.astype(float32)`: where hand-written code has to, before a linear solver, say."""
        return x.astype(self.real)

    def param(self, x: Any) -> jax.Array:
        """A bias, a scale, an embedding: layers written by hand cast it to the dtype they have."""
        return x

    def down(self, x: Any) -> jax.Array:
        """What a layer computed in float32 and returns: by hand, in the dtype it has."""
        return x

    def mm(self, a: Any, b: Any) -> jax.Array:
        return self._product(jnp.matmul, a, b)

    def einsum(self, spec: str, *operands: Any) -> jax.Array:
        return self._product(functools.partial(jnp.einsum, spec), *operands)

    def conv(self, x: Any, kernel: Any, dims: Any = ("NWC", "WIO", "NWC")) -> jax.Array:
        def convolve(x: Any, kernel: Any) -> jax.Array:
            strides = (1,) * (x.ndim - 2)
            return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=dims)

        return self._product(convolve, x, kernel)

    def scan(self, body: Any, init: Any, xs: Any = None, length: int | None = None) -> Any:
        return lax.scan(body, init, xs, length)

    def fori(self, n: int, body: Any, init: Any) -> Any:
        return lax.fori_loop(0, n, body, init)

    def repeat(self, n: int, body: Any, init: Any) -> Any:
        """A loop in Python: unrolled."""
        for i in range(n):
            init = body(i, init)
        return init


class Hand(Plain):
    """Products of 16-bit operands with 16-bit results, as one writes them."""

    def __init__(self, dtype: str) -> None:
        self.low = jnp.dtype(dtype)

    def _product(self, fn: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        # Widened again so that every backend accumulates in float32, forward and backward.
        rounded = (jnp.asarray(x).astype(self.low).astype(self.real) for x in operands)
        return fn(*rounded).astype(self.low)

    def param(self, x: Any) -> jax.Array:
        return x.astype(self.low)

    down = param

    def _start(self, body: Any, init: Any) -> Any:
        """`init`, widened where `body` returns more than it is given."""
        init = jax.tree.map(jnp.asarray, init)
        for _ in range(4):
            out = jax.eval_shape(body, init)
            init = jax.tree.map(
                lambda x, y: x.astype(jnp.promote_types(x.dtype, y.dtype)), init, out
            )
        return init

    def scan(self, body: Any, init: Any, xs: Any = None, length: int | None = None) -> Any:
        first = jax.tree.map(lambda x: jnp.asarray(x)[0], xs)
        init = self._start(lambda c: body(c, first)[0], init)

        def kept(carry: Any, x: Any) -> Any:
            new, y = body(carry, x)
            return jax.tree.map(lambda a, b: a.astype(b.dtype), new, carry), y

        return lax.scan(kept, init, xs, length)

    def fori(self, n: int, body: Any, init: Any) -> Any:
        init = self._start(lambda c: body(0, c), init)

        def kept(i: Any, carry: Any) -> Any:
            return jax.tree.map(lambda a, b: a.astype(b.dtype), body(i, carry), carry)

        return lax.fori_loop(0, n, kept, init)


class Program(NamedTuple):
    """A loss, and how its inputs are drawn.

    `geometry` programs have no contraction that 16 bits would make faster, or need another's
    result exactly: they are held to what is written by hand alone. `scale` is the loss scale
    under float16.
    """

    family: str
    loss: Callable[..., jax.Array]
    draw: Callable[[np.random.Generator], tuple[Any, ...]]
    geometry: bool
    differentiated: bool
    scale: float


PROGRAMS: dict[str, Program] = {}


def program(
    family: str,
    draw: Callable[[np.random.Generator], tuple[Any, ...]],
    *,
    geometry: bool = False,
    differentiated: bool = True,
    scale: float = 256.0,
) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]:
    """Registers a loss under its own name."""

    def register(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        name = loss.__name__.strip("_")
        if name in PROGRAMS:
            raise ValueError(f"two programs are called {name}")
        PROGRAMS[name] = Program(family, loss, draw, geometry, differentiated, scale)
        return loss

    return register


class Error(NamedTuple):
    """Relative errors against float64."""

    loss: float
    gradient: float

    def __str__(self) -> str:
        return f"{self.loss:.2e} / {self.gradient:.2e}"


def inputs(name: str) -> list[tuple[Any, ...]]:
    """Draws of a program's arguments; the floating ones are float32 numbers."""

    def narrowed(x: Any) -> Any:
        x = np.asarray(x)
        return x.astype(np.float32) if x.dtype == np.float64 else x.astype(np.int32)

    draw = PROGRAMS[name].draw
    return [
        tuple(jax.tree.map(narrowed, x) for x in draw(np.random.default_rng(seed)))
        for seed in range(DRAWS)
    ]


def _valued(name: str, loss: Callable[..., Any], scale: float) -> Callable[..., Any]:
    """`(loss, gradients)` of `loss` as a function of a program's arguments."""
    if not PROGRAMS[name].differentiated:
        return lambda *args: (loss(*args), ())

    def valued(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

        def scaled(values: Any) -> Any:
            given = leaves.copy()
            for i, x in zip(floats, values, strict=True):
                given[i] = x
            value = loss(*jax.tree.unflatten(tree, given))
            return value * scale, value

        grads, value = jax.grad(scaled, has_aux=True)([leaves[i] for i in floats])
        return value, [g / scale for g in grads]

    return valued


@functools.cache
def oracle(name: str) -> list[Any]:
    """Losses and gradients in float64, one pair for each draw."""
    fn = reference(_valued(name, functools.partial(PROGRAMS[name].loss, Plain()), 1.0))
    with jax.enable_x64(True):
        return [_numbers(fn(*jax.tree.map(_widened, args))) for args in inputs(name)]


def _widened(x: Any) -> Any:
    return x.astype(np.float64) if x.dtype == np.float32 else x


def _numbers(tree: Any) -> tuple[np.ndarray, np.ndarray]:
    value, grads = tree
    flat = [np.ravel(np.asarray(g, np.float64)) for g in jax.tree.leaves(grads)]
    return np.asarray(value, np.float64), np.concatenate([np.zeros(0), *flat])


VARIANTS = ("autocast", "hand", "floor", "float32")


@functools.cache
def error(name: str, variant: str, dtype: str, by: str = "numpy") -> Error:
    """The error of one variant of a program, computed in NumPy, or by "xla"."""
    loss = PROGRAMS[name].loss
    plain = functools.partial(loss, Plain())
    scale = PROGRAMS[name].scale if dtype == "float16" else 1.0
    if variant == "autocast":
        # As of a caller who names no arguments: the first is the parameters.
        fn = _valued(name, _unwarned(jaxmp.autocast(plain, f"mixed_{dtype}")), scale)
    elif variant == "hand":
        fn = _valued(name, functools.partial(loss, Hand(dtype)), scale)
    elif variant == "floor":
        fn = rounded_contractions(_valued(name, plain, scale), dtype)
    elif variant == "everything":
        fn = rounded_everywhere(_valued(name, plain, scale), dtype)
    else:
        fn = _valued(name, plain, 1.0)
    fn = jax.jit(fn, compiler_options=EXACT) if by == "xla" else reference(fn)
    got = [_numbers(fn(*args)) for args in inputs(name)]
    values, gradients = zip(
        *(
            (_relative(mine[0], true[0]), _relative(mine[1], true[1]))
            for mine, true in zip(got, oracle(name), strict=True)
        ),
        strict=True,
    )
    return Error(_root_mean_square(values), _root_mean_square(gradients))


def _unwarned(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which may say that weights are in other arguments than the first."""

    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*argnums does not name")
            return fn(*args)

    return call


def _root_mean_square(xs: Any) -> float:
    return float(np.sqrt(np.mean(np.square(xs))))


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    if not np.isfinite(want).all():
        raise ValueError("float64 is not finite: the program itself is at fault")
    if want.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        off = np.linalg.norm(np.nan_to_num(got - want, nan=np.inf))
    return float(off / np.linalg.norm(want))


def complaints(name: str, dtype: str, variant: str = "autocast", by: str = "numpy") -> str:
    """What is worse than it may be in a version of a program, with all figures, or ''."""

    def figures(variant: str) -> Error:
        return error(name, variant, dtype, by)

    mine = figures(variant)
    worse = [k for k in range(2) if not _is_fine(mine[k], name, figures, k)]
    if not worse:
        return ""
    too_far = " and ".join(Error._fields[k] for k in worse)
    return (
        f"{name} in {dtype}: {too_far} too far: {', '.join(f'{v} {figures(v)}' for v in VARIANTS)}"
    )


def _is_fine(mine: float, name: str, figures: Callable[[str], Error], k: int) -> bool:
    """The criterion for loss (0) or gradient (1); variants it does not need are not computed."""
    if mine < NEGLIGIBLE[k]:
        return True
    by_hand = figures("hand")[k]
    meaningful = by_hand <= MEANINGLESS  # or not finite, perhaps: then the floor alone decides
    if meaningful and (PROGRAMS[name].geometry or mine <= TIMES_FLOOR * by_hand):
        return mine <= TIMES_FLOOR * by_hand
    return mine <= TIMES_FLOOR * figures("floor")[k]
