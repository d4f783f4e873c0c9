"""The table of primitives: complete on every supported JAX, without contradictions, overridable."""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.extend.core.primitives as jex_primitives
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jaxmp
from jaxmp._core.jaxprs import primitive_table
from jaxmp._core.jaxprs.higher_order import HIGHER_ORDER
from jaxmp._core.jaxprs.primitive_table import TABLE, Flag, flagged, of_kind
from jaxmp._core.plan.primitives import CALLED, classify
from jaxmp._core.plan.rules import rules_for
from jaxmp.policy import get_policy

from support import (
    ROOT,
    assert_same_program,
    autocast,
    contraction_dtypes,
    explain,
    gaussian,
    primitives,
)

BF16 = "mixed_bfloat16"

X = gaussian(0, 6, 6)


def exported_primitives() -> dict[str, str]:
    """Primitive name → where this JAX exports it."""
    found: dict[str, str] = {}
    for module in (lax, lax.linalg, jex_primitives):
        for attribute in dir(module):
            value = getattr(module, attribute, None)
            if isinstance(value, Primitive):
                found.setdefault(value.name, f"{module.__name__}.{attribute}")
    return found


EXPORTED = exported_primitives()


def plan_rows(fn: Any, *args: Any, policy: Any = BF16) -> dict[str, Any]:
    """The row of each primitive that occurs once."""
    rows = explain(fn, policy)(*args).rows
    names = [row.op for row in rows]
    return {row.op: row for row in rows if names.count(row.op) == 1}


# --- the table -----------------------------------------------------------------------------------


def test_jax_exports_what_we_think_it_does() -> None:
    # If JAX moved its primitives, the next test would pass on an empty list.
    assert len(EXPORTED) > 150
    assert {"dot_general", "exp", "scan", "custom_vjp_call", "cholesky"} <= set(EXPORTED)


def test_every_exported_primitive_is_in_the_table() -> None:
    missing = EXPORTED.keys() - TABLE.keys() - HIGHER_ORDER.keys()
    assert not missing, {EXPORTED[name] for name in missing}


def test_no_primitive_is_listed_twice() -> None:
    listed = Counter(name for name, _ in primitive_table._parsed())
    assert set(listed.values()) == {1}, listed.most_common(3)


def test_no_higher_order_primitive_is_in_the_table() -> None:
    # A class would only be read after the plan has looked inside: it would mean nothing.
    assert TABLE.keys().isdisjoint(HIGHER_ORDER)


def test_no_other_file_lists_primitives() -> None:
    """A few, for one idea, may be named where they are read."""
    for path in (ROOT / "jaxmp").rglob("*.py"):
        if path.name == "primitive_table.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = getattr(node, "elts", [node])
            texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
            words = " ".join(texts).split()
            named = [word for word in words if word in TABLE]
            prose = len(named) < len(words) / 2
            assert prose or len(named) <= 5, f"{path}:{node.lineno} lists {' '.join(named)}"


def test_every_flag_is_some_primitives_and_is_read() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "jaxmp").rglob("*.py")]
    for flag in Flag:
        assert flagged(flag), flag
        name = f"Flag.{flag.name}"
        assert any(f"({name}" in text or f"| {name}" in text for text in sources), flag


@pytest.mark.parametrize(
    ("flag", "refined"),
    [
        (Flag.NORMALIZING | Flag.CHOOSING | Flag.BROADCASTING, of_kind("promote")),
        (Flag.AFFINE, of_kind("promote", "move")),
        (Flag.REPEATING | Flag.WRITING | Flag.CROSSING, of_kind("move")),
        (Flag.SCALING, flagged(Flag.BROADCASTING)),
        (Flag.SINUSOID, flagged(Flag.PERIODIC)),
        (Flag.REORDERING, flagged(Flag.MOVING)),
        (Flag.SENDING, flagged(Flag.CROSSING)),
        (Flag.MOVING, flagged(Flag.CHEAP) & flagged(Flag.UNMEASURED)),
        (Flag.UNMEASURED, flagged(Flag.POLYMORPHIC)),
    ],
)
def test_a_flag_is_one_of_what_it_refines(flag: Flag, refined: frozenset[str]) -> None:
    assert flagged(flag) <= refined


@pytest.mark.parametrize(
    "names",
    [*([name, *others] for name, others in CALLED.items()), ["log", "log1p", "log2"]],
    ids=" ".join,
)
def test_alike_in_every_flag(names: list[str]) -> None:
    """What a function of JAX may be; and logarithms."""
    assert len({TABLE[name] for name in names if name in TABLE}) == 1


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("compute", "dot_general conv_general_dilated ragged_dot_general"),
        (
            "full_precision",
            "exp log log1p pow rsqrt reduce_sum cumsum cumlogsumexp reduce_window_sum",
        ),
        ("full_precision", "scatter-add psum erf_inv lgamma sort top_k select_and_scatter_add"),
        ("promote", "add sub mul div max tanh logistic erf erfc select_n clamp concatenate"),
        ("move", "reshape transpose broadcast_in_dim slice gather reduce_max all_gather"),
        ("as_written", "fft cholesky random_bits complex convert_element_type pure_callback"),
    ],
)
def test_classes_of_the_design(kind: str, names: str) -> None:
    assert set(names.split()) <= of_kind(kind)


@pytest.mark.parametrize("approximate", [True, False])
def test_of_either_gelu_no_float32_is_kept_for_the_backward_pass(approximate: bool) -> None:
    """The exact one, by `erfc`, is what published encoders use; by hand it is 16 bits as well."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w, approximate=approximate) @ w

    _, kept = jax.eval_shape(lambda *args: jax.vjp(autocast(fn, BF16), *args), X, X)
    assert {a.dtype for a in jax.tree.leaves(kept)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("exponent", "kind"), [(2, "promote"), (3, "promote"), (-1, "full_precision")]
)
def test_a_negative_power_is_a_division(exponent: int, kind: str) -> None:
    assert classify("integer_pow", {"y": exponent}) == kind


def test_overrides_come_before_everything_else() -> None:
    overrides = {"integer_pow": "move", "exp": "promote", "sin": "as_written"}
    rules = rules_for(dataclasses.replace(get_policy("mixed_float16"), ops=overrides))
    eqns = jax.make_jaxpr(lambda x: jnp.sin(jnp.exp(x**-1)) + x)(1.0).eqns
    assert [rules.op_class(e) for e in eqns] == ["move", "promote", "as_written", "promote"]


# --- a primitive that nobody listed --------------------------------------------------------------


def make_primitive(name: str) -> Primitive:
    """A differentiable elementwise primitive, `3 * x`, as a user's library would define it."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x * 3)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 3, multiple_results=False))
    ad.deflinear2(primitive, lambda cotangent, _: [cotangent * 3])
    return primitive


triple_p = make_primitive("jaxmp_test_triple")


def product_p_impl(a: Any, b: Any) -> Any:
    return jnp.dot(a, b)


product_p = Primitive("jaxmp_test_product")
product_p.def_impl(product_p_impl)
product_p.def_abstract_eval(lambda a, b: a.update(shape=(a.shape[0], b.shape[1])))
mlir.register_lowering(product_p, mlir.lower_fun(product_p_impl, multiple_results=False))


def around_triple(x: jax.Array, w: jax.Array) -> jax.Array:
    return triple_p.bind(x @ w) @ w


def test_unknown_primitive_runs_as_written_and_says_so() -> None:
    found = explain(around_triple, BF16)(X, X)
    [row] = [row for row in found.rows if row.op == triple_p.name]
    assert (row.dtype, row.reason) == ("float32", "not classified: runs as written")
    assert f"not classified, run as written: {triple_p.name}" in found.summary()
    assert primitives(autocast(around_triple, BF16), X, X)[triple_p.name, "float32"] == 1
    assert contraction_dtypes(autocast(around_triple, BF16), X, X) == {"bfloat16": 2}


def test_unknown_primitive_computes_and_differentiates() -> None:
    fast = autocast(lambda x, w: jnp.sum(around_triple(x, w)), BF16)
    want = jax.grad(lambda x, w: jnp.sum(around_triple(x, w)))(X, X)
    for gradient in (jax.grad(fast), jax.jit(jax.grad(fast))):
        # Three contractions, each rounding two operands and a result by eps/2: 4.5 eps, doubled.
        assert np.linalg.norm(gradient(X, X) - want) <= 9 * eps(BF16) * np.linalg.norm(want)


KINDS = {
    "promote": ("bfloat16", "computed from 16-bit values"),
    "move": ("bfloat16", "moves values: as they are"),
    "full_precision": ("float32", "sensitive op: float32"),
    "as_written": ("float32", "runs as written"),
}


@pytest.mark.parametrize("key", [triple_p.name, triple_p], ids=["by name", "by primitive"])
def test_a_policy_classifies_a_users_primitive(key: Any) -> None:
    want = around_triple(X, X)
    for kind, (dtype, reason) in KINDS.items():
        policy = jaxmp.Policy("float32", "bfloat16", "float32", ops={key: kind})
        row = plan_rows(around_triple, X, X, policy=policy)[triple_p.name]
        assert (row.dtype, row.reason) == (dtype, reason)
        fast = autocast(around_triple, policy)
        assert primitives(fast, X, X)[triple_p.name, dtype] == 1
        # Two contractions and the op between them: 3 × 1.5 eps, doubled.
        assert np.linalg.norm(fast(X, X) - want) <= 9 * eps(BF16) * np.linalg.norm(want)


def test_a_users_contraction_can_be_low() -> None:
    policy = jaxmp.Policy("float32", "bfloat16", "float32", ops={product_p: "compute"})

    def fn(x: jax.Array) -> jax.Array:
        return product_p.bind(x, x)

    row = plan_rows(fn, X, policy=policy)[product_p.name]
    assert row.dtype == "bfloat16"
    fast = autocast(fn, policy)
    assert primitives(fast, X)[product_p.name, "bfloat16"] == 1
    assert fast(X).dtype == jnp.float32
    assert np.linalg.norm(fast(X) - X @ X) <= 4 * eps(BF16) * np.linalg.norm(X @ X)


# --- overrides of JAX's own primitives -----------------------------------------------------------


def with_ops(**overrides: str) -> jaxmp.Policy:
    return jaxmp.Policy("float32", "bfloat16", "float32", ops=overrides)


def gated(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.exp(x @ w) @ w


def test_a_follow_op_can_be_full() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w

    assert plan_rows(fn, X, X)["tanh"].dtype == "bfloat16"
    assert plan_rows(fn, X, X, policy=with_ops(tanh="full_precision"))["tanh"].dtype == "float32"
    assert primitives(autocast(fn, with_ops(tanh="full_precision")), X, X)["tanh", "float32"] == 1


@pytest.mark.parametrize("kind", ["full_precision", "as_written"])
def test_contractions_can_be_kept_float32(kind: str) -> None:
    policy = with_ops(dot_general=kind)
    assert explain(gated, policy)(X, X).products() == {"float32": 2}
    fast = autocast(gated, policy)
    assert contraction_dtypes(fast, X, X) == {"float32": 2}
    gradient = jax.grad(lambda x: jnp.sum(fast(x, X)))
    assert set(contraction_dtypes(gradient, X)) == {"float32"}
    np.testing.assert_array_equal(fast(X, X), gated(X, X))


def test_one_kind_of_contraction_alone() -> None:
    def fn(x: jax.Array, kernel: jax.Array, w: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return y @ w

    args = jnp.ones((2, 6, 4)), jnp.ones((3, 4, 6)), X
    policy = with_ops(conv_general_dilated="full_precision")
    rows = plan_rows(fn, *args, policy=policy)
    assert rows["conv_general_dilated"].dtype == "float32"
    assert rows["dot_general"].dtype == "bfloat16"


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    carry, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
    return carry


HIGHER = {
    "scan": scanned,
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: -(a @ w), x),
    "while": lambda x, w: lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ w), (0, x)
    )[1],
    "jit": lambda x, w: jax.jit(lambda a: a @ w)(x),
}


def test_overriding_a_higher_order_primitive_keeps_its_inside_as_written() -> None:
    for name, fn in HIGHER.items():
        assert set(contraction_dtypes(autocast(fn, BF16), X, X)) == {"bfloat16"}
        policy = with_ops(**{name: "as_written"})
        assert_same_program(autocast(fn, policy), fn, X, X)
        rows = explain(fn, policy)(X, X).rows
        [row] = [r for r in rows if r.op == name]
        assert (row.dtype, row.reason) == ("float32", "runs as written")
        assert "dot_general" not in {r.op for r in rows}


def test_overrides_hold_inside_higher_order_primitives_and_regions_of_their_own() -> None:
    policy = with_ops(tanh="full_precision")

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.checkpoint(scanned)(x, w) @ w

    assert plan_rows(fn, X, X, policy=policy)["tanh"].dtype == "float32"
    inner = autocast(scanned, policy)
    assert plan_rows(lambda x, w: inner(x, w) @ w, X, X)["tanh"].dtype == "float32"


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ValueError, match="half"):
        with_ops(exp="half")
