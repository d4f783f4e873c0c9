"""`audit` of products' results: rounded before a cross-entropy, or recomputed in another dtype."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp
from jaxmp._tools.audit.report import PrecisionError

from models import CASES
from support import gaussian, random_key, relative, slow_when

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, WIDTH, CLASSES, CHUNK = 64, 32, 256, 64
H, W = gaussian(0, ROWS, WIDTH, dtype=BF16), gaussian(1, WIDTH, CLASSES, dtype=BF16)
Y = jax.device_put(np.argmax(np.asarray(H, F32) @ np.asarray(W, F32), -1))

Loss = Callable[..., Any]


def kinds(fn, *args):
    """What `audit` finds of the dtypes of results."""
    found = {f.kind for f in jaxmp.audit(fn)(*args).findings}
    return found & {"rounded-result", "inconsistent-recompute"}


def gradient(loss):
    return jax.grad(loss, (0, 1))


def error(loss, exact):
    """The largest relative error of a gradient, against that of float32 operands."""
    h, w = np.asarray(H), np.asarray(W)
    found = reference(gradient(loss))(h, w, Y)
    right = reference(gradient(exact))(h.astype(F32), w.astype(F32), Y)
    return max(map(relative, found, right))


def cross_entropy(z, y):
    return optax.softmax_cross_entropy_with_integer_labels(z, y).mean()


# Rounded logits.


def rounded(h, w, y):
    return cross_entropy((h @ w).astype(F32), y)


@jax.custom_vjp
def logits(h, w):
    return jnp.dot(h, w, preferred_element_type=F32)


def logits_backward(saved, g):
    h, w = saved
    g = g.astype(h.dtype)
    return g @ w.T, h.T @ g


logits.defvjp(lambda h, w: (logits(h, w), (h, w)), logits_backward)


def healthy(h, w, y):
    return cross_entropy(logits(h, w), y)


def test_rounded_logits_are_found_and_the_advice_helps():
    report = jaxmp.audit(gradient(rounded))(H, W, Y)
    [finding] = report.findings
    assert finding.kind == "rounded-result"
    line = inspect.getsourcelines(rounded)[1] + 1
    assert finding.source == f"test_audit_rounding.py:{line}"
    assert finding.what == "its result is rounded to bfloat16, and widened for a cross-entropy"
    assert (finding.unit, finding.cost) == ("FLOPs", 2 * ROWS * WIDTH * CLASSES)
    assert "product rounded before a cross-entropy, 33.3% of the FLOPs" in str(report)
    with pytest.raises(PrecisionError, match="rounded"):
        report.assert_no("rounded-result")
    assert not jaxmp.audit(gradient(healthy))(H, W, Y).findings
    assert error(rounded, rounded) > 4 * error(healthy, rounded)


def across_devices(h, w, y):
    """Classes over two devices."""

    def local(h, w, y):
        z = (h @ w).astype(F32)
        top = lax.stop_gradient(lax.pmax(lax.stop_gradient(z).max(-1), "x"))
        total = lax.psum(jnp.exp(z - top[:, None]).sum(-1), "x")
        first = lax.axis_index("x") * z.shape[1]
        hit = (y[:, None] - first) == jnp.arange(z.shape[1])
        return (jnp.log(total) + top - lax.psum(jnp.where(hit, z, 0).sum(-1), "x")).mean()

    mesh = Mesh(jax.devices()[:2], ("x",))
    specs = (P(), P(None, "x"), P())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(h, w, y)


def by_logsumexp(z, y):
    z = z.astype(F32).reshape(ROWS, CLASSES)
    return (jax.nn.logsumexp(z, -1) - z[AT, y]).mean()


def scanned(h, w, y):
    rows = h.reshape(8, -1, WIDTH), y.reshape(8, -1)
    return lax.scan(lambda total, xs: (total + rounded(xs[0], w, xs[1]), None), 0.0, rows)[0]


def capped(z):
    return 30 * jnp.tanh(z.astype(F32) / 0.7 / 30)


AT = np.arange(ROWS)
ROUNDED = {
    "log of softmax": lambda h, w, y: -jnp.log(jax.nn.softmax((h @ w).astype(F32)))[AT, y].mean(),
    "logsumexp": lambda h, w, y: by_logsumexp((h @ w).reshape(8, -1, CLASSES), y),
    "temperature and bias": lambda h, w, y: cross_entropy(capped(h @ w + jnp.ones(256, BF16)), y),
    "checkpoint": jax.checkpoint(rounded),
    "jit": lambda h, w, y: jax.jit(cross_entropy)(jax.jit(jnp.dot)(h, w).astype(F32), y),
    "scan": scanned,
    "branch": lambda h, w, y: lax.cond(y[0] > 3, rounded, lambda h, w, y: 0.0, h, w, y),
    "devices": across_devices,
}


def test_whatever_stands_between():
    for name, loss in ROUNDED.items():
        for fn in (loss, gradient(loss)):
            assert kinds(fn, H, W, Y) == {"rounded-result"}, name


def with_accuracy(z, y):
    return cross_entropy(z.astype(F32), y), jnp.mean(jnp.argmax(z, -1) == y)


def with_probabilities(z, y):
    z = z.astype(F32)
    e = jnp.exp(z - z.max())
    total = e.sum(-1)
    return (jnp.log(total) - z[AT, y]).mean(), e / total[:, None]


def test_a_metric_of_the_rounded_logits_changes_nothing():
    for measured in (with_accuracy, with_probabilities):
        step = jax.grad(lambda h, w, y, f=measured: f(h @ w, y), (0, 1), has_aux=True)
        assert kinds(step, H, W, Y) == {"rounded-result"}


# What is usual in 16 bits, and what wants the 16 bits themselves.


def attention(h, w, y):
    weights = jax.nn.softmax((h @ h.T).astype(F32) / 8)
    return jnp.sum(logits(weights.astype(BF16) @ h, w))


@jax.custom_vjp
def flash(h):
    """Attention that keeps the logarithms of its sums for the backward pass."""
    return flash_forward(h)[0]


def flash_forward(h):
    s = (h @ h.T).astype(F32) / 8
    p = jnp.exp(s - s.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    out = jnp.dot(p.astype(BF16), h, preferred_element_type=F32) / total
    return out.astype(BF16), (h, s.max(-1, keepdims=True) + jnp.log(total))


def flash_backward(saved, g):
    h, lse = saved
    p = jnp.exp((h @ h.T).astype(F32) / 8 - lse).astype(BF16)
    return (p.T @ g,)


flash.defvjp(flash_forward, flash_backward)


def flash_attention(h, w, y):
    return jnp.sum(logits(flash(h), w))


def flash_attention_in_a_checkpoint(h, w, y):
    return jnp.sum(logits(jax.checkpoint(flash)(h), w))


def normalization(h, w, y):
    z = (h @ w).astype(F32)
    z = (z - z.mean(-1, keepdims=True)) * lax.rsqrt(z.var(-1, keepdims=True) + 1e-6)
    return healthy(z.astype(BF16), w.T @ w, y)


def residual_stream(h, w, y):
    h = h + (h @ w) @ w.T
    return healthy((h.astype(F32) / jnp.abs(h).astype(F32).max()).astype(BF16), w, y)


def softplus_step(h, w, y):
    return healthy((jax.nn.softplus((h @ (w @ w.T)).astype(F32)) * h).astype(BF16), w, y)


def least_squares(h, w, y):
    return jnp.mean(((h @ w).astype(F32) - 1) ** 2)


def multiplied_again(h, w, y):
    z = h @ w
    return cross_entropy(z.astype(F32), y) + jnp.sum(logits(z, w.T))


def returned(h, w, y):
    z = h @ w
    return cross_entropy(z.astype(F32), y), z


def test_other_results_are_not_remarked_on():
    for loss in (
        attention,
        flash_attention,
        flash_attention_in_a_checkpoint,
        normalization,
        residual_stream,
        softplus_step,
        least_squares,
        multiplied_again,
    ):
        assert not kinds(gradient(loss), H, W, Y), loss.__name__
    assert not kinds(jax.grad(returned, (0, 1), has_aux=True), H, W, Y)


@slow_when(lambda name: name == "lm_scan")
@pytest.mark.parametrize(("name", "head"), [("lm_scan", "Embed_0.attend"), ("mlp", "Dense_2")])
def test_models_by_hand_and_under_a_policy(name, head):
    case = CASES[name]

    def found(loss):
        step = jax.value_and_grad(loss, has_aux=True)
        report = jaxmp.audit(step)(*case.shapes(small=True))
        new = {"rounded-result", "inconsistent-recompute"}
        return [f.path.split("/")[-1] for f in report.findings if f.kind in new]

    assert found(case.loss(small=True, dtype=BF16)) == [head]
    for policy in ("mixed_bfloat16,residuals=recompute", "bfloat16"):
        assert not found(jaxmp.autocast(case.loss(small=True), policy))
    assert not found(case.loss_with(jaxmp.wrap(case.model(small=True), "mixed_bfloat16")))


def test_a_layer_whose_product_returns_float32():
    class Head(nn.Module):
        dot: Any

        @nn.compact
        def __call__(self, x):
            return nn.Dense(CLASSES, dtype=BF16, dot_general=self.dot)(x)

    def found(dot):
        head = Head(dot)
        params = jax.eval_shape(head.init, random_key(0), H)
        return kinds(jax.grad(lambda p: cross_entropy(head.apply(p, H).astype(F32), Y)), params)

    assert found(lax.dot_general) == {"rounded-result"}
    assert not found(functools.partial(lax.dot_general, preferred_element_type=F32))


# A fused cross-entropy, whose backward pass computes the logits again.


def fused(forward, backward):
    """Classes in chunks; the logits are computed twice, with results of two dtypes."""

    def product(h, w, dtype):
        return jnp.dot(h, w, preferred_element_type=dtype).astype(F32)

    def chunks(w):
        parts = w.reshape(WIDTH, -1, CHUNK).transpose(1, 0, 2)
        return jnp.arange(len(parts)), parts

    def hits(i, y):
        return (y[:, None] - i * CHUNK) == jnp.arange(CHUNK)

    def run(h, w, y):
        def step(carry, xs):
            top, total, label = carry
            z = product(h, xs[1], forward)
            new = jnp.maximum(top, z.max(-1))
            total = total * jnp.exp(top - new) + jnp.exp(z - new[:, None]).sum(-1)
            return (new, total, label + jnp.where(hits(xs[0], y), z, 0.0).sum(-1)), None

        start = jnp.full(ROWS, -jnp.inf), jnp.zeros(ROWS), jnp.zeros(ROWS)
        top, total, label = lax.scan(step, start, chunks(w))[0]
        lse = top + jnp.log(total)
        return (lse - label).mean(), (h, w, y, lse)

    def back(saved, g):
        h, w, y, lse = saved

        def step(dh, xs):
            p = jnp.exp(product(h, xs[1], backward) - lse[:, None]) - hits(xs[0], y)
            p = (p * g / ROWS).astype(BF16)
            dw = jnp.dot(h.T, p, preferred_element_type=F32)
            return dh + jnp.dot(p, xs[1].T, preferred_element_type=F32), dw

        dh, dw = lax.scan(step, jnp.zeros((ROWS, WIDTH)), chunks(w))
        dw = dw.transpose(1, 0, 2).reshape(w.shape)
        return dh.astype(h.dtype), dw.astype(w.dtype), np.zeros(y.shape, jax.dtypes.float0)

    loss = jax.custom_vjp(lambda h, w, y: run(h, w, y)[0])
    loss.defvjp(run, back)
    return lambda h, w, y: loss(h, w, y)


def test_a_product_recomputed_in_another_dtype_is_found_with_its_line():
    report = jaxmp.audit(gradient(fused(BF16, F32)))(H, W, Y)
    first, second = report.findings
    line = inspect.getsourcelines(fused)[1] + 4
    for finding in (first, second):
        assert finding.source == f"test_audit_rounding.py:{line}"
        assert finding.cost == 2 * ROWS * WIDTH * CLASSES
    assert (first.kind, second.kind) == ("inconsistent-recompute", "rounded-result")
    assert first.what.startswith(
        "bfloat16 in the forward pass, recomputed in float32 in the backward pass"
    )
    assert "product recomputed in another dtype, 25.0% of the FLOPs" in str(report)
    assert not jaxmp.audit(gradient(fused(F32, F32)))(H, W, Y).findings


def test_the_two_findings_are_told_apart():
    for forward, backward, found in (
        (F32, BF16, {"inconsistent-recompute"}),
        (BF16, BF16, {"rounded-result"}),
        (F32, F32, set()),
    ):
        for around in (lambda fn: fn, jax.jit, jax.checkpoint):
            assert kinds(gradient(around(fused(forward, backward))), H, W, Y) == found
    for policy in ("mixed_bfloat16", "mixed_bfloat16,residuals=recompute"):
        loss = jaxmp.autocast(fused(F32, F32), policy)
        assert not kinds(gradient(loss), H.astype(F32), W.astype(F32), Y)


def test_a_product_of_a_part_is_another():
    """A backward pass that multiplies some of the operands in float32, for a gate of its own."""

    def back(saved, g):
        h, w = saved
        gate = jnp.dot(h, w[:, :CHUNK], preferred_element_type=F32).mean()
        return (g @ w.T) * gate.astype(BF16), h.T @ g

    gated = jax.custom_vjp(jnp.dot)
    gated.defvjp(lambda h, w: (h @ w, (h, w)), back)
    assert not kinds(gradient(lambda h, w: jnp.sum(jnp.tanh(gated(h, w)))), H, W)
