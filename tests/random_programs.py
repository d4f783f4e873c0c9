"""Random differentiable programs, and what 16-bit rounding may do to each of them.

A `Program` is drawn choice by choice (from hypothesis or from a seed) and is plain data;
`Program.function()` is the JAX function it describes, with real `scan`, `cond`, `jit`,
`checkpoint`, `custom_jvp`, ... inside. `numpy_reference.run` computes such a function; a `Rounding`
multiplies every result by `1 ± unit` at random, cotangents included. The spread of
the results over a few such runs is the error that rounding every value once makes *in this
program*: it carries the program's own condition numbers, so a tolerance made of it needs no
constant per operation, and is as tight for a well-conditioned program as it is forgiving for an
ill-conditioned one.

Decisions must not hang on rounding, or no tolerance holds. Operations with a kink or a jump (relu,
max, sort, floor, comparisons) therefore take operands shifted well away from it (`_apart`), and
branches are taken on integers. Operations with poles or overflow get operands squashed into their
domain (`tanh`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from accuracy import ROUNDING
from jax import lax

from jaxmp._core.jaxprs import compat

from support import CONTRACTIONS, iter_eqns

ROWS, WIDTH = 4, 8
SHAPES = {"m": (ROWS, WIDTH), "v": (WIDTH,), "w": (WIDTH, WIDTH)}
INPUTS = ("m", "m", "v", "w", "w")  # then two int32 scalars: a branch index and a row index

Value = Any
_RNG = np.random.default_rng(0)
_SIGNS = np.where(_RNG.random((ROWS, WIDTH)) < 0.5, -1.0, 1.0).astype(np.float32)
_ORDER = np.stack([_RNG.permutation(WIDTH) for _ in range(ROWS)]).astype(np.float32)
_MASK = _RNG.random((ROWS, WIDTH)) < 0.6
_SEGMENTS = np.array([0, 2, 0, 1])


def _like(table: np.ndarray, x: Value) -> np.ndarray:
    return table if x.ndim == 2 else table[0]


def _apart(x: Value) -> Value:
    """`x` moved to at least 0.25 from zero: a constant decides the sign of each element."""
    return jnp.tanh(x) + 1.25 * _like(_SIGNS, x)


def _ranked(x: Value) -> Value:
    """`x` with elements at least 1 apart along the last axis, in a constant order."""
    return jnp.tanh(x) + 3.0 * _like(_ORDER, x)


def _squash(x: Value) -> Value:
    return jnp.tanh(x)


class Op(NamedTuple):
    """One first-order operation: operand kinds (`e` = m or v, the same throughout) and result."""

    inputs: str
    output: str
    run: Callable[..., Value]


OPS: dict[str, Op] = {}


def _unary(
    name: str, fn: Callable[[Value], Value], domain: Callable[..., Value] | None = None
) -> None:
    def run(x: Value) -> Value:
        return fn(x if domain is None else domain(x))

    OPS[name] = Op("e", "e", run)


def _positive(x: Value) -> Value:
    return 1.5 + _squash(x)


def _half(x: Value) -> Value:
    return 0.5 * _squash(x)


for _name, _fn, _domain in [
    ("tanh", jnp.tanh, None),
    ("logistic", jax.nn.sigmoid, None),
    ("sin", jnp.sin, None),
    ("cos", jnp.cos, None),
    ("erf", jax.scipy.special.erf, None),
    ("neg", jnp.negative, None),
    ("asinh", jnp.arcsinh, None),
    ("atan", jnp.arctan, None),
    ("silu", jax.nn.silu, None),
    ("gelu", jax.nn.gelu, None),
    ("softplus", jax.nn.softplus, None),
    ("stop_gradient", lambda x: 0.5 * x + 0.5 * lax.stop_gradient(x), None),
    ("copy", jnp.copy, None),
    ("exp", jnp.exp, _squash),
    ("exp2", jnp.exp2, _squash),
    ("expm1", jnp.expm1, _squash),
    ("sinh", jnp.sinh, _squash),
    ("cosh", jnp.cosh, _squash),
    ("cube", lambda x: x**3, _squash),
    ("square", jnp.square, _squash),
    ("log", jnp.log, _positive),
    ("log1p", jnp.log1p, _positive),
    ("sqrt", jnp.sqrt, _positive),
    ("rsqrt", lax.rsqrt, _positive),
    ("cbrt", jnp.cbrt, _positive),
    ("reciprocal", jnp.reciprocal, _positive),
    ("pow", lambda x: x**1.3, _positive),
    ("lgamma", lax.lgamma, _positive),
    ("digamma", lax.digamma, _positive),
    ("tan", jnp.tan, _half),
    ("asin", jnp.arcsin, _half),
    ("acos", jnp.arccos, _half),
    ("atanh", jnp.arctanh, _half),
    ("erf_inv", lax.erf_inv, _half),
    ("relu", jax.nn.relu, _apart),
    ("abs", jnp.abs, _apart),
    ("sign", lambda x: 0.3 * jnp.sign(x) * x, _apart),
    ("clip", lambda x: jnp.clip(x, -1.0, 1.0) + 0.1 * x, lambda x: 1.5 * _apart(x)),
    ("finite", lambda x: jnp.where(jnp.isfinite(x) & (x > 0), x, 0.1 * x), _apart),
    ("floor", lambda x: x - jnp.floor(x), lambda x: 0.3 * _squash(x) + 0.5),
    ("round", lambda x: x - 0.1 * jnp.round(x), lambda x: 0.3 * _squash(x) + 2.0),
    ("reduce_max", lambda x: x.max(-1, keepdims=True) - 0.1 * x, _ranked),
    ("reduce_min", lambda x: 0.3 * x.min(-1, keepdims=True) - 0.1 * x, _ranked),
    ("argmax", lambda x: jax.nn.one_hot(jnp.argmax(x, -1), WIDTH) * x, _ranked),
    ("sort", lambda x: 0.2 * jnp.sort(x, axis=-1), _ranked),
    ("cummax", lambda x: 0.2 * lax.cummax(x, axis=x.ndim - 1), _ranked),
    ("cummin", lambda x: 0.2 * lax.cummin(x, axis=x.ndim - 1), _ranked),
    ("cumsum", lambda x: 0.3 * jnp.cumsum(x, axis=-1), None),
    ("cumprod", lambda x: jnp.cumprod(x, axis=-1), lambda x: 1.0 + 0.2 * _squash(x)),
    ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=x.ndim - 1), _squash),
    ("reduce_prod", lambda x: jnp.prod(x, -1, keepdims=True) * x, lambda x: 1.0 + 0.2 * _squash(x)),
    ("reduce_sum", lambda x: 0.2 * x.sum(-1, keepdims=True) * jnp.ones_like(x), None),
    ("logsumexp", lambda x: jax.nn.logsumexp(x, -1, keepdims=True) - x, None),
    ("softmax", lambda x: jax.nn.softmax(x, axis=-1), None),
    ("log_softmax", lambda x: 0.3 * jax.nn.log_softmax(x, axis=-1), None),
    ("standardize", lambda x: jax.nn.standardize(x, axis=-1, epsilon=0.1), None),
    ("l2_normalize", lambda x: x / jnp.sqrt(1.0 + jnp.sum(x * x, -1, keepdims=True)), None),
    ("rev", lambda x: x[..., ::-1], None),
    ("roll", lambda x: jnp.roll(x, 3, -1), None),
    ("pad", lambda x: jnp.pad(x[..., 2:], [(0, 0)] * (x.ndim - 1) + [(1, 1)]), None),
    ("concatenate", lambda x: jnp.concatenate([x[..., 4:], 0.5 * x[..., :4]], -1), None),
    ("take", lambda x: jnp.take(x, np.array([0, 3, 3, 1, 7, 6, 2, 2]), axis=-1), None),
    ("scatter_add", lambda x: x.at[..., np.array([1, 1, 5])].add(0.5 * x[..., :3]), None),
    ("scatter_set", lambda x: x.at[..., np.array([2, 6])].set(0.25), None),
    ("reshape", lambda x: x.reshape(-1, 2).T.reshape(x.shape), None),
    ("iota", lambda x: x + 0.1 * lax.iota(jnp.float32, WIDTH), None),
    ("numpy_table", lambda x: x + _like(_SIGNS, x) * np.float32(0.3), None),
    ("constant_mask", lambda x: jnp.where(_like(_MASK, x), x, 0.0), None),
    (
        "lowest_mask",
        lambda x: jax.nn.softmax(jnp.where(_like(_MASK, x), x, jnp.finfo(jnp.float32).min), -1),
        None,
    ),
    (
        "dropout",
        lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.7, x.shape), x / 0.7, 0.0),
        None,
    ),
    ("barrier", lax.optimization_barrier, None),
    ("complex", lambda x: (lax.complex(x, 0.5 * x) * (0.6 - 0.8j)).real, None),
    ("fourier", lambda x: jnp.fft.irfft(jnp.fft.rfft(x), WIDTH).astype(jnp.float32), None),
    ("reduce_precision", lambda x: x + 0.0 * lax.reduce_precision(x, 8, 7), None),
]:
    _unary(_name, _fn, _domain)


def _layer_norm(x: Value, b: Value) -> Value:
    mean = x.mean(-1, keepdims=True)
    centered = x - mean
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 0.1) * b + 0.1


def _batch_norm(x: Value) -> Value:
    mean = x.mean(0)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(0) + 0.1)


def _convolution(x: Value, w: Value) -> Value:
    kernel = jnp.stack([0.7 * w, -0.7 * w.T])
    return lax.conv_general_dilated(
        x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0]


def _gated(x: Value, w: Value) -> Value:
    u = x @ w
    return jax.nn.silu(u) * _squash(x)


def _attention(x: Value, y: Value) -> Value:
    logits = (x @ y.T) * WIDTH**-0.5
    return jax.nn.softmax(logits, axis=-1) @ x


def _masked_attention(x: Value, y: Value) -> Value:
    causal = np.tril(np.ones((ROWS, ROWS), bool))
    logits = jnp.where(causal, (x @ y.T) * 0.3, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(logits, axis=-1) @ y


def _biased_attention(x: Value, y: Value, b: Value) -> Value:
    keep = np.arange(ROWS)[:, None] > 0  # the first row has nothing to attend to
    logits = 3.0 * _squash(x @ y.T * 0.3) + b[:ROWS]
    logits = jnp.where(keep, logits, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(logits, axis=-1) @ _squash(y)


def _attention_with_dropout(x: Value, y: Value, w: Value) -> Value:
    weights = jax.nn.softmax((x @ w) @ y.T * 0.3, axis=-1)
    keep = jax.random.bernoulli(jax.random.key(2), 0.7, weights.shape)
    return jnp.where(keep, weights / 0.7, 0.0) @ (y @ w)


def _heads(x: Value, y: Value) -> Value:
    q, k = (z.reshape(ROWS, 2, WIDTH // 2) for z in (x, y))
    weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k) * 0.5, axis=-1)
    return jnp.einsum("hts,shd->thd", weights, q).reshape(ROWS, WIDTH)


def _pick(x: Value, w: Value) -> Value:
    logits = jax.nn.log_softmax(x @ w)
    return 0.3 * jnp.take_along_axis(logits, np.array([[1], [7], [0], [1]]), axis=-1) * x


def _batched_matmul(x: Value, y: Value) -> Value:
    a, b = x.reshape(2, ROWS, WIDTH // 2), y.reshape(2, WIDTH // 2, ROWS)
    return 0.3 * jnp.einsum("bij,bjk->ibk", _squash(a), b).reshape(ROWS, WIDTH)


for _name, _inputs, _output, _run in [
    ("cast_to_bfloat16", "e", "e", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
    ("add", "ee", "e", lambda x, y: 0.5 * (x + y)),
    ("residual", "ee", "e", lambda x, y: x + _squash(y)),
    ("sub", "ee", "e", lambda x, y: x - (0.5 * y)),
    ("mul", "ee", "e", lambda x, y: x * _squash(y)),
    ("div", "ee", "e", lambda x, y: x / (2.0 + _squash(y))),
    ("max", "ee", "e", lambda x, y: jnp.maximum(_squash(x), _squash(y) + 2.25 * _like(_SIGNS, y))),
    ("min", "ee", "e", lambda x, y: jnp.minimum(_squash(x), _squash(y) + 2.25 * _like(_SIGNS, y))),
    ("select", "ee", "e", lambda x, y: jnp.where(_apart(y) > 0, x, y)),
    ("atan2", "ee", "e", lambda x, y: jnp.arctan2(_squash(x), 2.0 + _squash(y))),
    ("logaddexp", "ee", "e", lambda x, y: jnp.logaddexp(x, y)),
    ("power", "ee", "e", lambda x, y: (1.5 + _squash(x)) ** _squash(y)),
    ("bias", "mv", "m", lambda x, b: x + b),
    ("scale", "mv", "m", lambda x, b: x * (1.0 + 0.3 * _squash(b))),
    ("layer_norm", "mv", "m", _layer_norm),
    ("matrix_vector", "mv", "m", lambda x, b: _squash(x @ b)[:, None] * x),
    ("column_mean", "m", "v", lambda x: x.mean(0)),
    ("row", "m", "v", lambda x: x[1] + 0.1 * x[3]),
    ("column_norm", "m", "v", lambda x: jnp.sqrt(0.1 + jnp.sum(x * x, axis=0)) * 0.5),
    ("segment_sum", "m", "m", lambda x: jax.ops.segment_sum(x, _SEGMENTS, 3)[_SEGMENTS] * 0.5),
    (
        "window",
        "m",
        "m",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME") / 3.0,
    ),
    ("batch_norm", "m", "m", _batch_norm),
    ("matmul", "mw", "m", lambda x, w: x @ w),
    ("dense", "mw", "m", lambda x, w: jnp.tanh(x @ w + 0.1)),
    ("matmul_transposed", "mw", "m", lambda x, w: jnp.einsum("ij,kj->ik", x, w)),
    ("matmul_highest", "mw", "m", lambda x, w: jnp.matmul(x, w, precision="highest")),
    ("convolution", "mw", "m", _convolution),
    ("gated", "mw", "m", _gated),
    ("vector_matrix", "vw", "v", lambda b, w: b @ w),
    ("attention", "mm", "m", _attention),
    ("masked_attention", "mm", "m", _masked_attention),
    ("biased_attention", "mmv", "m", _biased_attention),
    ("attention_with_dropout", "mmw", "m", _attention_with_dropout),
    ("heads", "mm", "m", _heads),
    ("pick", "mw", "m", _pick),
    ("batched_matmul", "mm", "m", _batched_matmul),
    ("transpose", "w", "w", lambda w: w.T),
    ("weight_norm", "w", "w", lambda w: w * lax.rsqrt(0.5 + jnp.sum(w * w, axis=0))),
    ("outer", "wv", "w", lambda w, b: 0.5 * w + 0.2 * jnp.outer(_squash(b), _squash(b))),
    ("weight_product", "ww", "w", lambda w, u: 0.7 * (w @ u)),
]:
    OPS[_name] = Op(_inputs, _output, _run)


# --- programs --------------------------------------------------------------------------------


class Step(NamedTuple):
    """An operation on earlier values; higher-order ones (`blocks`) run inner programs."""

    op: str
    inputs: tuple[int, ...]
    blocks: tuple[Block, ...] = ()
    variant: int = 0


class Block(NamedTuple):
    """A straight-line program over `params`; its last value of kind `result` is returned."""

    params: str
    steps: tuple[Step, ...]
    result: int


# Higher-order operations: operand kinds, the blocks' parameter kinds and result kind.
NESTED: dict[str, tuple[str, str, str, int]] = {
    # name: (operands, parameters of each block, result, number of blocks)
    "jit": ("mmw", "mmw", "m", 1),
    "shared_jit": ("mmw", "mmw", "m", 0),
    "remat": ("mvw", "mvw", "m", 1),
    "custom_jvp": ("mw", "mw", "m", 1),
    "custom_vjp": ("mw", "mw", "m", 1),
    "scan": ("mmw", "mmw", "m", 1),
    "scan_accumulate": ("mmw", "mw", "m", 1),
    "scan_stacked_weights": ("mww", "mw", "m", 1),
    "fori_loop": ("mw", "mw", "m", 1),
    "while_loop": ("mw", "mw", "m", 1),
    "cond": ("mvw", "mvw", "m", 2),
    "switch": ("mmw", "mmw", "m", 3),
    "map_rows": ("mw", "vw", "v", 1),
    "vmap_rows": ("mw", "vw", "v", 1),
    "dynamic_row": ("mm", "", "m", 0),
}
# Loops over carries and shared functions must not nest without bound.
MAX_DEPTH = 2


class _Draw:
    """Draws programs; `choose(n)` returns an integer below n."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose

    def block(self, params: str, length: int, depth: int, result: str = "m") -> Block:
        kinds, steps = list(params), []
        for _ in range(length):
            step, kind = self._step(kinds, depth)
            steps.append(step)
            kinds.append(kind)
        last = max(i for i, kind in enumerate(kinds) if kind == result)
        return Block(params, tuple(steps), last)

    def _step(self, kinds: list[str], depth: int) -> tuple[Step, str]:
        # One step in three is a control-flow construct, one in three multiplies matrices.
        category = self.choose(3)
        if category == 0 and depth > 0:
            names = [n for n, (operands, *_) in NESTED.items() if set(operands) <= set(kinds)]
            if names:
                return self._nested(names[self.choose(len(names))], kinds, depth)
        names = [n for n, op in OPS.items() if self._fits(op, kinds)]
        if category == 1:
            names = [n for n in names if "w" in OPS[n].inputs or OPS[n].inputs == "mm"] or names
        name = names[self.choose(len(names))]
        op = OPS[name]
        generic = "e"
        if "e" in op.inputs:
            options = [k for k in "mv" if k in kinds]
            generic = options[self.choose(len(options))]
        inputs = tuple(self._operand(kinds, generic if k == "e" else k) for k in op.inputs)
        return Step(name, inputs), generic if op.output == "e" else op.output

    def _nested(self, name: str, kinds: list[str], depth: int) -> tuple[Step, str]:
        operands, params, result, count = NESTED[name]
        inputs = tuple(self._operand(kinds, k) for k in operands)
        blocks = tuple(
            self.block(params, 1 + self.choose(4), depth - 1, result) for _ in range(count)
        )
        return Step(name, inputs, blocks, self.choose(4)), "m"

    def _operand(self, kinds: list[str], kind: str) -> int:
        """Recent values more often than old ones, so that programs are deep."""
        candidates = [i for i, k in enumerate(kinds) if k == kind]
        n = len(candidates)
        return candidates[-1 - min(self.choose(n), self.choose(n))]

    @staticmethod
    def _fits(op: Op, kinds: list[str]) -> bool:
        return all(k in kinds if k != "e" else ("m" in kinds or "v" in kinds) for k in op.inputs)


def _project(y: Value) -> Value:
    """A loss term with cotangents of order 1, different for every element."""
    weights = np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)
    return jnp.sum(y * weights + 0.1 * y * y)


class Program(NamedTuple):
    """A drawn program: `main` over the inputs, `shared` called from several places in it."""

    main: Block
    shared: Block
    seed: int
    branch: int

    @classmethod
    def draw(cls, choose: Callable[[int], int], *, length: int = 12) -> Program:
        draw = _Draw(choose)
        shared = draw.block("mmw", 1 + choose(4), 0)
        main = draw.block("".join(INPUTS), 3 + choose(length - 2), MAX_DEPTH)
        return cls(main, shared, choose(1000), choose(3))

    @classmethod
    def from_seed(cls, seed: int, *, length: int = 12) -> Program:
        rng = np.random.default_rng(seed)
        return cls.draw(lambda n: int(rng.integers(n)), length=length)

    def arguments(self) -> tuple[Value, ...]:
        rng = np.random.default_rng(self.seed)
        scales = {"m": 1.0, "v": 1.0, "w": WIDTH**-0.5}
        arrays = [jnp.asarray(rng.normal(size=SHAPES[k]) * scales[k], jnp.float32) for k in INPUTS]
        return (*arrays, jnp.int32(self.branch), jnp.int32(rng.integers(ROWS)))

    def function(self) -> Callable[..., tuple[Value, tuple[Value, ...]]]:
        """The program as a JAX function of `arguments()`: a scalar loss and its ingredients."""

        def fn(*args: Value) -> tuple[Value, tuple[Value, ...]]:
            interpreter = _Interpreter(self.shared, args[-2], args[-1])
            return self._finish(interpreter, args)

        return fn

    def every_value(self, *args: Value) -> list[Value]:
        """The program as a function of `arguments()` that returns what each step computes."""
        interpreter = _Interpreter(self.shared, args[-2], args[-1])
        return interpreter.values(self.main, args[: len(INPUTS)])[len(INPUTS) :]

    def untouched(self) -> list[bool]:
        """For each step, whether no contraction has a part in what it computes."""
        return _untouched(self.main, self.shared)[len(INPUTS) :]

    def value_and_grad(self, fn: Callable[..., Any]) -> Callable[..., list[Value]]:
        """Loss, results and the gradients of every float input, as one flat list."""
        differentiate = jax.value_and_grad(fn, argnums=tuple(range(len(INPUTS))), has_aux=True)
        return lambda *args: jax.tree.leaves(differentiate(*args))

    def _finish(self, interpreter: _Interpreter, args: Sequence[Value]) -> Any:
        values = interpreter.values(self.main, args[: len(INPUTS)])
        matrices = [v for v in values if v.ndim == 2 and v.shape[0] == ROWS]
        vectors = [v for v in values if v.ndim == 1]
        results = (matrices[-1], matrices[-2], vectors[-1])
        loss = _project(matrices[-1]) + 0.3 * _project(matrices[-2]) + 0.1 * _project(vectors[-1])
        return loss, results

    def __str__(self) -> str:
        """A listing to read when a case fails."""
        lines = [f"seed {self.seed}, branch {self.branch}", "shared:"]
        lines += _listing(self.shared, "  ")
        return "\n".join([*lines, "main:", *_listing(self.main, "  ")])


def _untouched(block: Block, shared: Block) -> list[bool]:
    """For each parameter and step of a block, whether no contraction has a part in it."""
    clean = [True] * len(block.params)
    for step in block.steps:
        inner = [*step.blocks, *([shared] if step.op == "shared_jit" else [])]
        contracts = step.op in OPS and _contracts(step.op)
        clean.append(
            all(clean[i] for i in step.inputs)
            and not contracts
            and all(all(_untouched(b, shared)) for b in inner)
        )
    return clean


@functools.cache
def _contracts(op: str) -> bool:
    """Whether a first-order operation multiplies matrices."""
    shapes = [jnp.ones(SHAPES["m" if k == "e" else k]) for k in OPS[op].inputs]
    eqns = iter_eqns(jax.make_jaxpr(OPS[op].run)(*shapes))
    return any(eqn.primitive.name in CONTRACTIONS for eqn in eqns)


def _listing(block: Block, indent: str) -> list[str]:
    lines = [indent + f"params {block.params}"]
    for i, step in enumerate(block.steps, len(block.params)):
        operands = ", ".join(f"%{j}" for j in step.inputs)
        variant = f" variant {step.variant}" if step.op in NESTED else ""
        lines.append(f"{indent}%{i} = {step.op}({operands}){variant}")
        for inner in step.blocks:
            lines += _listing(inner, indent + "    ")
    return [*lines, f"{indent}return %{block.result}"]


class _Interpreter:
    """Runs blocks with JAX's own constructs."""

    def __init__(self, shared: Block, branch: Value, row: Value) -> None:
        self.branch, self.row = branch, row
        # One jitted function for every call site: its jaxpr is shared between them.
        self.shared_block = shared
        self.shared = jax.jit(lambda *a: self(shared, *a))

    def __call__(self, block: Block, *args: Value) -> Value:
        return self.values(block, args)[block.result]

    def values(self, block: Block, args: Sequence[Value]) -> list[Value]:
        values = list(args)
        for step in block.steps:
            operands = [values[i] for i in step.inputs]
            if step.op in OPS:
                value = OPS[step.op].run(*operands)
            else:
                value = getattr(self, step.op)(step, *operands)
            values.append(value)
        return values

    def jit(self, step: Step, x: Value, y: Value, w: Value) -> Value:
        if step.variant % 2:
            return jax.jit(lambda a: self(step.blocks[0], a, y, w))(x)
        return jax.jit(lambda *a: self(step.blocks[0], *a))(x, y, w)

    def shared_jit(self, step: Step, x: Value, y: Value, w: Value) -> Value:
        return self.shared(self.shared(x, y, w), x, w) if step.variant % 2 else self.shared(x, y, w)

    def remat(self, step: Step, x: Value, b: Value, w: Value) -> Value:
        policies = (None, jax.checkpoint_policies.dots_saveable)
        block = jax.checkpoint(
            lambda *a: self(step.blocks[0], *a),
            policy=policies[step.variant % 2],
            prevent_cse=step.variant < 2,
        )
        return block(x, b, w)

    def _rule_body(self, step: Step) -> Callable[..., Value]:
        # JAX forbids rules to close over tracers, so here branch and row are Python integers.
        inner = _Interpreter(self.shared_block, 1, 2)
        return lambda *args: inner(step.blocks[0], *args)

    def custom_jvp(self, step: Step, x: Value, w: Value) -> Value:
        body = self._rule_body(step)
        wrapped = jax.custom_jvp(body)

        @wrapped.defjvp
        def rule(primals, tangents):
            y, dy = jax.jvp(body, primals, tangents)
            return y, 0.5 * dy

        return wrapped(x, w)

    def custom_vjp(self, step: Step, x: Value, w: Value) -> Value:
        body = self._rule_body(step)
        wrapped = jax.custom_vjp(body)
        wrapped.defvjp(
            lambda *a: (body(*a), a),
            lambda a, g: tuple(-2.0 * t for t in jax.vjp(body, *a)[1](g)),
        )
        return wrapped(x, w)

    def scan(self, step: Step, x: Value, y: Value, w: Value) -> Value:
        def body(carry, u):
            new = 0.5 * carry + jnp.tanh(self(step.blocks[0], carry, u, w))
            return new, new[0] * u

        xs = jnp.stack([y, 0.5 * y, -y])
        carry, ys = lax.scan(
            body, x, xs, reverse=bool(step.variant % 2), unroll=1 + step.variant // 2
        )
        return carry + 0.1 * ys.sum(0)

    def scan_accumulate(self, step: Step, x: Value, y: Value, w: Value) -> Value:
        xs = jnp.stack([y, -0.5 * y, 0.3 * y])
        add = lambda acc, u: (acc + self(step.blocks[0], u, w), None)  # noqa: E731
        return 0.3 * lax.scan(add, x, xs)[0]

    def scan_stacked_weights(self, step: Step, x: Value, w: Value, u: Value) -> Value:
        body = lambda c, k: (0.5 * c + jnp.tanh(self(step.blocks[0], c, k)), None)  # noqa: E731
        return lax.scan(body, x, jnp.stack([w, u]))[0]

    def fori_loop(self, step: Step, x: Value, w: Value) -> Value:
        body = lambda i, c: 0.5 * c + jnp.tanh(self(step.blocks[0], c, w)) * (i + 1)  # noqa: E731
        return lax.fori_loop(0, 2, body, x)

    def while_loop(self, step: Step, x: Value, w: Value) -> Value:
        # Not differentiable in reverse: its operands are constants to the derivative.
        frozen, weights = lax.stop_gradient((x, w))
        body = lambda s: (s[0] + 1, 0.5 * s[1] + jnp.tanh(self(step.blocks[0], s[1], weights)))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 2, body, (jnp.int32(0), frozen))[1] + 0.1 * x

    def cond(self, step: Step, x: Value, b: Value, w: Value) -> Value:
        yes, no = (lambda *a, k=k: self(k, *a) for k in step.blocks)
        return lax.cond(self.branch > 0, yes, no, x, b, w)

    def switch(self, step: Step, x: Value, y: Value, w: Value) -> Value:
        branches = [lambda a, k=k: self(k, a, y, w) for k in step.blocks]
        return lax.switch(self.branch, branches, x)

    def map_rows(self, step: Step, x: Value, w: Value) -> Value:
        return lax.map(lambda r: self(step.blocks[0], r, w), x)

    def vmap_rows(self, step: Step, x: Value, w: Value) -> Value:
        return jax.vmap(lambda r, u: self(step.blocks[0], r, u), in_axes=(0, None))(x, w)

    def dynamic_row(self, step: Step, x: Value, y: Value) -> Value:
        row = lax.dynamic_slice_in_dim(x, self.row, 1)
        return lax.dynamic_update_slice_in_dim(y, 0.5 * row, (self.row + 1) % ROWS, 0)


# --- rounding at random ---------------------------------------------------------

# Results of these are copies, selections or integers: they carry no rounding of their own.
_EXACT = frozenset(
    """
    abs and argmax argmin broadcast_in_dim clamp complex concatenate conj convert_element_type
    copy copy_p cummax cummin dynamic_slice dynamic_update_slice empty2 eq expand_dims floor
    gather ge gt imag iota is_finite le lt max min name ne neg not optimization_barrier or pad
    real reduce_and reduce_max reduce_min reduce_or reduce_precision rem reshape rev round
    scatter select_n sign slice sort split squeeze stack stop_gradient transpose unstack
    """.split()  # noqa: SIM905
)
# Masks of the size of finfo.min must not become infinite.
_LARGE = 1e30


class Rounding:
    """Multiplies what it sees by `1 ± unit` and adds `± tiny`, elementwise, with random signs.

    `tiny` stands for the absolute error below the normal range (float16).
    """

    def __init__(self, seed: int, unit: float, tiny: float = 0.0) -> None:
        self.rng, self.unit, self.tiny = np.random.default_rng(seed), unit, tiny

    def __call__(self, x: Value, unit: float = 0.0) -> Value:
        if x.dtype != np.float32:
            return x
        x = np.asarray(x)
        signs = self.rng.integers(0, 2, size=x.shape).astype(np.float32) * 2 - 1
        sizes = max(self.unit, unit) * np.abs(x) + (x != 0) * self.tiny
        return (x + np.where(np.abs(x) < _LARGE, sizes, 0) * signs).astype(np.float32)

    def constant(self, x: Value) -> Value:
        """A literal or a captured table is rounded unless it is short enough to survive."""
        return x if x.dtype != np.float32 or (x.astype(jnp.bfloat16) == x).all() else self(x)

    def results(self, eqn: Any, outs: list[Value]) -> list[Value]:
        """Rounds what an equation computes, but not what it moves."""
        name = eqn.primitive.name
        if name == "convert_element_type" and outs[0].dtype == jnp.bfloat16:
            # The author's own rounding jumps by a whole spacing wherever a value is near a tie.
            return [self(outs[0].astype(np.float32), ROUNDING).astype(jnp.bfloat16)]
        return outs if name in _EXACT else [self(out) for out in outs]

    def branch(self, jaxpr: Any, outs: list[Value]) -> list[Value]:
        """What a branch hands on unchanged is rounded where a contraction wants the result."""
        jaxpr = compat.closed(jaxpr).jaxpr
        handed_on = [not hasattr(v, "val") and v in jaxpr.invars for v in jaxpr.outvars]
        return [self(o) if same else o for o, same in zip(outs, handed_on, strict=True)]


def random_settings(share: int) -> hypothesis.settings:
    """One `share`-th of the profile's examples."""
    return hypothesis.settings(
        max_examples=max(hypothesis.settings().max_examples // share, 3),
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=True,
    )
