"""Keys of a PolicyMap with a range of the layers that one scan runs."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import jaxmp

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
BF16 = "mixed_bfloat16"
FLOAT8, NVFP4 = f"{BF16},matmul=float8", f"{BF16},matmul=nvfp4"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.gelu(nn.Dense(64, name="up")(x))
        return x + nn.Dense(32, name="down")(h), h[0, 0]


class Scanned(nn.Module):
    block: type = Block
    reverse: bool = False
    unroll: int = 1

    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        layers = nn.scan(self.block, **options, length=4, reverse=self.reverse, unroll=self.unroll)
        x, firsts = layers(name="layers")(x, None)
        return nn.Dense(8, name="head")(x), firsts


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x):
        firsts = []
        for i in range(4):
            x, first = Block(name=f"layers_{i}")(x, None)
            firsts.append(first)
        return nn.Dense(8, name="head")(x), jax.numpy.stack(firsts)


def variables():
    return Scanned().init(jax.random.key(0), X)


def unrolled(variables):
    stack = variables["params"]["layers"]
    layers = {f"layers_{i}": jax.tree.map(lambda w, i=i: w[i], stack) for i in range(4)}
    return {"params": layers | {"head": variables["params"]["head"]}}


def wrapped(model, keys, default=NVFP4):
    return jaxmp.wrap(model, jaxmp.PolicyMap(keys, default=default))


def assert_equal(some, others):
    jax.tree.map(np.testing.assert_array_equal, some, others)


@pytest.mark.parametrize(
    ("ranges", "names"),
    [
        # JAX 0.10 on CPUs rounds bfloat16 layers in a scan and unrolled ones at other places.
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
            {"layers/down": NVFP4, "layers[:1]": "float32", "layers[:3]": BF16},
            {"layers_*/down": NVFP4, "layers_0": "float32", "layers_[12]": BF16},
        ),
    ],
)
def test_layers_of_a_scan_compute_as_those_with_names_of_their_own(ranges, names):
    params = variables()
    out = wrapped(Scanned(), ranges).apply(params, X)
    assert_equal(out, wrapped(Unrolled(), names).apply(unrolled(params), X))
    one = jaxmp.wrap(Scanned(), NVFP4).apply(params, X)
    assert not np.array_equal(out[0], one[0])  # the policies differ


def gradient(model, params):
    def loss(params):
        out, firsts = model.apply(params, X)
        return (out**2).sum() + firsts.sum()

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize(
    "model",
    [Scanned(), Scanned(reverse=True), Scanned(unroll=3), Scanned(block=nn.remat(Block))],
    ids=["plain", "reverse", "unroll", "remat"],
)
def test_a_scan_in_parts_of_equal_policies_is_the_scan(model):
    params = variables()
    parts = wrapped(model, {"layers[:1]": FLOAT8, "layers[-1:]": FLOAT8}, FLOAT8)
    one = jaxmp.wrap(model, FLOAT8)
    text = str(jax.make_jaxpr(parts.apply)(params, X))
    assert text.count("scan[") == 3
    assert_equal(parts.apply(params, X), one.apply(params, X))
    assert_equal(gradient(parts, params), gradient(one, params))


def test_the_last_layers_of_a_reverse_scan_are_those_of_its_stack():
    params = variables()
    model = wrapped(Scanned(reverse=True), {"layers[-1:]": "float32"}, BF16)
    zero = jax.tree.map(lambda w: w.at[:3].set(0), params["params"]["layers"])
    zero = {"params": params["params"] | {"layers": zero}}  # only the last layer computes
    assert_equal(model.apply(zero, X)[1], Scanned(reverse=True).apply(zero, X)[1])


def test_explain_shows_the_products_under_each_policy():
    model = wrapped(Scanned(), {"layers[:1]": "float32"}, BF16)
    report = jaxmp.explain(model.apply, "float32")(variables(), X)
    assert report.products() == {"bfloat16": 7, "float32": 2}


def test_a_range_that_no_scan_has_is_an_error():
    params = variables()
    with pytest.raises(ValueError, match=r"'layers\[:5\]' is not within the 4 layers"):
        wrapped(Scanned(), {"layers[:5]": BF16}).apply(params, X)
    with pytest.raises(ValueError, match=r"'layers_0\[:1\]' .* is not called in an nn.scan"):
        wrapped(Unrolled(), {"layers_0[:1]": BF16}).apply(unrolled(params), X)
    with pytest.raises(ValueError, match=r"'blocks\[:1\]' matches no module"):
        wrapped(Scanned(), {"blocks[:1]": BF16}).apply(params, X)
    with pytest.raises(ValueError, match=r"supported for the nn\.scan of Flax Linen"):
        wrapped(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), {"layers[:1]": BF16})


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
