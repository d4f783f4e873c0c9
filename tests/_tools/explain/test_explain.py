"""`explain`: every row is true, the counts are right, and nothing is computed to find out."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive

import jaxmp
from jaxmp._core.plan.why import Kind

from support import (
    autocast,
    contraction_dtypes,
    explain,
    float16_is_slow,
    gaussian,
    iter_eqns,
    jaxpr_of,
    slow_when,
)

BF16, F16 = "mixed_bfloat16", "mixed_float16"
X, W = gaussian(0, 4, 8, scale=0.3), gaussian(1, 8, 8, scale=0.3)
STRUCT = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.relu(x @ w) @ w)


def line_of(fn: Callable[..., Any], text: str) -> str:
    """``file.py:line`` of the line of `fn` that contains `text`."""
    lines, start = inspect.getsourcelines(fn)
    [offset] = [i for i, line in enumerate(lines) if text in line]
    return f"test_explain.py:{start + offset}"


def rows_of(fn: Callable[..., Any], op: str, *args: Any, policy: Any = BF16) -> list[Any]:
    return [r for r in explain(fn, policy)(*args).rows if r.op == op]


# --- rows ----------------------------------------------------------------------------------------


def test_a_row_says_what_where_which_dtype_why_and_how_often() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("encoder"):
            hidden = jnp.tanh(x @ w)  # low
        return jnp.sum(jnp.exp(hidden @ w))  # into the loss

    rows = explain(fn, BF16)(X, W).rows
    # No recipe, nothing rematerialized, and no attention.
    assert {dataclasses.astuple(r)[8:] for r in rows} == {(None, "", False, "", "", "", False)}
    product = 2 * 4 * 8 * 8
    costs = [(product, 64), (0, 64), (product, 64), (0, 128), (0, 4)]
    assert [dataclasses.astuple(r)[6:8] for r in rows] == costs
    assert [dataclasses.astuple(r)[:6] for r in rows] == [
        ("dot_general", "encoder", line_of(fn, "# low"), "bfloat16", "matmul or convolution", 1),
        ("tanh", "encoder", line_of(fn, "# low"), "bfloat16", "computed from 16-bit values", 1),
        ("dot_general", "", line_of(fn, "# into"), "bfloat16", "matmul or convolution", 1),
        ("exp", "", line_of(fn, "# into"), "float32", "sensitive op: float32", 1),
        ("reduce_sum", "", line_of(fn, "# into"), "float32", "sensitive op: float32", 1),
    ]
    fields = [field.name for field in dataclasses.fields(rows[0])]
    assert fields == [
        "op", "path", "source", "dtype", "reason", "count", "flops", "bytes", "recipe", "why_not",
        "intended", "residual", "fused", "not_fused", "unknown"
    ]  # fmt: skip


def test_lines_inside_control_flow_and_derivatives() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> Any:
            return jax.checkpoint(lambda a: jnp.tanh(a @ w))(c), None  # body

        return jnp.sum(lax.scan(body, x, None, length=3)[0])

    found = explain(jax.grad(fn), BF16)(X, W)
    dots = [r for r in found.rows if r.op == "dot_general"]
    assert {r.source for r in dots} == {line_of(fn, "# body")}
    assert all(r.count == 3 for r in dots)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8, name="out")(nn.relu(nn.Dense(16, name="in_")(nn.LayerNorm()(x))))


class Tower(nn.Module):
    remat: bool = False
    scan: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(Block) if self.remat else Block
        if self.scan:

            class Step(nn.Module):
                @nn.compact
                def __call__(self, x: jax.Array, _: None) -> Any:
                    return block(name="block")(x), None

            steps = nn.scan(
                Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return steps(name="layers")(x, None)[0]
        for i in range(3):
            x = block(name=f"layers_{i}")(x)
        return x


@slow_when(lambda policy, grad: (policy, grad) != (BF16, True))
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("policy", [BF16, "float32"])
def test_path_and_line_are_the_users_inside_a_wrapped_model(policy: str, *, grad: bool) -> None:
    """No transformation, no marker of jaxmp's, no line of Flax's."""
    for remat in (False, True):
        model = jaxmp.wrap(Tower(remat=remat), policy)
        params = jax.eval_shape(model.init, jax.random.key(0), X)

        def fn(params: Any, model: nn.Module = model) -> jax.Array:
            return jnp.sum(model.apply(params, X))

        program = jax.grad(fn) if grad else fn
        line = line_of(Block, "return x +")
        for rows in (jaxmp.explain(program)(params).rows, jaxmp.audit(program)(params).operations):
            found = {(r.path, r.source) for r in rows if r.op == "dot_general"}
            names = [f"layers_{i}/{name}" for i in range(3) for name in ("in_", "out")]
            if not remat:
                assert found == {(f"Tower/{name}", line) for name in names}
            assert len(found) == 6
            assert {source for _, source in found} == {line}
            assert sorted(path.partition("layers_")[2] for path, _ in found) == [
                name.removeprefix("layers_") for name in names
            ]


def test_a_line_beside_a_library_is_the_users() -> None:
    """In a folder whose name begins as that of the library."""
    package = Path(jaxmp.__file__).parent
    found: dict[str, Any] = {}

    def caller(x: jax.Array, w: jax.Array) -> jax.Array:
        return found["product"](x, w)

    source = "def product(x, w):\n    return x @ w\n"
    for folder, line in (
        (package, line_of(caller, "return")),
        (f"{package}_experiments", "train.py:2"),
    ):
        exec(compile(source, f"{folder}/train.py", "exec"), found)
        assert [r.source for r in rows_of(caller, "dot_general", X, W)] == [line]


def test_the_path_under_a_lifted_scan_and_its_count() -> None:
    model = Tower(scan=True)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    found = explain(model.apply, BF16)(params, X)
    dots = [r for r in found.rows if r.op == "dot_general"]
    assert [r.count for r in dots] == [3, 3]
    assert ["in_" in r.path.split("/") for r in dots] == [True, False]
    assert all("layers" in r.path and "block" in r.path for r in dots)
    assert found.products() == {"bfloat16": 6}


# --- counts --------------------------------------------------------------------------------------


def test_lengths_of_scans_are_multiplied_and_other_bodies_count_once() -> None:
    def nested(x: jax.Array, w: jax.Array) -> jax.Array:
        def inner(c: jax.Array, _: None) -> Any:
            with jax.named_scope("inside"):
                return jnp.tanh(c @ w), None

        def outer(c: jax.Array, _: None) -> Any:
            return lax.scan(inner, c @ w, None, length=5)[0], None

        with jax.named_scope("outside"):
            return jax.jit(lambda a: lax.scan(outer, a, None, length=7)[0])(x) @ w

    assert sorted(r.count for r in rows_of(nested, "dot_general", X, W)) == [1, 7, 35]
    assert sum(explain(nested, BF16)(X, W).products().values()) == 43
    [row] = rows_of(nested, "tanh", X, W)
    assert row.count == 35
    assert [part for part in row.path.split("/") if "side" in part] == ["outside", "inside"]

    def others(x: jax.Array, w: jax.Array) -> jax.Array:
        x = lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: jnp.tanh(a @ w) @ w, x)
        return lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 1, s[1] @ w), (0, x))[1]

    assert [r.count for r in rows_of(others, "dot_general", X, W)] == [1, 1, 1, 1]

    shared = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("first"):
            x = shared(x, w)
        with jax.named_scope("second"):
            return shared(x, w)

    assert [r.path for r in rows_of(twice, "dot_general", X, W)] == ["first", "second"]
    assert sum(explain(twice, BF16)(X, W).products().values()) == 2


def test_contractions_are_counted_by_dtype_most_first() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        exact = jnp.dot(x, w, precision="highest")
        kernel = w[None]
        convolved = lax.conv_general_dilated(
            x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return exact + (x @ w) @ w + convolved[0]

    found = explain(fn, F16)(X, W).products()
    assert list(found.items()) == [("float16", 3), ("float32", 1)]
    assert explain(jnp.sin, BF16)(X).products() == {}


# --- summary and table ---------------------------------------------------------------------------


def pinned(x: jax.Array, w: jax.Array) -> jax.Array:
    exact = jnp.dot(x, w, precision="highest")  # pinned
    region = jaxmp.full_precision(jnp.matmul)(x, w)  # region
    return (x @ w) @ w + exact + region


def test_it_counts_matmuls_by_dtype_and_names_each_reason_for_float32_once() -> None:
    def many(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(12):
            x = jnp.dot(x, w, precision="highest")  # all
        return x

    found = explain(pinned, BF16)(X, W)
    lines = found.summary().splitlines()
    assert lines[0].split() == ["policy", str(jaxmp.get_policy(BF16))]
    assert lines[1].partition(" of ")[0] in (
        "matmuls, convolutions    2 bfloat16 (50.0%), 2 float32 (50.0%)",
        "matmuls, convolutions    2 float32 (50.0%), 2 bfloat16 (50.0%)",
    )
    asked = "precision=HIGHEST, as the author asked"
    for fn, text, why, count in (
        (pinned, "# pinned", asked, "1 operation"),
        (pinned, "# region", "float32 region", "1 operation"),
        (many, "# all", asked, "12 operations"),
    ):
        lines = str(explain(fn, BF16)(X, W)).splitlines()
        [at] = [i for i, line in enumerate(lines) if line.startswith(f"float32, {why}: {count}")]
        assert f" {line_of(fn, text)}: dot_general" in lines[at + 1]
    summary = explain(layer, BF16)(X, W).summary()
    assert "float32 (" not in summary
    assert "not classified" not in summary
    assert "matmuls, convolutions    none" in explain(jnp.sin, BF16)(X).summary()


def test_all_of_it_is_the_summary_and_an_aligned_table() -> None:
    found = explain(pinned, BF16)(X, W)
    verdict, summary, table = found.to_text(verbose=True).split("\n\n")
    assert verdict.startswith(f"{BF16}: 2 of 4 matmuls and convolutions run in ")
    assert summary == found.summary()
    header, *body = table.splitlines()
    assert len(body) == len(found.rows)
    assert header.split() == ["op", "dtype", "times", "source", "path", "reason"]
    columns = [m.start() for m in re.finditer(r"\S+", header)]
    for line, row in zip(body, found.rows, strict=True):
        cells = [line[a:b].strip() for a, b in zip(columns, [*columns[1:], None], strict=True)]
        assert cells == [row.op, row.dtype, str(row.count), row.source, row.path, row.reason]


# --- nothing is computed -------------------------------------------------------------------------


def test_shapes_are_enough_and_explanations_are_plain_data() -> None:
    got = explain(layer, BF16)(STRUCT, STRUCT)
    assert got == explain(layer, BF16)(W, W)
    assert got != explain(layer, F16)(W, W)
    assert isinstance(got.rows, tuple)
    cells = {type(cell) for row in got.rows for cell in dataclasses.astuple(row)}
    assert cells == {str, int, bool, type(None)}  # no recipe
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)  # 4 TiB
    assert explain(layer, BF16)(huge, huge).products() == {"bfloat16": 2}

    def fn(x: jax.Array, w: jax.Array, *, times: int, activation: str) -> jax.Array:
        for _ in range(times):
            x = getattr(jnp, activation)(x @ w)
        return x

    found = explain(fn, BF16)(X, W, times=3, activation="tanh")
    assert found.products() == {"bfloat16": 3}


def test_nothing_runs() -> None:
    called: list[int] = []

    def callback(a: Any) -> Any:
        called.append(1)
        return np.asarray(a)

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: called.append(2))
        y = jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ w)
        return y @ w

    found = explain(fn, BF16)(X, W)
    jax.effects_barrier()
    assert called == []
    assert {r.op for r in found.rows} >= {"pure_callback", "debug_callback"}


# --- every reason --------------------------------------------------------------------------------


def normalized(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return jnp.maximum(y * 2.0 + 1.0, 0.0) @ w


UNKNOWN = Primitive("jaxmp_unknown")
UNKNOWN.def_abstract_eval(lambda aval: aval)


def summed(x: jax.Array, w: jax.Array) -> jax.Array:
    start = jnp.zeros((4, 8))
    return lax.scan(lambda s, _: (s + x @ w, jnp.sum(s @ w)), start, None, length=2)[0]


def by_complex(x: jax.Array, w: jax.Array) -> jax.Array:
    dims = (((1,), (0,)), ((), ()))
    return lax.dot_general(x, w * 1j, dims, preferred_element_type=jnp.complex64)


REASONS: dict[str, tuple[Callable[..., Any], str]] = {
    # The reason: a program, and the op it is given for, its dtype, and the policy, if another one.
    "matmul or convolution": (lambda x, w: (x @ w) @ w, "dot_general bfloat16"),
    "chooses among 16-bit values": (lambda x, w: jnp.sum(jnp.maximum(x @ w, 0.0)), "max bfloat16"),
    "summed in float32 from iteration to iteration": (
        summed, "add float32"),
    "computed from 16-bit values": (lambda x, w: jnp.tanh(x @ w) @ w, "tanh bfloat16"),
    "a parameter beside a 16-bit value": (lambda x, w: (x @ w + w[0]) @ w, "add bfloat16"),
    "a constant beside a 16-bit value": (lambda x, w: (x @ w + 0.5) @ w, "add bfloat16"),
    "made from 16-bit values, beside one": (
        lambda x, w: (x @ w + jnp.exp(x @ w)) @ w, "add bfloat16"),
    "float32 data wins over 16 bits": (lambda x, w: (x + x @ w) @ w, "add float32"),
    "a constant or a position as a factor of a 16-bit value": (
        lambda x, w: (x @ w * 280.0) @ w, "mul bfloat16"),
    "a constant beside a 16-bit value: multiplied in float32, then narrowed": (
        lambda x, w: (x @ w * 0.6) @ w, "mul bfloat16"),
    "a large constant, or a position, wins over 16 bits as a summand": (
        lambda x, w: (x @ w + 280.0) @ w, "add float32"),
    "made from 16-bit values, as a factor of one": (
        lambda x, w: (x @ w * jnp.exp(w @ w)[:1]) @ w, "mul bfloat16"),
    "a value that many share wins over 16 bits as a summand": (
        lambda x, w: (x @ w + jnp.exp(w @ w)[:1]) @ w, "add float32"),
    "divides by a 16-bit value, of which the derivative may overflow": (
        lambda x, w: (x @ w / (x @ w)) @ w, f"div float32 {F16}"),
    "an angle, a logarithm or a root wants the result as well": (
        lambda x, w: jnp.sum(jnp.sin(y := x @ w + w[0])) + jnp.sum(y @ w), "add float32"),
    "a recurrence: combined in float32": (
        lambda x, w: lax.associative_scan(jnp.multiply, x @ w) @ w, "mul float32"),
    "a position: it becomes an index": (lambda x, w: w[((x @ w) * 2.0).astype(int)], "mul float32"),
    "an operand is the solution of a linear system": (
        lambda x, w: x @ jnp.linalg.cholesky(w), "dot_general float32"),
    "an operand is made of constants": (
        lambda x, w: x @ jnp.cos(jnp.outer(jnp.arange(8.0), jnp.arange(8.0))),
        "dot_general float32"),
    "a small product: contracts 8 elements, neither operand of parameters alone": (
        lambda x, w: (x + w[0]) @ (w + x[0]), "dot_general float32"),
    "a small product: a matrix of 3 rows, and as few columns": (
        lambda x, w: x[:, :3] @ w[:3, :3], "dot_general float32"),
    "a scalar product": (lambda x, w: jnp.vdot(x, x), "dot_general float32"),
    "float16: multiplies by one float32 vector, and only float32 ops want the result": (
        lambda x, w: 1.0 / ((x @ w) @ (w @ w).sum(0)), f"dot_general float32 {F16}"),
    "a product of one parameter with itself, which costs the same for any batch": (
        lambda x, w: (w @ w) @ w, "dot_general float32"),
    "only angles or a linear solver want the result": (
        lambda x, w: jnp.sin(x @ w), "dot_general float32"),
    "only float32 ops want the result": (lambda x, w: jnp.tanh(x @ w), "tanh float32"),
    "no 16-bit operand": (lambda x, w: (x * 2.0) @ w, "mul float32"),
    "leaves a normalization towards a matmul or convolution": (normalized, "max bfloat16"),
    "ends a normalization: leaves in 16 bits": (
        lambda x, w: ((y := x @ w) * lax.rsqrt(jnp.var(y, -1, keepdims=True)) + w[0]) @ w,
        "add float32"),
    "normalizes: meets a statistic of its own operand": (normalized, "sub float32"),
    "the constant 1e-08 vanishes in float16": (
        lambda x, w: (x @ w + 1e-8) @ w, f"add float32 {F16}"),
    "the constant 100000 is beyond float16": (lambda x, w: (x @ w / 1e5) @ w, f"div float32 {F16}"),
    "sensitive op: float32": (lambda x, w: jnp.exp(x @ w) @ w, "exp float32"),
    "ops={'rev': 'compute'}": (
        lambda x, w: x[::-1] @ w,
        "rev bfloat16 mixed_bfloat16,ops=rev:compute",
    ),
    "moves values: as they are": (lambda x, w: (x @ w).reshape(8, 4).T @ w, "reshape bfloat16"),
    "runs as written": (lambda x, w: jnp.linalg.cholesky(w @ w.T), "cholesky float32"),
    "not classified: runs as written": (lambda x, w: UNKNOWN.bind(x @ w), "jaxmp_unknown float32"),
    "not classified, not looked inside: runs as written": (
        lambda x, w: lax.composite(lambda a: a * 2, "jaxmp.double")(x @ w), "composite float32"),
    "no float32 operand": (lambda x, w: jnp.arange(4) + 1, "add int32"),
    "float32 region": (lambda x, w: jaxmp.full_precision(jnp.matmul)(x, w), "dot_general float32"),
    "precision=HIGHEST, as the author asked": (
        lambda x, w: jnp.dot(x, w, precision="highest"), "dot_general float32"),
    "precision=HIGH, as the author asked": (
        lambda x, w: jnp.dot(x, w, precision="high"), "dot_general float32"),
    "multiplies float32 by complex64": (
        by_complex, "dot_general float32"),
    "the author's conversion": (
        lambda x, w: (x @ w).astype(jnp.int32), "convert_element_type float32"),
    "the author's upcast": (
        lambda x, w: x.astype(jnp.bfloat16).astype(jnp.float32) @ w,
        "convert_element_type float32"),
    "repeats values: its gradient is summed in float32": (
        lambda x, w: jnp.broadcast_to((x @ w)[:, None], (4, 3, 8)) @ w, "broadcast_in_dim float32"),
    "the author upcast an operand to float32": (
        lambda x, w: x.astype(jnp.bfloat16).astype(jnp.float32) @ w, "dot_general float32"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_given_where_it_holds(reason: str) -> None:
    fn, said = REASONS[reason]
    op, dtype, *other = said.split(" ")
    policy = other[0] if other else BF16
    rows = rows_of(fn, op, X, W, policy=policy)
    assert (dtype, reason) in [(r.dtype, r.reason) for r in rows], rows


# What other tests see: passes add it, or no row shows it, or `contraction` is not asked for it.
NOT_HERE = {
    Kind.INSIDE, Kind.WHILE, Kind.LAYERS_OWN, Kind.CLOSES_OVER, Kind.OPERANDS, Kind.DROPPED,
    Kind.MOVES_NARROWED, Kind.MOVES_WIDENED, Kind.OUTSIDE,
}  # fmt: skip


def test_no_reason_is_untested() -> None:
    # Notes begin with a space or punctuation, or are empty.
    kinds = [kind for kind in Kind if str(kind.of(1, 2))[:1].isalpha() and kind not in NOT_HERE]
    sentences = {k: k.of("…", "…").said() for k in kinds}
    patterns = {k: re.escape(said).replace("…", ".+") for k, said in sentences.items()}
    untested = {k for k, p in patterns.items() if not any(re.fullmatch(p, r) for r in REASONS)}
    assert not untested
    assert len(kinds) > 40


# --- explain agrees with what runs ---------------------------------------------------------------


def attention(x: jax.Array, w: jax.Array) -> jax.Array:
    q, k, v = x @ w, x @ (w + 1), x @ (w * 2)
    return jax.nn.softmax(q @ k.T / 8**0.5) @ v @ w


def trained(x: jax.Array, w: jax.Array) -> jax.Array:
    return w - 0.1 * jax.grad(lambda w: jnp.mean(normalized(x, w) ** 2))(w)


def linen(x: jax.Array, w: jax.Array) -> jax.Array:
    model = Tower(scan=True)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return model.apply(jax.tree.map(lambda p: jnp.full(p.shape, 0.1), params), x)


MODELS = {f.__name__: f for f in (normalized, attention, trained, linen, pinned)}


@float16_is_slow
@pytest.mark.parametrize(
    "policy", [BF16, F16, "mixed_bfloat16,softmax=bf16", "bfloat16", "float32"]
)
@pytest.mark.parametrize("name", MODELS)
def test_explain_agrees_with_the_transformed_program(name: str, policy: str) -> None:
    fn = MODELS[name]
    found = explain(fn, policy)(X, W)
    fast = autocast(fn, policy)
    written = Counter(r.dtype for r in found.rows if r.op == "dot_general")
    assert written == contraction_dtypes(fast, X, W)
    run = list(iter_eqns(jaxpr_of(fast, X, W)))
    # (reduce_max of a 16-bit value is exact in either dtype; bound in float32 for its transpose.)
    for op in ("exp", "tanh", "rsqrt", "reduce_sum", "logistic", "sqrt", "log"):
        said = Counter(r.dtype for r in found.rows if r.op == op)
        runs = Counter(str(e.invars[-1].aval.dtype) for e in run if e.primitive.name == op)
        assert said == runs, op


def test_what_the_policy_says_of_ops_that_do_not_occur() -> None:
    policy = f"{BF16},ops=exp:promote|pjit:full_precision|tanh:full_precision"
    said = explain(lambda x, w: jnp.exp(jnp.tanh(x @ w)), policy)(X, W).summary()
    assert said.splitlines()[-1] == "in the policy's ops, but met nowhere here: pjit"
    assert "met nowhere" not in explain(layer, BF16)(X, W).summary()


def test_the_scopes_of_jaxmp_are_not_modules() -> None:
    tx = jaxmp.dynamic_loss_scale(optax.sgd(0.1))

    def step(w: jax.Array, state: Any, x: jax.Array) -> Any:
        loss, grads = jaxmp.value_and_grad(lambda w, x: layer(x, w), state)(w, x)
        return tx.update(grads, state, w), loss

    found = explain(step, F16)(W, tx.init(W), X)
    assert any(r.op == "is_finite" for r in found.rows)
    assert "jaxmp" not in str(found)
    assert not any("jaxmp" in r.path for r in found.rows)


def test_the_optimizer_is_outside_the_model() -> None:
    """Of a step with a wrapped model: not a "float32 region", which someone asked for."""
    model = jaxmp.wrap(nn.Dense(4), BF16)
    tx = optax.adam(1e-3)

    @jaxmp.full_precision
    def pinned(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean(pinned(model.apply(p, x)) ** 2))(params)
        return tx.update(grads, state, params)

    params = model.init(jax.random.key(0), X)
    rows = jaxmp.explain(step)(params, tx.init(params), X).rows
    assert {r.reason for r in rows if r.op in ("sqrt", "integer_pow")} == {"outside the model"}
    assert {r.reason for r in rows if r.op == "sin"} == {"float32 region"}
    alone = jaxmp.explain(lambda x: jnp.sin(x))(X).rows
    assert {r.reason for r in alone} == {"float32 region"}


def test_the_letters_of_an_einsum_are_no_module() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("block"):
            return jnp.einsum("bi,ij->bj", x, w)

    assert {r.path for r in explain(fn, BF16)(X, W).rows} == {"block"}


def test_reasons_name_the_dtypes_of_a_policy_for_float64() -> None:
    """From the policy, not by rewriting English: operands of float32 stay so."""
    policy = jaxmp.Policy(param_dtype="float64", compute_dtype="float32", output_dtype="float64")
    with jax.enable_x64(True):
        x, w = (jnp.asarray(a, "float64") for a in (X, W))
        found = explain(lambda w, x: jnp.tanh(x.astype("float32") @ w.astype("float32")), policy)
        reasons = {r.reason for r in found(w, x).rows if r.op == "dot_general"}
    assert not any("float64, not float64" in reason for reason in reasons)
    said = Kind.OPERANDS.of("float32", "float64").said("float64", "float32", "float32")
    assert said == "operands are float32, not float64"
