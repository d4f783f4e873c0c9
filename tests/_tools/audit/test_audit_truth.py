"""What audit says is true and can be followed: purpose, cause and remedy of float32 products."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from public_models import build

import jaxmp
from jaxmp._tools.audit.audit import audit
from jaxmp._tools.audit.report import PrecisionError

from support import slow_when

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MIXED = "mixed_bfloat16"


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def line_of(fn, text):
    lines, start = inspect.getsourcelines(fn)
    [offset] = [i for i, line in enumerate(lines) if text in line]
    return f"test_audit_truth.py:{start + offset}"


def kinds(report):
    return {f.kind for f in report.findings}


# What is intended is not a fault.

X = shape(32, 32)


def with_highest(w, x):
    return jnp.sum(jnp.dot(x, w, precision="highest") @ w)


def with_complex(w, x):
    z = lax.complex(x, w)
    return jnp.sum((z @ z).real @ w)


def in_a_region(w, x):
    return jnp.sum(jaxmp.full_precision(jnp.dot)(x, w) @ w)


def rotary(w, x):
    angles = jnp.einsum("i,j->ij", x[:, 0], w[0, :16])  # contracts nothing
    y = x @ w
    return jnp.sum(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) * y @ w)


def camera(w, x):
    return jnp.sum((x[:, :3] @ w[:3, :3]) @ w[:3, :4])


def scalar(w, x):
    return jnp.vdot(x @ w, x @ w)


def stencil(w, x):
    filtered = jnp.convolve(x[0], jnp.array([1.0, -2.0, 1.0]), mode="same")
    return jnp.sum(filtered @ w)


def angles(w, x):
    return jnp.sum(jnp.sin(x @ w))


def symmetric_solver(w, x):
    matrix = w @ w.T + jnp.eye(32)

    def solve(matvec, b):
        return lax.fori_loop(0, 5, lambda _, y: y - 0.1 * (matvec(y) - b), jnp.zeros_like(b))

    y = lax.custom_linear_solve(lambda v: matrix @ v, x, solve, symmetric=True)
    return jnp.sum(jnp.tanh(y) @ w)


def root(w, x):
    """An implicit solver, as in a deep equilibrium model."""

    def residual(z):
        return z - jnp.tanh(z @ w + x)

    def solve(f, z):
        return lax.fori_loop(0, 5, lambda _, z: z - f(z), z)

    def tangent(g, y):
        return lax.custom_linear_solve(g, y, lambda f, b: solve(lambda z: f(z) - b, b), solve_t)

    def solve_t(f, b):
        return solve(lambda z: f(z) - b, b)

    z = lax.custom_root(residual, jnp.zeros_like(x), solve, tangent)
    return jnp.sum(z @ w)


ON_PURPOSE = {
    with_highest: "precision=HIGHEST, as the author asked",
    with_complex: None,
    in_a_region: "in a region that a policy or the author keeps float32",
    rotary: "autocast keeps it float32: only float32 ops want the result",
    camera: "autocast keeps it float32: a small product: a matrix of 3 rows, and as few columns",
    scalar: "autocast keeps it float32: a scalar product",
    stencil: "autocast keeps it float32: an operand is made of constants",
    angles: "autocast keeps it float32: only angles or a linear solver want the result",
    symmetric_solver: "inside custom_linear_solve, which autocast leaves as written",
}


@pytest.mark.parametrize("fn", ON_PURPOSE, ids=lambda fn: fn.__name__)
def test_what_autocast_or_the_author_keeps_is_no_fault(fn):
    program, what = jaxmp.autocast(fn, MIXED), ON_PURPOSE[fn]
    for run in (program, jax.grad(program, argnums=(0, 1))):
        report = audit(run)(X, X)
        report.assert_no()
        report.assert_no("float32-product")
        assert all(f.kind == "intended-float32" and f.fix == "intended" for f in report.findings)
        assert all(f.source.startswith("test_audit_truth.py") for f in report.findings)
        # The reason is the plan's.
        assert what is None or what in {f.what for f in report.findings}
        assert "No findings." in str(report)
        assert "fix:" not in str(report)
        assert ("\nOn purpose:\n" in str(report)) == bool(report.findings)
        if "float32" in report.product_share():
            with pytest.raises(PrecisionError, match="matmul or convolution kept in float32"):
                report.assert_no("intended-float32")


def test_an_implicit_solver_is_not_told_to_use_jaxmp():
    """Its derivative is a linear solve. JAX 0.12 has it in a primitive of the next generation."""
    program = jaxmp.autocast(root, MIXED)
    for fn in (program, jax.grad(program), jax.grad(program, argnums=(0, 1))):
        for finding in audit(fn)(X, X).findings:
            intended = finding.kind == "intended-float32"
            assert intended or "an operation that autocast does not know" in finding.what
            assert "remove the upcast" not in finding.fix
            assert "wrap" not in finding.fix


def test_tiny_products_are_not_worth_a_remark_where_jaxmp_is_not_used():
    """Of the others autocast would narrow every one."""
    for fn in (rotary, camera, scalar, stencil):
        plain = audit(jax.grad(fn))(X, X)
        transformed = audit(jax.grad(jaxmp.autocast(fn, MIXED)))(X, X)
        faults = sum(f.cost for f in plain.findings if f.kind == "float32-product")
        assert faults == transformed.product_flops().get("bfloat16", 0), fn.__name__
        assert kinds(plain) <= {"float32-product"}


def test_a_library_that_is_told_to_multiply_in_float32_is_intended_everywhere():
    with jax.default_matmul_precision("highest"):
        report = audit(jax.grad(angles))(X, X)
    assert kinds(report) == {"intended-float32"}
    report.assert_no()


def test_assert_products_in_counts_no_geometry():
    jaxmp.testing.assert_products_in(jaxmp.autocast(rotary, MIXED), dtype="bfloat16")(X, X)
    program = jaxmp.autocast(in_a_region, MIXED)
    with pytest.raises(PrecisionError, match="multiplies float32"):
        jaxmp.testing.assert_products_in(program, dtype="bfloat16")(X, X)


# What autocast chose is not a fault.


def max_pooling(w, x):
    y = (x @ w).reshape(1, 32, 32, 1)
    return jnp.sum(nn.max_pool(y, (3, 3), strides=(2, 2)).reshape(1, -1)[:, :32] @ w)


def broadcast_low(w, x):
    y = jnp.tanh(x @ w)
    return jnp.sum((y[:1] * y) @ w)


def softmax(w, x):
    return jnp.sum(jax.nn.softmax(x @ w) @ w)


@pytest.mark.parametrize("policy", [MIXED, "mixed_bfloat16,softmax=bf16", "bfloat16"])
def test_what_autocast_narrowed_is_no_sensitive_operation(policy):
    for fn in (max_pooling, broadcast_low, softmax):
        for program in (jaxmp.autocast(fn, policy), jax.grad(jaxmp.autocast(fn, policy))):
            assert kinds(audit(program)(X, X)) <= {"intended-float32"}, fn.__name__


def test_the_authors_own_sensitive_operation_is_found_beside_autocasts():
    def fn(w, x):
        y = jnp.exp(x.astype(BF16))  # by hand
        return jnp.sum(jax.nn.softmax(x @ w) @ w) + jnp.sum(y.astype(F32))

    report = audit(jaxmp.autocast(fn, "mixed_bfloat16,softmax=bf16"))(X, X)
    [finding] = [f for f in report.findings if f.kind == "sensitive-low"]
    assert finding.what == "exp runs in bfloat16"
    assert finding.source == line_of(fn, "by hand")


def test_the_backward_pass_of_max_pooling_is_not_said_to_be_float32_elsewhere():
    def fn(x):
        return jnp.sum(nn.max_pool(x, (2, 2), strides=(2, 2)).astype(F32))

    report = audit(jax.grad(fn))(shape(1, 8, 8, 1, dtype=BF16))
    assert "select_and_scatter_add" in {op.op for op in report.operations}
    assert not report.findings


PUBLIC = [
    "bfloat16_inputs",
    "linear_recurrent_unit",
    "mixture_of_experts",
    "nnx_cnn",
    "deep_equilibrium",
    "mamba",
    "neural_ode",
    "resnet_batchnorm",
    "rk4_adjoint",
]


@slow_when(lambda name: name != PUBLIC[0])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_under_autocast_have_no_faults(name):
    model = build(name)
    program = jax.grad(jaxmp.autocast(model.loss, MIXED), has_aux=model.has_aux)
    audit(program)(model.params, model.batch(0)).assert_no()


def kernel(x_ref, w_ref, out_ref):
    out_ref[...] = (x_ref[...] @ w_ref[...]).astype(F32)


def kernel_that_widens(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...].astype(F32) @ w_ref[...].astype(F32)


def test_a_kernel_is_told_how_it_gets_16_bits():
    def fn(w, x, body=kernel):
        return pl.pallas_call(body, out_shape=shape(32, 32), interpret=True)(x, w)

    [finding] = audit(fn)(X, X).findings
    assert finding.kind == "float32-product"
    assert finding.source == line_of(kernel, "@")
    assert finding.what.startswith("inside pallas_call, which autocast does not know")
    assert "jaxmp.reduced_precision" in finding.fix
    advised = jaxmp.reduced_precision(fn)
    assert not audit(advised, policy=MIXED)(X, X).findings

    def widening(w, x):
        return fn(w.astype(BF16), x.astype(BF16), kernel_that_widens)

    [finding] = audit(widening, policy=MIXED)(X, X).findings
    assert finding.what == "an upcast from bfloat16 to float32"
    assert finding.source == line_of(kernel_that_widens, "@")


def test_a_scatter_is_an_operation_and_how_it_adds_is_none():
    for dtype, said in ((F32, []), (BF16, ["scatter-add runs in bfloat16"])):
        report = audit(lambda x, d=dtype: jnp.zeros(8, d).at[jnp.arange(4)].add(x))(
            shape(4, dtype=dtype)
        )
        assert [f.what for f in report.findings] == said
        names = [op.op for op in report.operations]
        assert "scatter-add" in names
        assert "add" not in names[names.index("scatter-add") + 1 :]


# Whose upcast it was.


def dispatched(params, x, upcast):
    """A mixture of experts whose author dispatches in bfloat16 and computes in float32."""
    router, w1, w2 = params
    gates = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 8)
    place = (jnp.cumsum(chosen, 0) * chosen - 1).astype(int)
    dispatch = jax.nn.one_hot(place, 16, dtype=BF16) * chosen[..., None].astype(BF16)
    given = jnp.einsum("tec,td->ecd", dispatch, x.astype(BF16))
    given = given.astype(F32) if upcast else given  # the upcast
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", given, w1))  # the product
    out = jnp.einsum("ecf,efd->ecd", hidden, w2)
    return jnp.sum(jnp.einsum("tec,ecd->td", (dispatch * gates[..., None]).astype(BF16), out) ** 2)


EXPERTS = (shape(32, 8), shape(8, 32, 64), shape(8, 64, 32))


def test_an_upcast_that_autocast_honours_is_the_authors():
    """Forward and backward: it is not by the policy that the expert's gradient is float32."""
    program = jaxmp.autocast(lambda p, x: dispatched(p, x, upcast=True), MIXED)
    report = audit(jax.grad(program, argnums=(0, 1)))(EXPERTS, shape(64, 32))
    [finding] = [f for f in report.findings if f.kind == "float32-product"]
    assert finding.source == line_of(dispatched, "# the upcast")
    assert finding.sites == (line_of(dispatched, "# the product"),)
    assert finding.what == "an upcast from bfloat16 to float32"
    assert finding.cost == report.product_flops()["float32"]
    program = jaxmp.autocast(lambda p, x: dispatched(p, x, upcast=False), MIXED)
    assert not audit(jax.grad(program))(EXPERTS, shape(64, 32)).findings  # the advice was right


def test_a_product_outside_of_autocast_is_told_so():
    inner = jaxmp.autocast(lambda w, x: jnp.tanh(x @ w) @ w, MIXED)

    def whole(w, x):
        return jnp.sum(inner(w, x) @ jnp.tanh(x))  # outside

    [finding] = audit(jax.grad(whole))(X, X).findings
    assert finding.what == "what autocast returns in float32 is multiplied outside of it"
    assert finding.source == line_of(whole, "# outside")
    audit(jaxmp.autocast(whole, MIXED))(X, X).assert_no()  # the advice


def test_a_gradient_that_arrives_in_float32_is_told_with_its_reason():
    def fn(w, x):
        return jnp.sum(jnp.dot(x, w, preferred_element_type=F32) ** 2)

    def advice(w, x):
        return jnp.sum(jnp.dot(x, w).astype(F32) ** 2)

    low = shape(32, 32, dtype=BF16)
    [finding] = audit(jax.grad(fn))(low, low).findings
    assert finding.kind == "float32-product"
    assert "the product in the forward pass returns that" in finding.what
    assert "preferred_element_type" in finding.fix
    assert not audit(jax.grad(advice))(low, low).findings


# Parameters in float32.


class GettingStarted(nn.Module):
    """NVIDIA's getting-started baseline in JAX: no layer has a dtype, the input has 16 bits."""

    norm: bool = True
    dtype: object = None  # which the advice gives

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(x) if self.norm else x
        x = nn.Dense(64, dtype=self.dtype, name="up")(x)
        x = nn.gelu(x)
        return nn.Dense(32, dtype=self.dtype, name="down")(x)


@pytest.mark.parametrize("norm", [False, True], ids=["dense", "layer norm before it"])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_the_opening_example(norm, grad):
    """All of its products are float32, although its input has 16 bits; here is why."""
    model = GettingStarted(norm)
    x = shape(16, 32, dtype=BF16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x).astype(F32) ** 2)

    report = audit(jax.grad(loss) if grad else loss)(params, x)
    assert report.product_share() == {"float32": 1.0}
    assert "100.0% float32" in str(report)
    found = [f for f in report.findings if f.kind == "float32-product"]
    assert len(found) == 2  # one for each layer
    for name, finding in zip(("down", "up"), sorted(found, key=lambda f: f.path), strict=True):
        assert f"the argument [0]['params']['{name}']['kernel'] is float32" in finding.what
        assert finding.source == line_of(GettingStarted, f'"{name}"')
        assert finding.path.endswith(name)
        assert "dtype=jnp.bfloat16" in finding.fix
    meets = "so is what it meets" if norm else "meets a bfloat16 value"
    assert meets in next(f for f in found if f.path.endswith("up")).what
    # Both pieces of the advice.
    for advised in (jaxmp.wrap(model, MIXED), GettingStarted(norm, BF16)):
        fixed = audit(lambda p, x, m=advised: jnp.mean(m.apply(p, x) ** 2))(params, x)
        assert fixed.product_share() == {"bfloat16": 1.0}


class StartedInNNX(nnx.Module):
    def __init__(self, *, norm):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(32, rngs=rngs) if norm else None
        self.up = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, x):
        return self.up(x if self.norm is None else self.norm(x))


@pytest.mark.parametrize("norm", [False, True], ids=["linear", "layer norm before it"])
@pytest.mark.parametrize("closed_over", [False, True], ids=["argument", "closed over"])
def test_the_opening_example_in_nnx(norm, closed_over):
    """Its LayerNorm widens for its scale, not for the number that a mean divides by."""
    model, x = StartedInNNX(norm=norm), shape(16, 32, dtype=BF16)
    audited = audit(model)(x) if closed_over else audit(lambda m, x: m(x))(model, x)
    found = audited.findings
    contraction = next(f for f in found if f.kind == "float32-product")
    # Which of the layer's parameters is the first is Flax's to say.
    meets = r"(constant array float32\[|argument \[0\]\.).* is float32 and meets a bfloat16 value"
    assert re.search(meets, contraction.what)
    assert all("the constant 32" not in f.what for f in found)
    assert all("dtype=jnp.bfloat16" in f.fix and "Python number" not in f.fix for f in found)


def test_a_number_that_promotes_is_to_be_a_python_number():
    report = audit(lambda x: x * np.float32(2) @ x)(shape(32, 32, dtype=BF16))
    contraction = next(f for f in report.findings if f.kind == "float32-product")
    assert contraction.what == "the constant 2.0 is float32 and meets a bfloat16 value"
    assert "Python number" in contraction.fix


# For which chip.


def test_the_advice_names_a_policy_that_the_target_multiplies():
    for target, dtype, policy in (
        ("gpu-t4", BF16, "mixed_float16"),
        ("tpu-v5e", F16, "mixed_bfloat16"),
        ("gpu-a100", jnp.float8_e4m3fn, "mixed_bfloat16"),
    ):
        low, full = shape(128, 128, dtype=dtype), shape(128, 128)
        [finding] = audit(jnp.dot, target=target)(low, low).findings
        assert finding.kind == "emulated"
        assert policy in finding.fix
        assert "half" not in finding.fix
        [finding] = audit(jnp.dot, target=target)(full, full).findings
        assert policy in finding.fix
        assert not audit(jaxmp.autocast(jnp.dot, policy), target=target)(full, full).findings


def test_sizes_are_judged_for_devices_that_multiply_tiles(monkeypatch):
    x = shape(100, 100, dtype=F16)
    for multiple, described in (
        (None, {"platform": "cpu"}),
        (128, {"platform": "tpu"}),
        (256, {"platform": "tpu", "device_kind": "TPU v6 lite"}),
        (None, {"platform": "gpu", "compute_capability": "6.1"}),
        (8, {"platform": "gpu", "compute_capability": "7.0"}),
        (8, {"platform": "gpu", "compute_capability": "gfx90a"}),
    ):
        unknown = {"device_kind": "one that the tables do not have"}
        device = SimpleNamespace(**(unknown | described))
        monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
        found = [f.fix for f in audit(jnp.dot)(x, x).findings if f.kind == "misaligned"]
        assert found == [f"pad the dimension to a multiple of {multiple}"] * (multiple is not None)
