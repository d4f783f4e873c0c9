"""`jaxmp.diagnose`: planted faults are found where they were planted."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmp
from jaxmp import numerics
from jaxmp.numerics import Fault, NumericsReport

from support import gaussian, one_line, random_key

X = gaussian(0, 8, 16)


def line(fn: Callable[..., Any], text: str) -> str:
    """``file.py:line`` of the line of a function that holds a text."""
    lines, start = inspect.getsourcelines(fn)
    [found] = [start + i for i, one in enumerate(lines) if text in one]
    return f"test_diagnose.py:{found}"


def only(report: NumericsReport) -> Fault:
    [fault] = report.faults
    assert fault is report.first
    assert fault.reaches
    return fault


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = jnp.tanh(nn.Dense(16, name=f"hidden_{i}")(x))
        return nn.Dense(4, name="head")(x)


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Linear(16, 16, rngs=rngs)
        self.body = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.stem(x))
        return self.head(self.body(h))


def linen_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(MLP().apply({"params": params}, x) ** 2)


def linen_params() -> Any:
    return jax.jit(MLP().init)(random_key(0), X)["params"]


def nnx_loss(model: Deep, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


# Planted faults.


def test_overflow_in_the_forward_pass_of_a_layer() -> None:
    params = linen_params()
    kernel = np.asarray(params["hidden_1"]["kernel"])
    params["hidden_1"]["kernel"] = np.clip(kernel * np.float32(1e5), -6e4, 6e4)
    report = jaxmp.diagnose(linen_loss, "mixed_float16")(params, X)
    # tanh takes infinities: the results are finite, and the report tells all the same.
    fault = (*report.faults, *report.contained)[0]
    assert (fault.site.op, fault.kind, fault.everywhere) == ("dot_general", "overflow", False)
    assert fault.site.path == "MLP/hidden_1"
    assert fault.site.line == line(MLP.__call__, "hidden_{i}")
    assert not fault.site.backward
    assert "MLP/hidden_1" in str(report)


@pytest.mark.slow
def test_overflow_in_the_backward_pass_only() -> None:
    params = linen_params()
    report = jaxmp.diagnose(linen_loss, "mixed_float16", loss_scale=2.0**20)(params, X)
    fault = report.first
    assert fault is not None
    assert (fault.kind, fault.everywhere, fault.site.backward) == ("overflow", False, True)
    assert fault.site.dtype == "float16"
    assert 1 <= report.largest_loss_scale < 2.0**20
    better = jaxmp.diagnose(linen_loss, "mixed_float16", loss_scale=report.largest_loss_scale)
    again = better(params, X)
    assert again.faults == ()
    assert again.largest_loss_scale == report.largest_loss_scale
    twice = jaxmp.diagnose(linen_loss, "mixed_float16", loss_scale=2 * report.largest_loss_scale)
    assert twice(params, X).first is not None


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.nn.relu(h @ w), None

    return jnp.mean(lax.scan(layer, x, weights)[0])


def test_overflow_in_iteration_7_of_a_scan() -> None:
    weights = np.stack([np.eye(16, dtype=np.float32)] * 10)
    weights[7] *= 6e4
    fault = only(jaxmp.diagnose(scanned, "mixed_float16")(weights, np.abs(X) + 2))
    assert (fault.site.op, fault.kind, fault.iteration) == ("dot_general", "overflow", (7,))
    assert fault.site.line == line(scanned, "h @ w")
    assert "iteration 7" in str(fault)


def logarithm(w: jax.Array, x: jax.Array) -> jax.Array:
    p = jax.nn.relu(x @ w)
    return -jnp.mean(jnp.log(p))  # here


def normalized(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ w)
    h = h / jnp.sum(h, axis=-1, keepdims=True)  # here
    return jnp.mean(h**2)


def summed(w: jax.Array, x: jax.Array) -> jax.Array:
    h = (x @ w).astype(jnp.float16)
    return jnp.sum(h).astype(jnp.float32) * 1e-6  # here


def attention(w: jax.Array, x: jax.Array, mask: jax.Array) -> jax.Array:
    scores = jnp.where(mask, (x @ w) @ x.T, -jnp.inf)
    return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)  # here


@jax.custom_vjp
def steep(x: jax.Array) -> jax.Array:
    return x


steep.defvjp(lambda x: (x, x), lambda x, g: (g * 1e6 * x,))


def with_a_rule(w: jax.Array, x: jax.Array) -> jax.Array:
    # JAX gives the operations of a backward rule the line where the function was called.
    h = steep((x @ w) * 2.0)  # here
    return jnp.sum(h @ w)


def rematerialized(w: jax.Array, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w) @ w  # here

    return jnp.mean(block(w, x))


EYE, MASK = np.eye(16, dtype=np.float32), np.tri(8, dtype=bool)
THIRD = (np.arange(8) == 2)[:, None]
# A loss, its policy and arguments; the fault's operation, where only one could be it, and kind;
# whether it is in float32 as well, and whether in the backward pass.
FAULTS = [
    (logarithm, "mixed_bfloat16", (EYE, X), "log", ("infinity", True, False)),
    (normalized, "mixed_float16", (EYE, np.where(THIRD, -1.0, X)), "div", ("nan", True, False)),
    (summed, None, (EYE, np.full((64, 16), 100.0, np.float32)), "", ("overflow", False, False)),
    (attention, "mixed_bfloat16", (EYE, X, MASK & ~THIRD), "", ("nan", True, False)),
    (with_a_rule, "mixed_float16", (EYE, X), "", ("overflow", False, True)),
    (rematerialized, "mixed_float16", (300 * EYE, np.abs(X) + 1), "dot_general",
     ("overflow", False, False)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "policy", "args", "op", "kind"),
    FAULTS,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_found_in_its_line(loss, policy, args, op, kind) -> None:
    fault = jaxmp.diagnose(loss, policy)(*args).first
    assert fault is not None
    assert (fault.kind, fault.everywhere, fault.site.backward) == kind
    assert fault.site.op == op or not op
    assert fault.site.line == line(loss, "# here")
    if loss is logarithm:
        assert "no loss scale" in str(fault)
    if loss is attention:
        assert "masked" in fault.why
        assert jaxmp.diagnose(attention, policy)(EYE, X, MASK).faults == ()
    if loss is with_a_rule:  # it multiplies in float32: its constant is beyond float16
        assert (fault.of.op, fault.of.dtype) == ("mul", "float32")


@pytest.mark.slow
def test_overflow_in_a_layer_of_nnx_and_in_the_backward_pass_of_a_scan() -> None:
    model = Deep(nnx.Rngs(0))
    model.body.kernel[...] = jnp.full((16, 16), 3e4)
    fault = jaxmp.diagnose(nnx_loss, "mixed_float16")(model, 10 * X).first
    assert fault is not None
    assert (fault.site.op, fault.kind, fault.everywhere) == ("dot_general", "overflow", False)
    assert fault.site.line == line(Deep.__call__, "self.body(h)")
    assert jnp.all(model.body.kernel[...] == 3e4)
    # The eighth layer from the end: of ten, the backward pass is at layer 2.
    weights = jnp.stack([EYE] * 10).at[2].mul(1e-3)
    loss = lambda w, x: 3e4 * scanned(w, x)  # noqa: E731
    report = jaxmp.diagnose(loss, "mixed_float16", loss_scale=2.0**12)(weights, jnp.abs(X) + 1)
    assert report.first is not None
    assert (report.first.kind, report.first.site.backward) == ("overflow", True)


def training(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(w: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 4))(w)
        return w - 10.0 * grad, loss

    return lax.scan(step, w, length=12)[1][-1]


@pytest.mark.slow
def test_a_learning_rate_that_explodes() -> None:
    report = jaxmp.diagnose(training, "float32", grad=False)(jnp.eye(16), X)
    fault = report.first
    assert fault is not None
    assert fault.everywhere
    assert fault.kind == "infinity"
    [iteration] = fault.iteration
    assert 1 <= iteration < 12
    w = jnp.eye(16)  # the loss is finite up to the iteration before, and no longer after
    for i in range(iteration + 1):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((X @ w) ** 4))(w)
        assert jnp.isfinite(loss) or i == iteration
        w = w - 10.0 * grad
    assert not jnp.isfinite(w).all()


@pytest.mark.slow
def test_a_nan_in_the_batch() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return linen_loss(params, batch["inputs"])

    batch = {"inputs": X.at[2, 3].set(jnp.nan)}
    fault = only(jaxmp.diagnose(loss, "mixed_bfloat16")(linen_params(), batch))
    assert (fault.kind, fault.site.op, fault.site.path) == (
        "argument", "argument", "batch['inputs']",
    )  # fmt: skip


class Heads(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(nn.Dense(16, name="trunk")(x))
        return nn.Dense(4, name="main")(h), nn.Dense(4, name="auxiliary")(h)


@pytest.mark.slow
def test_underflow_of_the_gradients_of_one_layer() -> None:
    params = Heads().init(jax.random.key(1), X)["params"]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        main, auxiliary = Heads().apply({"params": params}, x)
        return jnp.mean(main**2) + 1e-8 * jnp.mean(auxiliary**2)

    report = jaxmp.diagnose(loss, "mixed_float16")(params, X)
    assert report.faults == ()
    places = {site.path for site, share in report.underflows if site.backward and share > 0.5}
    assert places == {"Heads/auxiliary"}
    assert report.smallest_loss_scale > 2.0**10
    assert "became 0: " in str(report)
    scaled = jaxmp.diagnose(loss, "mixed_float16", loss_scale=report.smallest_loss_scale)
    assert scaled(params, X).underflows == ()


@pytest.mark.slow
def test_where_a_policy_that_saturates_acted_and_how_often() -> None:
    x = jnp.abs(X).at[2:].set(1e-3)
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) @ w)  # noqa: E731
    report = jaxmp.diagnose(loss, "mixed_float16,saturate=true")(jnp.full((16, 16), 6e4), x)
    assert report.faults == ()
    fault, _ = [fault for fault in report.contained if fault.site.op == "dot_general"]
    assert (fault.kind, fault.reaches) == ("overflow", False)
    assert "in 0.25 of its values" in str(fault)


# What is fine.


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is() -> None:
    for policy in ("mixed_bfloat16", "mixed_float16", "float32", None):
        report = jaxmp.diagnose(linen_loss, policy, loss_scale=8.0)(linen_params(), X)
        assert (report.faults, report.contained, report.predicted) == ((), (), ()), policy
        assert "every result is finite" in str(report), policy


def halved_outside(w: jax.Array, x: jax.Array) -> jax.Array:
    h = 1e5 * jnp.tanh(x @ w)
    low = h.astype(jnp.float16)
    return jnp.mean(low.astype(jnp.float32))


def test_what_is_converted_is_named_with_its_line_and_what_no_loss_scale_mends() -> None:
    said: list[str] = []
    for call, tool in (
        (lambda: jaxmp.diagnose(jnp.sin, "mixed_float16", progress=True), "diagnose"),
        (lambda: numerics.capture(jnp.sin, None, progress=True)(X), "capture"),
    ):
        with pytest.raises(TypeError, match=f"{tool}: progress is called with a line of text"):
            call()
    report = jaxmp.diagnose(halved_outside, None, progress=said.append)(jnp.eye(16), X)
    assert [text.partition(":")[0] for text in said] == ["diagnose", "capture", "diagnose"]
    made, cast = line(halved_outside, "1e5"), line(halved_outside, "h.astype")
    fault = str(report.first)
    assert fault.startswith(f"convert_element_type of mul (float32 at {made}) (float16, forward)")
    assert f" in {cast}: overflow" in fault
    assert "none helps the convert_element_type above, in the forward pass\n" in str(report)


def test_it_says_with_which_loss_scale_to_begin() -> None:
    report = jaxmp.diagnose(lambda w, x: jnp.mean(x @ w), "mixed_float16")(jnp.eye(16), X)
    assert report.init_scale == report.largest_loss_scale / 16 == 2.0**18
    said = "begin with init_scale=2**18, finite up to 2**22: 0.00% of gradients become 0 there, "
    assert f"\nloss scale    1; {said}" in str(report)
    low = jaxmp.diagnose(lambda w, x: jnp.mean(x @ w), "mixed_bfloat16")(jnp.eye(16), X)
    assert "\nloss scale    1; none is needed" in str(low)


def test_a_report_on_many_layers_fits_a_screen() -> None:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for i, w in enumerate(params):
            with jax.named_scope(f"block_{i}"):
                x = jnp.tanh(x @ w)
                beyond = jnp.isinf((x * 1e9).astype(jnp.float16))
                x = jnp.where(beyond, x, 0) + (x * 1e-9).astype(jnp.float16)
        return jnp.sum(x)

    report = jaxmp.diagnose(loss_fn, None)([jnp.eye(16)] * 12, X)
    lines = str(report).splitlines()
    assert lines[0].startswith("not finite ")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert re.search(
        r"contained convert_.* in block_\* at \S+ ×12: overflow: .* would leave", one_line(report)
    )


def test_what_no_loss_scale_keeps_is_named() -> None:
    def loss_fn(params, x):
        return jnp.sum(x @ params["a"] * 1e-9) + jnp.sum(x @ params["b"] * 1e4)

    params = {"a": jnp.eye(16), "b": jnp.eye(16)}
    report = jaxmp.diagnose(loss_fn, "mixed_float16")(params, X)
    assert report.smallest_loss_scale > report.largest_loss_scale == report.init_scale == 4.0
    at = line(loss_fn, '"a"')
    lost = rf"100% of the norm of \w+ \(float16, backward\) in {at}: keep it in float32, or in bf"
    assert re.search(rf"init_scale=2\*\*2, finite up to 2\*\*2: .* and {lost}", one_line(report))
    report = jaxmp.diagnose(lambda p, x: 1e6 * loss_fn(p, x), "mixed_float16")(params, X)
    assert report.init_scale is None
    assert "loss scale    1; none: gradients overflow at 1 already: " in str(report)


@pytest.mark.slow
def test_what_a_backward_pass_computes_again_is_no_gradient() -> None:
    """It is as large at any loss scale: probabilities of 1 bounded the scale by 32768."""

    @jax.custom_vjp
    def again(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    again.defvjp(
        lambda x: (again(x), x), lambda x, g: (g * (1 - jnp.tanh(x.astype(jnp.float16)) ** 2),)
    )

    def loss_fn(w, x):
        h = jax.checkpoint(lambda h: jnp.exp(h))(again(x @ w) + 5)
        h, _ = lax.scan(lambda h, w: (jax.nn.softmax(10 * (h @ w)), None), h, jnp.stack([w] * 3))
        return 1e-3 * jnp.mean(h**2)

    def largest(report: NumericsReport) -> float:
        return max(float(m.statistics.largest.max()) for m in report._gradients())

    one, two = (
        jaxmp.diagnose(loss_fn, "mixed_float16", loss_scale=scale)(jnp.eye(16), X)
        for scale in (1.0, 1024.0)
    )
    assert one.init_scale == two.init_scale > 2.0**16
    assert largest(two) == pytest.approx(1024 * largest(one))
    again_too = [m for m in one.wide.sites.values() if m.site.backward and not m.site.scaled]
    assert max(float(m.statistics.largest.max()) for m in again_too) > 1


@pytest.mark.slow
def test_a_decoder_trains_from_the_advised_scale_on_without_a_skip() -> None:
    """The advice was "none suits all", while 2**16 trained without a skip."""
    vocabulary, length, shrunk = 64, 32, 1e-4

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(vocabulary, 64)(tokens)
            x += self.param("positions", nn.initializers.normal(0.02), (length, 64))
            for _ in range(2):
                h = nn.LayerNorm()(x)
                x += nn.MultiHeadDotProductAttention(4)(h, mask=nn.make_causal_mask(tokens))
                x += nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))
            return nn.Dense(vocabulary)(nn.LayerNorm()(x))

    model = jaxmp.wrap(Decoder(), "mixed_float16")

    def batch(i: int) -> jax.Array:
        start, step = jax.random.randint(jax.random.key(i), (2, 8, 1), 1, 7)
        return (9 * start + step * jnp.arange(length + 1)) % vocabulary

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return shrunk * losses.mean()

    params = model.init(jax.random.key(0), batch(0)[:, :-1])["params"]
    report = jaxmp.diagnose(loss_fn, None)(params, batch(0))
    assert report.init_scale is not None
    assert report.smallest_loss_scale <= report.init_scale <= report.largest_loss_scale
    tx = jaxmp.dynamic_loss_scale(optax.adamw(1e-3), init_scale=report.init_scale)
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    def step(state: Any, tokens: jax.Array) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    for i in range(200):
        state, loss = step(state, batch(i))
    assert loss < shrunk * 2
    assert jaxmp.loss_scaling.skipped_count(state.opt_state) == 0
    assert state.loss_scale == report.init_scale


def test_a_saturated_tanh_is_no_underflow() -> None:
    """1 - tanh(x)**2 is 0 where tanh(x) rounds to 1; the user wrote no such operation."""
    params = {"w": jax.random.normal(jax.random.key(0), (16, 64))}
    x = 3 * jax.random.normal(jax.random.key(1), (32, 16))
    report = jaxmp.diagnose(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"])), "mixed_bfloat16")(
        params, x
    )
    assert report.underflows == ()
    assert not any("one_minus_square" in str(site) for site in report.run.program.sites.values())


def test_after_a_nan_in_the_forward_pass_nothing_else_is_said_of_loss_scales() -> None:
    params, x = {"w": -jnp.ones((8, 8))}, jnp.ones((4, 8))
    report = jaxmp.diagnose(lambda p, x: jnp.mean(jnp.log(x @ p["w"])), "mixed_float16")(params, x)
    [said] = [line for line in str(report).splitlines() if line.startswith("loss scale")]
    assert said == "loss scale    1; none helps the log above, in the forward pass"
