"""What calling a wrapped NNX module does: one behavior, one test."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from flax import nnx

import jaxmp

from nnx_models import (
    IMAGES,
    LOW,
    MLP,
    POLICY,
    ROWS,
    WIDTH,
    Attention,
    abstract,
    assert_close,
    assert_same,
    made,
    pair,
    runs_low,
    uniform,
)
from support import case, contraction_dtypes

# What a call changes.


def test_rngs_passed_in():
    class Noise(nnx.Module):
        def __call__(self, x, rngs):
            return x + rngs.noise.normal(x.shape)

    rngs, same = nnx.Rngs(noise=0), nnx.Rngs(noise=0)
    # A jit draws normal numbers with other last bits than operations one by one.
    np.testing.assert_allclose(
        jaxmp.wrap(Noise(), POLICY)(ROWS, rngs), Noise()(ROWS, same), rtol=1e-5, atol=1e-6
    )
    assert int(rngs.noise.count[...]) == int(same.noise.count[...]) == 1


def test_counts_and_statistics_reach_the_original_in_float32():
    model = made("cnn")
    expected = made("cnn")
    wrapped = jaxmp.wrap(model, POLICY)
    for _ in range(5):
        wrapped(IMAGES)
        expected(IMAGES)
    statistics = nnx.state(model, nnx.BatchStat)
    assert_close(statistics, nnx.state(expected, nnx.BatchStat))
    assert_same(nnx.state(model, nnx.RngState), nnx.state(expected, nnx.RngState))
    assert int(wrapped.dropout.rngs.count[...]) == 5
    # The first BatchNorm sees products of 16 bits; its own averages are of full precision.
    low = np.asarray(model.norm.mean[...])
    assert low.dtype == np.float32
    assert not np.array_equal(low, low.astype(jnp.bfloat16).astype(np.float32))


def decoded(model: Attention, x: jax.Array) -> jax.Array:
    model.attention.init_cache(x[:, :1].shape[:1] + x.shape[1:])
    step = nnx.jit(lambda model, x: model(x, decode=True))
    return jnp.concatenate([step(model, x[:, i : i + 1]) for i in range(x.shape[1])], 1)


def test_decode_cache():
    model, wrapped = pair("attention")
    x = uniform(2, 4, WIDTH)
    got = decoded(wrapped, x)
    assert_close(got, decoded(model, x))
    assert int(wrapped.attention.cache_index[...]) == 4
    cache = nnx.state(wrapped, nnx.Cache)
    assert_close(cache, nnx.state(model, nnx.Cache))
    # Decoding step by step is attending to all at once.
    np.testing.assert_allclose(
        got, nnx.jit(lambda m: m(x))(wrapped), rtol=0, atol=8 * eps("bfloat16")
    )


def test_init_cache_of_a_wrapped_attention():
    attention = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=nnx.Rngs(0))
    wrapped = jaxmp.wrap(attention, POLICY)
    wrapped.init_cache((2, 4, WIDTH))
    assert wrapped.cached_key.dtype == jnp.float32
    nnx.jit(lambda m, x: m(x))(wrapped, uniform(2, 1, WIDTH))
    assert int(wrapped.cache_index[...]) == 1
    assert np.any(wrapped.cached_key[:, 0])
    assert not np.any(wrapped.cached_key[:, 1:])


class Sower(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return x


@pytest.mark.filterwarnings("ignore:.*Module.sow.*outside of:DeprecationWarning")
def test_sown_variables_and_those_captured():
    model = Sower(nnx.Rngs(0))
    wrapped = jaxmp.wrap(nnx.clone(model), POLICY)
    for _ in range(2):
        out, captured = nnx.capture(wrapped, nnx.Intermediate)(ROWS)
        expected_out, expected = nnx.capture(model, nnx.Intermediate)(ROWS)
        assert_close(captured, expected)
        assert_close(out, expected_out)
    assert not nnx.state(wrapped, nnx.Intermediate)
    for _ in range(2):
        wrapped(ROWS)
        model(ROWS)
    assert len(wrapped.hidden) == 2
    assert_close(nnx.pop(wrapped, nnx.Intermediate), nnx.pop(model, nnx.Intermediate))
    assert not nnx.state(wrapped, nnx.Intermediate)


def test_capture_of_method_outputs():
    # For the time of it, Flax replaces the methods of the classes: of those marked here, too.
    # (Classes of this test: `nnx.tabulate` leaves others in a state that breaks capturing.)
    class Dense(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x)

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first = Dense(WIDTH, WIDTH, rngs=rngs)
            self.second = Dense(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    def capture(model):
        return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(ROWS)

    model = Two(nnx.Rngs(0))
    policy = jaxmp.PolicyMap({"first": "float32"}, default=POLICY)
    wrapped = jaxmp.wrap(nnx.clone(model), policy)
    wrapped(ROWS)
    for _ in range(2):
        assert_close(capture(wrapped), capture(model))
    assert_close(wrapped(ROWS), model(ROWS))
    assert not nnx.state(wrapped, nnx.Intermediate)


def test_new_variables_and_attributes():
    class Lazy(nnx.Module):
        def __init__(self):
            self.scale = nnx.data(None)
            self.calls = 0

        def __call__(self, x):
            if self.scale is None:
                self.scale = nnx.Param(jnp.ones(x.shape[-1]))
            self.calls += 1
            return x * self.scale

    wrapped = jaxmp.wrap(Lazy(), POLICY)
    wrapped(ROWS)
    assert isinstance(wrapped.scale, nnx.Param)
    scale = wrapped.scale
    wrapped(ROWS)
    assert wrapped.scale is scale
    assert wrapped.calls == 2


def test_variables_of_the_authors_types():
    class Statistic(nnx.Variable):
        pass

    class Counter(nnx.Module):
        def __init__(self):
            self.steps = Statistic(jnp.zeros((), jnp.int32))
            self.total = Statistic(jnp.zeros((), jnp.float16))
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.steps[...] += 1
            self.total[...] += jnp.asarray(0.5, jnp.float16)
            return self.linear(x)

    model = Counter()
    wrapped = jaxmp.wrap(model, POLICY)
    wrapped(ROWS)
    wrapped(ROWS)
    steps, total = model.steps[...], model.total[...]
    assert (int(steps), steps.dtype) == (2, jnp.int32)
    assert (float(total), total.dtype) == (1.0, jnp.float16)
    assert isinstance(wrapped.total, Statistic)


def test_metadata_of_variables_survives():
    model = nnx.Linear(
        WIDTH, 4, kernel_init=nnx.with_metadata(nnx.initializers.ones, tag="mine"), rngs=nnx.Rngs(0)
    )
    wrapped = jaxmp.wrap(model, POLICY)
    wrapped(ROWS)
    assert model.kernel.get_metadata("tag") == wrapped.kernel.get_metadata("tag") == "mine"


def test_shared_submodules():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.second = self.first
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.second(self.linear(self.first(x)))

    model = Twice(nnx.Rngs(0))
    wrapped = jaxmp.wrap(nnx.clone(model), POLICY)
    assert wrapped.first is wrapped.second
    assert_close(wrapped(ROWS), model(ROWS))
    assert wrapped.first is wrapped.second
    assert_close(nnx.state(wrapped, nnx.BatchStat), nnx.state(model, nnx.BatchStat))


def test_returned_submodules_and_variables():
    class Parts(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(x), self.linear, {"kernel": self.linear.kernel}

    for policy in (POLICY, "bfloat16"):
        wrapped = jaxmp.wrap(Parts(), policy)
        out, linear, kernel = wrapped(ROWS)
        assert out.dtype == jaxmp.get_policy(policy).output_dtype
        assert linear is wrapped.linear
        assert isinstance(linear, nnx.Linear)
        assert kernel["kernel"] is wrapped.linear.kernel
        assert linear.kernel.dtype == jnp.float32


# Calls.


def test_static_boolean_and_callable_arguments():
    class Choosy(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0))

        def __call__(self, x, twice=False, *, mode: str, activation=None, times: int = 1):
            assert isinstance(twice, bool)
            if mode == "skip":
                return x
            out = self.linear(x)
            out = out if activation is None else activation(out)
            return (2 * out if twice else out) * times

    model = Choosy()
    wrapped = jaxmp.wrap(model, POLICY)
    assert wrapped(ROWS, mode="skip") is not None
    np.testing.assert_array_equal(wrapped(ROWS, mode="skip"), ROWS)
    kwargs = {"mode": "run", "activation": jnp.tanh, "times": 3}
    assert_close(wrapped(ROWS, True, **kwargs), model(ROWS, True, **kwargs))
    np.testing.assert_array_equal(
        wrapped(ROWS, True, mode="run"), 2 * wrapped(ROWS, False, mode="run")
    )


def test_a_method_that_calls_another_is_one_program():
    _, wrapped = pair("mlp")
    assert runs_low(wrapped)  # __call__ calls encode
    # encode's result goes on to the head in 16 bits: no seam of float32 between the two.
    table = jaxmp.explain(lambda x: wrapped(x), "float32")(ROWS)
    assert table.products() == LOW


def test_static_and_class_methods_properties_and_what_is_inherited():
    class Helpers(MLP):
        def __call__(self, x):
            return self.double(super().__call__(x))

        @staticmethod
        def double(x):
            return 2 * x

        @classmethod
        def create(cls):
            return cls(nnx.Rngs(0))

        @property
        def size(self):
            return self.head.out_features

    model = Helpers.create()
    wrapped = jaxmp.wrap(model, POLICY)
    assert (wrapped.double(2), wrapped.size) == (4, 4)
    assert isinstance(wrapped.create(), Helpers)
    assert_close(wrapped(ROWS), model(ROWS))
    assert runs_low(wrapped)


def test_methods_jitted_and_rematted_by_the_author():
    # nnx.jit makes a method an object, no function: it was left in float32.
    class Jitted(MLP):
        @nnx.jit
        def __call__(self, x):
            return self.head(nnx.relu(self.hidden(x)))

        @nnx.remat
        def encode(self, x):
            return self.norm(self.hidden(x))

    model = Jitted(nnx.Rngs(0))
    wrapped = jaxmp.wrap(model, POLICY)
    assert_close(wrapped(ROWS), model(ROWS))
    assert_close(wrapped.encode(ROWS), model.encode(ROWS))
    assert runs_low(wrapped)


def test_a_module_passed_to_a_method():
    class Norms(nnx.Module):
        def __call__(self, x, norm):
            return norm(x)

    norm, same = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    jaxmp.wrap(Norms(), POLICY)(ROWS, norm)
    nnx.jit(lambda norm, x: norm(x))(same, ROWS)  # compiled, as an eager call is, to the same bits
    assert_same(nnx.state(norm), nnx.state(same))
    assert np.any(norm.mean[...])


def test_a_jitted_call_in_a_loop_traces_once():
    count = 0

    class Counted(MLP):
        def __call__(self, x):
            nonlocal count
            count += 1
            return super().__call__(x)

    wrapped = jaxmp.wrap(Counted(nnx.Rngs(0)), POLICY)
    call = nnx.jit(lambda model, x: model(x))
    for i in range(4):
        call(wrapped, ROWS + i)
        wrapped.head.bias[...] += 1
    assert count == 1
    wrapped(ROWS[:2])
    assert count == 2


def test_the_module_is_whole_again_when_a_call_raises():
    class Faulty(MLP):
        def __call__(self, x):
            super().__call__(x)
            raise RuntimeError("on purpose")

    policy = jaxmp.PolicyMap({"hidden": "float32"}, default="bfloat16")
    wrapped = jaxmp.wrap(Faulty(nnx.Rngs(0)), policy)
    nnx.update(wrapped, jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(wrapped)))
    before = type(wrapped.hidden)
    with pytest.raises(RuntimeError, match="on purpose"):
        wrapped(ROWS)
    with pytest.raises(RuntimeError, match="on purpose"):
        jaxmp.autocast(lambda x: wrapped(x), POLICY)(ROWS)
    assert type(wrapped.hidden) is before
    assert wrapped.hidden.kernel.dtype == jnp.bfloat16
    assert not isinstance(wrapped.hidden.kernel.get_raw_value(), jax.core.Tracer)


# Wraps in wraps and in autocasts.


def test_wrapped_in_wrapped_inner_wins():
    inner = jaxmp.wrap(made("mlp"), "float32")
    low = jaxmp.wrap(made("mlp"), POLICY)
    with pytest.warns(UserWarning, match="MLP is wrapped already"):
        got = jaxmp.wrap(inner, POLICY)(ROWS)
    # Compiled, as an eager call is, to the same bits.
    assert_same(got, nnx.jit(lambda model, x: model(x))(made("mlp"), ROWS))
    with pytest.warns(UserWarning, match="stays in force"):
        assert runs_low(jaxmp.wrap(low, "float32"))


def test_a_wrapped_submodule_keeps_its_policy_in_a_wrapped_module():
    model = made("mlp")
    model.head = jaxmp.wrap(model.head, "float32")
    graphdef, state = nnx.split(jaxmp.wrap(model, "mixed_float16"))
    counts = contraction_dtypes(lambda s, x: nnx.merge(graphdef, s)(x), state, ROWS)
    assert counts == {"float16": 1, "float32": 1}


def test_a_wrapped_submodule_in_an_unwrapped_module():
    model = abstract("listed")
    model.layers[1] = jaxmp.wrap(model.layers[1], POLICY)
    graphdef, state = nnx.split(model)
    counts = contraction_dtypes(lambda s, x: nnx.merge(graphdef, s)(x), state, ROWS)
    assert counts == {"bfloat16": 2, "float32": 5}


def test_wrapped_in_an_autocast():
    graphdef, state = nnx.split(jaxmp.wrap(made("mlp"), "float32"))
    fn = jaxmp.autocast(lambda s, x: nnx.merge(graphdef, s)(x).T @ x, POLICY)
    rows = jnp.tile(ROWS, (2, 1))  # of fewer it would be geometry
    assert contraction_dtypes(fn, state, rows) == {"float32": 2, "bfloat16": 1}


def test_unwrapped_in_an_autocast_that_closes_over_it():
    wrapped = jaxmp.wrap(made("mlp"), "bfloat16")
    nnx.update(wrapped, jax.tree.map(lambda x: x.astype("bfloat16"), nnx.state(wrapped)))
    out = jaxmp.autocast(lambda x: wrapped(x), POLICY)(ROWS)
    assert_close(out, made("mlp")(ROWS))
    assert not isinstance(wrapped.head.kernel.get_raw_value(), jax.core.Tracer)


def test_a_shared_jit_is_not_reused_across_policies():
    model = made("mlp")
    run = nnx.jit(lambda m, x: m(x))
    full, low = run(model, ROWS), run(jaxmp.wrap(model, POLICY), ROWS)
    assert_close(low, full)
    assert_same(run(model, ROWS), full)


# Errors.


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"not the class MLP.*jaxmp.wrap\(MLP\(\.\.\.\), policy\)"):
        jaxmp.wrap(MLP, POLICY)
    with pytest.raises(ValueError, match="mixed_bfloat17"):
        jaxmp.wrap(made("mlp"), "mixed_bfloat17")
    for name, key, message in [
        ("scanned", "layers/0/*", "'layers/0/*' matches no module.*: 'layers"),
        ("listed", "layer_0", "'layer_0' matches no module.*: 'layers"),
        ("listed", "layers/3", "'layers/3' matches no module.*: 'layers"),
        ("listed", "Layers/0", "'Layers/0' matches no module.*: 'layers"),
        ("listed", nnx.Conv, r"no module of the class Conv .*: Block, .*Linear"),
    ]:
        policy = jaxmp.PolicyMap({key: "float32"}, default=POLICY)
        message = message.replace("/*'", r"/\*'")
        with case(key), pytest.raises(ValueError, match=message):
            jaxmp.wrap(abstract(name), policy)


def test_an_error_in_the_model_is_the_models():
    with pytest.raises(TypeError, match=r"dot_general|contracting"):
        jaxmp.wrap(made("mlp"), POLICY)(uniform(4, WIDTH + 1))
