"""Keys of a PolicyMap with a range of the layers that one scan runs."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference

import jaxmp

from support import random_key, slow_when

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
BF16 = "mixed_bfloat16"
FLOAT8, NVFP4 = f"{BF16},matmul=float8", f"{BF16},matmul=nvfp4"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.gelu(nn.Dense(64, name="up")(x))
        return x + nn.Dense(32, name="down")(h), h[0, 0]


OPTIONS = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 4}


class Scanned(nn.Module):
    block: type = Block
    reverse: bool = False
    unroll: int = 1

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(self.block, **OPTIONS, reverse=self.reverse, unroll=self.unroll)
        x, firsts = layers(name="layers")(x, None)
        return nn.Dense(8, name="head")(x), firsts


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        firsts = []
        for i in range(4):
            x, first = Block(name=f"layers_{i}")(x, None)
            firsts.append(first)
        return nn.Dense(8, name="head")(x), jnp.stack(firsts)


@functools.cache
def variables():
    return jax.jit(Scanned().init)(random_key(0), X)


def output(model, params):
    return reference(model.apply)(params, X)


@functools.cache
def under_one_policy():
    return output(jaxmp.wrap(Scanned(), FLOAT8), variables())


def unrolled(variables):
    stack = variables["params"]["layers"]
    layers = {f"layers_{i}": jax.tree.map(lambda w, i=i: w[i], stack) for i in range(4)}
    return {"params": layers | {"head": variables["params"]["head"]}}


def wrapped(model, keys, default=FLOAT8):
    return jaxmp.wrap(model, jaxmp.PolicyMap(keys, default=default))


def assert_equal(some, others):
    jax.tree.map(np.testing.assert_array_equal, some, others)


@pytest.mark.parametrize(
    ("ranges", "names"),
    [
        (
            {"layers[:1]": "float32", "layers[-1:]": "float32"},
            {"layers_0": "float32", "layers_3": "float32"},
        ),
        ({"layers[1:3]/up": "float32"}, {"layers_[12]/up": "float32"}),
        (
            {"layers/up": BF16, "layers[:2]": "float32"},
            {"layers_*/up": BF16, "layers_[01]": "float32"},
        ),
        (  # the first match counts, and a module inside keeps the default
            {"layers/down": FLOAT8, "layers[:1]": "float32", "layers[:3]": BF16},
            {"layers_*/down": FLOAT8, "layers_0": "float32", "layers_[12]": BF16},
        ),
    ],
)
def test_layers_of_a_scan_compute_as_those_with_names_of_their_own(ranges, names):
    params = variables()
    out = output(wrapped(Scanned(), ranges), params)
    assert_equal(out, output(wrapped(Unrolled(), names), unrolled(params)))
    assert not np.array_equal(out[0], under_one_policy()[0])  # the policies differ


def gradient(model, params, compiled=reference):
    def loss(params):
        out, firsts = model.apply(params, X)
        return (out**2).sum() + firsts.sum()

    return compiled(jax.grad(loss))(params)


@slow_when(lambda model: model == Scanned())  # the others are that and more
@pytest.mark.parametrize(
    "model",
    [Scanned(), Scanned(reverse=True), Scanned(unroll=3), Scanned(block=nn.remat(Block))],
    ids=["plain", "reverse", "unroll", "remat"],
)
def test_a_scan_in_parts_of_equal_policies_is_the_scan(model):
    params = variables()
    parts = wrapped(model, {"layers[:1]": FLOAT8, "layers[-1:]": FLOAT8})
    one = jaxmp.wrap(model, FLOAT8)
    text = str(jax.make_jaxpr(parts.apply)(params, X))
    assert text.count("scan[") == 3
    assert_equal(output(parts, params), output(one, params))
    assert_equal(gradient(parts, params), gradient(one, params))


def test_the_last_layers_of_a_reverse_scan_are_those_of_its_stack():
    params = variables()
    model = wrapped(Scanned(reverse=True), {"layers[-1:]": "float32"}, BF16)
    zero = jax.tree.map(lambda w: w.at[:3].set(0), params["params"]["layers"])
    zero = {"params": params["params"] | {"layers": zero}}  # only the last layer computes
    assert_equal(output(model, zero)[1], output(Scanned(reverse=True), zero)[1])


FIRST = {"layers[:1]": "float32"}
ALL = {"layers[:1]": "float32", "layers[1:]": "float32", "head": "float32"}  # in two scans


def stacked(gradients):
    layers = [gradients["params"][f"layers_{i}"] for i in range(4)]
    layers = jax.tree.map(lambda *x: np.stack(x), *layers)
    return {"params": {"layers": layers, "head": gradients["params"]["head"]}}


def distance(some, others):
    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    return max(np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b) for a, b in pairs)


def first_and_last(policy, default):
    """Returns a scan with a policy for its first and last layers, and the same unrolled."""
    model = wrapped(Scanned(), {"layers[:1]": policy, "layers[-1:]": policy}, default)
    return model, wrapped(Unrolled(), {"layers_0": policy, "layers_3": policy}, default)


@pytest.mark.parametrize("default", [FLOAT8, NVFP4])
def test_the_first_and_last_layers_stay_16_bit_inside_one_scan(default):
    params = variables()
    model, named = first_and_last(BF16, default)
    found = jaxmp.explain(model.apply, "float32")(params, X).products()
    assert found == jaxmp.explain(named.apply, "float32")(unrolled(params), X).products()
    assert found["bfloat16"] == 5  # of two layers, and the head


@slow_when(lambda default: default == NVFP4)
@pytest.mark.parametrize("default", [BF16, FLOAT8, NVFP4])
def test_the_gradients_of_few_bits_are_those_of_the_unrolled_layers(default):
    params = variables()
    # With a first layer in bfloat16, which JAX 0.10 rounds at another place in a scan, nvfp4 makes
    # of that half unit in the last place 18%, as it does of one in the input.
    model, named = first_and_last("float32", default)
    how = jax.jit if default == NVFP4 else reference  # which has no numbers of four bits
    expected = stacked(gradient(named, unrolled(params), how))
    assert distance(gradient(model, params, how), expected) < 2**-7  # two roundings to bfloat16


def test_the_gradient_of_a_scan_in_parts_is_that_of_float64():
    params = variables()
    model = wrapped(Scanned(), {"layers[1:3]": "p=f32,c=f16,o=f32"}, "float32")
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda w: np.asarray(w, np.float64), unrolled(params))
        exact = stacked(gradient(Unrolled(), wide))
    error = distance(gradient(model, params), exact)
    assert 2**-15 < error < 2**-9  # of float16


def products(model, params, x=X, **options):
    """Returns the number of products in a forward pass by dtype."""
    rngs = {"dropout": random_key(1)}
    run = jaxmp.explain(lambda p, x: model.apply(p, x, rngs=rngs, **options), "float32")
    return run(params, x).products()


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(32, name="up")(x))
        return nn.Dropout(0.5, deterministic=False)(x), None


class Lifted(nn.Module):
    """Layers as some function of Flax's runs them."""

    lift: object

    @nn.compact
    def __call__(self, x):
        return self.lift(self, x)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(32, name="up")(x)


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        inner = nn.scan(Block, **OPTIONS | {"length": 3})
        return inner(name="inner")(x, None)[0], None


def function(_, x):
    return nn.scan(lambda layer, x, _: layer(x, None), **OPTIONS)(Block(name="layers"), x, None)[0]


def scanned_again(lengths):
    return Lifted(lambda _, x: nn.remat_scan(Plain, lengths=lengths)(name="layers")(x))


def around(lift):
    return Lifted(lambda _, x: lift(nn.scan(Block, **OPTIONS))(name="layers")(x, None)[0])


@pytest.mark.parametrize(
    ("model", "keys", "float32", "bfloat16"),
    [
        (Lifted(function), FIRST, 2, 6),
        (scanned_again((4,)), FIRST, 1, 3),
        (around(nn.remat), FIRST, 2, 6),
        (around(nn.jit), FIRST, 2, 6),
        (Scanned(block=Nested), FIRST, 6, 18),
        (Scanned(block=Nested), {"layers/inner[:1]": "float32"}, 8, 16),
        (Scanned(block=Nested), {"layers[:1]/inner": "float32"}, 6, 18),
        (Scanned(block=Nested), FIRST | {"**/inner[-1:]/up": "float32"}, 9, 15),
        (Scanned(), {f"layers[{i}:{i + 1}]": "float32" for i in range(4)}, 8, 1),
        (Scanned(), {"layers[:2]": "float32", "layers[1:]": BF16}, 4, 5),
        (Scanned(), {"layers[:1]/up": BF16, "layers[:1]": "float32"}, 1, 8),
    ],
    ids=str,
)
def test_what_runs_layers_is_split(model, keys, float32, bfloat16):
    if isinstance(model, Scanned) and model.block is Nested:
        model = Lifted(lambda _, x: nn.scan(Nested, **OPTIONS)(name="layers")(x, None)[0])
    params = jax.eval_shape(model.init, random_key(0), X)
    found = products(wrapped(model, keys, BF16), params)
    assert found == {"float32": float32, "bfloat16": bfloat16}


def test_other_variables_and_rngs_are_those_of_the_whole_scan():
    rngs = {"params": True, "dropout": True}
    axes = {"params": 0, "batch_stats": 0}
    layers = nn.scan(Normed, variable_axes=axes, split_rngs=rngs, length=4)
    model = Lifted(lambda _, x: layers(name="layers")(x, None)[0])
    keys = {"params": random_key(0), "dropout": random_key(1)}
    parts = wrapped(model, {"layers[:1]": BF16, "layers[3:]/up": BF16}, BF16)
    first, again = jax.jit(lambda keys: (model.init(keys, X), parts.init(keys, X)))(keys)
    assert_equal(again, first)  # the tree is one stack
    run = {"rngs": {"dropout": random_key(2)}, "mutable": ["batch_stats"]}
    one = jaxmp.wrap(model, BF16)
    outputs = jax.jit(lambda params: [m.apply(params, X, **run) for m in (parts, one)])
    assert_equal(*outputs(first))


@pytest.mark.parametrize("rule", [jax.custom_jvp, jax.custom_vjp])
def test_layers_in_a_function_with_a_derivative_rule_have_their_policies(rule):
    model = wrapped(Scanned(), ALL, BF16)

    def run(params):
        return model.apply(params, X)[0].sum()

    fn = rule(run)
    if rule is jax.custom_jvp:
        fn.defjvp(lambda primals, tangents: jax.jvp(run, primals, tangents))
    else:
        fn.defvjp(lambda params: jax.vjp(run, params), lambda pullback, g: pullback(g))
    params = variables()
    expected = reference(jax.grad(lambda params: Scanned().apply(params, X)[0].sum()))(params)
    assert distance(reference(jax.grad(jaxmp.autocast(fn, BF16)))(params), expected) < 1e-5


def test_sharded_parameters_of_layers_in_parts():
    params = variables()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def sharded(path, w):
        axis = 0 if "layers" in str(path) and "kernel" in str(path) else w.ndim - 1
        names = ["data" if i == axis else None for i in range(w.ndim)]
        return jax.device_put(w, NamedSharding(mesh, PartitionSpec(*names)))

    spread = jax.tree_util.tree_map_with_path(sharded, params)
    found = gradient(wrapped(Scanned(), ALL, BF16), spread, jax.jit)
    assert distance(found, gradient(Scanned(), params)) < 1e-5


def test_a_part_of_a_wrapped_model_has_its_ranges():
    class Whole(nn.Module):
        def setup(self):
            self.body = Scanned()

        def __call__(self, x):
            return self.body(x)[0]

    model = wrapped(Whole(), {"body/layers[:1]": "float32"}, BF16)
    params = jax.eval_shape(Whole().init, random_key(0), X)
    run = jaxmp.explain(lambda p: model.bind(p).body(X), "float32")
    assert run(params).products() == {"bfloat16": 7, "float32": 2}


def test_reports_show_both_policies_of_the_layers():
    params = variables()
    model = wrapped(Scanned(), FIRST, BF16)
    text = jaxmp.explain(model.apply, "float32")(params, X).to_text(verbose=True)
    rows = [line for line in text.splitlines() if "dot_general" in line and "layers/up" in line]
    assert ["float32" in row for row in rows] == [True, False]
    kept = str(jaxmp.audit(lambda p: model.apply(p, X)[0].sum(), BF16)(params))
    assert "in a region that a policy or the author keeps float32" in kept


def test_a_range_that_no_scan_has_is_an_error():
    def shapes(model, keys, params):
        return jax.eval_shape(wrapped(model, keys).apply, params, X)

    params = variables()
    with pytest.raises(ValueError, match=r"'layers\[:5\]' is not within the 4 layers"):
        shapes(Scanned(), {"layers[:5]": BF16}, params)
    with pytest.raises(ValueError, match=r"'layers_0\[:1\]' .* is not called in an nn.scan"):
        shapes(Unrolled(), {"layers_0[:1]": BF16}, unrolled(params))
    with pytest.raises(ValueError, match=r"'layers/up\[:1\]' .* is not called in an nn.scan"):
        shapes(Scanned(), {"layers/up[:1]": BF16}, params)
    with pytest.raises(ValueError, match=r"'blocks\[:1\]' matches no module"):
        shapes(Scanned(), {"blocks[:1]": BF16}, params)
    for key in ("layers[0]", "layers[::2]", "layers[-:2]"):
        with pytest.raises(ValueError, match=r"a range without a step, as in 'layers\[0:1\]'"):
            shapes(Scanned(), {key: BF16}, params)
    with pytest.raises(ValueError, match=r"supported for the nn\.scan of Flax Linen"):
        wrapped(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {"layers[:1]": BF16})


def test_a_range_that_could_be_of_two_scans_is_an_error():
    model = wrapped(scanned_again((2, 2)), FIRST)
    params = jax.eval_shape(scanned_again((2, 2)).init, random_key(0), X)
    with pytest.raises(ValueError, match="'layers', which scans inside each other run"):
        jax.eval_shape(model.apply, params, X)


def test_a_range_inside_layers_with_a_derivative_rule_is_an_error():
    class Ruled(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            run = nn.Dense.__call__
            pull = {"forward_fn": lambda m, x: nn.vjp(run, m, x), "backward_fn": lambda v, g: v(g)}
            return nn.custom_vjp(run, **pull)(nn.Dense(32, name="up"), x), 0.0

    params = jax.eval_shape(Scanned(block=Ruled).init, random_key(0), X)
    model = wrapped(Scanned(block=Ruled), {"layers[:1]/up": "float32"}, BF16)
    with pytest.raises(ValueError, match=r"derivative rule of .* calls inside the layers"):
        jax.eval_shape(jax.grad(lambda p: model.apply(p, X)[0].sum()), params)
    whole = wrapped(Scanned(block=Ruled), FIRST, BF16)
    assert products(whole, params) == {"float32": 1, "bfloat16": 4}


@pytest.fixture(params=["jax_remat3", "jax_custom_jvp3"])
def next_generation(request):
    if jax.__version_info__ < (0, 12):
        pytest.skip("not looked inside before JAX 0.12")
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, False)


def test_only_modules_in_functions_of_the_next_generation_are_an_error(next_generation):
    class Rectified(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.relu(nn.Dense(32, name="up")(x)), 0.0

    remat = next_generation == "jax_remat3"
    block = Scanned(block=nn.remat(Rectified) if remat else Rectified)
    params = jax.eval_shape(block.init, random_key(0), X)
    message = "not supported with RematTraced; turn off"
    with pytest.raises(ValueError, match=message) if remat else contextlib.nullcontext():
        assert products(wrapped(block, FIRST, BF16), params) == {"float32": 1, "bfloat16": 4}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("layers[2:1]", r"its range \[2:1\] has no layer"),
        ("layers[:0]", r"its range \[:0\] has no layer"),
        ("a[:1]/b[:1]", "two ranges"),
        ("[:1]", "stands after the name"),
        ("**[:1]", "stands after one name"),
    ],
)
def test_a_range_that_cannot_be_is_an_error(key, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.PolicyMap({key: BF16}, default=NVFP4)


def test_policies_of_one_stack_store_it_alike():
    with pytest.raises(ValueError, match=r"one array; the policies have weights 'int4' and 'None'"):
        jaxmp.PolicyMap({"layers[:1]": BF16}, default=f"{BF16},weights=int4")
    with pytest.raises(ValueError, match="have param_dtype 'float32' and 'bfloat16'"):
        jaxmp.PolicyMap({"layers[:1]": "bfloat16"}, default=BF16)


def test_a_range_after_a_key_for_all_layers_is_an_error():
    with pytest.raises(ValueError, match=r"'layers\[:1\]' would have no effect"):
        jaxmp.PolicyMap({"layers": BF16, "layers[:1]": "float32"}, default=NVFP4)
