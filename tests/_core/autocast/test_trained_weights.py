"""A policy's ``weights``: what is trained is, to the bit, what `jaxmp.quantize` stores of it."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp
from jaxmp._core.jaxprs.walk import equations

from support import needs_tpu_compiler, random_key, slow_when

LOW = "mixed_bfloat16"
WEIGHTS = ("int4@32", "int8", "int8@tensor", "int4@row", "float8", "e2m1@32")
X = np.random.default_rng(0).normal(size=(16, 64)).astype("float32")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(128, name="up")(x))), None


class Linen(nn.Module):
    layer: type = Layer

    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(self.layer, length=2, **options)(name="layers")(x, None)
        return nn.Dense(64, name="head")(x)


@functools.cache
def variables_of(model=Linen):
    return jax.jit(model().init)(random_key(0), X)


class Norm(nnx.Module):
    """A model with state that a call changes."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.head = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.norm(self.up(x))))


def function(params, x):
    rows = params["embedding"][jnp.arange(16) % 7]
    return jnp.tanh((x + rows) @ params["up"]) @ params["embedding"].T


def call(model, x):
    return model(x)


def called(model, fn=call):
    """What `fn` returns of an NNX module, in NumPy."""
    graph, state = nnx.split(model)
    return reference(lambda state, x: fn(nnx.merge(graph, state), x))(state, X)


def params_of_function():
    rng = np.random.default_rng(1)
    shapes = {"embedding": (64, 128), "up": (128, 128)}
    params = {k: (rng.normal(size=s) / 8).astype("float32") for k, s in shapes.items()}
    return params, np.tile(X, 2)


@pytest.mark.parametrize("bits", WEIGHTS)
@slow_when(lambda bits: bits not in WEIGHTS[:2])  # less of the same
def test_a_function(bits):
    params, x = params_of_function()
    trains = f"{LOW},weights={bits}"
    few = jaxmp.quantize(params, trains)
    served = jaxmp.autocast(function, LOW)(few, x)
    np.testing.assert_array_equal(jaxmp.autocast(function, trains)(params, x), served)
    assert np.abs(served - reference(function)(params, x)).max() > 1e-3  # it is rounded
    # By name, and in an autocast around it.
    inner = jaxmp.autocast(function, trains)
    around = jaxmp.autocast(lambda p, x: inner(x=x, params=p), LOW)
    few = reference(lambda params: jaxmp.quantize(params, trains))(params)
    np.testing.assert_array_equal(
        reference(around)(params, x), reference(jaxmp.autocast(function, LOW))(few, x)
    )


@pytest.mark.parametrize("bits", WEIGHTS)
@slow_when(lambda layer, bits: layer is Layer or bits != WEIGHTS[0])  # as a function has them
@pytest.mark.parametrize("layer", [Layer, nn.remat(Layer)], ids=["scan", "scan of remat"])
def test_a_linen_module(layer, bits):
    model, trains, variables = Linen(layer), f"{LOW},weights={bits}", variables_of()
    few = jaxmp.quantize(variables, trains)
    trained, serves = jaxmp.wrap(model, trains), jaxmp.wrap(model, LOW)
    served = jax.jit(serves.apply)(few, X)
    np.testing.assert_array_equal(jax.jit(trained.apply)(variables, X), served)

    def loss(model, variables, x):
        out = model.apply(variables, x)
        return jnp.sum(out**2), out

    # In another autocast, the last bits of a product depend on how XLA fuses what is around.
    few = reference(lambda variables: jaxmp.quantize(variables, trains))(variables)
    around = [
        reference(jaxmp.autocast(functools.partial(loss, m), LOW))(v, X)[1]
        for m, v in ((trained, variables), (serves, few))
    ]
    np.testing.assert_array_equal(*around)
    grads, exact = (
        reference(jax.grad(functools.partial(loss, m), has_aux=True))(v, X)[0]
        for m, v in ((trained, variables), (model, jaxmp.dequantize(few)))
    )
    for got, want in zip(*map(jax.tree.leaves, (grads, exact)), strict=True):
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize("bits", WEIGHTS)
@slow_when(lambda bits: bits != WEIGHTS[0])  # by default, a function has rows
def test_an_nnx_module(bits):
    trains = f"{LOW},weights={bits}"
    model, twin = Norm(), jaxmp.quantize(Norm(), trains)

    @nnx.jit
    def run(model, x):
        return model(x), model.norm.mean[...]

    served, stats = run(jaxmp.wrap(twin, LOW), X)
    wrapped = jaxmp.wrap(model, trains)
    out, moved = run(wrapped, X)
    np.testing.assert_array_equal(out, served)
    np.testing.assert_array_equal(moved, stats)
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0  # the call moved the average
    np.testing.assert_array_equal(model.up.kernel[...], Norm().up.kernel[...])  # and no weight
    low = jaxmp.autocast(call, LOW)
    inside = called(Norm(), lambda m, x: low(jaxmp.wrap(jaxmp.quantize(m, trains), LOW), x))
    np.testing.assert_array_equal(called(wrapped, low), inside)
    gradient = nnx.grad(lambda m, x: jnp.sum(m(x) ** 2))
    grads = nnx.eval_shape(gradient, wrapped, X)
    assert grads["up"]["kernel"].dtype == jnp.float32
    np.testing.assert_array_equal(
        called(Norm(), jaxmp.autocast(call, trains)),
        called(Norm(), lambda m, x: low(jaxmp.quantize(m, trains), x)),
    )


def is_stored(tree):
    leaves = jax.tree.leaves(tree, is_leaf=jaxmp.quantized.is_quantized)
    return [jaxmp.quantized.is_quantized(leaf) for leaf in leaves if leaf.size >= 4096]


def test_by_path_a_map_says_the_same_to_training_and_to_serving():
    model, variables = Linen(), variables_of()
    policies = jaxmp.PolicyMap({"layers/up": LOW, "head": LOW}, default=f"{LOW},weights=int4")
    few = jaxmp.quantize(variables, policies)
    assert is_stored(few) == [False, True, False]  # head, layers/down, layers/up
    trained = reference(jaxmp.wrap(model, policies).apply)(variables, X)
    served = reference(jaxmp.wrap(model, LOW).apply)(few, X)
    np.testing.assert_array_equal(trained, served)
    inside = jaxmp.PolicyMap({"layers/**": f"{LOW},weights=int8"}, default=LOW)
    assert is_stored(jaxmp.quantize(variables, inside)) == [False, True, True]


def test_by_class_where_modules_are_discovered_in_the_first_call():
    model, variables = Linen(), variables_of()
    policies = jaxmp.PolicyMap({Layer: f"{LOW},weights=int4"}, default=LOW)
    few = jaxmp.quantize(variables, {"layers": "int4"})
    served = reference(jaxmp.wrap(model, LOW).apply)(few, X)
    trained = jaxmp.wrap(model, policies)
    np.testing.assert_array_equal(reference(trained.apply)(variables, X), served)
    with pytest.raises(TypeError, match="has the class Layer as a key"):
        jaxmp.quantize(variables, policies)
    nnx_model = Norm()
    by_class = jaxmp.PolicyMap({nnx.Linear: f"{LOW},weights=int4"}, default=LOW)
    np.testing.assert_array_equal(
        called(jaxmp.wrap(Norm(), by_class)),
        called(jaxmp.wrap(jaxmp.quantize(nnx_model, "int4"), LOW)),
    )


def test_a_part_called_by_itself_and_a_module_wrapped_by_itself():
    model, trains = Norm(), f"{LOW},weights=int4"
    wrapped = jaxmp.wrap(model, trains)
    few = jaxmp.wrap(jaxmp.quantize(Norm(), "int4"), LOW)
    np.testing.assert_array_equal(called(wrapped.up), called(few.up))
    # A module inside that was wrapped by itself says so itself.
    outer = Norm()
    outer.up = jaxmp.wrap(outer.up, LOW)
    np.testing.assert_array_equal(
        called(jaxmp.wrap(outer, trains)),
        called(jaxmp.wrap(jaxmp.quantize(Norm(), {"head": "int4"}), LOW)),
    )


def test_what_a_module_returns_of_its_parameters_is_what_it_was_given():
    model = jaxmp.wrap(Linen(), f"{LOW},weights=int4")
    variables = jax.jit(model.init)(random_key(0), X)
    np.testing.assert_array_equal(
        variables["params"]["head"]["kernel"], variables_of()["params"]["head"]["kernel"]
    )
    _, changed = reference(functools.partial(model.apply, mutable=["params"]))(variables, X)
    chex_equal = jax.tree.map(lambda a, b: bool((a == b).all()), changed, variables)
    assert jax.tree.all(chex_equal)


class Adapted(nn.Module):
    @nn.compact
    def __call__(self, x):
        shape = (64, 64)
        w = self.param("kernel", nn.initializers.normal(), shape)
        a = self.variable("lora", "kernel", lambda: jnp.full(shape, 0.01))
        return x @ w + x @ a.value


def test_what_quantize_leaves_is_left():
    """Collections but "params", and arrays beside modules are rounded as well as their Params."""
    model, trains, variables = Adapted(), f"{LOW},weights=int4", variables_of(Adapted)
    few = jaxmp.quantize(variables, trains)
    assert is_stored(few) == [False, True]
    collections = {"params": ("params", "lora")}
    trained, served = (jaxmp.wrap(model, policy, **collections) for policy in (trains, LOW))
    np.testing.assert_array_equal(
        reference(trained.apply)(variables, X), reference(served.apply)(few, X)
    )
    table = np.random.default_rng(3).normal(size=(64, 64)).astype("float32")

    def fn(both, x):
        return both["model"](x) @ both["table"]

    args = {"model": Norm(), "table": table}
    few = {"model": jaxmp.quantize(Norm(), "int4"), "table": jaxmp.quantize(table, "int4")}
    np.testing.assert_array_equal(
        called(args, jaxmp.autocast(fn, trains)), called(few, jaxmp.autocast(fn, LOW))
    )


def test_training_in_float32_for_few_bits():
    params, x = params_of_function()
    got = reference(jaxmp.autocast(function, "float32,weights=int8"))(params, x)
    want = reference(function)(jaxmp.dequantize(jaxmp.quantize(params, "int8")), x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(got - reference(function)(params, x)).max() > 1e-3


def test_weights_that_are_stored_already_are_read_as_they_are():
    params, x = params_of_function()
    few = jaxmp.quantize(params, "int4@row")
    np.testing.assert_array_equal(
        reference(jaxmp.autocast(function, f"{LOW},weights=int8"))(few, x),
        reference(jaxmp.autocast(function, LOW))(few, x),
    )


def test_under_fsdp_and_resumed_in_the_middle(tmp_path):
    """Eight devices, weights split: the losses of one device; and a run that was interrupted."""
    fn, tx = jaxmp.autocast(function, f"{LOW},weights=int4"), optax.adam(1e-2)
    params, x = params_of_function()

    @jax.jit
    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(fn(p, x) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run(params, state, steps):
        losses = []
        for _ in range(steps):
            params, state, loss = step(params, state, x)
            losses.append(float(loss))
        return params, state, losses

    *at_3, first = run(params, tx.init(params), 3)
    np.savez(tmp_path / "run.npz", *jax.tree.leaves(at_3))
    with np.load(tmp_path / "run.npz") as saved:
        restored = jax.tree.unflatten(jax.tree.structure(at_3), [saved[k] for k in saved.files])
    straight, again = run(*at_3, 3)[2], run(*restored, 3)[2]
    assert straight == again
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        split = jax.device_put(params, jax.NamedSharding(mesh, P(None, "data")))
        losses = run(split, tx.init(split), 3)[2]
    np.testing.assert_allclose(losses, first, rtol=0.01)


@pytest.mark.slow
@needs_tpu_compiler
def test_fsdp_gathers_codes():
    """Compiled for eight v5e: scales by row are multiplied after the sums, and codes cross."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    rows = jax.NamedSharding(mesh, P("data"))
    shapes = {"up": (1024, 4096), "down": (4096, 1024)}
    params = {k: jax.ShapeDtypeStruct(s, "float32", sharding=rows) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((4096, 1024), "float32", sharding=rows)

    def crossing(policy):
        @functools.partial(jaxmp.autocast, policy=policy)
        def loss(params, x):
            return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)

        def step(params, x):
            grads = jax.grad(loss)(params, x)
            return jax.lax.with_sharding_constraint(grads, {"up": rows, "down": rows})

        program = jaxmp.preflight(step, target="tpu-v5e:2x4")(params, x)["as written"].program
        kinds = ("all-gather", "collective-permute")
        sizes = {}
        for (kind, dtype), (_, size) in program.collectives.items():
            if kind in kinds:
                sizes[dtype] = sizes.get(dtype, 0) + size
        return sizes

    before, after = crossing(LOW), crossing(f"{LOW},weights=int8")
    assert after.get("bfloat16", 0) == 0
    assert sum(after.values()) < 0.6 * sum(before.values())


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("mixed_bfloat16,weights=int3", "names no format .*the formats are int8, int4, e4m3, e2m1"),
        ("mixed_bfloat16,weights=int4@rows", "after the @ is what shares a scale"),
        ("mixed_bfloat16,weights=int4@1", "2 or more"),
        ("mixed_float8,weights=int4", "matmul=float8 multiplies forward in a format of its own"),
        ("mixed_bfloat16,matmul=auto,weights=int4", "say one of them"),
    ],
)
def test_wrong_policies(policy, says):
    with pytest.raises(ValueError, match=says):
        jaxmp.get_policy(policy)


def test_wrong_uses_of_quantize():
    params, _ = params_of_function()
    with pytest.raises(ValueError, match="does not say what weights are stored in: add weights="):
        jaxmp.quantize(params, jaxmp.get_policy(LOW))
    with pytest.raises(ValueError, match="a policy says what shares a scale"):
        jaxmp.quantize(params, f"{LOW},weights=int4", block_size=32)
    with pytest.raises(ValueError, match="and so does granularity='row'"):
        jaxmp.quantize(params, "int4@32", granularity="row")
    with pytest.raises(ValueError, match="nothing to quantize"):
        jaxmp.quantize({"w": np.ones((8, 8), "float32")}, f"{LOW},weights=int4")


def test_a_program_whose_weights_are_none_is_warned_of():
    fn = jaxmp.autocast(lambda w, x: x @ w, f"{LOW},weights=int4")
    with pytest.warns(UserWarning, match="weights=int4 rounds no parameter of this program"):
        fn(np.ones((8, 8), "float32"), X[:, :8])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn(np.ones((64, 64), "float32"), X)


def test_tools_see_casts_of_jaxmp_and_no_finding():
    model = jaxmp.wrap(Linen(), f"{LOW},weights=int4@row")
    variables = variables_of()
    for report in (
        jaxmp.audit(jax.grad(lambda v, x: jnp.sum(model.apply(v, x))))(variables, X),
        jaxmp.audit(jaxmp.wrap(Linen(), LOW).apply)(jaxmp.quantize(variables, "int4@row"), X),
    ):
        assert not report.findings
        assert "by the author" not in str(report)
    backward = jaxmp.get_policy(f"{LOW},matmul=bf16:float8:float8,weights=int8")
    assert str(backward) == f"{LOW},matmul=bf16:float8:float8,weights=int8"


ACTIVATIONS = (
    ("int8", "int8"),
    ("int4@row", "int8"),
    ("int8@tensor", "int8"),
    ("float8", "float8"),
    ("e2m1@row", "float8"),
)


@pytest.mark.parametrize(("bits", "activations"), ACTIVATIONS)
@slow_when(lambda bits: bits not in ("int4@row", "float8"))
def test_activations_too(bits, activations):
    """Trained as served; and the products are those of rounded rows, computed in float64."""
    params, x = params_of_function()
    also = f"activations={activations}"
    few = jaxmp.quantize(params, f"{LOW},weights={bits}")
    served = jaxmp.autocast(function, f"{LOW},{also}")(few, x)
    trained = jaxmp.autocast(function, f"{LOW},weights={bits},{also}")(params, x)
    np.testing.assert_array_equal(trained, served)

    layer = jaxmp.autocast(lambda p, x: x @ p["up"], f"{LOW},o=float32,{also}")
    low = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    got = np.float64(reference(layer)({"up": few["up"]}, x))
    most = np.abs(low).max(1, keepdims=True)
    dtype = jnp.dtype(few["up"].values.dtype)
    if activations == "int8":
        scale = most / 127
        rounded = np.round(low / scale) * scale
    else:
        scale = 2.0 ** np.ceil(np.log2(most / 448))
        rounded = (low / scale).astype("float8_e4m3fn").astype(np.float64) * scale
    want = rounded @ np.asarray(few["up"].dequantize(), np.float64)
    # The result's own rounding, and quotients by float32 scales at ties.
    assert np.linalg.norm(got - want) <= 2**-8 * np.linalg.norm(want), dtype
    plain = low @ np.asarray(few["up"].dequantize(), np.float64)
    assert np.linalg.norm(want - plain) > 2**-8 * np.linalg.norm(want)  # it matters


def test_products_with_activations_are_integers_and_their_gradients_are_not():
    params, x = params_of_function()
    policy = f"{LOW},weights=int4@row,activations=int8"
    report = jaxmp.explain(function, policy)(params, x)
    assert [row.recipe.forward for row in report.rows if row.op == "dot_general"] == ["int8"] * 2
    assert report.products() == {"int8": 2}
    assert not [row for row in report.rows if row.op == "reduce_max"]  # the rounding of weights

    def loss(function, params, x):
        return jnp.sum(function(params, x) ** 2)

    fast = functools.partial(loss, jaxmp.autocast(function, policy))
    sums = [
        str(eqn.outvars[0].aval.dtype)
        for eqn in equations(jax.make_jaxpr(jax.grad(fast))(params, x).jaxpr.eqns)
        if eqn.primitive.name == "dot_general"
    ]
    assert sums.count("int32") == 2
    assert len(sums) == 6  # and two for each gradient
    gradient = reference(jax.grad(functools.partial(loss, function)))
    exact = gradient(jaxmp.dequantize(jaxmp.quantize(params, policy)), x)
    grads = jax.jit(jax.grad(fast))(params, x)
    for got, want in zip(*map(jax.tree.leaves, (grads, exact)), strict=True):
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - want) <= 0.03 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (f"{LOW},weights=int4,activations=int8", "say weights=int4@row"),
        (f"{LOW},weights=int8,activations=float8", "integers multiply integers"),
        (f"{LOW},activations=int4", "names no format .*the formats are int8, e4m3"),
        ("mixed_int8,activations=int8", "is for products with stored weights"),
    ],
)
def test_wrong_activations(policy, says):
    with pytest.raises(ValueError, match=says):
        jaxmp.get_policy(policy)


def test_activations_that_are_not_rounded_are_warned_of():
    params, x = params_of_function()
    with pytest.warns(UserWarning, match="activations=int8 changes nothing"):
        jaxmp.autocast(function, f"{LOW},activations=int8")(params, x)
    for few, why in (("int4@32", "several scales in a sum"), ("float8", "of the other kind")):
        with pytest.warns(UserWarning, match=f"100% of the FLOPs .* {why}"):
            jaxmp.autocast(function, f"{LOW},activations=int8")(jaxmp.quantize(params, few), x)
