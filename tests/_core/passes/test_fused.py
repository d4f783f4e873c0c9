"""Attention that a kernel computes: found however it is written, laid out as kernels take it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp
from jaxmp._core.passes.fused_attention import kernels
from jaxmp._core.passes.fused_attention.kernels import Kernel, KernelCall
from jaxmp._core.plan.why import Residual
from jaxmp._tools.preflight.aot_worker import topology_devices
from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.speed.target import parse_target

from support import assert_same_program, gaussian, needs_gpu_compiler, needs_tpu_compiler, relative

BATCH, TIME, HEADS, WIDTH = 2, 16, 4, 8
BF16 = "mixed_bfloat16"
FUSED = f"{BF16},attention=fused@gpu-h100"
CAUSAL = np.tril(np.ones((TIME, TIME), bool))
PADDED = np.arange(TIME) < np.array([[12], [TIME]])  # [example, key]


Q, K, V = (gaussian(i, BATCH, TIME, HEADS, WIDTH) for i in range(3))
FEW = (Q, *(gaussian(i, BATCH, TIME, 2, WIDTH) for i in (1, 2)))
BIAS = gaussian(3, HEADS, TIME, TIME)


def scores_of(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k)


def weighted(s, v):
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def plain(q, k, v):
    return weighted(scores_of(q, k) / 4, v)


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def causal_constant(q, k, v):
    return weighted(jnp.where(CAUSAL, scores_of(q, k) / 4, -1e9), v)


def causal_and_padded(q, k, v):
    mask = nn.combine_masks(nn.make_causal_mask(q[..., 0, 0]), PADDED[:, None, None])
    return nn.dot_product_attention(q, k, v, mask=mask)


def from_the_other_side(q, k, v):
    later = jnp.arange(TIME)[:, None] < jnp.arange(TIME)
    return weighted(jnp.where(later, jnp.finfo(jnp.float32).min, scores_of(q, k) / 4), v)


def biased(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias[None], mask=PADDED[:, None, None])


def biased_before_the_scale(q, k, v, bias):
    s = scores_of(q, k) - bias
    return weighted(-(s * np.float32(-0.5)) / jnp.sqrt(4.0) + 3, v)


def mask_added(q, k, v):
    s = scores_of(q, k) / 4 + jnp.where(PADDED[:, None, None], 0.0, -1e10)
    return weighted(s, v)


def first_key(q, k, v):
    """A comparison of positions that is one row, whatever the query: a mask, and not causal."""
    first = jnp.arange(1)[:, None] >= jnp.arange(TIME)
    return weighted(jnp.where(first, scores_of(q, k) / 4, -1e9), v)


def wrapped(q, k, v):
    """Positions that pass the largest number of their type, and come in another order."""
    late = (jnp.arange(TIME) + 120).astype(jnp.int8)
    return weighted(jnp.where(late[:, None] >= late, scores_of(q, k) / 4, -1e9), v)


def wrapped_below_zero(q, k, v):
    early = jnp.arange(TIME, dtype=jnp.uint32) - 1
    return weighted(jnp.where(early[:, None] >= early, scores_of(q, k) / 4, -1e9), v)


def distances(q, k, v):
    away = -0.1 * jnp.abs(jnp.arange(TIME)[:, None] - jnp.arange(TIME))
    return weighted(scores_of(q, k) / 4 + away.astype(jnp.float32), v)


def few_keys(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, mask=PADDED[:, None, None], is_causal=True)


def few_keys_by_hand(q, k, v):
    q = q.reshape(BATCH, TIME, 2, 2, WIDTH)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k) / 4
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(jnp.where(CAUSAL, s, -1e9)), v)


def one_key_head(q, k, v):
    s = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]) / 4
    s = jnp.where(PADDED[:, None, None], s, -jnp.inf)
    return jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(s), v[:, :, 0])


def heads_in_the_batch(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(-1, TIME, WIDTH) for x in (q, k, v))
    return jax.nn.softmax(q @ k.transpose(0, 2, 1) / 4) @ v


def keys_first(q, k, v):
    s = jnp.einsum("bshd,bthd->sbth", k, q) / 4
    s = jnp.where(jnp.asarray(CAUSAL).T[:, None, :, None], s, -1e9)
    return jnp.einsum("sbth,bshd->hbdt", jax.nn.softmax(s, axis=0), v)


def causal_free(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def fewer_queries(q, k, v):
    """Causal in its own way: a mask like any other."""
    s = scores_of(q[:, :8], k) / 4
    return weighted(jnp.where(CAUSAL[:8], s, -1e9), v)


def mapped(q, k, v):
    def head(q, k, v):
        return jax.nn.softmax(jnp.where(CAUSAL, q @ k.T / 4, -1e9)) @ v

    return jax.vmap(jax.vmap(head, (1, 1, 1), 1))(q, k, v)


# What there is: a causal mask, a bias, another mask.
FOUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "plain": (plain, (Q, K, V), ""),
    "causal": (causal, (Q, K, V), "causal"),
    "causal constant": (causal_constant, (Q, K, V), "causal"),
    "causal linen": (
        lambda q, k, v: nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(q[..., 0, 0])),
        (Q, K, V),
        "causal",
    ),
    "causal and padded": (causal_and_padded, (Q, K, V), "causal masked"),
    "from the other side": (from_the_other_side, (Q, K, V), "causal"),
    # A triangle, and none that is causal.
    "one ahead": (
        lambda q, k, v: weighted(
            jnp.where(jnp.tril(CAUSAL | True, 1), scores_of(q, k) / 4, -1e9), v
        ),
        (Q, K, V),
        "masked",
    ),
    "biased": (biased, (Q, K, V, BIAS), "biased masked"),
    "biased before the scale": (biased_before_the_scale, (Q, K, V, BIAS), "biased"),
    "mask added": (mask_added, (Q, K, V), "masked"),
    # What is added is scaled as well: an exponential of -5000 is zero, and -1e4 is the limit.
    "bias added before the scale": (
        lambda q, k, v: weighted(
            (scores_of(q, k) + jnp.where(PADDED[:, None, None], 0.0, -2e4)) / 4, v
        ),
        (Q, K, V),
        "biased",
    ),
    "first key": (first_key, (Q, K, V), "masked"),
    "wrapped": (wrapped, (Q, K, V), "masked"),
    "wrapped below zero": (wrapped_below_zero, (Q, K, V), "masked"),
    "distances": (distances, (Q, K, V), "biased"),
    "few keys": (few_keys, FEW, "causal masked"),
    "few keys by hand": (few_keys_by_hand, FEW, "causal"),
    "one key head": (one_key_head, (Q, K, V), "masked"),
    "heads in the batch": (heads_in_the_batch, (Q, K, V), ""),
    "keys first": (keys_first, (Q, K, V), "causal"),
    "no batch": (
        lambda q, k, v: jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T / 4) @ v[0, :, 0],
        (Q, K, V),
        "",
    ),
    "last query": (lambda q, k, v: causal_free(q[:, -1:], k, v), (Q, K, V), ""),
    "fewer queries": (fewer_queries, (Q, K, V), "masked"),
    "mapped": (mapped, (Q, K, V), "causal"),
}


def new_stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kernel that runs here, and takes what cuDNN's takes; what it is asked for is listed."""
    asked: list[str] = []

    def run(call: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        has = {"causal": call.causal, "biased": bias is not None, "masked": mask is not None}
        asked.append(" ".join(word for word, there in has.items() if there))
        return kernels.library(call, q, k, v, bias, mask, implementation="xla")

    monkeypatch.setattr(kernels, "CUDNN", Kernel("stand-in", "cpu", run))
    return asked


stand_in = pytest.fixture(new_stand_in, name="stand_in")


def checkpointed(run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that keeps what it is given, as kernels do."""
    return lambda call, *arrays: jax.checkpoint(functools.partial(run, call))(*arrays)


@pytest.fixture
def elsewhere(monkeypatch):
    """The same kernel, of a platform that this is not."""
    run = functools.partial(kernels.library, implementation="xla")
    monkeypatch.setattr(kernels, "CUDNN", Kernel("stand-in", "cuda", checkpointed(run)))


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any) -> jax.Array:
        out = fn(*args)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return loss


def gradients(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(jax.grad(fn, tuple(range(len(args)))))(*args)


def exactly(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """A function and its gradients, in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in args]
        return jax.device_get((fn(*wide), gradients(loss_of(fn), *wide)))


def explained(fn: Callable[..., Any], *args: Any, policy: str = FUSED) -> list[tuple[str, str]]:
    rows = jaxmp.explain(fn, policy)(*args).rows
    return [(row.fused, row.not_fused) for row in rows if row.fused or row.not_fused]


def check(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Fused, a function and its gradients are as exact as without."""
    out, want = exactly(fn, *args)
    got = [jaxmp.autocast(fn, policy)(*args) for policy in (FUSED, BF16)]
    assert got[0].dtype == jnp.float32
    assert got[0].shape == out.shape
    assert relative(got[0], out) <= 1.5 * relative(got[1], out) < 0.02
    grads = [gradients(loss_of(jaxmp.autocast(fn, p)), *args) for p in (FUSED, BF16)]
    assert relative(grads[0], want) <= 1.5 * relative(grads[1], want) < 0.05


def test_it_is_found_and_laid_out_as_a_library_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (fn, args, what) in FOUND.items():
        asked = new_stand_in(monkeypatch)
        assert explained(fn, *args) == [("stand-in on gpu-h100", "")], name
        asked.clear()
        fused = jaxmp.autocast(fn, FUSED)
        assert jax.eval_shape(fused, *args) == jax.eval_shape(fn, *args), name
        assert set(asked) == {what}, name
        if fn in (causal_and_padded, biased_before_the_scale, keys_first):  # of all: slow, below
            assert relative(jax.jit(fused)(*args), reference(fn)(*args)) < 0.02, name


@pytest.mark.usefixtures("stand_in")
@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_its_gradients_are_as_exact(name: str) -> None:
    check(*FOUND[name][:2])


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["biased", "few keys", "fewer queries"])
def test_another_platform_computes_the_same_without_a_kernel(name: str) -> None:
    check(*FOUND[name][:2])


def test_a_bias_is_scaled_in_float32_and_then_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def bias_of(_call: KernelCall, _q: Any, _k: Any, _v: Any, bias: Any, _mask: Any) -> Any:
        return jnp.moveaxis(bias, 1, 2)[..., :WIDTH]  # in place of the attention

    monkeypatch.setattr(kernels, "CUDNN", Kernel("stand-in", "cpu", bias_of))

    def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return weighted((scores_of(q, k) + bias) * 0.3, v)

    bias = np.broadcast_to(BIAS, (BATCH, *BIAS.shape))
    out = jaxmp.autocast(attention, FUSED)(Q, K, V, bias)
    want = (bias * np.float32(0.3)).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(out, np.moveaxis(want, 1, 2)[..., :WIDTH])


@pytest.mark.usefixtures("elsewhere")
def test_neither_scores_nor_probabilities_are_made_or_kept() -> None:
    fused = jaxmp.autocast(biased, FUSED)
    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(fused, *a)[1])(Q, K, V, BIAS)
    size = BATCH * HEADS * TIME**2
    made = [v.aval for eqn in jaxpr.eqns for v in eqn.outvars]
    large = [a for a in made if getattr(a, "size", 0) >= size and a.dtype != bool]
    assert not large


# Layers, and what is around attention.


def linen_layer(**kwargs: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    layer = nn.MultiHeadDotProductAttention(HEADS, **kwargs)
    x = gaussian(4, BATCH, TIME, HEADS * WIDTH)
    params = jax.jit(nn.MultiHeadDotProductAttention(HEADS).init)(jax.random.key(0), x)
    mask = nn.make_causal_mask(x[..., 0])
    rngs = {"dropout": jax.random.key(2)}
    return lambda p, x: layer.apply(p, x, mask=mask, rngs=rngs), (params, x)


def scanned(q, k, v):
    def layer(x, _):
        return x + jax.checkpoint(causal)(x, k, v), None

    return jax.lax.scan(layer, q, None, length=2)[0]


def per_query(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mapped over a batch of queries that share keys and values."""
    return lambda q, k, v: jax.vmap(fn, (0, None, None))(jnp.stack([q, q[::-1]]), k, v)


AROUND: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "in a scan of checkpoints": (scanned, lambda fn: fn(scanned)),
    "in a checkpoint": (causal, lambda fn: jax.checkpoint(fn(causal))),
    "mapped": (per_query(causal), lambda fn: per_query(fn(causal))),
    "of a map": (per_query(causal), lambda fn: fn(per_query(causal))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_it_is_differentiated_wherever_it_is(name: str, stand_in: list[str]) -> None:
    as_written, around = AROUND[name]
    want = gradients(loss_of(as_written), Q, K, V)
    got, unfused = (
        gradients(
            loss_of(around(lambda fn, p=p: jaxmp.autocast(fn, p, argnums=(0, 1, 2)))), Q, K, V
        )
        for p in (FUSED, BF16)
    )
    assert stand_in
    assert relative(got, want) <= 1.5 * relative(unfused, want) < 0.05


@pytest.mark.usefixtures("elsewhere")
def test_a_shared_mask_is_mapped_inside_alone() -> None:
    """cuDNN's call is mapped by a rule of JAX's that takes a mask of each head."""
    stacked = [jnp.stack([x, x]) for x in (Q, K, V)]

    def outside(fn: Callable[..., Any]) -> Any:
        return jax.eval_shape(jax.grad(loss_of(jax.vmap(jaxmp.autocast(fn, FUSED)))), *stacked)

    with pytest.raises(NotImplementedError, match=r"Write jaxmp.autocast\(jax.vmap\(f\), policy\)"):
        outside(mask_added)
    assert outside(causal).shape == stacked[0].shape
    inside = jaxmp.autocast(jax.vmap(mask_added), FUSED)
    assert jax.eval_shape(jax.grad(loss_of(inside)), *stacked).shape == stacked[0].shape


def second_read(q, k, v):
    p = jax.nn.softmax(scores_of(q, k) / 4)
    return jnp.einsum("bhts,bshd->bthd", p, v) + jnp.sum(p**2)


def scores_returned(q, k, v):
    s = scores_of(q, k) / 4
    return weighted(s, v), s


def dropped(q, k, v):
    p = jax.nn.softmax(scores_of(q, k) / 4)
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, p.shape)
    return jnp.einsum("bhts,bshd->bthd", jnp.where(keep, p / 0.8, 0), v)


def reshaped(q, k, v):
    p = jax.nn.softmax(scores_of(q, k) / 4).reshape(BATCH * HEADS, TIME, TIME)
    return p @ v.transpose(0, 2, 1, 3).reshape(BATCH * HEADS, TIME, WIDTH)


def exponentials_masked(q, k, v):
    s = scores_of(q, k) / 4
    e = jnp.where(CAUSAL, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return jnp.einsum("bhts,bshd->bthd", e / e.sum(-1, keepdims=True), v)


def epsilon(q, k, v):
    e = jnp.exp(scores_of(q, k) / 4)
    return jnp.einsum("bhts,bshd->bthd", e / (e.sum(-1, keepdims=True) + 1e-6), v)


def precise(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / 4
    return weighted(s, v)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "second read": (second_read, "something else reads its scores or its probabilities"),
    "scores returned": (scores_returned, "something else reads its scores or its probabilities"),
    "capped": (lambda q, k, v: weighted(jnp.tanh(scores_of(q, k) / 20) * 5, v), "capped, by tanh"),
    "dropped": (dropped, "its probabilities are dropped, masked or scaled"),
    "reshaped": (reshaped, "its probabilities are reshaped"),
    "exponentials masked": (exponentials_masked, "its exponentials are masked"),
    "epsilon": (epsilon, "something is added to their sum"),
    "temperature": (
        lambda q, k, v: weighted(scores_of(q, k) * jnp.exp(q[:, :1, :1, :1]), v),
        "multiplied by an array",
    ),
    "no mask": (
        lambda q, k, v: weighted(jnp.where(CAUSAL, scores_of(q, k) / 4, -2.0), v),
        "masked scores are set to -2",
    ),
    "other values": (
        lambda q, k, v: weighted(scores_of(q, k) / 4, v[..., :4]),
        "stand-in refuses it: value shape should be",
    ),
    "values of all heads": (
        lambda q, k, v: jnp.einsum(
            "bhts,bsd->bthd", jax.nn.softmax(scores_of(q, k) / 4), v[:, :, 0]
        ),
        "keys and values have different axes",
    ),
    "of no product": (
        lambda q, k, v: jax.nn.softmax(q) @ jnp.swapaxes(k, -1, -2) + v.sum(),
        "its scores are not computed next to their softmax",
    ),
    "precise": (precise, "a product of it is in float32 (precision=HIGHEST, as the author asked)"),
    "no gradient of scores": (
        lambda q, k, v: weighted(jax.lax.stop_gradient(scores_of(q, k) / 4), v),
        "its scores come of stop_gradient",
    ),
}


@pytest.mark.usefixtures("stand_in")
def test_what_no_kernel_computes_stays_and_says_why() -> None:
    for name, (fn, said) in REFUSED.items():
        [(fused, why)] = explained(fn, Q, K, V)
        assert not fused, name
        assert said in why, name
        with pytest.warns(UserWarning, match="attention=fused: 100% of the FLOPs of attention"):
            assert_same_program(jaxmp.autocast(fn, BF16), jaxmp.autocast(fn, FUSED), Q, K, V)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("recipe", "bits"), [("nvfp4", "4 bits"), ("int8", "8 bits")])
def test_products_of_few_bits_say_how_many(recipe: str, bits: str) -> None:
    wide = [gaussian(i, BATCH, TIME, HEADS, 16) for i in range(3)]
    policy = f"{FUSED},matmul={recipe}"
    assert explained(plain, *wide, policy=policy) == [("", f"a product of it is in {bits}")]
    stored = jaxmp.quantize(wide[0], "int8@tensor", min_size=1)
    said = [("", "a product of it reads a weight in few bits")]
    assert explained(plain, stored, *wide[1:]) == said


# Which kernel, and what it takes.


def test_pallas_takes_what_it_takes() -> None:
    policy = f"{BF16},attention=fused@tpu-v5e"
    long = [jax.ShapeDtypeStruct((1, 256, 4, 16), jnp.float32)] * 3
    few = [long[0], *[jax.ShapeDtypeStruct((1, 256, 2, 16), jnp.float32)] * 2]
    assert explained(causal, *long, policy=policy) == [("Pallas on tpu-v5e", "")]
    assert explained(causal, *few, policy=policy) == [("Pallas on tpu-v5e", "")]

    def masked(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    mask = jax.ShapeDtypeStruct((1, 1, 256, 256), bool)
    float16 = policy.replace("bfloat16", "float16")
    for why, args, asked in (
        ("it supports no bias, and of masks the causal one only", (masked, *long, mask), policy),
        ("16 queries are not a multiple of 128", (causal, Q, K, V), policy),
        ("TPUs do not multiply float16", (causal, *long), float16),
    ):
        assert explained(*args, policy=asked) == [("", f"Pallas refuses it: {why}")]


def test_a_kernel_that_failed_once_is_asked_again() -> None:
    raised: list[Exception] = [RuntimeError("the driver is busy"), ValueError("rank promotion")]

    def run(call: KernelCall, *arrays: Any) -> Any:
        if raised:
            raise raised.pop()
        return kernels.plain(call, *arrays)

    kernel, call = Kernel("busy", "cuda", run), KernelCall(1.0, causal=True)
    said = [kernels.refusal(kernel, call, SHAPES, varying=False) for _ in range(3)]
    assert said == [
        *(f"busy refuses it: {why}" for why in ("rank promotion", "the driver is busy")),
        "",
    ]

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake")

    with pytest.raises(ZeroDivisionError, match="a mistake"):
        kernels.refusal(Kernel("broken", "cuda", broken), call, SHAPES, varying=False)


@pytest.mark.slow
def test_pallas_computes_it() -> None:
    call = KernelCall(0.2, causal=True)
    arrays = [
        gaussian(i, 1, 256, heads, 32).astype(jnp.bfloat16) for i, heads in enumerate((4, 2, 2))
    ]

    def both(run: Callable[..., Any]) -> Any:
        return run(call, *arrays), jax.grad(loss_of(functools.partial(run, call)), (0, 1, 2))(
            *arrays
        )

    with pltpu.force_tpu_interpret_mode():
        got = both(kernels.flash)
    assert relative(got, jax.tree.map(np.float64, both(kernels.plain))) < 0.02


def test_without_a_kernel_it_runs_as_it_did_and_says_so() -> None:
    policy = f"{BF16},attention=fused"
    assert explained(causal, Q, K, V, policy=policy) == [("", "there is no kernel for cpu")]
    summary = jaxmp.explain(causal, policy)(Q, K, V).summary()
    assert "attention                none fused\n  1 not: test_fused.py:" in summary
    assert "gpu-t4" in explained(causal, Q, K, V, policy=f"{policy}@gpu-t4")[0][1]
    assert_same_program(jaxmp.autocast(causal, BF16), jaxmp.autocast(causal, policy), Q, K, V)


def test_audit_names_what_is_not_fused(stand_in: list[str]) -> None:
    def step(policy: str) -> list[str]:
        loss = loss_of(jaxmp.autocast(causal, policy))
        report = jaxmp.audit(jax.grad(loss))(Q, K, V)
        return [str(f) for f in report.findings if f.kind == "not-fused"]

    [finding] = step(f"{BF16},attention=fused")
    assert "attention that no kernel computes" in finding
    assert "not fused: there is no kernel for cpu" in finding
    assert not step(FUSED)
    assert stand_in


@pytest.mark.usefixtures("stand_in")
def test_the_summary_counts_what_is_fused() -> None:
    summary = jaxmp.explain(scanned, FUSED, (0, 1, 2))(Q, K, V).summary()
    assert "attention                2 by stand-in on gpu-h100 fused" in summary
    assert "attention" not in jaxmp.explain(scanned, BF16, (0, 1, 2))(Q, K, V).summary()


@pytest.mark.usefixtures("stand_in")
def test_a_module_may_have_its_own_word() -> None:
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            attention = functools.partial(nn.MultiHeadDotProductAttention, HEADS)
            return attention(name="first")(attention(name="second")(x))

    x = gaussian(4, BATCH, TIME, HEADS * WIDTH)
    model = jaxmp.wrap(Two(), jaxmp.PolicyMap({"second": BF16}, default=FUSED))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    rows = jaxmp.explain(model.apply)(params, x).rows
    [fused] = [row for row in rows if row.fused]
    assert fused.path.startswith("Two/first")
    assert not any(row.not_fused for row in rows)


@pytest.mark.usefixtures("elsewhere")
def test_its_second_derivative_is_refused_by_name() -> None:
    loss = loss_of(jaxmp.autocast(plain, FUSED))

    def twice(q):
        return jnp.sum(jax.grad(lambda q: loss(q, K, V))(q) ** 2)

    with pytest.raises(NotImplementedError, match="has a first derivative, and no second one"):
        jax.eval_shape(jax.grad(twice), Q)


@pytest.mark.slow
def test_what_is_around_is_computed_again_and_the_kernel_is_not(stand_in: list[str]) -> None:
    fn, (params, x) = linen_layer()
    policy = f"{FUSED},residuals=recompute"
    rows = jaxmp.explain(fn, policy)(params, x).rows
    [kept] = [row.residual for row in rows if row.fused]
    assert kept == Residual.KERNEL
    assert {row.residual for row in rows} >= {Residual.SAVED}
    want = jax.jit(jax.grad(loss_of(jaxmp.autocast(fn, FUSED))))(params, x)
    got = jax.jit(jax.grad(loss_of(jaxmp.autocast(fn, policy))))(params, x)
    assert relative(got, jax.tree.map(np.float64, want)) < 0.02
    assert stand_in


@pytest.mark.usefixtures("stand_in")
def test_a_gradient_inside_is_transformed_last() -> None:
    fn = jax.grad(loss_of(plain))
    [(_, why)] = explained(fn, Q, K, V)
    assert "as a backward pass does: transform the function first" in why


def split(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), **kwargs)


@pytest.mark.usefixtures("stand_in")
def test_it_is_found_under_shard_map() -> None:
    assert explained(split(causal), Q, K, V) == [("stand-in on gpu-h100", "")]
    fused = [split(jaxmp.autocast(causal, FUSED)), jaxmp.autocast(split(causal), FUSED)]
    for each in fused:
        jax.eval_shape(jax.grad(loss_of(each)), Q, K, V)


def test_pallas_does_not_say_over_which_devices_its_result_differs() -> None:
    policy = f"{BF16},attention=fused@tpu-v5e"
    long = [jax.ShapeDtypeStruct((1, 256, 4, 16), jnp.float32)] * 3
    [(_, why)] = explained(split(causal), *long, policy=policy)
    assert "say check_vma=False" in why
    unchecked = split(causal, check_vma=False)
    assert explained(unchecked, *long, policy=policy) == [("Pallas on tpu-v5e", "")]


def test_what_shardings_in_types_say_is_kept() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, P("d"))
    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(x, sharding) for x in (Q, K, V))
        [(_, why)] = explained(causal_constant, q, k, v, policy=f"{BF16},attention=fused@tpu-v5e")
    assert why == "the types of its arrays say how they are sharded"


# Compiled for chips that are not there.

CUDNN_BACKWARD = {"__cudnn$fmhaSoftmaxBackward": 1}
SHAPES = (jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16),) * 3
needs_cudnn = pytest.mark.skipif(  # JAX asks for it when it traces the call, GPU or not
    bool(kernels.refusal(kernels.CUDNN, KernelCall(1.0, causal=True), SHAPES, varying=False)),
    reason="needs cuDNN",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "calls"),
    [
        pytest.param(
            "gpu-h100",
            [{"__cudnn$fmhaSoftmax": 1}, {"__cudnn$fmhaSoftmax": 1, **CUDNN_BACKWARD}],
            marks=[needs_gpu_compiler, needs_cudnn],
        ),
        pytest.param(
            "tpu-v5e", [{"tpu_custom_call": 1}, {"tpu_custom_call": 3}], marks=needs_tpu_compiler
        ),
    ],
)
def test_compilers_see_the_kernel_forward_and_backward(target, calls) -> None:
    """And the memory falls by at least the probabilities, which are kept without it."""
    time, heads = 4096, 8  # more than a TPU keeps in fast memory
    shapes = [jax.ShapeDtypeStruct((1, time, heads, 64), jnp.float32)] * 3

    def preflight(policy: str, made_of: Callable[..., Any]) -> Any:
        report = jaxmp.preflight(made_of(jaxmp.autocast(causal, policy)), target=target)(*shapes)
        return report["as written"]

    def step(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(loss_of(fn), (0, 1, 2))

    policy = f"{BF16},attention=fused"
    forward, both = (preflight(policy, made_of) for made_of in (loss_of, step))
    assert forward.program.library_calls.items() >= calls[0].items()
    assert both.program.library_calls.items() >= calls[1].items()
    saved = preflight(BF16, step).temporary_bytes - both.temporary_bytes
    assert saved > 2 * heads * time**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "calls"),
    [
        pytest.param("gpu-h100:4", 2, marks=[needs_gpu_compiler, needs_cudnn]),
        pytest.param("tpu-v5e:2x2", 3, marks=needs_tpu_compiler),
    ],
)
def test_examples_are_split_over_devices_without_a_word_between_them(target, calls) -> None:
    chip = parse_target(target)
    job = {"platform": chip.compiler, "topology": chip.topology, "config": chip.config}
    devices = topology_devices(job)
    mesh = jax.make_mesh((4,), ("d",), devices=devices, axis_types=(AxisType.Auto,))
    fn = jaxmp.autocast(causal, f"{BF16},attention=fused@{target.partition(':')[0]}")
    if chip.platform == "tpu":  # whose compiler splits no kernel
        fn = jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    sharding = jax.sharding.NamedSharding(mesh, P("d"))
    args = [jax.ShapeDtypeStruct((8, 1024, 4, 64), jnp.float32, sharding=sharding)] * 3
    step = jax.jit(jax.grad(loss_of(fn), (0, 1, 2)), out_shardings=sharding)
    platform = "tpu" if chip.platform == "tpu" else "cuda"
    program = read_hlo(step.trace(*args).lower(lowering_platforms=(platform,)).compile().as_text())
    kernels_called = [n for name, n in program.library_calls.items() if "Concat" not in name]
    assert sum(kernels_called) == calls
    assert not program.moved


# Policies.


def test_policies_say_so() -> None:
    policy = jaxmp.Policy("float32", "bfloat16", "float32", attention="fused")
    assert jaxmp.get_policy(str(policy)) == policy
    assert str(policy) == "mixed_bfloat16,attention=fused"
    assert repr(policy) == "get_policy('mixed_bfloat16,attention=fused')"
    assert jaxmp.get_policy(f"{BF16},attention=Fused@gpu-h100").attention == "fused@gpu-h100"
    assert jaxmp.get_policy(BF16).attention is None


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ("flash", "attention is 'fused' or 'fused@CHIP'"),
        ("fused@", "'fused@' names no chip; the chips are tpu-v4"),
        ("fused@gpu-h10", "names no chip (did you mean 'gpu-h100'?)"),
    ],
)
def test_policies_refuse_what_is_none(attention: str, said: str) -> None:
    for make in (
        lambda: jaxmp.Policy("float32", "bfloat16", "float32", attention=attention),
        lambda: jaxmp.get_policy(f"{BF16},attention={attention}"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            make()
    with pytest.raises(TypeError, match="attention takes None, 'fused' or 'fused@CHIP'"):
        jaxmp.Policy("float32", "bfloat16", "float32", attention=True)
