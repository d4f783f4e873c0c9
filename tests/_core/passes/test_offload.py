"""`residuals=offload`, and the policies that offload: the same numbers, saved on the host."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from host_memory_kit import device_with
from test_residuals import PROGRAMS, W, X, attention, exactly, layers, loop

import jaxmp
from jaxmp._core.plan.why import Residual
from jaxmp.checkpoint_policies import (
    long_products,
    offload_long_products,
    offload_products,
    products,
)

from linen_models import variables_of
from models import CASES
from support import assert_same, autocast, explain, gaussian, iter_eqns, slow_when

RECOMPUTE, OFFLOAD = (f"mixed_bfloat16,residuals={how}" for how in ("recompute", "offload"))
HOST = jax.memory.Space.Host


def saved(fn, *args) -> tuple[Counter[str], Counter[str]]:
    """Bytes by dtype of what the forward pass saves, on the device and on the host."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args)[1])(*args).jaxpr
    found = {id(v): v.aval for v in jaxpr.outvars if v not in jaxpr.invars}
    device, host = Counter[str](), Counter[str]()
    for aval in found.values():
        counts = host if aval.memory_space == HOST else device
        counts[str(aval.dtype)] += aval.size * aval.dtype.itemsize
    return device, host


def assert_same_bits(fn, *args, argnums: Any = 0):
    """Offloading changes no bit of a loss or a gradient; something is on the host."""
    grads = [jax.value_and_grad(autocast(fn, p), argnums) for p in (RECOMPUTE, OFFLOAD)]
    traced = exactly(lambda *args: [grad(*args) for grad in grads]).trace(*args)
    assert_same(*traced.lower().compile()(*args))
    on_host = [
        v.aval.size
        for eqn in iter_eqns(traced.jaxpr)
        for v in eqn.outvars
        if v.aval.memory_space == HOST
    ]
    assert sum(on_host) > 0


@slow_when(lambda name: name not in ("layers", "loop", "sharded"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_gradients_are_those_of_recompute_to_the_bit(name):
    assert_same_bits(PROGRAMS[name], W, X, argnums=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm", "lm_scan"])
def test_a_language_model_of_linen_has_the_same_bits(name):
    params, state, tokens, labels = CASES[name].arrays(0)
    loss = CASES[name].loss(small=True)
    assert_same_bits(lambda params: loss(params, state, tokens, labels)[0], params)


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x += self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
        return self.embed.attend(x + self.down(nnx.gelu(self.up(self.norm(x)))))


@pytest.mark.slow
def test_a_decoder_of_nnx_has_the_same_bits():
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))
    params = jax.tree.map(lambda x: gaussian(2, *x.shape, scale=1 / 4), shapes)
    tokens = jnp.arange(2 * 12).reshape(2, 12) % 32

    def loss(params):
        logits = nnx.merge(graph, params)(tokens).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 3])

    assert_same_bits(loss, params)


def test_all_but_statistics_is_on_the_host():
    for fn in (layers, attention, loop):
        kept, _ = saved(autocast(fn, RECOMPUTE), W, X)
        device, host = saved(autocast(fn, OFFLOAD), W, X)
        assert device + host == kept, fn.__name__
        assert device.total() * 4 < host.total(), fn.__name__
        assert set(device) <= {"float32"}, "statistics"


def test_what_an_iteration_reads_of_the_one_before_is_on_the_host():
    _, host = saved(autocast(loop, OFFLOAD), W, X)
    carries, last, out = 3 * X.nbytes, X.nbytes, 3 * X.nbytes // 2
    assert host == {"float32": carries + last, "bfloat16": out}


def test_much_smaller_arrays_are_not_worth_a_copy():
    def decaying(w, x):
        def body(carry, _):
            x, rate = carry
            return (jnp.tanh(x @ w) * rate, jnp.cos(rate)), None

        return jnp.mean(jax.lax.scan(body, (x, jnp.float32(1)), length=3)[0][0])

    jaxpr = str(jax.make_jaxpr(jax.grad(autocast(decaying, OFFLOAD)))(W, X))
    sizes = set(re.findall(r"f32<host>\[([\d,]*)\]", jaxpr))
    assert any("32" in size for size in sizes), "the rows of x"
    assert not sizes & {"", "3"}, "the rate"


def test_parameters_stay_where_they_are():
    def two(ws, x):
        return jnp.mean(jax.nn.gelu(jax.nn.gelu(x @ ws[0]) @ ws[1]))

    jaxpr = str(jax.make_jaxpr(jax.grad(autocast(two, OFFLOAD)))((W, W), X))
    assert re.findall(r"<host>\[[\d,]+\]", jaxpr)
    assert not re.findall(rf"<host>\[{W.shape[0]},{W.shape[1]}\]", jaxpr)


def test_a_region_offloads_alone():
    policies = jaxmp.PolicyMap({"up": OFFLOAD}, default="mixed_bfloat16")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(24, name="down")(x))
            return nn.gelu(nn.Dense(48, name="up")(x))

    params = variables_of(Net(), X)
    _, host = saved(lambda p: jaxmp.wrap(Net(), policies).apply(p, X).mean(), params)
    assert host == {"bfloat16": 2 * 32 * 24}, "what the product of the region reads"


TRANSFORMS = {
    "vmap of grad": lambda fn: jax.vmap(jax.grad(fn), (None, 0)),
    "grad of vmap": lambda fn: jax.grad(lambda w, xs: jax.vmap(fn, (None, 0))(w, xs).sum()),
    "jvp": lambda fn: lambda w, xs: jax.jvp(lambda w: jax.grad(fn)(w, xs[0]), (w,), (w,)),
}


@slow_when(lambda transform: transform == "grad of vmap")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_vmap_and_forward_mode_are_those_of_recompute(transform):
    xs = np.stack([X, 2 * np.asarray(X)])
    fns = [TRANSFORMS[transform](autocast(layers, p)) for p in (RECOMPUTE, OFFLOAD)]
    assert_same(*exactly(lambda *args: [fn(*args) for fn in fns])(W, xs))


def test_a_gradient_of_a_gradient_is_refused_by_jax():
    grad = jax.grad(autocast(layers, OFFLOAD))
    with pytest.raises(ValueError, match=r"Expected cotangent type .* but got .*<host>"):
        jax.eval_shape(jax.grad(lambda w: grad(w, X).sum()), W)


def test_a_device_without_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda **_: [device_with("device")])
    message = "^residuals=offload needs .* and Chip has 'device'; use residuals=recompute"
    with pytest.raises(NotImplementedError, match=message):
        jax.make_jaxpr(autocast(layers, OFFLOAD))(W, X)
    jax.make_jaxpr(autocast(layers, RECOMPUTE))(W, X)


def test_explain_says_what_is_on_the_host():
    found = explain(layers, OFFLOAD)(W, X)
    assert {r.residual for r in found.rows if r.op == "dot_general"} == {Residual.OFFLOADED}
    assert f"; 3 {Residual.OFFLOADED}; " in found.summary()
    assert "offload: of no effect" in explain(lambda w: w + 1, OFFLOAD)(W).summary()


def test_the_string_form_reads_back():
    assert str(jaxmp.get_policy(OFFLOAD)) == OFFLOAD


# The policies.


@pytest.mark.parametrize(
    ("saving", "offloading"), [(products, offload_products), (long_products, offload_long_products)]
)
def test_the_policies_save_the_same_on_the_host(saving, offloading):
    for fn in (layers, attention):
        plain, offloaded = (jax.checkpoint(fn, policy=p) for p in (saving, offloading))
        kept, (device, host) = saved(plain, W, X)[0], saved(offloaded, W, X)
        assert host["float32"] > device["float32"], "statistics"
        assert device + host == kept
        grads = tuple(map(jax.grad, (plain, offloaded)))
        assert_same(*jax.jit(lambda w, x, grads=grads: [grad(w, x) for grad in grads])(W, X))


def test_scanned_layers_of_linen_offload():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))), None

    def loss_under(policy):
        stack = nn.scan(
            nn.remat(Layer, policy=policy, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )()
        variables = variables_of(stack, X, None)
        return lambda v: jnp.mean(stack.apply(v, X, None)[0] ** 2), variables

    (plain, variables), (offloaded, _) = map(loss_under, (products, offload_products))
    assert_same(
        *jax.jit(lambda v: [jax.value_and_grad(f)(v) for f in (plain, offloaded)])(variables)
    )
    assert saved(offloaded, variables)[1]["float32"] == 3 * 32 * 64 * 4


def test_a_policy_that_is_called_says_how_to_use_it():
    with pytest.raises(TypeError, match="offload_products, products are policies themselves"):
        offload_products(gaussian(0, 2))
