"""`jaxmp.prepare`: a model and its optimizer under one policy."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp.dtypes import half_dtype
from jaxmp.loss_scaling import LossScaleState

from support import ones

X = ones(4, 16)
TX = optax.adamw(1e-3)


def products(model: Any) -> set[str]:
    if isinstance(model, nn.Module):
        args = model.apply, model.init(jax.random.key(0), X)
    elif isinstance(model, nnx.Module):
        args = (model,)
    else:
        args = model, jnp.ones((16, 32))
    fn, *params = args
    return set(jaxmp.explain(fn)(*params, X).products())


MODELS = {
    "linen": lambda: nn.Dense(32),
    "nnx": lambda: nnx.Linear(16, 32, rngs=nnx.Rngs(0)),
    "function": lambda: lambda w, x: x @ w,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_optimizer_are_under_one_policy(name: str) -> None:
    for dtype in ("float16", "bfloat16"):
        model, tx = jaxmp.prepare(MODELS[name](), TX, f"mixed_{dtype}", init_scale=8.0)
        assert products(model) == {dtype}
        state = tx.init(X)
        assert isinstance(state, LossScaleState) == (dtype == "float16")
        assert float(jaxmp.loss_scaling.loss_scale(state)) == (8 if dtype == "float16" else 1)


def test_the_default_is_what_the_device_multiplies(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = jaxmp.prepare(nn.Dense(32), TX)
    name = jnp.dtype(half_dtype()).name
    assert products(model) == {name}
    assert products(jaxmp.wrap(nn.Dense(32))) == products(model)
    expected = [
        f"{f}: no policy was named; on this cpu it is mixed_{name}." for f in ("prepare", "wrap")
    ]
    assert caplog.messages == expected
    jaxmp.prepare(nn.Dense(32), TX, "mixed_half")
    assert caplog.messages == expected  # a policy that is named is not told


def test_a_map_and_collections_are_those_of_wrap() -> None:
    policy = jaxmp.PolicyMap({"**": "mixed_float16"}, default="float32")
    model, tx = jaxmp.prepare(nn.Sequential([nn.Dense(32)]), TX, policy)
    assert products(model) == {"float16"}
    assert isinstance(tx.init(X), LossScaleState)
    with pytest.raises(TypeError, match="params are the names"):
        jaxmp.prepare(nn.Dense(2), TX, params=[3])


class Averaged(nn.Module):
    """A model with methods of the names that an optimizer's have."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(32)(x)

    def update(self, x: Any) -> Any:
        return self(x)


def test_a_model_is_none_of_optax_whatever_its_methods_are_called() -> None:
    model, _ = jaxmp.prepare(Averaged(), TX, "mixed_float16")
    assert products(model) == {"float16"}


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match=r"prepare: the model comes first, and then the optimizer"):
        jaxmp.prepare(TX, nn.Dense(2))
    with pytest.raises(TypeError, match=r"prepare: tx must be an optax transformation.*'mixed_b"):
        jaxmp.prepare(nn.Dense(2), "mixed_bfloat16")
    with pytest.raises(ValueError, match="init_scale"):
        jaxmp.prepare(nn.Dense(2), TX, "mixed_bfloat16", init_scale=0)


# A scaler and policies that do not go together.


def grads_of(model: Any, tx: Any, how: str) -> Any:
    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    params = {"params": {"kernel": jnp.ones((16, 32)), "bias": jnp.ones(32)}}
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    if how == "state":
        return jax.eval_shape(state.value_and_grad(loss), params, X)
    fn = jaxmp.value_and_grad(loss, state.opt_state)
    return jax.eval_shape(fn, params, X) if how == "jit" else fn(params, X)


@pytest.mark.parametrize("how", ["function", "jit", "state"])
def test_float16_without_a_scaler_warns_where_it_is_differentiated(how: str) -> None:
    with pytest.warns(UserWarning, match="under 'mixed_float16', and the optimizer has no loss"):
        grads_of(jaxmp.wrap(nn.Dense(32), "mixed_float16"), TX, how)
    policy = jaxmp.PolicyMap({nn.Dense: "mixed_float16"}, default="mixed_bfloat16")
    with pytest.warns(UserWarning, match=r"jaxmp\.prepare\(model, tx, policy\)"):
        grads_of(jaxmp.wrap(nn.Dense(32), policy), TX, how)


def test_what_does_not_warn() -> None:
    """A scaler may be there to skip steps; and without a policy nothing is known."""
    scaled = jaxmp.static_loss_scale(TX, 1.0)
    grads_of(jaxmp.wrap(nn.Dense(32), "mixed_bfloat16"), scaled, "jit")
    grads_of(jaxmp.wrap(nn.Dense(32), "mixed_bfloat16"), scaled, "state")
    for policy in ("mixed_bfloat16", "mixed_float16", "float32", "mixed_float8"):
        grads_of(*jaxmp.prepare(nn.Dense(32), TX, policy), "jit")
    grads_of(nn.Dense(32, dtype=jnp.float16), TX, "jit")
    grads_of(nn.Dense(32), jaxmp.dynamic_loss_scale(TX), "jit")
    grads_of(jaxmp.wrap(nn.Dense(32), "float32"), jaxmp.dynamic_loss_scale(TX), "jit")


def test_what_diagnose_differentiates_does_not_warn() -> None:
    params = nn.Dense(32).init(jax.random.key(0), X)
    model = jaxmp.wrap(nn.Dense(32), "mixed_float16")
    jaxmp.diagnose(lambda p, x: jnp.mean(model.apply(p, x) ** 2))(params, X)


def test_an_nnx_model_in_float16_without_a_scaler_warns() -> None:
    model = jaxmp.wrap(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), "mixed_float16")
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    with pytest.warns(UserWarning, match="no loss scale"):
        jaxmp.value_and_grad(lambda m: jnp.mean(m(X) ** 2), optimizer.opt_state)(model)
