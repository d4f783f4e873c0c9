"""Two programs that should be the same model: what rounding explains, and what it does not."""

from __future__ import annotations

import functools
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accuracy import eps
from flax import nnx
from flax.traverse_util import flatten_dict

import jaxmp
from jaxmp._tools.parity.parity import prepare
from jaxmp.testing import tolerance

from support import float16_is_slow, gaussian, random_key

HERE = "test_parity.py"


class Net(nn.Module):
    eps: float = 1e-6
    scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16, name="first")(x))
        x = self.scale * x  # the line of the scale
        x = nn.LayerNorm(epsilon=self.eps, name="norm")(x)
        return nn.Dense(4, name="last")(x)


def line_of(text):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    [number] = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"{HERE}:{number}"


@pytest.fixture(scope="module")
def net():
    x = gaussian(1, 8, 12)
    return jax.jit(Net().init)(random_key(0), x), x


def layer(w, x, factor=1.0):
    with jax.named_scope("layer"):
        return jnp.tanh(x @ w) * factor


LAYER = jax.device_put(np.eye(8) + 0.1), gaussian(0, 4, 8)


@pytest.fixture(scope="module")
def activations(net):
    """What another library would have saved of it."""
    _, state = jax.jit(functools.partial(Net().apply, capture_intermediates=True))(*net)
    flat = flatten_dict(state["intermediates"])
    return {".".join(path[:-1]): np.asarray(value[0]) for path, value in flat.items() if path[:-1]}


def layers(report):
    return [row.layer for row in report.rows]


@float16_is_slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_rounding_explains_what_a_policy_does(net, policy):
    report = jaxmp.parity(jaxmp.autocast(Net().apply, policy), Net().apply)(*net)
    assert report.same, report
    assert report, "it is true"
    assert report.first is None
    assert report.located == ""
    assert {"Net/first", "Net/norm", "Net/last", "output"} <= set(layers(report))
    assert all(0 < row.difference <= row.bound < row.size for row in report.rows)
    assert str(report).startswith("verdict       the same: rounding explains every difference")


def test_the_same_program_differs_by_nothing():
    report = jaxmp.parity(layer, jax.jit(layer))(*LAYER)
    assert report.same
    assert [row.difference for row in report.rows] == [0] * len(report.rows)
    assert all(row.bound > 0 for row in report.rows)


def test_the_first_layer_that_differs_is_named_with_its_line(net):
    report = jaxmp.parity(Net(scale=1.001).apply, Net().apply)(*net)
    assert not report
    assert report.first.layer == "Net/norm (input)"
    assert report.located == f"mul in Net at {line_of('the line of the scale')}"
    assert report.first.difference > report.first.bound
    assert report.first.size == pytest.approx(0.6, abs=0.3)
    text = str(report)
    assert text.startswith("verdict       not the same: Net/norm (input) differs")
    assert report.located in text
    assert "the same      up to Net/first" in text
    assert len(text.splitlines()) <= 40


def test_an_epsilon_is_found_in_float32_and_hidden_by_16_bits(net):
    other = Net(eps=1e-5).apply
    report = jaxmp.parity(Net().apply, other)(*net)
    assert report.first.layer == "Net/norm"
    assert jaxmp.parity(jaxmp.autocast(Net().apply, "mixed_bfloat16"), other)(*net).same


def test_a_dtype_says_what_may_round():
    def low(w, x):
        return layer(w, x.astype(jnp.bfloat16).astype(jnp.float32))

    assert jaxmp.parity(low, layer)(*LAYER).same
    assert jaxmp.parity(low, layer, dtype="float32")(*LAYER).first.layer == "layer"


def test_saved_activations_of_another_library(net, activations):
    report = jaxmp.parity(jaxmp.autocast(Net().apply, "mixed_bfloat16"), activations)(*net)
    assert report.same, report
    assert layers(report) == ["Net/first", "Net/norm", "Net/last"]
    changed = activations | {"norm": activations["norm"] * 1.001}
    report = jaxmp.parity(Net().apply, changed)(*net)
    assert report.first.layer == "Net/norm"
    assert line_of("the line of the scale").partition(":")[0] in report.located
    assert report.only_f == ("Net",)


def test_saved_in_16_bits_may_be_off_by_their_rounding():
    saved = np.asarray(layer(*LAYER)).astype(jnp.bfloat16)
    assert jaxmp.parity(layer, {"layer": saved})(*LAYER).same
    changed = {"layer": saved * jnp.bfloat16(1.03)}
    assert jaxmp.parity(layer, changed)(*LAYER).first.layer == "layer"


def test_a_map_says_which_layer_is_which(net, activations):
    saved = activations
    torch = {"fc1": saved["first"].T, "ln": saved["norm"], "more": np.zeros(3)}
    match = {"Net/first": ("fc1", np.transpose), "Net/norm": "ln"}
    report = jaxmp.parity(Net().apply, torch, match=match)(*net)
    assert report.same
    pairs = [(row.layer, row.other) for row in report.rows]
    assert pairs == [("Net/first", "fc1"), ("Net/norm", "ln")]
    assert report.only_g == ("more",)


class Blocks(nnx.Module):
    def __init__(self, rngs, width=16):
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs)])
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x, factor=1.0):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x * factor)


def test_nnx():
    net, x = Blocks(nnx.Rngs(0)), gaussian(1, 8, 16)
    named = {"blocks/0", "head", "output"}
    report = jaxmp.parity(jaxmp.wrap(net, "mixed_bfloat16"), net)(x)
    assert report.same, report
    assert named <= set(layers(report))
    assert type(net.head) is nnx.Linear

    report = jaxmp.parity(net.head.__call__, lambda x: net.head(1.01 * x), match={})(x)
    assert report.first.layer == "output"
    report = jaxmp.parity(lambda n, x: n(x, 1.01), lambda n, x: n(x))(net, x)
    assert named - {"output"} <= set(layers(report))
    assert report.first.layer == "head (input)"
    assert report.located.startswith("mul at test_parity.py:")


def test_a_quantized_model_has_the_layers_of_the_model():
    """How its weights are dequantized is none."""
    net, x = Blocks(nnx.Rngs(0)), gaussian(1, 8, 16)
    few_bits = jaxmp.quantize(net, "int8", min_size=1)
    reports = [jaxmp.parity(m, m)(x) for m in (net, few_bits)]
    assert layers(reports[0]) == layers(reports[1])


def test_functions_with_named_scopes_and_without():
    report = jaxmp.parity(lambda w, x: layer(w, x, 1.1), layer)(*LAYER)
    assert report.first.layer == "layer"
    assert report.located.startswith("mul in layer at test_parity.py:")

    def plain(w, x):
        return {"a": jnp.tanh(x @ w), "b": x.sum()}

    report = jaxmp.parity(jaxmp.autocast(plain, "mixed_bfloat16"), plain)(*LAYER)
    assert report.same
    assert layers(report) == ["output['a']", "output['b']"]
    assert "no other layer has a name in both" in " ".join(str(report).split())


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            return (nn.tanh(block(x)), None)

        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(nn.Dense(8, name="block"), x, None)[0]


@pytest.fixture(scope="module")
def stack():
    x = gaussian(0, 4, 8)
    return jax.jit(Stack().init)(random_key(1), x), x


def test_jit_inside_and_a_scan_over_layers(stack):
    model = Stack()
    low = jax.jit(jaxmp.autocast(jax.jit(model.apply), "mixed_bfloat16"))
    report = jaxmp.parity(low, model.apply)(*stack)
    assert report.same, report
    assert any(row.layer.endswith("block") for row in report.rows)


@pytest.mark.slow
def test_layers_of_a_scan_and_layers_one_by_one(stack):
    def unrolled(variables, x):
        [p] = variables["params"].values()
        for i in range(3):
            with jax.named_scope("block"):
                x = x @ p["kernel"][i] + p["bias"][i]
            x = jnp.tanh(x)
        return x

    match = {"output": "output"}
    assert jaxmp.parity(Stack().apply, unrolled, match=match)(*stack).same


def attend(q, k, v, mask):
    with jax.named_scope("attention"):
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return jnp.einsum("bqk,bkd->bqd", weights, v)


def trainer(w, x, first):
    """All positions at once."""
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    return attend(q, k, v, jnp.tril(jnp.ones((x.shape[1],) * 2, bool)))


def sampler(w, x, first):
    """One position after the other, from a cache of keys and values."""
    batch, time, _ = x.shape
    cache = jnp.zeros((2, batch, time, w.shape[1] // 3))

    def step(cache, i):
        q, k, v = jnp.split(jax.lax.dynamic_slice_in_dim(x, i, 1, 1) @ w, 3, axis=-1)
        new = jnp.stack([k, v])
        cache = jax.lax.dynamic_update_slice(cache, new, (0, 0, i, 0))
        out = attend(q, cache[0], cache[1], (jnp.arange(time) <= i) & (jnp.arange(time) >= first))
        return cache, out

    return jax.lax.scan(step, cache, jnp.arange(time))[1]


@pytest.mark.slow
def test_a_trainer_and_a_sampler_with_a_cache():
    x = gaussian(0, 2, 6, 8)
    w = gaussian(1, 8, 24, scale=1 / 3)
    match = {"attention": ("attention", lambda out: out[:, :, 0].swapaxes(0, 1))}
    prepared = prepare(trainer, sampler, (w, x, jnp.int32(0)), match)
    report = prepared.run()
    assert report.same, report
    assert layers(report) == ["attention"]
    assert 0 < report.rows[0].difference < 1e-5
    assert prepared.run((w, x, jnp.int32(1))).first.layer == "attention"  # it forgets the first


def test_shapes_that_differ_are_to_be_arranged():
    message = r"parity: 'layer' is float32\[4,8\] in f and float32\[2,8\] in g"
    with pytest.raises(ValueError, match=message):
        jaxmp.parity(layer, lambda w, x: layer(w, x[:2]))(*LAYER)


def test_gradients_are_layers_too():
    def gradient(factor):
        return jax.grad(lambda w, x: jnp.sum(layer(w, x, factor) ** 2))

    low = jaxmp.autocast(gradient(1.0), "mixed_bfloat16")
    report = jaxmp.parity(low, gradient(1.0))(*LAYER)
    assert report.same, report
    assert any("backward" in row.layer for row in report.rows)
    assert not jaxmp.parity(gradient(1.0), gradient(1.001))(*LAYER).same


def test_another_order_of_sums_and_of_the_batch():
    w = gaussian(0, 256, 8)
    x = gaussian(1, 4, 256)

    def product(w, x):
        return x @ w

    report = jaxmp.parity(product, lambda w, x: x[:, ::-1] @ w[::-1])(w, x)
    assert report.same, report
    report = jaxmp.parity(product, lambda w, x: (x[::-1] @ w)[::-1])(w, x)
    assert report.same


def test_what_is_not_finite_on_both_sides_is_not_compared():
    def fn(x):
        return jnp.log(x)

    x = np.float32([-1.0, 0.0, 2.0, 3.0])
    report = jaxmp.parity(fn, fn)(x)
    assert report.same
    assert report.rows[0].nonfinite == 2
    assert "2 elements in both alike" in str(report)
    report = jaxmp.parity(fn, lambda x: jnp.log(jnp.abs(x)))(x)
    assert not report.same
    assert report.first.difference == np.inf


def test_a_check_that_fails_when_results_are_rounded_otherwise_says_where():
    def check(x, y):
        np.testing.assert_array_equal(y, np.float32(3) * x)
        return y

    def checked(x):
        return jax.pure_callback(check, x, x, 3 * x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="Arrays are not equal") as raised:
        jaxmp.parity(checked, checked)(np.linspace(0.1, 1, 64, dtype=np.float32))
    assert "parity: this was in a run whose results are rounded" in raised.value.__notes__[0]


def test_integers_and_booleans():
    x = gaussian(0, 64, 16)

    def fn(x):
        return {"best": x.argmax(-1), "positive": x > 0, "n": jnp.int32(3)}

    assert jaxmp.parity(fn, fn)(x).same
    report = jaxmp.parity(fn, lambda x: fn(x) | {"n": jnp.int32(4)})(x)
    assert [row.layer for row in report.rows if not row.explained] == ["output['n']"]


def test_a_vacuous_bound_is_said_to_be():
    a, b, x = np.float32(np.random.default_rng(0).normal(size=(3, 16, 16)))
    w = np.concatenate([1e3 * a, b - 1e3 * a], dtype=np.float32)  # most of the product cancels

    def fn(w, x):
        return jnp.concatenate([x, x], 1) @ w

    report = jaxmp.parity(jaxmp.autocast(fn, "mixed_bfloat16"), fn)(w, x)
    assert report.rows[0].vacuous
    assert "unknown: rounding alone may make the values anything" in str(report)


def test_nothing_matches(net):
    with pytest.raises(ValueError, match="no layer of f has the name of one of g") as error:
        jaxmp.parity(Net().apply, {"fc1": np.zeros(3), "ln": np.zeros(3)})(*net)
    assert "'Net/first'" in str(error.value)
    assert "'fc1', 'ln'" in str(error.value)

    def other(variables, x):
        return layer(variables["params"]["first"]["kernel"], x)

    with pytest.raises(ValueError, match="in g 'layer'"):
        jaxmp.parity(Net().apply, other)(*net)


def test_a_wrong_map(net, activations):
    named = r"match names 'Net/frist', which is not a layer of f"
    for match, error, message in (
        ({"Net/frist": "first"}, ValueError, named),
        ({"Net/first": "frist"}, ValueError, r"match names 'frist', which is not a layer of g"),
        ({"Net/first": 3}, TypeError, r"must be the name of a layer of g, or such a name and"),
        ({"Net/first": ("first", 3)}, TypeError, r"got \('first', 3\)"),
        (["first"], TypeError, r"match must map layers of f to layers of g; got list"),
    ):
        with pytest.raises(error, match=message):
            jaxmp.parity(Net().apply, activations, match=match)(*net)


def test_wrong_uses(net):
    with pytest.raises(TypeError, match="parity: fn is the Flax module 'Net'"):
        jaxmp.parity(Net(), Net().apply)
    with pytest.raises(TypeError, match="parity: fn must be callable, got int"):
        jaxmp.parity(Net().apply, 3)
    with pytest.raises(TypeError, match="saved activations are arrays by the names of layers"):
        jaxmp.parity(Net().apply, {"first": "array"})
    with pytest.raises(TypeError, match="its arguments are arrays"):
        jaxmp.parity(Net().apply, Net().apply)(net[0], jax.ShapeDtypeStruct((8, 12), jnp.float32))
    with pytest.raises(ValueError, match="parity: dtype"):
        jaxmp.parity(Net().apply, Net().apply, dtype="int8")
    with pytest.raises(TypeError, match="parity: progress is called with a line of text"):
        jaxmp.parity(Net().apply, Net().apply, progress=True)
    with pytest.raises(ValueError, match="returns no array"):
        jaxmp.parity(lambda x: None, lambda x: None)(net[1])

    with pytest.raises(TypeError, match=r"go into a second call.*jaxmp\.parity\(f, g\)\(\*args\)"):
        jaxmp.parity(Net().apply, Net().apply, *net)
    with pytest.raises(TypeError, match=r"outside jit; args\[0\] is traced"):
        jax.jit(lambda x: jaxmp.parity(jnp.sin, jnp.sin)(x).first)(net[1])


def test_it_says_what_it_waits_for():
    said = []
    jaxmp.parity(layer, lambda w, x: layer(w, x, 1.5), progress=said.append)(*LAYER)
    assert said == [
        "parity: traces both programs",
        "parity: compiles and runs f: as written, and 8 times rounded at random",
        "parity: the same of g",
        "parity: finds the operation that differs in layer",
    ]


def test_arguments_may_be_keywords():
    def scaled(x, *, slope):
        with jax.named_scope("layer"):
            return jax.nn.leaky_relu(2 * x, slope)

    x = np.linspace(-1, 1, 100, dtype=np.float32)
    assert jaxmp.parity(scaled, scaled)(x, slope=0.1)
    assert not jaxmp.parity(scaled, lambda x, slope: scaled(x, slope=2 * slope))(x, slope=0.1)
    assert set(jaxmp.testing.tolerance(scaled)(x, slope=0.1)) == {"rtol", "atol"}


# Tolerances for tests of results under a policy.


def mlp(w, x):
    return jnp.tanh(x @ w) @ w


MLP = gaussian(0, 32, 32, scale=1 / 6), jax.device_put(np.cos(np.arange(512.0)).reshape(16, 32))


@float16_is_slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_policy_is_within_its_tolerance_and_a_mistake_is_not(policy):
    def fn(w, x):
        y = mlp(w, x)
        return {"y": y, "loss": jnp.mean(y**2), "none": None, "exact": (x.T, jnp.arange(3))}

    allowed = tolerance(fn, policy)(*MLP)
    low, full = jaxmp.autocast(fn, policy)(*MLP), fn(*MLP)
    jax.tree.map(lambda a, b, t: np.testing.assert_allclose(a, b, **t), low, full, allowed)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(1.1 * low["y"], full["y"], **allowed["y"])
    assert eps(policy) < allowed["y"]["rtol"] < 40 * eps(policy)
    # Each result has its own; what is exact may not differ.
    assert allowed["loss"]["rtol"] != allowed["y"]["rtol"]
    assert allowed["exact"] == ({"rtol": 0.0, "atol": 0.0},) * 2


def test_without_a_policy_the_tolerance_is_that_of_another_order_of_sums():
    assert 1e-8 < tolerance(mlp)(*MLP)["rtol"] < 1e-4


def test_wrong_uses_of_a_tolerance():
    with pytest.raises(TypeError, match="tolerance: fn must be callable"):
        tolerance(3, "mixed_bfloat16")
    with pytest.raises(ValueError, match="mixed_bfloat61"):
        tolerance(mlp, "mixed_bfloat61")
