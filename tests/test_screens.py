"""`explain` and `audit` answer on one screen, whatever the depth of the model, and lose nothing."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp import _screen
from jaxmp._audit.findings import alike

from models import CASES, Case, Size
from transformer import TransformerLM

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MIXED = "mixed_bfloat16"


def lm(layers: int) -> Case:
    """The benchmarks' language model, of any depth; nothing of it runs."""
    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    config = {"width": 128, "heads": 4, "layers": layers, "seq": 128, "vocab": 512}
    size = Size(config, tokens, tokens, config["vocab"])
    return Case("lm", TransformerLM, size, size, has_softmax=True)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Decoder(nnx.Module):
    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(64, 16, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def decoder_loss(net: Decoder, tokens: jax.Array) -> jax.Array:
    logits = net(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@functools.cache
def program(name: str) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """A loss, its gradient, and what to call them with."""
    if name == "nnx decoder":
        net = Decoder(6, nnx.Rngs(0))
        tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        return decoder_loss, nnx.value_and_grad(decoder_loss), (net, tokens)
    case = {"lm": lm(4), "lm of 24 layers": lm(24), "cnn": CASES["cnn"]}[name]
    loss = case.loss(small=True)
    return loss, jax.value_and_grad(loss, has_aux=True), case.shapes(small=True)


NAMES = ["lm", "lm of 24 layers", "cnn", "nnx decoder"]


@functools.cache
def explained(name: str, policy: str = MIXED, only: str | None = None) -> Any:
    loss, _, args = program(name)
    return jaxmp.explain(loss, policy, only=only)(*args)


@functools.cache
def audited(name: str, policy: str | None) -> Any:
    _, gradient, args = program(name)
    return jaxmp.audit(gradient, policy)(*args)


def check_screen(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= _screen.LINES == 40
    assert max(map(len, lines)) <= _screen.COLUMNS == 120
    assert re.match(r"[^.]+\S\.", lines[0]), "the answer first, in a sentence"
    assert "to_text(verbose=True)" in lines[-1]


# --- it fits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", [None, "matmul", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_explain_fits_a_screen(name: str, only: str | None) -> None:
    found = explained(name, only=only)
    check_screen(str(found))
    assert str(found).startswith(f"{MIXED}: ")
    assert str(found) == found.to_text()
    assert len(found.to_text(verbose=True).splitlines()) > len(found.rows)


@pytest.mark.parametrize("policy", [None, MIXED])
@pytest.mark.parametrize("name", NAMES)
def test_audit_fits_a_screen(name: str, policy: str | None) -> None:
    report = audited(name, policy)
    check_screen(str(report))
    assert ("Nothing to remark." in str(report)) == (policy is not None)
    assert str(report) == report.to_text()


@pytest.mark.parametrize("policy", ["float32", "mixed_float8", f"{MIXED},residuals=recompute"])
def test_explain_fits_under_policies_with_more_to_say(policy: str) -> None:
    check_screen(str(explained("lm", policy)))


def test_many_faults_fit_a_screen_the_gravest_first() -> None:
    """Thirty layers of which no two are at fault for the same reason."""

    def fn(x: jax.Array, *tables: jax.Array) -> jax.Array:
        for i, table in enumerate(tables):
            x = x + np.full((16, 2 * i + 2), 1.5, np.float32).mean() * jnp.exp(x) @ table
        return x

    x = jax.ShapeDtypeStruct((16, 16), BF16)
    tables = [jax.ShapeDtypeStruct((16, 16), F32) for _ in range(30)]
    report = jaxmp.audit(fn)(x, *tables)
    check_screen(str(report))
    assert len(report.findings) > 30
    assert "matmul or convolution in float32" in str(report).splitlines()[0]
    assert re.search(r"… and \d+ more (findings|places)", str(report))


# --- nothing is lost -----------------------------------------------------------------------------


def test_layers_that_differ_in_their_number_are_one_row() -> None:
    found = explained("lm of 24 layers")
    assert "TransformerLM/Block_*/Dense_* ×48" in str(found)
    assert "TransformerLM/Block_*/LayerNorm_* ×48" in str(found)
    assert "Block_*/Dense_* ×48" in str(audited("lm of 24 layers", None))
    assert "argument [0]['Block_*'] ×24" in str(audited("lm of 24 layers", None))
    assert "Block_7" not in str(found)
    assert "Block_7" in found.to_text(verbose=True)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_groups_are_all_rows(name: str) -> None:
    found = explained(name)
    groups = found.groups()
    grouped = [row for _, rows in groups for row in rows]
    assert Counter(grouped) == Counter(found.rows)
    for path, rows in groups:
        assert len({(row.source, row.dtype, row.reason, row.residual) for row in rows}) == 1
        pattern = re.escape(path.partition(" ×")[0]).replace(r"\*", r"\d+")
        assert all(re.fullmatch(pattern, row.path) for row in rows)
    assert len(groups) < len(found.rows) / 2
    # Costliest first, matmuls and convolutions before all else.
    flops = [sum(row.flops for row in rows) for _, rows in groups]
    assert flops == sorted(flops, reverse=True)
    lines = found.to_text(verbose=True).splitlines()
    assert len(lines[lines.index("", 2) + 2 :]) == len(found.rows)


@pytest.mark.parametrize("name", NAMES)
def test_alike_findings_are_all_findings(name: str) -> None:
    report = audited(name, None)
    groups = alike(report.findings)
    assert Counter(f for group in groups for f in group) == Counter(report.findings)
    verbose = report.to_text(verbose=True)
    assert all(str(finding) in verbose for finding in report.findings)
    total = sum(f.share for f in report.findings)
    assert total == pytest.approx(1)
    assert "1. matmul or convolution in float32, 100.0% of the FLOPs" in str(report)


def test_numbers_of_sizes_and_dtypes_are_not_those_of_layers() -> None:
    assert _screen.of_any_layer("k = 96: multiples of 8") == "k = 96: multiples of 8"
    assert _screen.of_any_layer("float32[8,16] of h_3") == "float32[8,16] of h_*"
    assert _screen.of_any_layer("['layers'][11]['w']") == "['layers'][*]['w']"
    assert _screen.common(["the argument [0]['h_1']", "the argument [0]['h_2']"]).endswith(
        "['h_*']"
    )


# --- some rows -----------------------------------------------------------------------------------


def test_only_matmuls_a_dtype_or_a_module() -> None:
    found = explained("lm")
    matmuls = explained("lm", only="matmul").rows
    assert {row.op for row in matmuls} == {"dot_general"}
    assert len(matmuls) == sum(row.op == "dot_general" for row in found.rows)
    full = explained("lm", only="float32").rows
    assert full == tuple(row for row in found.rows if row.dtype == "float32")
    inside = tuple(r for r in found.rows if r.path.startswith("TransformerLM/Block_1/MultiHead"))
    for pattern in (
        "TransformerLM/Block_1/MultiHeadDotProductAttention_0",
        "Block_1/MultiHead*",  # as in a PolicyMap, below the model
        "**/Block_1/MultiHead*",
    ):
        assert explained("lm", only=pattern).rows == inside
    assert len(explained("lm", only="Block_*/Dense_0").rows) == 4 * len(
        explained("lm", only="Block_2/Dense_0").rows
    )


def test_only_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"only='Blok_1' is neither .*TransformerLM/Block_1"):
        explained("lm", only="Blok_1")


def test_the_rest_is_as_without() -> None:
    few, found = explained("lm", only="matmul"), explained("lm")
    for field in dataclasses.fields(found):
        assert field.name in ("rows", "_saved") or (
            getattr(few, field.name) == getattr(found, field.name)
        )


# --- what a derivative saves ---------------------------------------------------------------------


def test_bytes_that_are_saved_are_those_of_a_derivative() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w) @ w)

    w, x = (jax.ShapeDtypeStruct(shape, F32) for shape in ((16, 16), (8, 16)))
    jaxpr = jax.make_jaxpr(lambda w, x: jax.vjp(lambda w: fn(w, x), w)[1])(w, x).jaxpr
    saved = set(jaxpr.outvars) - set(jaxpr.invars)
    plain = jaxmp.explain(fn, "float32")(w, x).residual_bytes
    assert plain == {"float32": sum(v.aval.size * 4 for v in saved)}
    mixed = jaxmp.explain(fn, MIXED)(w, x).residual_bytes
    assert mixed["bfloat16"] >= (16 * 16 + 2 * 8 * 16) * 2  # the operands of both products
    assert "saved for backward pass" in str(jaxmp.explain(fn, MIXED)(w, x))


def test_what_has_no_derivative_saves_nothing() -> None:
    def loop(w: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c @ w + 1, w)

    w = jax.ShapeDtypeStruct((16, 16), F32)
    for fn in (loop, jax.grad(lambda w: jnp.sum(w @ w)), lambda w: jnp.argmax(w)):
        found = jaxmp.explain(fn, MIXED)(w)
        assert found.residual_bytes == {}
        assert "saved for backward pass" not in str(found)


# --- six planted faults --------------------------------------------------------------------------

H, W, Y = (
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((64, 32), BF16), ((32, 256), BF16), ((64,), jnp.int32))
)


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def rounded_result(w: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
    return cross_entropy((h @ w).astype(F32), y)


def two_widths(w: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
    return cross_entropy((h * jnp.sqrt(F32(32))) @ w, y)


def numpy_constant(w: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
    return cross_entropy((h * np.full(32, 1.5, np.float32)) @ w, y)


FROZEN = jnp.ones((32, 32), F32)


def float32_by_closure(w: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
    return cross_entropy(jnp.tanh(h @ FROZEN) @ w, y)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (rounded_result, "rounded-result"),
        (two_widths, "promotion"),
        (numpy_constant, "promotion"),
        (float32_by_closure, "float32-product"),
    ],
)
def test_planted_dtypes_are_found_and_shown(loss: Any, kind: str) -> None:
    report = jaxmp.audit(jax.grad(loss))(W, H, Y)
    first_line = loss.__code__.co_firstlineno + 1
    found = [f for f in report.findings if f.kind == kind]
    assert found[0].source == f"test_screens.py:{first_line}"
    check_screen(str(report))
    assert f"test_screens.py:{first_line}" in str(report)
    assert found[0].fix in " ".join(str(report).split())


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.tanh(nn.Dense(64)(x)))


NETWORK = Network()
X = jnp.ones((4, 64))
PARAMS = NETWORK.init(jax.random.key(0), X)


def loss_of(params: Any, x: Any) -> jax.Array:
    return jnp.mean(jaxmp.wrap(NETWORK, "mixed_float16").apply(params, x) ** 2)


def unscaled(state: Any, x: Any) -> Any:
    return state.apply_gradients(grads=jax.grad(loss_of)(state.params, x))


def scaled_twice(state: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> jax.Array:
        return jaxmp.loss_scaling.scale_loss(loss_of(params, x), state.opt_state)

    _, grads = jaxmp.value_and_grad(loss, state.opt_state)(state.params, x)
    return state.apply_gradients(grads=grads)


@pytest.mark.parametrize(
    ("step", "tx", "kind"),
    [
        (unscaled, optax.adam(1e-3), "no-scale"),
        (scaled_twice, jaxmp.dynamic_loss_scale(optax.adam(1e-3)), "scaled-twice"),
    ],
)
def test_planted_scales_are_found_and_shown(step: Any, tx: Any, kind: str) -> None:
    state = jaxmp.TrainState.create(apply_fn=NETWORK.apply, params=PARAMS, tx=tx)
    report = jaxmp.audit(step)(state, X)
    assert report.findings[0].kind == kind
    check_screen(str(report))
    assert "test_screens.py:" in str(report)
    assert report.findings[0].what[:60] in " ".join(str(report).split())
