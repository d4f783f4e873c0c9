"""`explain`, `audit` and `preflight` answer on one screen, of any program, and lose nothing."""

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
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._tools import screen
from jaxmp._tools.audit.report import alike

from linen_models import variables_of
from models import Case, Size
from support import needs_gpu_compiler, ones, slow_when
from transformer import TransformerLM

BF16, F32 = jnp.bfloat16, jnp.float32
MIXED = "mixed_bfloat16"
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def shape(*sizes: int, dtype: Any = F32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def nnx_step() -> Program:
    """A step with an optimizer, both of which it changes."""
    net = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), jnp.tanh,
                         nnx.Linear(32, 16, rngs=nnx.Rngs(1)))  # fmt: skip
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - x) ** 2))(net)
        optimizer.update(net, grads)
        return loss

    return step, (net, optimizer, shape(8, 16))


def sharded() -> Program:
    """Parameters and batch over eight devices."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    return step, (shape(64, 64, sharding=split), shape(64, 64, sharding=split))


def scanned() -> Program:
    """Many steps in one call."""

    def steps(params: Any, batches: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
            return w - 0.1 * grad, loss

        return jax.lax.scan(step, params, batches)

    return steps, (shape(32, 32), shape(10, 8, 32))


class Stateful(nn.Module):
    """Layers with statistics and with noise."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False)(nn.Conv(16, (3, 3))(x))
        x = nn.Dropout(0.1, deterministic=False)(nn.relu(x))
        return nn.Dense(10)(x.mean((1, 2)))


def stateful() -> Program:
    model = Stateful()
    x, key = shape(16, 8, 8, 3), jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(lambda k, x: model.init({"params": k, "dropout": k}, x), key, x)

    def loss(params: Any, rest: Any, x: Any, key: Any) -> Any:
        y, updated = model.apply(
            {"params": params, **rest}, x, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return jnp.mean(y**2), updated

    rest = {"batch_stats": variables["batch_stats"]}
    return jax.value_and_grad(loss, has_aux=True), (variables["params"], rest, x, key)


def deep() -> Program:
    """A hundred layers, each written out."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return jax.value_and_grad(loss), ([shape(16, 16) for _ in range(100)], shape(32, 16))


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


def decoder() -> Program:
    return decoder_loss, (Decoder(3, nnx.Rngs(0)), shape(2, 8, dtype=jnp.int32))


def lm() -> Program:
    """The benchmarks' language model."""
    tokens = shape(4, 128, dtype=jnp.int32)
    size = Size(LM, tokens, tokens, LM["vocab"])
    case = Case("lm", TransformerLM, size, size, has_softmax=True)
    return case.loss(small=True), case.shapes(small=True)


LM = {"width": 128, "heads": 4, "layers": 3, "seq": 128, "vocab": 512}
LOSSES = {"lm": lm, "decoder": decoder}
STEPS = {each.__name__: each for each in (nnx_step, sharded, scanned, stateful, deep)}


@functools.cache
def program(name: str) -> Program:
    return (LOSSES | STEPS)[name]()


@functools.cache
def explained(name: str, policy: str = MIXED, only: str | None = None) -> Any:
    fn, args = program(name)
    return jaxmp.explain(fn, policy, only=only)(*args)


@functools.cache
def audited(name: str, policy: str | None) -> Any:
    """Of a step, or of the gradient of a loss."""
    fn, args = program(name)
    grad = nnx.value_and_grad if name == "decoder" else jax.value_and_grad
    options = {"has_aux": True} if name == "lm" else {}
    return jaxmp.audit(grad(fn, **options) if name in LOSSES else fn, policy)(*args)


def check_size(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= screen.LINES == 40
    assert max(map(len, lines)) <= screen.COLUMNS == 120


def check_screen(text: str) -> None:
    check_size(text)
    lines = text.splitlines()
    assert re.match(r"[^.]+\S\.", lines[0]), "the answer first, in a sentence"
    assert "to_text(verbose=True)" in lines[-1]


# --- it fits -------------------------------------------------------------------------------------


@slow_when(lambda name: name == "decoder")
@pytest.mark.parametrize("name", [*LOSSES, *STEPS])
def test_explain_fits_a_screen_and_groups_have_all_rows(name: str) -> None:
    found = explained(name)
    check_screen(str(found))
    assert str(found).startswith(f"{MIXED}: ")
    assert str(found) == found.to_text()
    lines = found.to_text(verbose=True).splitlines()
    assert len(lines[lines.index("", 2) + 2 :]) == len(found.rows)
    groups = found.groups()
    assert Counter(row for _, rows in groups for row in rows) == Counter(found.rows)
    for path, rows in groups:
        assert len({(row.source, row.dtype, row.reason, row.residual) for row in rows}) == 1
        pattern = re.escape(path.partition(" ×")[0]).replace(r"\*", r"\d+")
        assert all(re.fullmatch(pattern, row.path) for row in rows)
    # Costliest first, matmuls and convolutions before all else.
    flops = [sum(row.flops for row in rows) for _, rows in groups]
    assert flops == sorted(flops, reverse=True)


@slow_when(lambda name: name in ("decoder", "deep"))
@pytest.mark.parametrize("name", [*LOSSES, *STEPS])
def test_audit_fits_a_screen_and_groups_have_all_findings(name: str) -> None:
    written, mixed = audited(name, None), audited(name, MIXED)
    for report in (written, mixed):
        check_screen(str(report))
        assert str(report) == report.to_text()
    assert written.product_share() == {"float32": 1.0}
    assert "1. matmul or convolution in float32, 100.0% of the FLOPs" in str(written)
    assert Counter(f for group in alike(written.findings) for f in group) == Counter(
        written.findings
    )
    verbose = written.to_text(verbose=True)
    assert all(str(finding) in verbose for finding in written.findings)
    assert sum(f.share for f in written.findings) == pytest.approx(1)
    assert mixed.product_share() == {"bfloat16": 1.0}
    assert "No findings." in str(mixed)
    mixed.assert_no("float32-product", "overruled")
    if name in STEPS:
        count = sum(op.count for op in mixed.operations if op.flops)
        assert count == sum(explained(name).products().values())


@slow_when(lambda policy: policy != "mixed_float8")
@pytest.mark.parametrize("policy", ["float32", "mixed_float8", f"{MIXED},residuals=recompute"])
def test_explain_fits_under_policies_with_more_to_say(policy: str) -> None:
    check_screen(str(explained("lm", policy)))


@slow_when(lambda name, only: (name, only) != ("lm", "matmul"))
@pytest.mark.parametrize("only", ["matmul", "float32"])
@pytest.mark.parametrize("name", LOSSES)
def test_explain_fits_of_some_rows(name: str, only: str) -> None:
    check_screen(str(explained(name, only=only)))


def test_a_notebook_shows_the_text_of_a_report() -> None:
    assert repr(explained("lm", MIXED)) == str(explained("lm", MIXED))
    for name in jaxmp.__all__:
        getattr(jaxmp, name)  # loads its module
    reports = [cls for cls in subclasses(screen.Report) if cls.__module__.startswith("jaxmp")]
    names = {cls.__name__ for cls in reports}
    assert {"Capture", "NumericsReport", "PreflightReport", "Tuned"} <= names
    assert {cls.__repr__ for cls in reports} == {screen.Report.__repr__}


class Sample(screen.Report):
    def _sections(self, *, verbose: bool) -> Any:
        yield ["the answer."]
        yield {"lost": list("abcdefghi"), "found": (), "policy": MIXED}
        yield []
        yield lambda room: screen.truncated([["row", "x" * 130]] * 30, room, "row")
        yield ["everything" if verbose else "the rest"]


def test_sections_share_a_screen() -> None:
    """The one that can be cut short gets the lines that the others leave."""
    text = str(Sample())
    check_size(text)
    answer, facts, rows, rest = (section.splitlines() for section in text.split("\n\n"))
    assert (answer, rest) == (["the answer."], ["the rest"])
    assert facts[0].split() == ["lost", "a"]
    assert [line.strip() for line in facts[-2:]] == ["and 4 more", f"policy        {MIXED}"]
    assert rows[1] == "x" * 119 + "…"
    assert rows[-1] == "… and 17 more rows"
    assert len(text.splitlines()) in (39, 40)
    verbose = Sample().to_text(verbose=True).split("\n\n")
    assert len(verbose[2].splitlines()) == 60
    assert "more" not in "".join(verbose)
    assert verbose[3] == "everything"


def subclasses(cls: type) -> list[type]:
    return [each for sub in cls.__subclasses__() for each in (sub, *subclasses(sub))]


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


@pytest.mark.filterwarnings("ignore:autocast. 100% of the FLOPs of products are float64")
def test_a_float64_program_fits_a_screen_and_is_told_of() -> None:
    with jax.enable_x64(True):
        fn, args = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), [shape(8, 8, dtype=np.float64)] * 2
        check_screen(str(jaxmp.explain(fn, MIXED)(*args)))
        report = jaxmp.audit(fn, MIXED)(*args)
        narrowed = jaxmp.audit(fn, "p=f64,c=f32,o=f64")(*args)
    check_screen(str(report))
    assert {f.kind for f in report.findings} == {"float64-product"}
    assert narrowed.product_share() == {"float32": 1.0}


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_preflight_fits_a_screen(name: str) -> None:
    fn, args = program(name)
    target = "gpu-h100:8" if name == "sharded" else "gpu-h100"
    report = jaxmp.preflight(fn, ["float32", MIXED], target=target, price_per_hour=2.5)(*args)
    check_size(str(report))
    result = report[MIXED]
    assert result.requested == audited(name, MIXED).product_flops()
    assert report.step_time(MIXED).seconds > 0
    assert report.cost(MIXED) > 0
    assert result.device_count == (8 if name == "sharded" else 1)


@needs_gpu_compiler
@pytest.mark.slow
def test_of_a_float64_program_no_time_is_said() -> None:
    with jax.enable_x64(True):
        args = [shape(8, 8, dtype=np.float64)] * 2
        report = jaxmp.preflight(jnp.matmul, target="gpu-h100", price_per_hour=1)(*args)
    check_size(str(report))
    assert report.step_time("as written") is report.cost("as written") is None


# --- nothing is lost -----------------------------------------------------------------------------


def test_layers_that_differ_in_their_number_are_one_row() -> None:
    found, written = explained("lm"), str(audited("lm", None))
    assert "TransformerLM/Block_*/Dense_* ×6" in str(found)
    assert "TransformerLM/Block_*/LayerNorm_* ×6" in str(found)
    assert "Block_*/Dense_* ×6" in written
    assert "argument [0]['Block_*'] ×3" in written
    assert "Block_2" not in str(found)
    assert "Block_2" in found.to_text(verbose=True)
    assert len(found.groups()) < len(found.rows) / 2
    for text, general in (
        ("k = 96: multiples of 8", "k = 96: multiples of 8"),
        ("float32[8,16] of h_3", "float32[8,16] of h_*"),
        ("['layers'][11]['w']", "['layers'][*]['w']"),
    ):
        assert screen.of_any_layer(text) == general, "numbers of sizes are not those of layers"
    merged_text = screen.merged_text(["the argument [0]['h_1']", "the argument [0]['h_2']"])
    assert merged_text.endswith("['h_*']")


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
    assert len(explained("lm", only="Block_*/Dense_0").rows) == 3 * len(
        explained("lm", only="Block_2/Dense_0").rows
    )
    with pytest.raises(ValueError, match=r"only='Blok_1' is neither .*TransformerLM/Block_1"):
        explained("lm", only="Blok_1")
    few = explained("lm", only="matmul")  # the rest is as without
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


# --- planted faults ------------------------------------------------------------------------------

H, W, Y = shape(64, 32, dtype=BF16), shape(32, 256, dtype=BF16), shape(64, dtype=jnp.int32)


def numpy_constant(w: jax.Array, h: jax.Array, y: jax.Array) -> jax.Array:
    logits = (h * np.full(32, 1.5, np.float32)) @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.tanh(nn.Dense(64)(x)))


NETWORK = Network()
X = ones(4, 64)
PARAMS = variables_of(NETWORK, X)


def loss_of(params: Any, x: Any) -> jax.Array:
    return jnp.mean(jaxmp.wrap(NETWORK, "mixed_float16").apply(params, x) ** 2)


def scaled_twice(state: Any, x: Any) -> Any:
    def loss(params: Any, x: Any) -> jax.Array:
        return jaxmp.loss_scaling.scale_loss(loss_of(params, x), state.opt_state)

    _, grads = jaxmp.value_and_grad(loss, state.opt_state)(state.params, x)
    return state.apply_gradients(grads=grads)


def test_planted_faults_are_shown_with_their_line() -> None:
    tx = jaxmp.dynamic_loss_scale(optax.adam(1e-3))
    state = jaxmp.TrainState.create(apply_fn=NETWORK.apply, params=PARAMS, tx=tx)
    for fn, args, kind, line in (
        (jax.grad(numpy_constant), (W, H, Y), "promotion", numpy_constant.__code__),
        (scaled_twice, (state, X), "scaled-twice", None),
    ):
        report = jaxmp.audit(fn)(*args)
        finding = next(f for f in report.findings if f.kind == kind)
        check_screen(str(report))
        shown = " ".join(str(report).split())
        assert finding.what[:60] in shown
        assert "test_screens.py:" in shown
        if line:
            assert finding.source == f"test_screens.py:{line.co_firstlineno + 1}"
            assert finding.source in shown
            assert finding.fix in shown
