"""`jaxmp.audit`: what it counts, and whom it blames."""

from __future__ import annotations

import functools
import inspect
import json
import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._core.plan.flops import contraction_flops
from jaxmp._tools.audit.audit import audit
from jaxmp._tools.audit.report import PrecisionError

from aot import residual_mib
from models import CASES
from support import iter_eqns, jaxpr_of, slow_when

BF16, F32 = jnp.bfloat16, jnp.float32


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# Whom it blames: the seven leaks, each planted in a bfloat16 model.


class Leaky(nn.Module):
    """A bfloat16 perceptron; `leak(module, x)` stands between its layers."""

    leak: object

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, param_dtype=BF16)
        x = dense(64)(x.astype(BF16))
        x = nn.gelu(self.leak(self, x))
        return dense(8)(dense(64)(x))


LEAKS = {
    "a NumPy table": lambda module, x: x + np.ones((8, 64), np.float32),
    "a NumPy root": lambda module, x: x / np.sqrt(64),
    "a float32 mask": lambda module, x: jnp.where(x > 0, x, np.float32(-1e9)),
    "a float32 norm": lambda module, x: nn.LayerNorm(dtype=jnp.float32)(x),
    "a parameter": lambda module, x: x * module.param("scale", nn.initializers.ones, (64,)),
    "a carry": lambda module, x: nn.RNN(nn.LSTMCell(64, dtype=BF16))(x[None])[0],
    "a scale": lambda module, x: x * jnp.arange(64.0),
    "nothing": lambda module, x: x,
}


def loss_of(model):
    def loss(params, x):
        logits = model.apply(params, x).astype(jnp.float32)
        labels = jnp.zeros(len(logits), int)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


@pytest.mark.parametrize("name", LEAKS)
def test_the_first_finding_is_the_planted_line(name):
    model, x = Leaky(LEAKS[name]), shape(8, 32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    report = audit(jax.value_and_grad(loss_of(model)))(params, x)
    if name == "nothing":
        report.assert_no("float32-product", "promotion")
        return
    first = report.findings[0]
    assert first.kind == "float32-product"
    assert first.source == f"test_audit.py:{LEAKS[name].__code__.co_firstlineno}"
    assert first.cost == sum(
        op.flops for op in report.operations if op.dtype == "float32" and op.flops
    )


def test_a_jitted_library_function_is_blamed_on_the_line_that_calls_it():
    """`jnp.where` is traced once, with the line of its first call in it."""

    def fn(x, w):
        a = jnp.where(x > 0, x, 0.0) @ w  # the same shapes: the trace of `where` is reused
        return a @ w, jnp.where(x > 0, x, jnp.float32(0.0)) @ w

    x, w = shape(8, 8, dtype=BF16), shape(8, 8, dtype=BF16)
    audit(lambda x: jnp.where(x > 0, x, jnp.float32(0.0)))(x)
    [finding] = [f for f in audit(fn)(x, w).findings if f.kind == "float32-product"]
    line = inspect.getsourcelines(fn)[1] + 2
    assert finding.source == f"test_audit.py:{line}"


def test_every_float32_contraction_of_a_plain_model_is_named():
    case = CASES["lm"]
    report = audit(jax.value_and_grad(case.loss(small=True), has_aux=True))(
        *case.shapes(small=True)
    )
    named = {s for f in report.findings if f.kind == "float32-product" for s in f.sites}
    there = {op.source for op in report.operations if op.flops}
    assert named == there
    assert report.product_share() == {"float32": 1.0}
    assert "jaxmp.wrap" in report.findings[0].fix


# What it counts.


def test_scans_multiply_and_branches_share():
    def fn(x, w):
        x, _ = lax.scan(lambda c, _: (c @ w, None), x, None, length=5)
        return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)

    one = 2 * 8**3
    x = shape(8, 8)
    assert audit(fn)(x, x).product_flops() == {"float32": 5 * one + one / 2}


def test_forward_and_backward_are_told_apart():
    x = shape(16, 16)

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    report = audit(jax.grad(loss))(x, x)
    one = 2 * 16**3
    # The first product needs no gradient with respect to x.
    assert report.product_flops(backward=False) == {"float32": 2 * one}
    assert report.product_flops(backward=True) == {"float32": 3 * one}


CONVOLUTIONS = {
    "same": {"padding": "SAME", "strides": (1, 1)},
    "strided": {"padding": "SAME", "strides": (2, 2)},
    "valid": {"padding": "VALID", "strides": (1, 1)},
    "dilated": {"padding": "SAME", "strides": (1, 1), "kernel_dilation": (2, 2)},
    "transposed": {"padding": 1, "strides": (1, 1), "input_dilation": (2, 2)},
    "depthwise": {"padding": "SAME", "strides": (1, 1), "feature_group_count": 64},
}


def check_flops(fn, *args):
    """The count of contractions beside XLA's of all operations, which are few else."""
    ours = sum(contraction_flops(eqn) for eqn in iter_eqns(jaxpr_of(fn, *args)))
    theirs = jax.jit(fn).lower(*args).cost_analysis()["flops"]
    assert ours == pytest.approx(theirs, rel=1e-2)


def test_convolutions_are_counted_as_xla_counts_them():
    x = shape(4, 16, 16, 64)
    for options in CONVOLUTIONS.values():
        model = nn.Conv(64, (3, 3), use_bias=False, **options)
        check_flops(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)


@slow_when(lambda model: model == "cnn")
@pytest.mark.parametrize("model", ["cnn", "lm_scan"])
def test_flops_agree_with_xla(model):
    """A scan's body counts once here, as XLA counts it."""
    case = CASES[model]
    params, state, inputs, _ = case.shapes()
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state)

    def fn(params, inputs):
        variables = {"params": params, **state}
        return case.model().apply(variables, inputs, mutable=list(state))[0]

    check_flops(fn, params, inputs)


def test_residuals_are_those_of_the_backward_pass():
    case = CASES["mlp"]
    shapes = case.shapes()
    report = audit(jax.value_and_grad(case.loss(), has_aux=True))(*shapes)
    inputs = shapes[2]
    kept = residual_mib(case.loss(), *shapes) * 2**20 - inputs.size * 4  # an argument
    assert sum(report.residual_bytes.values()) == kept


def test_the_dtypes_of_residuals_come_in_the_order_in_which_they_are_read():
    def orders(_):
        def loss(w, x):
            def body(c, x):
                return (jnp.tanh(c) * jnp.sin(x.astype(F32)).sum()).astype(BF16) @ w, None

            return jnp.sum(jax.lax.scan(body, jnp.ones((2, 4), BF16), x)[0])

        report = audit(jax.grad(loss))(shape(4, 4, dtype=BF16), shape(3, 4, dtype=BF16))
        return tuple(report.residual_bytes)

    found = set(map(orders, range(10)))
    assert len(found) == 1
    assert len(*found) > 1


def test_arguments_by_field_and_casts():
    state = {"params": {"w": shape(8, 8)}, "opt": {"m": shape(8, 8, dtype=BF16)}}

    def fn(state, x):
        return x.astype(BF16) @ state["params"]["w"].astype(BF16)

    report = audit(fn)(state, shape(4, 8))
    assert report.arguments == {
        "[0]['opt']": {"bfloat16": 128},
        "[0]['params']": {"float32": 256},
        "[1]": {"float32": 128},
    }
    assert report.casts() == {"float32->bfloat16": (2, 64 + 128)}


def test_sensitive_operations_in_16_bits_are_found():
    report = audit(lambda x: jax.nn.softmax(x @ x))(shape(8, 8, dtype=BF16))
    found = {f.what for f in report.findings if f.kind == "sensitive-low"}
    assert "exp runs in bfloat16" in found
    mixed = audit(lambda x: jax.nn.softmax(x @ x), policy="mixed_bfloat16")(shape(8, 8))
    assert not [f for f in mixed.findings if f.kind == "sensitive-low"]


def test_sizes_that_the_chip_has_to_pad_are_found():
    for dtype, k, target, multiple in (
        (BF16, 100, None, None),  # a CPU
        (BF16, 100, "gpu-t4", 8),
        (BF16, 96, "gpu-h100", None),
        (BF16, 100, "gpu-h100", 8),
        (jnp.float8_e4m3fn, 104, "gpu-h100", 16),
        (jnp.float8_e4m3fn, 112, "gpu-h100", None),
        (BF16, 96, "tpu-v5e", 128),
        (BF16, 256, "tpu-v5e", None),
        (BF16, 384, "tpu-v5p", None),
        (BF16, 384, "tpu-v6e", 256),
        (BF16, 384, "tpu7x:2x2x1", 256),
        (BF16, 512, "tpu-v6e", None),
        (F32, 100, "gpu-h100", None),
    ):
        x, w = shape(256, k, dtype=dtype), shape(k, 256, dtype=dtype)
        found = audit(jnp.dot, target=target)(x, w).findings
        said = [(f.what, f.cost) for f in found if f.kind == "misaligned"]
        what = f"k = {k}: {target} takes sizes in multiples of {multiple}"
        assert said == [(what, 2 * 256 * 256 * k)] * (multiple is not None), (target, k)


def test_what_the_chip_emulates_is_found():
    for dtype, target, emulated in (
        (BF16, "gpu-t4", True),
        (jnp.float16, "gpu-t4", False),
        (jnp.float16, "tpu-v5e", True),
        (jnp.float8_e4m3fn, "gpu-a100", True),
        (jnp.float8_e4m3fn, "gpu-h100", False),
        (jnp.float8_e4m3fn, "tpu-v5e", True),
        (jnp.float8_e4m3b11fnuz, "tpu-v5e", False),
        (jnp.float8_e4m3b11fnuz, "tpu7x", True),
        (jnp.float8_e4m3fnuz, "gpu-h100", True),
        (jnp.float8_e4m3fnuz, "gpu-mi300x", False),
        (jnp.float8_e4m3fn, "gpu-mi300x", True),
        (jnp.int8, "tpu7x", True),
        (jnp.int8, "tpu-v6e", False),
        (BF16, "gpu-v100", True),
        (BF16, None, False),
        (jnp.int32, "gpu-h100", False),
    ):
        x = shape(128, 128, dtype=dtype)
        found = [f for f in audit(jnp.dot, target=target)(x, x).findings if f.kind == "emulated"]
        assert bool(found) == emulated, (dtype, target)
        assert all(f"natively by {target}" in f.what for f in found)


@slow_when(lambda target: target in ("tpu7x", "gpu-mi300x", "gpu-b200"))
@pytest.mark.parametrize(
    ("policy", "target", "dtype", "emulated"),
    [
        ("mixed_float8", "tpu-v5e", "float8_e4m3b11fnuz", []),
        ("mixed_float8", "tpu7x", "float8_e4m3fn", []),
        ("mixed_float8", "gpu-mi300x", "float8_e4m3fnuz", []),
        ("mixed_bfloat16,matmul=mxfp8", "gpu-b200", "float8_e4m3fn", []),
        ("mixed_bfloat16,matmul=mxfp8", "gpu-h100", "bfloat16", ["float8_e4m3fn in blocks"]),
        ("mixed_bfloat16,matmul=e4m3", "tpu-v6e", "float8_e4m3fn", ["float8_e4m3fn"]),
    ],
)
def test_a_recipe_is_audited_in_the_format_of_the_chip(policy, target, dtype, emulated):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w[0]) @ w[1])

    args = (shape(64, 64), shape(64, 64)), shape(128, 64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is emulated: ")
        step = jax.grad(jaxmp.autocast(loss, policy))
        report = audit(step, target=target)(*args)
    assert dtype in report.product_share()
    found = [f.what.partition(" is not")[0] for f in report.findings if f.kind == "emulated"]
    assert found == emulated
    assert dtype in str(jaxmp.explain(loss, policy, target=target)(*args))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_under_a_mesh_a_target_is_told_too(kind):
    """JAX's own context then has the mesh of the arrays, which no other device may replace."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w[0]) @ w[1])

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType[kind],))
    with jax.set_mesh(mesh):
        w, x = (
            jax.device_put(np.ones((64, 64), np.float32), P()),
            jax.device_put(np.ones((64, 64), np.float32), P("data")),
        )
        step = jax.jit(jax.grad(jaxmp.autocast(loss, "mixed_float8")))
        for target, dtype in (("tpu-v5e", "float8_e4m3b11fnuz"), ("gpu-h100", "float8_e4m3fn")):
            assert dtype in audit(step, target=target)((w, w), x).product_share(), target


def test_formats_with_a_scale_for_each_block_are_known():
    """A B200 multiplies MXFP8 and NVFP4; MXFP4 is dequantized there, without a word of XLA's."""
    for values, scale, block, target, name in (
        (jnp.float4_e2m1fn, jnp.float8_e8m0fnu, 32, "gpu-b200", "mxfp4"),
        (jnp.float4_e2m1fn, jnp.float8_e4m3fn, 16, "gpu-b200", ""),
        (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32, "gpu-b200", ""),
        (jnp.float8_e4m3fn, jnp.float8_e8m0fnu, 32, "gpu-h100", "mxfp8"),
        (jnp.float4_e2m1fn, jnp.float8_e8m0fnu, 32, "gpu-mi355x", ""),
    ):
        x, s = shape(1, 128, 128, dtype=values), shape(1, 128, 128 // block, dtype=scale)
        report = audit(jax.nn.scaled_matmul, target=target)(x, x, s, s)
        assert report.product_share() == {jnp.dtype(values).name: 1.0}
        found = [f.what for f in report.findings]
        assert len(found) == bool(name), (name, target)
        assert all(what.startswith(f"{name} is not multiplied natively") for what in found)


def test_a_device_that_the_tables_do_not_have_is_asked_for_its_capability(monkeypatch):
    """An older GPU, say: compute capability 7.0."""
    monkeypatch.setattr("jaxmp.dtypes.half_dtype", lambda device=None: jnp.float16)
    x = shape(128, 128, dtype=BF16)
    [finding] = [f for f in audit(jnp.dot)(x, x).findings if f.kind == "emulated"]
    assert "bfloat16 is not multiplied natively by this cpu" in finding.what
    assert not audit(jnp.dot, target="gpu-h100")(x, x).findings


def test_an_unknown_target_and_a_map_are_refused_by_the_name_of_the_tool():
    with pytest.raises(ValueError, match="audit: unknown target 'gpu-h10'"):
        audit(jnp.dot, target="gpu-h10")(shape(8, 8), shape(8, 8))
    with pytest.raises(TypeError, match="audit: takes one policy"):
        audit(jnp.dot, policy=jaxmp.PolicyMap({}, default="float32"))(shape(8, 8), shape(8, 8))


def round_trips(fn, *args, **options):
    return [f for f in audit(fn, **options)(*args).findings if f.kind == "round-trip"]


def test_a_cast_that_is_undone_is_found_with_both_lines():
    def fn(x):
        low = x.astype(BF16)
        return jnp.sin(low.reshape(-1).astype(F32))

    [finding] = round_trips(fn, shape(8, 8))
    line = inspect.getsourcelines(fn)[1]
    assert finding.source == f"test_audit.py:{line + 2}"
    narrowed = f"float32 was cast to bfloat16 at test_audit.py:{line + 1} and comes back rounded"
    assert finding.what == narrowed
    assert finding.cost == 8 * 8 * (2 + 4)


def test_it_is_found_across_functions():
    """The upcast is inside, the cast that undoes it outside."""
    x = shape(8, 8, dtype=BF16)
    for name, around in {
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "map": lambda f: lambda x: lax.map(f, x),
        "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, f, x),
        "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0],
    }.items():
        assert round_trips(around(lambda x: x.astype(F32).astype(BF16)), x), name
        if name in ("jit", "checkpoint"):
            across = around(lambda x: x.astype(F32))
            [finding] = round_trips(lambda x, f=across: f(x).astype(BF16), x)
            assert finding.what.endswith("comes back unchanged")


def test_what_a_loop_changes_is_no_cast_undone():
    """The first iteration's carry was just widened; the second's was not."""

    def body(c):
        return jnp.sin(c.astype(BF16).astype(F32))

    for loop in (
        lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0],
        lambda x: lax.while_loop(lambda c: c[0, 0] < 3, body, x),
    ):
        found = round_trips(lambda x, f=loop: f(x.astype(F32)), shape(8, 8, dtype=BF16))
        assert [f.what.split()[0] for f in found] == ["float32"]  # the one in the body alone


def test_a_narrow_value_that_something_else_wants_is_no_cast_undone():
    def fn(x, w):
        low = x.astype(BF16)
        return low @ w, jnp.sin(low.astype(F32))

    assert not round_trips(fn, shape(8, 8), shape(8, 8, dtype=BF16))


@slow_when(lambda name: name == "lm")
@pytest.mark.parametrize("name", ["lm", "mlp"])
def test_neither_models_by_hand_nor_ours_undo_casts(name):
    """What autocast inserts on both sides is among `casts`, and the compiler's to remove."""
    case = CASES[name]
    for loss in (
        case.loss(small=True, dtype=BF16),
        jaxmp.autocast(case.loss(small=True), "mixed_bfloat16"),
    ):
        assert not round_trips(jax.value_and_grad(loss, has_aux=True), *case.shapes(small=True))


def test_the_casts_of_a_region_in_the_compute_dtype_are_ours():
    def stream(x, w):
        x = jaxmp.reduced_precision(lambda x: x)(jnp.exp(x))
        return jnp.mean((x + x @ w) ** 2)

    step = jax.grad(jaxmp.autocast(stream, "mixed_bfloat16"), argnums=(0, 1))
    report = audit(step)(shape(8, 8), shape(8, 8))
    assert not report.findings
    assert not report.casts(inserted=False)
    assert report.casts(inserted=True)


# How it is read.


def test_repeated_layers_print_as_one_finding():
    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.tanh(nn.Dense(8)(x))
            return nn.Dense(8, name="head")(x)

    x = shape(8, 8)
    params = jax.eval_shape(Deep().init, jax.random.key(0), x)
    report = audit(Deep().apply)(params, x)
    assert len(report.findings) == 4
    text = str(report)
    assert "1. matmul or convolution in float32, 100.0% of the FLOPs: nothing in the" in text
    assert re.search(r" 75\.0%  test_audit\.py:\d+ Deep/Dense_\* ×3\n", text)
    assert re.search(r" 25\.0%  test_audit\.py:\d+ Deep/head\n", text)
    assert text.count("fix:") == 1
    assert "\n2. " not in text
    assert report.to_text(verbose=True).count("fix:") == 4


def test_assert_products_in():
    x = shape(8, 8)
    jaxmp.testing.assert_products_in(jnp.dot, dtype="float32")(x, x)
    mixed = jaxmp.autocast(jax.grad(lambda w: jnp.sum(w @ w)), "mixed_bfloat16")
    jaxmp.testing.assert_products_in(mixed, dtype="bf16")(x)
    with pytest.raises(PrecisionError, match=r"test_audit\.py:\d+ multiplies float32"):
        jaxmp.testing.assert_products_in(lambda x: x @ x, dtype="bfloat16")(x)
    with pytest.raises(PrecisionError, match="there is no matmul"):
        jaxmp.testing.assert_products_in(jnp.sin, dtype="bfloat16")(x)


def test_assert_no_lists_the_findings():
    report = audit(jnp.dot)(shape(8, 8), shape(8, 8))
    listed = r"matmul or convolution in float32, 100\.0% of the FLOPs"
    with pytest.raises(PrecisionError, match=listed):
        report.assert_no("float32-product")
    report.assert_no("sensitive-low")
    with pytest.raises(ValueError, match="unknown kind 'float33'"):
        report.assert_no("float33")


def test_the_report_is_json():
    report = audit(jax.grad(lambda w: jnp.sum(w @ w)))(shape(8, 8))
    read = json.loads(json.dumps(report.to_dict()))
    assert read["findings"][0]["kind"] == "float32-product"
    assert len(read["operations"]) == len(report.operations)


def test_nothing_runs():
    ran = []

    def fn(x):
        jax.debug.callback(lambda: ran.append(1))
        return x @ x

    audit(fn)(jnp.ones((8, 8)))
    jax.effects_barrier()
    assert not ran


@pytest.mark.filterwarnings("ignore:autocast. 100% of the FLOPs of products are float64")
def test_float64_is_told_of():
    """jaxmp has nothing to do with it, and who asked for 16 bits thinks it has."""
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((64, 64), jnp.float64)
        report = audit(jnp.matmul, policy="mixed_bfloat16")(x, x)
    (found,) = report.findings
    assert (found.kind, found.share) == ("float64-product", 1.0)
    assert "jax_enable_x64" in str(report)


def test_a_policy_that_another_overrules_is_told_of():
    """A module that was wrapped already stays under its own policy, whatever a tool is given."""
    x, mixed = shape(16, 16), "mixed_bfloat16"
    said = "decides no product here: the 1 of them"
    for inner, asked in (("float32", mixed), ("mixed_float16", mixed), (mixed, "float32")):
        fn = jaxmp.wrap(jnp.matmul, inner)
        with pytest.warns(UserWarning, match=f"audit: '.*' {said}"):
            report = audit(fn, policy=asked)(x, x)
        (found,) = [f for f in report.findings if f.kind != "intended-float32"]
        assert (found.kind, found.share) == ("overruled", 1.0)
        assert said in str(report)
        if asked == mixed:
            assert said in str(jaxmp.explain(fn, asked)(x, x))
        audit(fn)(x, x).assert_no("overruled")  # nor is it said where none is asked for
        assert not jaxmp.explain(fn)(x, x).overruled
    # Not where it decides one, or the policies multiply alike.
    audit(lambda x, w: fn(x, w) @ w, policy=mixed)(x, x)
    audit(jaxmp.wrap(jnp.matmul, mixed), policy=mixed)(x, x).assert_no()
    audit(jaxmp.wrap(jnp.matmul, "float32"), policy="float32")(x, x).assert_no("overruled")


def test_numpys_float64_is_what_jax_makes_of_it():
    """A data loader gives float64 arrays, which are float32 to JAX, without a word."""
    w, x = np.ones((16, 16)), np.ones((32, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = audit(jnp.matmul, policy="mixed_bfloat16")(x, w)
        assert report.arguments["[0]"] == {"float32": 4 * x.size}
        jaxmp.explain(lambda w, x: jnp.sin(x @ w).sum(), "mixed_bfloat16")(w, x).summary()
        with jax.enable_x64(True):
            report = audit(jnp.matmul)(x, w)
            assert report.arguments["[0]"] == {"float64": 8 * x.size}


def test_what_is_float32_outside_of_a_wrapped_module_has_that_reason() -> None:
    """Sinkhorn's scalings start from literals: most of the FLOPs were float32 without a word."""
    model = jaxmp.wrap(nn.Dense(8), "mixed_bfloat16")
    x = jnp.ones((16, 8))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(variables):
        features = model.apply(variables, x)
        kernel = jnp.exp(-jnp.sum((features[:, None] - features) ** 2, -1))
        return jnp.sum(kernel @ jnp.ones(16))

    report = jaxmp.audit(loss)(variables)
    [finding] = [f for f in report.findings if f.kind == "intended-float32"]
    assert finding.what.startswith("outside the wrapped module")
    assert jaxmp.audit(lambda x: jnp.sum(x @ jnp.ones(8)))(x).findings == ()


def test_a_product_of_a_wrapped_models_weights_outside_of_it_is_told_the_real_remedy():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((16, 16)))

        def features(self, x):
            return x @ self.w

    def loss(net, x):
        return Net.features(net, x).sum()

    x = jnp.ones((32, 16))
    for net, remedy in (
        (Net(), "jaxmp.wrap(model"),
        (jaxmp.wrap(Net(), "mixed_bfloat16"), "model.f(x)"),
    ):
        [finding] = jaxmp.audit(loss)(net, x).findings
        assert (finding.kind, remedy in finding.fix) == ("float32-product", True), finding


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_where_a_models_own_dtype_narrows_is_said(policy):
    """Under a policy too, which decides nothing there; what autocast narrows is not among it."""

    class Model(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Dense(8, dtype=self.dtype)(x)
            return nn.Dense(8)(x)

    def said(model):
        params = jax.eval_shape(model.init, jax.random.key(0), shape(4, 8))
        fn = (jaxmp.wrap(model, policy) if policy else model).apply
        lines = str(audit(fn)(params, shape(4, 8))).splitlines()
        return [line for line in lines if line.startswith("narrowed by the author")]

    [line] = said(Model(jnp.bfloat16))
    assert re.search(r"  test_audit\.py:\d+ Model/Dense_\* ×2$", line)
    assert said(Model()) == []
