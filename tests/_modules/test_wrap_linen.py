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
import pytest
from flax import nnx
from numpy_reference import reference

import jaxmp

from linen_models import (
    BF16,
    CASES,
    CNN,
    F16,
    KEY,
    MLP,
    RNGS,
    AutoEncoder,
    X,
    abstract_variables,
    all_counts,
    assert_close,
    compiled,
    counts,
    gradient_of,
    program,
    run,
    run_all,
    variables_of,
)
from support import assert_same, case, contraction_dtypes, float16_is_slow, gaussian, slow_when


def wrapped_case(name: str, policy: str | None) -> nn.Module:
    model = CASES[name].model
    return model if policy is None else jaxmp.wrap(model, policy)


@functools.cache
def initialized(name: str) -> Any:
    """Variables whose parameters bfloat16 holds."""
    rounded = lambda p: np.asarray(p / 2).astype(jnp.bfloat16).astype(p.dtype)  # noqa: E731
    model, x = CASES[name]
    variables = variables_of(model, x)
    if name == "experts":  # of which no other one is to be chosen in 16 bits
        variables = compiled(model.init)(KEY, x)
    return {**variables, "params": jax.tree.map(rounded, variables["params"])}


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
    return computed(name, step(name, policy))


def computed(name: str, fn: Callable[..., Any]) -> Any:
    how = compiled if name in ("cnn", "lstm", "gru") else reference  # which cannot split keys
    return how(fn)(*split(initialized(name)))


# --- Every model ---------------------------------------------------------------------------------


def test_init_is_the_program_of_the_module_itself() -> None:
    """No autocast: values that `init` computes from the data are those of float32."""

    class DataDependent(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.Dense(8)(x)
            return y - self.param("mean", lambda _: y.mean(0))

    for name, (model, x) in {**CASES, "data": (DataDependent(), X)}.items():
        wrapped, rngs = jaxmp.wrap(model, BF16), {"params": KEY, **RNGS}
        assert program(wrapped.init, rngs, x) == program(model.init, rngs, x), name
    wrapped = jaxmp.wrap(MLP(), BF16)
    want = program(MLP().init_with_output, KEY, X)
    assert program(wrapped.init_with_output, KEY, X) == want
    keys = jax.random.split(KEY, 3)
    ensemble, want = (jax.vmap(m.init, in_axes=(0, None)) for m in (wrapped, MLP()))
    assert program(ensemble, keys, X) == program(want, keys, X)
    variables = jax.eval_shape(ensemble, keys, X)
    apply = jax.vmap(wrapped.apply, in_axes=(0, None))
    assert contraction_dtypes(apply, jax.tree.map(lambda s: jnp.ones(s.shape), variables), X) == {
        "bfloat16": 2
    }


@float16_is_slow
@slow_when(lambda name: name in ("mlp", "setup", "gru", "simple recurrence"))
@pytest.mark.parametrize("policy", [BF16, F16])
@pytest.mark.parametrize("name", CASES)
def test_all_contractions_are_low_forward_and_backward(name: str, policy: str) -> None:
    arguments = split(variables_of(*CASES[name]))
    total = contraction_dtypes(step(name), *arguments).total()
    low = policy.removeprefix("mixed_")
    # A dispatch by one-hot rows contracts nothing. In float16 products by one float32 vector, such
    # as the gates of a token, are float32, for its range.
    outer = {"experts": 4 if policy == "mixed_float16" else 1}.get(name, 0)
    want = Counter({low: total - outer, "float32": outer})
    assert contraction_dtypes(step(name, policy), *arguments) == want
    # Outputs, gradients and changed state of float32: the same program, so the same bits.
    assert program(step(name, "float32"), *arguments) == program(step(name), *arguments)


@slow_when(lambda name: name not in ("cnn", "scan", "transformer"))
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_state_are_close_and_in_their_dtypes(name: str) -> None:
    """Close enough to tell that no dropout mask differs."""
    for got, want in zip(result(name, BF16), result(name, None), strict=True):
        assert_close(got, want)


def test_a_checkpoint_loads_both_ways() -> None:
    variables, own = (
        jax.tree.map(jnp.ones_like, abstract)
        for abstract in (
            abstract_variables(CNN(), CASES["cnn"].x),
            abstract_variables(jaxmp.wrap(CNN(), BF16), CASES["cnn"].x),
        )
    )
    for source, target in ((variables, own), (own, variables)):
        blank = jax.tree.map(jnp.zeros_like, target)
        stored = flax.serialization.to_bytes(source)
        assert_same(flax.serialization.from_bytes(blank, stored), source)


def test_equality_hash_pickle_and_repr() -> None:
    for name, (model, _) in CASES.items():
        wrapped, again = jaxmp.wrap(model, BF16), jaxmp.wrap(model, BF16)
        with case(name):
            assert wrapped == again
            assert hash(wrapped) == hash(again)
            assert wrapped != jaxmp.wrap(model, F16)
            assert wrapped != model
            assert repr(wrapped) == repr(model)
            assert isinstance(wrapped, type(model))
            assert type(pickle.loads(pickle.dumps(wrapped))) is type(wrapped)
            assert pickle.loads(pickle.dumps(wrapped)) == wrapped
    with pytest.warns(UserWarning, match="wrapped already"):
        twice = jaxmp.wrap(jaxmp.wrap(MLP(), BF16), "float32")
    assert pickle.loads(pickle.dumps(twice)) == twice


def test_tabulate_has_the_rows_of_the_module_itself() -> None:
    for name in ("cnn", "experts"):
        model, x = CASES[name]
        rngs = {"params": KEY, **RNGS}
        options = {"depth": 3, "console_kwargs": {"width": 200}}
        table = jaxmp.wrap(model, BF16).tabulate(rngs, x, **options)
        assert table == model.tabulate(rngs, x, **options)
        assert "Total Parameters" in table
    # And parameters as they are stored.
    options = {"console_kwargs": {"width": 200, "no_color": True}}
    table = jaxmp.wrap(MLP(), "p=bf16,c=bf16,o=f32").tabulate(KEY, X, **options)
    assert table.count("bfloat16") == 4
    assert len(table.splitlines()) == len(MLP().tabulate(KEY, X, **options).splitlines())


@slow_when(lambda model: model != "cnn")
@pytest.mark.parametrize("model", ["cnn", "scan", "transformer"])
def test_the_numbers_are_those_of_autocast_on_the_apply_function(model: str) -> None:
    class Autocast:
        apply = staticmethod(jaxmp.autocast(CASES[model].model.apply, BF16))

    cast = computed(model, gradient_of_step(Autocast, CASES[model].x))
    assert_same(result(model, BF16), cast)


# --- Entry points --------------------------------------------------------------------------------


def test_init_by_method_and_lazily() -> None:
    wrapped = jaxmp.wrap(AutoEncoder(), BF16)
    for method in ("encode", AutoEncoder.encode, wrapped.encode):
        variables = abstract_variables(wrapped, X, method=method)
        assert variables == abstract_variables(AutoEncoder(), X, method="encode")
        assert set(variables["params"]) == {"encoder"}
    wrapped, abstract = jaxmp.wrap(MLP(), "bfloat16"), jax.ShapeDtypeStruct(X.shape, X.dtype)
    models = MLP(), wrapped
    want, got = compiled(lambda: [model.lazy_init(KEY, abstract) for model in models])()
    assert_same(got, jax.tree.map(lambda p: p.astype(jnp.bfloat16), want))


def test_apply_takes_method() -> None:
    model = AutoEncoder()
    variables, wrapped = variables_of(model, X), jaxmp.wrap(model, BF16)
    want = functools.partial(wrapped.apply, method="encode")
    assert_close(compiled(want)(variables, X), run(model, variables, X, method="encode"))
    for method in (AutoEncoder.encode, model.encode, lambda self, x: self.encode(x)):
        assert program(functools.partial(wrapped.apply, method=method), variables, X) == program(
            want, variables, X
        )
        assert counts(wrapped, variables, X, method=method) == {"bfloat16": 1}


def test_every_public_method_is_wrapped_and_may_call_another() -> None:
    wrapped = jaxmp.wrap(AutoEncoder(), BF16)
    variables = variables_of(wrapped, X)
    for name, x, count in (("encode", X, 1), ("decode", X[:, :6], 1), ("__call__", X, 2)):
        assert counts(wrapped, variables, x, method=name) == {"bfloat16": count}


def test_what_flax_does_not_manage_is_left_alone() -> None:
    wrapped = jaxmp.wrap(AutoEncoder(), BF16)
    assert (wrapped.describe(), wrapped.area, wrapped.halve(3.0)) == ("width 6", 48, 1.5)
    assert wrapped.narrow().width == 2
    for name in ("describe", "halve", "narrow", "area", "_hidden"):
        assert name not in vars(type(wrapped)), name


def test_apply_mutable() -> None:
    """And the averages of BatchNorm are those of float32."""

    def steps(model: nn.Module) -> Any:
        apply = compiled(functools.partial(model.apply, rngs=RNGS, mutable=["batch_stats"]))
        variables, results = initialized("cnn"), []
        for seed in range(4):
            results.append(apply(variables, 3 + gaussian(seed, 6, 6, 6, 2)))
            variables = {**variables, **results[-1][1]}
        return results[0], variables["batch_stats"]

    wrapped = jaxmp.wrap(CNN(), BF16)
    (first, last), (want, want_last) = steps(wrapped), steps(CNN())
    assert_close(first, want)
    assert_close(last, want_last, roundings=2)
    variables, x = initialized("cnn"), 3 + gaussian(0, 6, 6, 6, 2)
    _, everything = run(wrapped, variables, x, rngs=RNGS, mutable=True)
    assert_same(everything["params"], variables["params"])
    assert_same(everything["batch_stats"], first[1]["batch_stats"])
    with pytest.raises(flax.errors.ModifyScopeVariableError, match="batch_stats"):
        jax.eval_shape(functools.partial(wrapped.apply, rngs=RNGS), variables, x)


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
def test_parameters_come_back_in_the_dtype_that_they_had(stored: Any) -> None:
    """Though the module inside is shown those stored in 16 bits as float32."""
    variables, x = initialized("cnn"), gaussian(0, 6, 6, 6, 2)
    params = jax.tree.map(lambda w: w.astype(stored), variables["params"])
    given = {**variables, "params": params}
    _, changed = run(jaxmp.wrap(CNN(), "bfloat16"), given, x, rngs=RNGS, mutable=True)
    assert {w.dtype for w in jax.tree.leaves(changed["params"])} == {jnp.dtype(stored)}


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
    np.testing.assert_array_equal(*run_all([Model(BF16), Model(None)], {}, X, rngs=rngs))


def test_sow_and_capture_intermediates() -> None:
    class Sower(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(8)(x)
            self.sow("intermediates", "hidden", x)
            self.sow("losses", "norm", jnp.sum(x**2), reduce_fn=jnp.add, init_fn=lambda: 0.0)
            self.sow("losses", "norm", jnp.sum(x), reduce_fn=jnp.add, init_fn=lambda: 0.0)
            return nn.Dense(2)(x)

    variables = variables_of(Sower(), X)
    params, models = {"params": variables["params"]}, [jaxmp.wrap(Sower(), BF16), Sower()]
    assert_close(*run_all(models, params, X, mutable=["intermediates", "losses"]))
    options = {"capture_intermediates": True, "mutable": ["intermediates"]}
    assert_close(*run_all(models, params, X, **options))


def test_perturbations_get_gradients() -> None:
    class Perturbed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(2)(self.perturb("hidden", nn.tanh(nn.Dense(8)(x))))

    variables = variables_of(Perturbed(), X)

    models = jaxmp.wrap(Perturbed(), BF16), Perturbed()
    got, want = reference(lambda v: [gradient_of(m, X)(v)[0] for m in models])(variables)
    assert_close(got, want)
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
    encoder, inner = bound.encoder.unbind()  # and carries its policy: tests/_modules/test_parts.py
    assert isinstance(encoder, nn.Dense)
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

    variables = variables_of(AutoEncoder(), X)
    assert program(nn.init(twice, wrapped), KEY, X) == program(
        nn.init(twice, AutoEncoder()), KEY, X
    )
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
    apply = functools.partial(wrapped.apply, mutable=["batch_stats"])
    out, changed = jax.eval_shape(apply, variables, X)
    assert {k: str(v.dtype) for k, v in out.items()} == {
        "x": "bfloat16",
        "half": "float16",
        "top": "int32",
    }
    assert {str(v.dtype) for v in jax.tree.leaves(changed)} == {"float32"}


def test_parameters_stored_in_16_bits() -> None:
    """They are the rounded float32 ones, and everything else is what it was."""
    rngs, x = {"params": KEY, **RNGS}, CASES["cnn"].x
    models = CNN(), jaxmp.wrap(CNN(), "bfloat16")
    created, stored = compiled(lambda: [model.init(rngs, x) for model in models])()
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), created["params"])
    assert_same(stored, {**created, "params": rounded})
    params, state = split(initialized("cnn"))
    arguments = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), state
    policy = "p=bf16,c=bf16,o=f32"
    total = contraction_dtypes(step("cnn"), params, state).total()
    assert contraction_dtypes(step("cnn", policy), *arguments) == {"bfloat16": total}
    (grads, stats), (out, changed) = compiled(step("cnn", policy))(*arguments)
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"bfloat16"}
    assert {str(s.dtype) for s in jax.tree.leaves((stats, out, changed))} == {"float32"}
    (grads32, _), rest32 = result("cnn", None)
    assert_close(jax.tree.map(lambda g: g.astype(jnp.float32), grads), grads32)
    assert_close((out, changed), rest32)


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
        models = [jaxmp.wrap(model, policy), model]
        (_, changed), (_, want) = run_all(models, variables, X, mutable=["state"])
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

    (got, out), (want, out32) = reference(lambda: (decode(wrapped), decode(model)))()
    assert_close(got, want)
    assert_close(out, out32)
    [index] = (v["cache_index"] for v in got.values())
    assert index == 12
    assert set(contraction_dtypes(lambda: decode(wrapped))) == {"bfloat16"}


def test_boxed_parameters() -> None:
    for boxed, policy in (
        (nn.with_partitioning, BF16),
        (nn.with_logical_partitioning, "p=bf16,c=bf16,o=f32"),
    ):
        dense = nn.Dense(8, kernel_init=boxed(nn.initializers.ones, ("in", "out")))
        model = nn.Sequential([dense, nn.Dense(2)])
        wrapped = jaxmp.wrap(model, policy)
        variables = variables_of(wrapped, X)
        specs = nn.get_partition_spec(variables_of(model, X))
        assert nn.get_partition_spec(variables) == specs
        kernel = variables["params"]["layers_0"]["kernel"]
        assert isinstance(kernel, nn.Partitioned | nn.LogicallyPartitioned)
        assert kernel.value.dtype == jaxmp.get_policy(policy).param_dtype
        for v in (variables, nn.unbox(variables)):
            assert all_counts(wrapped, v, X).keys() == {"bfloat16"}
            grads, _ = jax.eval_shape(gradient_of(wrapped, X), v)
            assert jax.tree.structure(grads) == jax.tree.structure(v)


# --- Errors --------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    bound = MLP().bind(variables_of(MLP(), X))
    for module, policy, error, message in [
        (MLP, BF16, TypeError, r"wrap: .* class MLP: wrap an instance, as in"),
        (bound, BF16, ValueError, r"wrap: the MLP is bound .* Wrap the unbound module"),
        (MLP(), "mixed_bfloat17", ValueError, "mixed_bfloat17"),
        (MLP(), 16, TypeError, "wrap: a policy is a string"),
        (3, BF16, TypeError, "Flax Linen or NNX module or a callable; got 'int'"),
        (BF16, MLP(), TypeError, "wrap: the module comes first"),
    ]:
        with case(message), pytest.raises(error, match=message):
            jaxmp.wrap(module, policy)
    with pytest.raises(ValueError, match="compute_dtype is float64"):
        counts(jaxmp.wrap(MLP(), "p=f32,c=f64,o=f32"), variables_of(MLP(), X), X)
    for module, params, message in [
        (Adapted(), (nn.Dense,), "names of Linen's collections"),
        (jnp.tanh, "lora", "is for Linen modules"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ("params", "lora"), "every nnx.Param"),
    ]:
        with case(message), pytest.raises(TypeError, match=message):
            jaxmp.wrap(module, BF16, params=params)


def test_wrapping_again_under_the_same_policy_is_no_matter() -> None:
    assert jaxmp.wrap(jaxmp.wrap(MLP(), BF16), BF16)
    by_path = jaxmp.wrap(MLP(), jaxmp.PolicyMap({}, default=BF16))
    with pytest.warns(UserWarning, match="under a PolicyMap"):
        jaxmp.wrap(by_path, BF16)


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
    variables = variables_of(wrapped, X)
    with pytest.warns(UserWarning, match="AroundOddDtype/OddDtype_0/Dense_0"):
        assert contraction_dtypes(wrapped.apply, variables, X) == {"bfloat16": 1, "float32": 1}


class Adapted(nn.Module):
    """A dense layer with a trained bias in a collection of its own, and a mean in another."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        bias = self.variable("lora", "bias", jnp.zeros, (8,)).value
        mean = self.variable("statistics", "mean", jnp.zeros, (8,)).value
        x = nn.Dense(8)(nn.Dense(8)(x) + bias)
        return nn.Dense(8)(x + mean)


def test_other_trained_collections_are_said() -> None:
    variables = variables_of(Adapted(), X)

    def kept(model: nn.Module) -> int:
        rows = jaxmp.explain(model.apply)(variables, X).rows
        return sum(row.reason == "float32 data wins over 16 bits" for row in rows)

    assert kept(jaxmp.wrap(Adapted(), BF16)) == 2
    adapted = jaxmp.wrap(Adapted(), BF16, params=("params", "lora"))
    assert kept(adapted) == 1
    assert kept(pickle.loads(pickle.dumps(adapted))) == 1
    stored = jaxmp.wrap(Adapted(), "bfloat16", params=["params", "lora"])
    dtypes = jax.tree.map(lambda leaf: str(leaf.dtype), abstract_variables(stored, X))
    assert dtypes["lora"]["bias"] == "bfloat16"
    assert dtypes["statistics"]["mean"] == "float32"
