"""`jaxmp.quantize(…, calibrate=(fn, batches))`: what is gathered, and what is refused."""

from __future__ import annotations

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference

import jaxmp
from jaxmp._core.products.scaled import dequantize
from jaxmp._core.quantize.gptq import round_for
from jaxmp.formats import ALL_FORMATS
from jaxmp.quantized import QuantizedArray, is_quantized

from support import random_key, slow_when

INT4 = ALL_FORMATS["int4"]
IN, OUT, LAYERS = 16, 4, 3
RNG = np.random.default_rng(0)
MIX = RNG.integers(-1, 2, (IN, IN))
# Whole numbers, whose products float32 sums exactly, in any order.
BATCHES = [np.float32(RNG.integers(-3, 4, (2, 5, IN)) @ MIX) for _ in range(3)]
W = np.float32(RNG.normal(size=(IN, OUT)))
STACK = np.float32(RNG.normal(size=(LAYERS, IN, OUT)))


def outer(*inputs: np.ndarray) -> np.ndarray:
    """The sum of ``x xᵀ`` over all rows, in float64."""
    rows = np.float64(np.concatenate([x.reshape(-1, x.shape[-1]) for x in inputs]))
    return rows.T @ rows


def shrunk(moments: np.ndarray, count: int) -> np.ndarray:
    """What Chen et al. shrink a covariance to (2010, eq. 23), of the correlations."""
    spreads, p = np.sqrt(np.diag(moments)), len(moments)
    s = moments / np.outer(spreads, spreads)
    of_squares, squared = np.trace(s @ s), np.trace(s) ** 2
    share = ((1 - 2 / p) * of_squares + squared) / (
        (count + 1 - 2 / p) * (of_squares - squared / p)
    )
    share = min(share, 1)
    s = (1 - share) * s + share * np.trace(s) / p * np.eye(p)
    return np.float32(s * np.outer(spreads, spreads))


def moments_of(*inputs: np.ndarray) -> np.ndarray:
    return shrunk(outer(*inputs), sum(x.any(-1).sum() for x in inputs))


COUNT = sum(x.any(-1).sum() for x in BATCHES)
MOMENTS = moments_of(*BATCHES)


def small(params, fn, batches=BATCHES, fmt="int4", **options):
    options = {"granularity": "row", "min_size": 1, **options}
    return jaxmp.quantize(params, fmt, calibrate=(fn, batches), **options)


def same(found, values, scale) -> None:
    np.testing.assert_array_equal(np.int8(found.values), np.int8(values))
    np.testing.assert_array_equal(found.scale, scale)


# --- functions ----------------------------------------------------------------------------------


@jax.custom_vjp
def with_rule(x, w):
    return x @ w


with_rule.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g @ w.T, None))


def recurrent(w, x):
    """The weight is the same in each iteration: of a scan, and of a loop in it."""

    def step(carry, row):
        return lax.fori_loop(0, 2, lambda _, c: c + (row @ w).sum(), carry), row @ w

    return lax.scan(step, 0.0, x.reshape(-1, 1, IN))


MULTIPLIED = {
    "product": lambda w, x: x @ w,
    "loss": lambda w, x: jnp.square(x @ w).sum(),
    "jit": jax.jit(lambda w, x: x @ w),
    "bfloat16": lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
    "autocast": jaxmp.autocast(lambda w, x: x @ w, "mixed_bfloat16"),
    "remat": jax.checkpoint(lambda w, x: jnp.sin(x @ w)),
    "custom rule": lambda w, x: with_rule(x.reshape(-1, IN), w),
    "transposed": lambda w, x: w.T @ jnp.swapaxes(x, 1, 2),
    "vmap": jax.vmap(lambda w, x: x @ w, (None, 0)),
    "reshaped": lambda w, x: jnp.einsum("btd,dhk->bthk", x, w.reshape(IN, 2, -1)),
    "a part": lambda w, x: jnp.einsum(
        "btij,ijo->bto", x.reshape(2, 5, 2, -1), w.reshape(2, -1, OUT)
    ),
    "a part, other order": lambda w, x: jnp.tensordot(
        w.reshape(2, -1, OUT), jnp.moveaxis(x.reshape(10, 2, -1), 2, 0), ((1, 0), (0, 2))
    ),
    "branch": lambda w, x: lax.cond(x[0, 0, 0] > 1e9, lambda: x.sum(), lambda: (x @ w).sum()),
    "gradient": lambda w, x: jax.grad(lambda w: (x @ w).sum())(w),
    "decay": lambda w, x: (x @ w).sum() + jnp.square(w).sum(),
    "function of moved weights": lambda w, x: x @ jax.jit(jnp.transpose)(jax.jit(jnp.transpose)(w)),
}


@pytest.mark.parametrize("name", MULTIPLIED)
def test_a_weight_is_rounded_for_the_inputs_of_its_product(name):
    found = small({"w": W}, lambda p, x: MULTIPLIED[name](p["w"], x))["w"]
    same(found, *round_for(W, MOMENTS, INT4, (IN, 1)))
    assert not np.array_equal(
        found.scale, jaxmp.quantize(W, "int4", granularity="row", min_size=1).scale
    )


def test_moments_of_several_products_and_iterations_add():
    expected = round_for(W, moments_of(*BATCHES, *(x[:, :2] for x in BATCHES)), INT4, (IN, 1))
    same(small({"w": W}, lambda p, x: (x @ p["w"], x[:, :2] @ p["w"]))["w"], *expected)
    # Moments three times as large.
    same(
        small({"w": W}, lambda p, x: recurrent(p["w"], x))["w"],
        *round_for(W, moments_of(*3 * BATCHES), INT4, (IN, 1)),
    )


def stacked(w, x):
    """Layers in a scan: each gets other inputs."""
    return lax.scan(lambda h, p: (h + 1, h @ p), x, w)


def backwards(w, x):
    """The last layer runs first."""
    return lax.scan(lambda h, p: (h - 1, h @ p), x + LAYERS - 1, w, reverse=True)


def nested(w, x):
    """The inner scan shares what the outer one slices."""

    def layer(h, p):
        return h + 1, lax.scan(lambda c, row: (c, row @ p), 0.0, h)[1]

    return lax.scan(layer, x, w)


SLICED = {
    "scan": stacked,
    "remat": lambda w, x: lax.scan(jax.checkpoint(lambda h, p: (h + 1, h @ p)), x, w),
    "reversed": backwards,
    "nested": nested,
    "experts": lambda w, x: jnp.einsum("lbtd,ldo->lbto", jnp.stack([x, x + 1, x + 2]), w),
    "vmap": lambda w, x: jax.vmap(lambda p, h: h @ p)(w, jnp.stack([x, x + 1, x + 2])),
    "experts, transposed": lambda w, x: jnp.einsum(
        "lod,lbtd->lbto", jnp.swapaxes(w, 1, 2), jnp.stack([x, x + 1, x + 2])
    ),
}


@pytest.mark.parametrize("name", SLICED)
def test_each_layer_is_rounded_for_its_own_inputs(name):
    found = small({"w": STACK}, lambda p, x: SLICED[name](p["w"], x))["w"]
    for i, w in enumerate(STACK):
        expected = round_for(w, moments_of(*(x + i for x in BATCHES)), INT4, (IN, 1))
        same(QuantizedArray(found.values[i], found.scale[i], W.dtype), *expected)


def test_layers_of_experts():
    """The loop slices the second axis, and the product has the first."""
    weights = np.stack([STACK, STACK[::-1]])  # [experts, layers, in, out]

    def layer(h, p):
        return h + 1, jnp.einsum("etd,edo->eto", jnp.stack([h, 2 * h]), p)

    def run(p, x):
        return lax.scan(layer, x.reshape(-1, IN), jnp.swapaxes(p["w"], 0, 1))

    found = small({"w": weights}, run)["w"]
    for expert in range(2):
        for i in range(LAYERS):
            moments = moments_of(*((1 + expert) * (x + i) for x in BATCHES))
            values, scale = found.values[expert, i], found.scale[expert, i]
            expected = round_for(weights[expert, i], moments, INT4, (IN, 1))
            same(QuantizedArray(values, scale, W.dtype), *expected)


# --- axes ---------------------------------------------------------------------------------------

HEADS = np.float32(RNG.normal(size=(2, IN // 2, OUT)))
TALL = np.float32(RNG.normal(size=(IN, 2, OUT // 2)))
TABLE = np.float32(RNG.normal(size=(OUT, IN)))


def matrix(found, axes):
    """Values and scales with axes in another order, as matrices."""
    return [jnp.transpose(a, axes) for a in (found.values, found.scale)]


def test_attention_has_two_axes_in_a_row_or_a_column():
    """Scales are shared along the longest axis, whichever axes the product sums over."""
    found = small({"w": TALL}, lambda p, x: jnp.einsum("btd,dho->btho", x, p["w"]))["w"]
    assert found.scale.shape == (1, 2, OUT // 2)
    values, scale = round_for(TALL.reshape(IN, -1), MOMENTS, INT4, (IN, 1))
    same(found, values.reshape(TALL.shape), scale.reshape(1, 2, OUT // 2))

    def project(p, x):
        return jnp.einsum("bthd,hdo->bto", x.reshape(2, 5, 2, -1), p["w"])

    found = small({"w": HEADS}, project)["w"]
    assert found.scale.shape == (2, 1, OUT)
    values, scale = round_for(HEADS.reshape(IN, OUT), MOMENTS, INT4, (IN // 2, 1))
    same(found, values.reshape(HEADS.shape), scale.reshape(2, 1, OUT))


@pytest.mark.slow
def test_a_scale_of_the_tensor():
    found = small({"w": W}, lambda p, x: x @ p["w"], granularity="tensor")["w"]
    same(found, *round_for(W, MOMENTS, INT4, (IN, OUT)))


def test_scales_that_rows_of_the_matrix_share():
    """Along an axis of outputs: the shapes are those without calibration."""
    wide = np.float32(RNG.normal(size=(IN, 24, 2)))
    found = small({"w": wide}, lambda p, x: jnp.einsum("btd,dho->btho", x, p["w"]))["w"]
    assert found.scale.shape == (IN, 1, 2)
    rows = wide.swapaxes(1, 2).reshape(IN, -1)
    values, scale = round_for(rows, MOMENTS, INT4, (1, 24))
    same(found, values.reshape(IN, 2, 24).swapaxes(1, 2), scale.reshape(IN, 1, 2))


def test_the_first_of_two_contracted_axes_shares_a_scale():
    long = np.float32(RNG.normal(size=(IN // 2, 2, OUT)))
    found = small(
        {"w": long}, lambda p, x: jnp.einsum("btdh,dho->bto", x.reshape(2, 5, -1, 2), p["w"])
    )["w"]
    assert found.scale.shape == (1, 2, OUT)
    order = np.arange(IN).reshape(-1, 2).T.ravel()
    rows = long.swapaxes(0, 1).reshape(IN, OUT)
    values, scale = round_for(rows, MOMENTS[order][:, order], INT4, (IN // 2, 1))
    same(found, values.reshape(2, -1, OUT).swapaxes(0, 1), scale.reshape(2, 1, OUT).swapaxes(0, 1))


IMAGES = [np.float32(RNG.integers(-3, 4, (2, 7, 8, 3))) for _ in range(2)]


def patches(x):
    """Those of a kernel [2, 3] with strides (2, 1), padding, in the order of the kernel's axes."""
    x = np.pad(x, ((0, 0), (1, 0), (0, 2), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 3), (1, 2))[:, ::2]
    return np.float32(np.moveaxis(windows, 3, -1).reshape(-1, 2 * 3 * 3))


@pytest.mark.parametrize("layouts", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "CNHW")])
def test_convolutions(layouts):
    kernel = np.float32(RNG.normal(size=(2, 3, 3, OUT)))

    def convolved(p, x):
        x = jnp.transpose(x, ["NHWC".index(c) for c in layouts[0]])
        kernel = jnp.transpose(p["w"], ["HWIO".index(c) for c in layouts[1]])
        padding = ((1, 0), (0, 2))
        return lax.conv_general_dilated(x, kernel, (2, 1), padding, dimension_numbers=layouts)

    found = small({"w": kernel}, convolved, IMAGES)["w"]
    assert found.scale.shape == (2, 3, 1, OUT)
    moments = moments_of(*map(patches, IMAGES))
    values, scale = round_for(kernel.reshape(-1, OUT), moments, INT4, (3, 1))
    same(found, values.reshape(kernel.shape), scale.reshape(2, 3, 1, OUT))


@pytest.mark.slow
def test_of_few_inputs_the_product_with_others_is_not_worse_than_of_the_nearest():
    """As it would be if they were taken for all that there are: 12, for rows of 48 weights."""
    r = np.random.default_rng(1)
    mix = np.eye(48) + r.normal(size=(48, 48)) / 20
    others, *batches = (np.float32(r.normal(size=(n, 48)) @ mix) for n in (512, 6, 6))
    w = np.float32(r.normal(size=(48, 32)))
    few, plain = (
        np.square(others @ (w - dequantize(q))).sum()
        for q in (
            small(w, lambda w, x: x @ w, batches),
            jaxmp.quantize(w, "int4", granularity="row", min_size=1),
        )
    )
    assert few < plain
    trusted = round_for(w, np.float32(outer(*batches)), INT4, (48, 1))
    assert np.square(others @ (w - dequantize(trusted))).sum() > 1.2 * plain


def test_inputs_of_zeros_are_not_counted():
    """As experts are given that have fewer tokens than places."""
    filled = [np.concatenate([x, 0 * x, 0 * x], 1) for x in BATCHES]
    same(small(W, lambda w, x: x @ w, filled), *round_for(W, MOMENTS, INT4, (IN, 1)))


@slow_when(lambda fmt: fmt != "e2m1")
@pytest.mark.parametrize(
    ("fmt", "size"), [("int4", 8), ("e2m1", 16), ("float8_e4m3fn", 32), ("int8", 32)]
)
def test_blocks_and_formats(fmt, size):
    r = np.random.default_rng(1)
    params = {"w": np.float32(r.normal(size=(32, 4)))}
    mix = np.eye(32) + r.normal(size=(32, 32)) / 4
    batches = [np.float32(r.normal(size=(40, 32)) @ mix)]
    options = {"granularity": "block", "block_size": size, "min_size": 1}
    plain = jaxmp.quantize(params, fmt, **options)["w"]
    found = small(params, lambda p, x: x @ p["w"], batches, fmt, **options)["w"]
    assert str(found) == str(plain)
    products = [np.square(batches[0] @ (dequantize(q) - params["w"])).sum() for q in (found, plain)]
    assert products[0] < products[1]


def looked_up(p, x):
    """A tied head."""
    rows = p["embedding"][jnp.int32(x[..., 0]) % OUT]
    return (rows + x) @ p["embedding"].T


def test_a_table_that_is_looked_up_too_has_errors_in_all_directions():
    found = small({"embedding": TABLE}, looked_up)["embedding"]
    assert found.scale.shape == (OUT, 1)
    rows = TABLE[np.int32(np.stack(BATCHES)[..., 0]) % OUT] + np.stack(BATCHES)
    moments = outer(rows)
    moments += np.eye(IN) * np.trace(moments) / IN
    values, scale = round_for(TABLE.T, shrunk(moments, COUNT), INT4, (IN, 1))
    # Sums of numbers that are not whole.
    np.testing.assert_allclose(found.scale, scale.T, rtol=1e-6)
    np.testing.assert_array_equal(np.int8(found.values), np.int8(values).T)


def table_loss(p, x):
    """A loss whose gradients with respect to rows are in one direction, and its head."""
    rows = p["embedding"][jnp.int32(x[..., 0]) % OUT]
    return jnp.sum(rows @ np.eye(IN, dtype=np.float32)[3]) + jnp.sum(
        lax.stop_gradient(x) @ p["embedding"].T
    )


def table_loss_in_a_loop(p, x):
    """The same, looked up where gradients cannot be told apart."""
    return lax.scan(lambda c, row: (c + table_loss(p, row[None]), None), 0.0, x)[0]


def table_loss_without_a_derivative(p, x):
    return lax.while_loop(lambda c: c < -1e9, lambda c: c + 1, table_loss(p, x))


def two_results(p, x):
    return table_loss(p, x), jnp.zeros(())


def with_rule_around(p, x):
    """The derivative is that of its rule, in the other direction; the product is in it."""

    @jax.custom_jvp
    def head(rows, table, x):
        return rows[..., 3].sum() + jnp.sum(x @ table.T)

    head.defjvp(lambda primals, tangents: (head(*primals), tangents[0][..., 5].sum()))
    return head(p["embedding"][jnp.int32(x[..., 0]) % OUT], p["embedding"], x)


DIRECTIONS = {
    "loss": (table_loss, 3),
    "jit": (jax.jit(table_loss), 3),
    "rule": (with_rule_around, 5),
    "loop": (table_loss_in_a_loop, None),
    "while": (table_loss_without_a_derivative, None),
    "no loss": (two_results, None),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_errors_of_rows_that_are_looked_up_matter_by_the_gradient_of_a_loss(name):
    """In its direction, as much as in the head's: the sum of the diagonal is the same."""
    calibrated, direction = DIRECTIONS[name]
    moments = outer(*BATCHES)
    trace = np.trace(moments)
    if direction is None:
        moments = moments + np.eye(IN) * trace / IN
    else:
        moments[direction, direction] += trace
    values, scale = round_for(TABLE.T, shrunk(moments, COUNT), INT4, (IN, 1))
    found = small({"embedding": TABLE}, calibrated)["embedding"]
    np.testing.assert_allclose(found.scale, scale.T, rtol=1e-6)
    np.testing.assert_array_equal(np.int8(found.values), np.int8(values).T)


# --- models -------------------------------------------------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(IN)(nn.tanh(x)), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.Dense(IN, name="first")(x)
        scanned = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return nn.Dense(OUT, name="last")(scanned(name="layers")(x, None)[0])


class Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(IN, IN, rngs=rngs)
        self.norm = nnx.BatchNorm(IN, rngs=rngs)
        self.last = nnx.Linear(IN, OUT, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def linen():
    model = Model()
    variables = jax.jit(model.init)(random_key(0), BATCHES[0])
    return variables, lambda v, x: model.apply(v, x, mutable=["batch_stats"])[0]


def wrapped():
    model = jaxmp.wrap(Model(), "mixed_bfloat16")
    variables = jax.jit(model.init)(random_key(0), BATCHES[0])
    return variables, jax.jit(lambda v, x: model.apply(v, x, mutable=["batch_stats"])[0])


def call(model, x):
    return model(x)


def module(policy=None):
    model = Module(nnx.Rngs(0))
    return model if policy is None else jaxmp.wrap(model, policy), call


MODELS = {
    "linen": linen,
    "wrapped linen": wrapped,
    "nnx": module,
    "wrapped nnx": lambda: module("mixed_bfloat16"),
}


@slow_when(lambda name: name in ("linen", "wrapped nnx"))
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Every matrix is calibrated, the results are nearer, and nothing else changes."""
    params, fn = MODELS[name]()
    before = jax.tree.map(np.asarray, nnx.state(params) if "nnx" in name else params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = small(params, fn)
    after = nnx.state(params) if "nnx" in name else params
    jax.tree.map(np.testing.assert_array_equal, before, after)
    plain = jaxmp.quantize(params, "int4", granularity="row", min_size=1)
    types = [[jax.typeof(x) for x in jax.tree.leaves(tree)] for tree in (found, plain)]
    assert types[0] == types[1]
    leaves = (jax.tree.leaves(tree, is_leaf=is_quantized) for tree in (found, plain))
    quantized = [(a, b) for a, b in zip(*leaves, strict=True) if is_quantized(a)]
    assert len(quantized) == (2 if "nnx" in name else 3)
    for a, b in quantized:
        assert not np.array_equal(a.scale, b.scale)
    run = reference(fn) if fn is not call else call
    wanted, mine, nearest = (
        run(p, BATCHES[0]) for p in (params, *map(jaxmp.dequantize, (found, plain)))
    )
    assert np.square(mine - wanted).mean() < np.square(nearest - wanted).mean() * 0.9


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def layer(rngs):
            return Module(rngs)

        self.layers = layer(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + jnp.tile(layer(x), IN // OUT)

        return run(x, self.layers)


def test_stacked_nnx_layers_and_their_state():
    model = Stacked(nnx.Rngs(0))
    graph, state = nnx.split(model)
    of_module = small(model, nnx.jit(lambda model, x: model(x))).layers
    of_state = small(state, lambda state, x: nnx.merge(graph, state)(x))["layers"]
    for name, shape in (("first", (LAYERS, IN, IN)), ("last", (LAYERS, IN, OUT))):
        a, b = getattr(of_module, name).kernel, of_state[name]["kernel"]
        a, b = a.get_raw_value(), b.get_raw_value()
        assert a.shape == shape
        same(a, b.values, b.scale)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_weights_and_batches(kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    batches = [put(x, "data") for x in BATCHES]
    found = small({"w": put(W, None, "model")}, lambda p, x: x @ p["w"], batches)["w"]
    same(found, *round_for(W, MOMENTS, INT4, (IN, 1)))
    assert found.values.sharding.spec == PartitionSpec(None, "model")


def test_batches_are_trees_and_may_be_a_generator():
    def fn(p, batch):
        assert batch["train"] is False  # not an array: given as it is
        return batch["x"] @ p["w"]

    found = small({"w": W}, fn, ({"x": x, "train": False} for x in BATCHES))["w"]
    same(found, *round_for(W, MOMENTS, INT4, (IN, 1)))


def test_a_program_is_traced_once():
    count = []
    small({"w": W}, lambda p, x: count.append(0) or x @ p["w"])
    assert len(count) == 1


# --- what is not calibrated ---------------------------------------------------------------------

OTHERWISE = {
    "read by gather": lambda w, x: w[jnp.int32(x) % 4],
    "read by sin": lambda w, x: x @ jnp.sin(w),
    "read by concatenate": lambda w, x: x @ jnp.concatenate([w, w], 1),
    "read by ragged_dot_general": lambda w, x: lax.ragged_dot(x[0], w[None], jnp.int32([5])),
    "read by a convolution in groups": lambda w, x: lax.conv_general_dilated(
        x[..., None, :2],
        w[None, :, None, :],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    ),
    "read by a product that sums over a part of an axis": lambda w, x: jnp.einsum(
        "btj,ijo->bito", x[..., :8], w.reshape(2, 8, OUT)
    ),
    "not read": lambda w, x: x,
    "multiplied along several axes": lambda w, x: (x @ w) @ w.T,
    "read by the carry of a loop": lambda w, x: lax.fori_loop(
        0, 2, lambda _, c: (-c[0], c[1] + (x @ c[0]).sum()), (w, 0.0)
    ),
    "read by neg, the carry of a loop": lambda w, x: lax.while_loop(
        lambda c: c[1] < 9, lambda c: (-w, c[1] + 1 + 0 * (x @ c[0]).sum()), (w, 0.0)
    ),
}


@pytest.mark.parametrize("reason", OTHERWISE)
def test_what_is_not_a_product_is_rounded_to_the_nearest_and_said(reason):
    params = {"head": W, "other": W}
    with pytest.warns(UserWarning, match="^quantize: rounded to the nearest") as said:
        found = small(params, lambda p, x: (x @ p["head"], OTHERWISE[reason](p["other"], x)))
    assert [str(one.message) for one in said] == [
        f"quantize: rounded to the nearest, without calibration: other ({reason})."
    ]
    assert said[0].filename == __file__
    same(found["head"], *round_for(W, MOMENTS, INT4, (IN, 1)))
    plain = jaxmp.quantize(W, "int4", granularity="row", min_size=1)
    same(found["other"], plain.values, plain.scale)


def test_many_are_counted():
    params = {f"w{i}": W for i in range(8)}
    with pytest.warns(UserWarning, match=r"w5 \(not read\), and 2 more\.$"):
        small(params, lambda p, x: x @ p["w0"])


def test_scales_that_layers_share():
    """There are more layers than inputs, so a row is along the layers."""
    many = np.float32(RNG.normal(size=(20, IN, OUT)))
    with pytest.warns(UserWarning, match=r"w \(with scales that several products share\)"):
        small({"w": many, "v": W}, lambda p, x: (stacked(p["w"], x), x @ p["v"]))


# --- wrong uses ---------------------------------------------------------------------------------


def fn(p, x):
    return x @ p["w"]


WRONG = {
    "no pair": (fn, TypeError, r"calibrate is a pair of .*: \(fn, batches\); got function"),
    "no function": ((BATCHES, fn), TypeError, r"got \['list', 'function'\]"),
    "one batch": ((fn, BATCHES[0]), TypeError, r"got 'ndarray': give \[batch\] for one batch"),
    "empty": ((fn, iter([])), ValueError, r"batches are empty"),
    "shape": (
        (fn, [*BATCHES, BATCHES[0][:1]]),
        ValueError,
        r"batch 3 is float32\[1, 5, 16\], and the first is float32\[2, 5, 16\]",
    ),
    "structure": ((fn, [BATCHES[0], {"x": BATCHES[0]}]), ValueError, r"batch 1 is a PyTreeDef"),
    "not finite": (
        (fn, [BATCHES[0], BATCHES[0] * np.float32(np.nan)]),
        ValueError,
        r"inputs that fn multiplies by w are not finite",
    ),
    "no product": (
        (lambda p, x: x, BATCHES),
        ValueError,
        r"<lambda> multiplies by none of the weights that are quantized: w \(not read\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses(name):
    calibrate, kind, said = WRONG[name]
    with pytest.raises(kind, match=f"^quantize: .*{said}"):
        jaxmp.quantize({"w": W}, "int4", min_size=1, calibrate=calibrate)


def test_the_leaf_of_another_shape_is_named():
    batches = [{"x": x, "y": np.zeros(3 if i else 2)} for i, x in enumerate(BATCHES)]
    with pytest.raises(ValueError, match=r"batch 1 at \['y'\] is float64\[3\], and the first is"):
        small({"w": W}, lambda p, batch: batch["x"] @ p["w"], batches)


def test_weights_are_arrays():
    shape = jax.ShapeDtypeStruct(W.shape, W.dtype)
    with pytest.raises(TypeError, match="runs its function on the weights, and w is a shape"):
        small({"w": shape}, fn)
    with pytest.raises(TypeError, match="and w is traced: call quantize with arrays, outside"):
        jax.jit(lambda w: small({"w": w}, fn))(W)


def test_weights_are_finite():
    bad = W.copy()
    bad[0, 0] = np.inf
    with pytest.raises(ValueError, match="w holds an infinity"):
        small({"w": bad}, fn)


def test_training_is_for_the_nearest():
    with pytest.raises(ValueError, match="straight_through trains the weights for the nearest"):
        small({"w": W}, fn, straight_through=True)
