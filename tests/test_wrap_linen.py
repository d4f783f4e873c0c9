"""The contract of `wrap` on Flax Linen: what a wrapped module does as the module itself does.

First what holds for each of a list of models, then one test per behavior. `test_wrap_linen_inside`
has the wrapped module inside other modules, transforms and policies.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxmp

from linen_models import (
    BF16,
    CASES,
    CNN,
    EPS,
    F16,
    KEY,
    MLP,
    RNGS,
    AutoEncoder,
    X,
    abstract_variables,
    all_counts,
    assert_close,
    assert_same,
    compiled,
    counts,
    gradient_of,
    run,
    variables_of,
)
from support import contraction_dtypes, float16_is_slow, gaussian, jaxpr_of, slow_when


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    """Module scope keeps one model's tests together, and with them what they compile once."""
    return request.param


def wrapped_case(name: str, policy: str | None) -> nn.Module:
    model = CASES[name].model
    return model if policy is None else jaxmp.wrap(model, policy)


@functools.cache
def initialized(name: str, policy: str | None = None) -> Any:
    model, x = wrapped_case(name, policy), CASES[name].x
    return compiled(lambda: model.init({"params": KEY, **RNGS}, x))()


def step(name: str, policy: str | None = None) -> Callable[..., Any]:
    """Of the variables: all gradients, and the output with the changed collections."""
    return gradient_of_step(wrapped_case(name, policy), CASES[name].x)


def gradient_of_step(model: Any, x: jax.Array) -> Callable[..., Any]:
    def loss(params: Any, state: Any) -> Any:
        out, changed = model.apply({"params": params, **state}, x, rngs=RNGS, mutable=list(state))
        return jnp.mean(jnp.sin(out)), (out, changed)

    return jax.grad(loss, has_aux=True, argnums=(0, 1))


def split(variables: Any) -> tuple[Any, Any]:
    state = dict(variables)
    return state.pop("params"), state


@functools.cache
def result(name: str, policy: str | None) -> Any:
    return compiled(step(name, policy))(*split(initialized(name)))


# --- Every model ---------------------------------------------------------------------------------


@slow_when(lambda name: name in ("lstm", "setup"))
def test_init_gives_the_variables_of_the_module_itself(name: str) -> None:
    assert_same(initialized(name, BF16), initialized(name))


@float16_is_slow
@pytest.mark.parametrize("policy", [BF16, F16])
def test_all_contractions_are_low_forward_and_backward(name: str, policy: str) -> None:
    arguments = split(initialized(name))
    total = contraction_dtypes(step(name), *arguments).total()
    low = policy.removeprefix("mixed_")
    outer = {"experts": 1}.get(name, 0)  # a dispatch by one-hot rows contracts nothing
    want = Counter({low: total - outer, "float32": outer})
    assert contraction_dtypes(step(name, policy), *arguments) == want


@slow_when(lambda name: name in ("lstm", "setup"))
def test_outputs_gradients_and_state_are_close_and_in_their_dtypes(name: str) -> None:
    """Close enough to tell that no dropout mask differs."""
    for got, want in zip(result(name, BF16), result(name, None), strict=True):
        assert_close(got, want)


def test_float32_is_the_identity(name: str) -> None:
    """Outputs, gradients and changed state: the same program, so the same bits."""
    arguments = split(initialized(name))
    as_written = str(jaxpr_of(step(name), *arguments))
    assert str(jaxpr_of(step(name, "float32"), *arguments)) == as_written


def test_a_checkpoint_loads_both_ways(name: str) -> None:
    variables, own = initialized(name), initialized(name, BF16)
    for source, target in ((variables, own), (own, variables)):
        blank = jax.tree.map(jnp.zeros_like, target)
        stored = flax.serialization.to_bytes(source)
        assert_same(flax.serialization.from_bytes(blank, stored), source)


def test_equality_hash_pickle_and_repr(name: str) -> None:
    model, wrapped = CASES[name].model, wrapped_case(name, BF16)
    assert wrapped == wrapped_case(name, BF16)
    assert hash(wrapped) == hash(wrapped_case(name, BF16))
    assert wrapped != wrapped_case(name, F16)
    assert wrapped != model
    assert repr(wrapped) == repr(model)
    assert isinstance(wrapped, type(model))
    assert type(pickle.loads(pickle.dumps(wrapped))) is type(wrapped)
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped


def test_tabulate_has_the_rows_of_the_module_itself(name: str) -> None:
    rngs, x = {"params": KEY, **RNGS}, CASES[name].x
    options = {"depth": 3, "console_kwargs": {"width": 200}}
    table = wrapped_case(name, BF16).tabulate(rngs, x, **options)
    assert table == CASES[name].model.tabulate(rngs, x, **options)
    assert "Total Parameters" in table


@slow_when(lambda model: model != "cnn")
@pytest.mark.parametrize("model", ["cnn", "scan", "transformer"])
def test_the_numbers_are_those_of_autocast_on_the_apply_function(model: str) -> None:
    class Autocast:
        apply = staticmethod(jaxmp.autocast(CASES[model].model.apply, BF16))

    cast = compiled(gradient_of_step(Autocast, CASES[model].x))(*split(initialized(model)))
    assert_same(result(model, BF16), cast)


# --- Entry points --------------------------------------------------------------------------------


def test_init_is_not_autocast() -> None:
    """Values that `init` computes from the data are those of float32."""

    class DataDependent(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.Dense(8)(x)
            mean = self.param("mean", lambda _: y.mean(0))
            return y - mean

    wrapped = jaxmp.wrap(DataDependent(), BF16)
    assert_same(compiled(wrapped.init)(KEY, X), compiled(DataDependent().init)(KEY, X))
    assert contraction_dtypes(wrapped.init, KEY, X) == {"float32": 1}


def test_init_with_output() -> None:
    model = MLP()
    got = compiled(jaxmp.wrap(model, BF16).init_with_output)(KEY, X)
    assert_same(got, compiled(model.init_with_output)(KEY, X))


def test_init_by_method() -> None:
    wrapped = jaxmp.wrap(AutoEncoder(), BF16)
    for method in ("encode", AutoEncoder.encode, wrapped.encode):
        variables = abstract_variables(wrapped, X, method=method)
        assert variables == abstract_variables(AutoEncoder(), X, method="encode")
        assert set(variables["params"]) == {"encoder"}


def test_lazy_init_and_eval_shape() -> None:
    wrapped = jaxmp.wrap(MLP(), "bfloat16")
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    variables = wrapped.lazy_init(KEY, abstract)
    want = jax.tree.map(lambda p: p.astype(jnp.bfloat16), MLP().lazy_init(KEY, abstract))
    assert_same(variables, want)
    shapes = jax.eval_shape(wrapped.init, KEY, X)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(
        lambda p: (p.shape, p.dtype), want
    )


@pytest.mark.parametrize(
    "method",
    ["encode", AutoEncoder.encode, AutoEncoder().encode, lambda self, x: self.encode(x)],
    ids=["name", "function", "unwrapped", "lambda"],
)
def test_apply_takes_method(method: Any) -> None:
    model = AutoEncoder()
    variables, wrapped = variables_of(model, X), jaxmp.wrap(model, BF16)
    got = run(wrapped, variables, X, method=method)
    assert_close(got, run(model, variables, X, method="encode"))
    assert counts(wrapped, variables, X, method=method) == {"bfloat16": 1}


def test_every_public_method_is_wrapped_and_may_call_another() -> None:
    wrapped = jaxmp.wrap(AutoEncoder(), BF16)
    variables = variables_of(wrapped, X)
    for name, x, count in (("encode", X, 1), ("decode", X[:, :6], 1), ("__call__", X, 2)):
        assert counts(wrapped, variables, x, method=name) == {"bfloat16": count}


def test_what_flax_does_not_manage_is_left_alone() -> None:
    model, wrapped = AutoEncoder(), jaxmp.wrap(AutoEncoder(), BF16)
    variables = variables_of(model, X)
    assert (wrapped.describe(), wrapped.area, wrapped.halve(3.0)) == ("width 6", 48, 1.5)
    assert wrapped.narrow().width == 2
    for name in ("describe", "halve", "narrow", "area", "_hidden", "setup"):
        assert name not in vars(type(wrapped)), name
    # A private method is the author's own: called from outside it runs as written.
    assert counts(wrapped, variables, X, method="_hidden") == {"float32": 1}


def test_apply_mutable() -> None:
    model, x = CNN(), CASES["cnn"].x
    variables, wrapped = initialized("cnn"), jaxmp.wrap(CNN(), BF16)
    out, changed = run(wrapped, variables, x, rngs=RNGS, mutable=["batch_stats"])
    assert_close((out, changed), run(model, variables, x, rngs=RNGS, mutable=["batch_stats"]))
    _, everything = run(wrapped, variables, x, rngs=RNGS, mutable=True)
    assert_same(everything["params"], variables["params"])
    assert_same(everything["batch_stats"], changed["batch_stats"])
    with pytest.raises(flax.errors.ModifyScopeVariableError, match="batch_stats"):
        jax.eval_shape(functools.partial(wrapped.apply, rngs=RNGS), variables, x)


def test_batch_statistics_accumulate_over_steps() -> None:
    def run(model: nn.Module) -> Any:
        variables, update = initialized("cnn"), apply(model)
        for seed in range(4):
            _, changed = update(variables, 3 + gaussian(seed, 6, 6, 6, 2))
            variables = {**variables, **changed}
        return variables["batch_stats"]

    def apply(model: nn.Module) -> Callable[..., Any]:
        return compiled(functools.partial(model.apply, rngs=RNGS, mutable=["batch_stats"]))

    assert_close(run(jaxmp.wrap(CNN(), BF16)), run(CNN()), roundings=2)


def test_dropout_masks_are_those_of_the_module_itself() -> None:
    model = MLP(features=64, rate=0.5)
    variables = variables_of(model, X)

    def dropped(model: nn.Module) -> jax.Array:
        _, state = run(
            model, variables, X, train=True, rngs=RNGS, mutable=True, capture_intermediates=True
        )
        return state["intermediates"]["Dropout_0"]["__call__"][0] == 0

    got = dropped(jaxmp.wrap(model, BF16))
    np.testing.assert_array_equal(got, dropped(model))
    assert got.any()


def test_random_keys_count_on_after_the_call() -> None:
    """A module with two wrapped draws and one of its own draws what it drew unwrapped."""

    class Noise(nn.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x + jax.random.normal(self.make_rng("noise"), x.shape)

    class Model(nn.Module):
        policy: str | None

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            noise = Noise() if self.policy is None else jaxmp.wrap(Noise(), self.policy)
            return noise(noise(x)) + jax.random.normal(self.make_rng("noise"), x.shape)

    rngs = {"noise": jax.random.key(3)}
    np.testing.assert_array_equal(*(run(Model(p), {}, X, rngs=rngs) for p in (BF16, None)))


def test_capture_intermediates() -> None:
    model = AutoEncoder()
    variables = variables_of(model, X)

    def captured(model: nn.Module, which: Any) -> Any:
        options = {"capture_intermediates": which, "mutable": ["intermediates"]}
        _, state = run(model, variables, X, **options)
        return state

    for which in (True, lambda module, name: name == "encode"):
        assert_close(captured(jaxmp.wrap(model, BF16), which), captured(model, which))


def test_sow() -> None:
    class Sower(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(8)(x)
            self.sow("intermediates", "hidden", x)
            self.sow("losses", "norm", jnp.sum(x**2), reduce_fn=jnp.add, init_fn=lambda: 0.0)
            self.sow("losses", "norm", jnp.sum(x), reduce_fn=jnp.add, init_fn=lambda: 0.0)
            return nn.Dense(2)(x)

    variables = variables_of(Sower(), X)
    options = {"mutable": ["intermediates", "losses"]}
    got = run(jaxmp.wrap(Sower(), BF16), {"params": variables["params"]}, X, **options)
    assert_close(got, run(Sower(), {"params": variables["params"]}, X, **options))


def test_perturbations_get_gradients() -> None:
    class Perturbed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(2)(self.perturb("hidden", nn.tanh(nn.Dense(8)(x))))

    variables = variables_of(Perturbed(), X)

    got, _ = compiled(gradient_of(jaxmp.wrap(Perturbed(), BF16), X))(variables)
    assert_close(got, compiled(gradient_of(Perturbed(), X))(variables)[0])
    assert jnp.any(got["perturbations"]["hidden"])


def test_bind_and_unbind() -> None:
    model = AutoEncoder()
    variables, wrapped = variables_of(model, X), jaxmp.wrap(model, BF16)
    bound = wrapped.bind(variables)
    np.testing.assert_array_equal(bound(X), wrapped.apply(variables, X))
    assert contraction_dtypes(bound.encode, X) == {"bfloat16": 1}
    assert contraction_dtypes(bound.decode, X[:, :6]) == {"bfloat16": 1}
    assert_same(bound.variables, variables)
    module, unbound = bound.unbind()
    assert module == wrapped
    assert_same(unbound, variables)
    encoder, inner = bound.encoder.unbind()  # a submodule by itself is what the author wrote
    assert type(encoder) is nn.Dense
    assert_same(inner["params"], variables["params"]["encoder"])


def test_bound_module_keeps_its_mutations() -> None:
    variables, x = initialized("cnn"), CASES["cnn"].x
    wrapped, options = jaxmp.wrap(CNN(), BF16), {"rngs": RNGS, "mutable": ["batch_stats"]}

    def call_bound(variables: Any, x: jax.Array) -> Any:
        bound = wrapped.bind(variables, **options)
        bound(x)
        return bound.variables["batch_stats"]

    _, changed = run(wrapped, variables, x, **options)
    assert_same(compiled(call_bound)(variables, x), changed["batch_stats"])


def test_functional_nn_apply_and_nn_init() -> None:
    wrapped = jaxmp.wrap(AutoEncoder(), BF16)

    def twice(module: AutoEncoder, x: jax.Array) -> jax.Array:
        return module.encode(module(x))

    variables = compiled(nn.init(twice, wrapped))(KEY, X)
    assert_same(variables, compiled(nn.init(twice, AutoEncoder()))(KEY, X))
    assert contraction_dtypes(nn.apply(twice, wrapped), variables, X) == {"bfloat16": 3}


# --- The module as an object ---------------------------------------------------------------------


def test_fields_clone_and_copy_keep_the_policy() -> None:
    wrapped = jaxmp.wrap(MLP(features=6), BF16)
    assert (wrapped.features, wrapped.name, wrapped.parent) == (6, None, None)
    assert [f.name for f in dataclasses.fields(wrapped)] == [
        f.name for f in dataclasses.fields(MLP)
    ]
    wide = wrapped.clone(features=16)
    for module, features in (
        (wide, 16),
        (copy.copy(wrapped), 6),
        (copy.deepcopy(wrapped), 6),
        (wrapped.copy(features=16), 16),
        (dataclasses.replace(wrapped, features=16), 16),
    ):
        variables = variables_of(module, X)
        assert variables["params"]["Dense_0"]["bias"].shape == (features,)
        assert counts(module, variables, X) == {"bfloat16": 2}
    assert wide == jaxmp.wrap(MLP(features=16), BF16)


def test_the_original_is_not_touched() -> None:
    model = MLP()
    variables = variables_of(model, X)
    jaxmp.wrap(model, BF16)
    assert type(model) is MLP
    assert counts(model, variables, X) == {"float32": 2}


def test_name_docstring_and_signature_are_the_modules() -> None:
    model, wrapped = AutoEncoder(name="coder"), jaxmp.wrap(AutoEncoder(name="coder"), BF16)
    assert wrapped.name == "coder"
    assert type(wrapped).__doc__ == AutoEncoder.__doc__
    assert type(wrapped).__qualname__ == AutoEncoder.__qualname__
    assert wrapped.encode.__doc__ == model.encode.__doc__
    assert wrapped.encode.__annotations__ == model.encode.__annotations__


def test_as_a_static_argument_it_compiles_once() -> None:
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(model: nn.Module, variables: Any, x: jax.Array) -> jax.Array:
        traced.append(model)
        return model.apply(variables, x)

    variables = variables_of(MLP(), X)
    for policy in (BF16, BF16, F16):
        run(jaxmp.wrap(MLP(), policy), variables, X)
    assert len(traced) == 2


# --- Transformed, trained ------------------------------------------------------------------------


def test_eager_jit_and_vmap_agree() -> None:
    wrapped = jaxmp.wrap(MLP(), BF16)
    variables = variables_of(wrapped, X)
    eager = wrapped.apply(variables, X)
    np.testing.assert_allclose(jax.jit(wrapped.apply)(variables, X), eager, atol=EPS)
    mapped = jax.vmap(wrapped.apply, in_axes=(None, 0))(variables, X)
    np.testing.assert_allclose(mapped, eager, atol=EPS)


def test_vmap_of_init_makes_an_ensemble() -> None:
    wrapped, keys = jaxmp.wrap(MLP(), BF16), jax.random.split(KEY, 3)
    variables = compiled(jax.vmap(wrapped.init, in_axes=(0, None)))(keys, X)
    assert_same(variables, compiled(jax.vmap(MLP().init, in_axes=(0, None)))(keys, X))
    apply = jax.vmap(wrapped.apply, in_axes=(0, None))
    assert contraction_dtypes(apply, variables, X) == {"bfloat16": 2}


def test_second_derivatives_and_jvp() -> None:
    wrapped = jaxmp.wrap(MLP(), BF16)
    variables = variables_of(wrapped, X)

    def tangent(x: jax.Array) -> jax.Array:
        return jax.jvp(lambda x: wrapped.apply(variables, x), (x,), (x,))[1]

    assert set(contraction_dtypes(tangent, X)) == {"bfloat16"}
    assert set(contraction_dtypes(jax.grad(lambda x: jnp.sum(tangent(x) ** 2)), X)) == {"bfloat16"}


def test_training_under_jit_with_donation() -> None:
    """Loss and parameters follow those of float32; the donated buffers are used."""
    target = jnp.sin(X[:, :6])

    def train(model: nn.Module) -> tuple[list[float], Any]:
        state = TrainState.create(
            apply_fn=model.apply, params=initialized("mlp")["params"], tx=optax.adam(1e-2)
        )
        state = jax.tree.map(jnp.array, state)  # to donate a copy

        @functools.partial(compiled, donate_argnums=0)
        def update(state: TrainState) -> tuple[TrainState, jax.Array]:
            def loss(params: Any) -> jax.Array:
                out = state.apply_fn({"params": params}, X, train=True, rngs=RNGS)
                return jnp.mean((out - target) ** 2)

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        losses = []
        for _ in range(20):
            before = state.params["Dense_0"]["kernel"]
            state, value = update(state)
            losses.append(float(value))
            assert before.is_deleted()
        return losses, state.params

    (losses, params), (losses32, params32) = train(jaxmp.wrap(MLP(), BF16)), train(MLP())
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, losses32, rtol=4 * EPS)
    assert_close(params, params32)


def test_static_arguments_stay_static() -> None:
    class Options(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *, act: Any, mode: str, scale: float, flag: bool) -> Any:
            y = act(nn.Dense(4)(x["x"])) * scale
            return {"y": y if flag and mode == "on" else None, "mode": mode, "none": x["none"]}

    options = {"act": nn.gelu, "mode": "on", "scale": 2.0, "flag": True}
    wrapped, x = jaxmp.wrap(Options(), BF16), {"x": X, "none": None}
    variables = variables_of(Options(), x, **options)
    out = wrapped.apply(variables, x, **options)
    assert (out["mode"], out["none"], out["y"].dtype) == ("on", None, jnp.float32)
    assert wrapped.apply(variables, x, **{**options, "flag": False})["y"] is None


def test_an_error_inside_leaves_no_trace() -> None:
    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, fail: bool = False) -> jax.Array:
            x = nn.Dense(8)(x)
            if fail:
                raise KeyError("the author's own")
            return nn.Dense(2, dtype=jnp.float32)(x)

    wrapped = jaxmp.wrap(Fails(), BF16)
    variables = variables_of(Fails(), X)
    with pytest.warns(UserWarning, match=r"wrap: 1 layer with 20% .*: Fails/Dense_1\."):
        before = counts(wrapped, variables, X)
    with pytest.raises(KeyError, match="the author's own"):
        wrapped.apply(variables, X, fail=True)
    assert counts(wrapped, variables, X) == before == {"bfloat16": 1, "float32": 1}
    assert counts(Fails(), variables, X) == {"float32": 2}


# --- Dtypes at the boundary ----------------------------------------------------------------------


def test_output_dtype() -> None:
    class Outputs(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))
            return {"x": x, "half": x.astype(jnp.float16), "top": jnp.argmax(x, -1)}

    variables = variables_of(Outputs(), X)
    wrapped = jaxmp.wrap(Outputs(), "p=f32,c=bf16,o=bf16")
    assert abstract_variables(wrapped, X) == abstract_variables(Outputs(), X)
    out, changed = run(wrapped, variables, X, mutable=["batch_stats"])
    assert {k: str(v.dtype) for k, v in out.items()} == {
        "x": "bfloat16",
        "half": "float16",
        "top": "int32",
    }
    assert {str(v.dtype) for v in jax.tree.leaves(changed)} == {"float32"}


def test_parameters_stored_in_16_bits() -> None:
    """They are the rounded float32 ones, and everything else is what it was."""
    variables, stored = initialized("cnn"), initialized("cnn", "bfloat16")
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), variables["params"])
    assert_same(stored["params"], rounded)
    assert_same(stored["batch_stats"], variables["batch_stats"])
    policy = "p=bf16,c=bf16,o=f32"
    arguments = split(stored)
    total = contraction_dtypes(step("cnn"), *split(variables)).total()
    assert contraction_dtypes(step("cnn", policy), *arguments) == {"bfloat16": total}
    (grads, stats), (out, changed) = compiled(step("cnn", policy))(*arguments)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"bfloat16"}
    assert {str(s.dtype) for s in jax.tree.leaves((stats, out, changed))} == {"float32"}
    rounded = jax.tree.map(lambda p: p.astype(jnp.float32), rounded)
    (grads32, _), rest32 = compiled(step("cnn"))(rounded, arguments[1])
    assert_close(jax.tree.map(lambda g: g.astype(jnp.float32), grads), grads32)
    assert_close((out, changed), rest32)


def test_tabulate_shows_parameters_as_they_are_stored() -> None:
    options = {"console_kwargs": {"width": 200, "no_color": True}}
    table = jaxmp.wrap(MLP(), "p=bf16,c=bf16,o=f32").tabulate(KEY, X, **options)
    plain = MLP().tabulate(KEY, X, **options)
    assert table.count("bfloat16") == 4
    assert len(table.splitlines()) == len(plain.splitlines())


def test_parameters_stored_in_16_bits_are_float32_to_the_modules_code() -> None:
    seen = []

    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            w = self.param("w", nn.initializers.ones, (8, 8))
            seen.append(str(w.dtype))
            return jnp.sum(jnp.exp(x @ w))

    wrapped = jaxmp.wrap(Looks(), "bfloat16")
    variables = variables_of(wrapped, X)
    assert variables["params"]["w"].dtype == jnp.bfloat16
    assert counts(wrapped, variables, X) == {"bfloat16": 1}
    assert set(seen) == {"float32"}


def test_other_collections_keep_their_dtypes_and_are_updated() -> None:
    class Stateful(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            count = self.variable("state", "count", jnp.zeros, (), jnp.int32)
            flag = self.variable("state", "flag", jnp.zeros, (), bool)
            ema = self.variable("state", "ema", jnp.zeros, (8,))
            half = self.variable("state", "half", jnp.zeros, (8,), jnp.float16)
            x = nn.Dense(8)(x)
            if not self.is_initializing():
                count.value += 1
                flag.value = ~flag.value
                ema.value = 0.9 * ema.value + 0.1 * x.mean(0)
                half.value = half.value + jnp.float16(0.5)
            return x @ x.T

    model = Stateful()
    variables = variables_of(model, X)
    for policy in (BF16, "bfloat16"):
        wrapped = jaxmp.wrap(model, policy)
        _, changed = run(wrapped, variables, X, mutable=["state"])
        _, want = run(model, variables, X, mutable=["state"])
        assert_close(changed, want)
        for name in ("count", "flag", "half"):
            assert_same(changed["state"][name], want["state"][name])


def test_decode_cache() -> None:
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.MultiHeadDotProductAttention(1, decode=True)(x)

    model, wrapped = Decoder(), jaxmp.wrap(Decoder(), BF16)
    tokens = gaussian(5, 2, 12, 16)
    variables = variables_of(model, tokens)
    cache = jax.tree.map(jnp.zeros_like, variables["cache"])

    def decode(model: nn.Module) -> Any:
        def token(cache: Any, x: jax.Array) -> Any:
            state = {"params": variables["params"], "cache": cache}
            out, changed = model.apply(state, x[:, None], mutable=["cache"])
            return changed["cache"], out

        return jax.lax.scan(token, cache, tokens.swapaxes(0, 1))

    (got, out), (want, out32) = (
        compiled(lambda: decode(wrapped))(),
        compiled(lambda: decode(model))(),
    )
    assert_close(got, want)
    assert_close(out, out32)
    [index] = (v["cache_index"] for v in got.values())
    assert index == 12
    assert set(contraction_dtypes(lambda: decode(wrapped))) == {"bfloat16"}


@pytest.mark.parametrize("boxed", [nn.with_partitioning, nn.with_logical_partitioning])
@pytest.mark.parametrize("policy", [BF16, "p=bf16,c=bf16,o=f32"])
def test_boxed_parameters(boxed: Any, policy: str) -> None:
    dense = nn.Dense(8, kernel_init=boxed(nn.initializers.ones, ("in", "out")))
    model = nn.Sequential([dense, nn.Dense(2)])
    wrapped = jaxmp.wrap(model, policy)
    variables = variables_of(wrapped, X)
    assert nn.get_partition_spec(variables) == nn.get_partition_spec(variables_of(model, X))
    kernel = variables["params"]["layers_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned | nn.LogicallyPartitioned)
    assert kernel.value.dtype == jaxmp.get_policy(policy).param_dtype
    for v in (variables, nn.unbox(variables)):
        assert all_counts(wrapped, v, X).keys() == {"bfloat16"}
        grads, _ = jax.eval_shape(gradient_of(wrapped, X), v)
        assert jax.tree.structure(grads) == jax.tree.structure(v)


# --- Errors --------------------------------------------------------------------------------------


def test_a_class_instead_of_an_instance() -> None:
    with pytest.raises(TypeError, match=r"wrap: .* class MLP: wrap an instance, as in"):
        jaxmp.wrap(MLP, BF16)


def test_a_module_that_is_bound_already() -> None:
    bound = MLP().bind(variables_of(MLP(), X))
    with pytest.raises(ValueError, match=r"wrap: the MLP is bound .* Wrap the unbound module"):
        jaxmp.wrap(bound, BF16)


def test_a_policy_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match="mixed_bfloat17"):
        jaxmp.wrap(MLP(), "mixed_bfloat17")
    with pytest.raises(TypeError, match="wrap: a policy is a string"):
        jaxmp.wrap(MLP(), 16)
    with pytest.raises(ValueError, match="compute_dtype is float64"):
        compiled(jaxmp.wrap(MLP(), "p=f32,c=f64,o=f32").apply)(variables_of(MLP(), X), X)


def test_no_module_at_all() -> None:
    with pytest.raises(TypeError, match="Flax Linen or NNX module or a callable; got 'int'"):
        jaxmp.wrap(3, BF16)


def test_wrapping_again_under_the_same_policy_is_no_matter() -> None:
    wrapped = jaxmp.wrap(CASES["mlp"].model, "mixed_bfloat16")
    assert jaxmp.wrap(wrapped, "mixed_bfloat16")
    by_path = jaxmp.wrap(CASES["mlp"].model, jaxmp.PolicyMap({}, default="mixed_bfloat16"))
    with pytest.warns(UserWarning, match="under a PolicyMap"):
        jaxmp.wrap(by_path, "mixed_bfloat16")


def test_the_module_comes_first() -> None:
    with pytest.raises(TypeError, match="wrap: the module comes first"):
        jaxmp.wrap("mixed_bfloat16", CASES["mlp"].model)


def test_a_module_wrapped_twice_pickles():
    with pytest.warns(UserWarning, match="wrapped already"):
        wrapped = jaxmp.wrap(jaxmp.wrap(CASES["mlp"].model, "mixed_bfloat16"), "float32")
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped


class OddDtype(nn.Module):
    """Its `dtype` is not a dtype."""

    dtype: str = "mixed"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, dtype=jnp.float32)(x)


class AroundOddDtype(nn.Module):
    @nn.compact
    def __call__(self, x):
        return OddDtype("something else")(nn.Dense(16)(x))


def test_a_field_called_dtype_may_be_anything():
    wrapped = jaxmp.wrap(AroundOddDtype(), "mixed_bfloat16")
    x = jnp.ones((6, 8))
    variables = wrapped.init(jax.random.key(0), x)
    with pytest.warns(UserWarning, match="AroundOddDtype/OddDtype_0/Dense_0"):
        assert contraction_dtypes(wrapped.apply, variables, x) == {"bfloat16": 1, "float32": 1}


class Adapted(nn.Module):
    """A dense layer with a trained bias in a collection of its own, and a mean in another."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        bias = self.variable("lora", "bias", jnp.zeros, (8,)).value
        mean = self.variable("statistics", "mean", jnp.zeros, (8,)).value
        x = nn.Dense(8)(nn.Dense(8)(x) + bias)
        return nn.Dense(8)(x + mean)


def test_other_trained_collections_are_said() -> None:
    x = jnp.ones((4, 8))
    variables = Adapted().init(jax.random.key(0), x)

    def kept(model: nn.Module) -> int:
        rows = jaxmp.explain(model.apply)(variables, x).rows
        return sum(row.reason == "float32 data wins over 16 bits" for row in rows)

    assert kept(jaxmp.wrap(Adapted(), BF16)) == 2
    adapted = jaxmp.wrap(Adapted(), BF16, params=("params", "lora"))
    assert kept(adapted) == 1
    assert kept(pickle.loads(pickle.dumps(adapted))) == 1
    stored = jaxmp.wrap(Adapted(), "bfloat16", params=["params", "lora"])
    dtypes = jax.tree.map(lambda leaf: str(leaf.dtype), stored.init(jax.random.key(0), x))
    assert dtypes["lora"]["bias"] == "bfloat16"
    assert dtypes["statistics"]["mean"] == "float32"


@pytest.mark.parametrize(
    ("module", "params", "message"),
    [
        (Adapted(), (nn.Dense,), "names of Linen's collections"),
        (jnp.tanh, "lora", "is for Linen modules"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ("params", "lora"), "every nnx.Param"),
    ],
)
def test_collections_are_names_of_linen(module: Any, params: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        jaxmp.wrap(module, BF16, params=params)
