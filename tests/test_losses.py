"""The loss of a projection without its logits: `jaxmp.losses`."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accuracy import eps
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp
from jaxmp.losses import linear_cross_entropy

from support import case, iter_eqns, ones, slow_when

EPS = eps("float32")
ALL = (0, 1, 2)


def arrays(tokens=(2, 6), features=8, vocab=40, seed=0, size=1.0):
    """Arrays whose logits are of about some size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*tokens, features)) * size / features**0.5
    table, bias = rng.normal(size=(features, vocab)), rng.normal(size=vocab)
    labels = rng.integers(0, vocab, tokens)
    return tuple(jax.device_put((x, table, bias, labels)))


def optax_loss(x, table, bias, labels):
    logits = x @ table + bias
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def ours(x, table, bias, labels, **options):
    return linear_cross_entropy(x, table, labels, bias=bias, **options)


def weighted(loss_fn, labels):
    """A scalar of all losses, no two of which weigh the same."""

    def fn(x, table, bias):
        losses = loss_fn(x, table, bias, labels)
        return jnp.sum(losses * jnp.linspace(1, 2, losses.size).reshape(losses.shape))

    return fn


def oracle(x, table, bias, labels, *, z_loss=0.0, label_smoothing=0.0, soft_cap=None):
    """Losses, and gradients of their `weighted` sum, in float64 NumPy."""
    x, table, bias = (np.asarray(a, np.float64) for a in (x, table, bias))
    labels = np.asarray(labels)
    logits, slope = x @ table + bias, 1.0
    if soft_cap is not None:
        tanh = np.tanh(logits / soft_cap)
        logits = np.where(np.isneginf(logits), logits, soft_cap * tanh)
        slope = 1 - tanh**2
    top = logits.max(-1, keepdims=True)
    normalizer = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    target = np.eye(table.shape[1])[labels] * (1 - label_smoothing)
    target = target + label_smoothing / table.shape[1]
    losses = normalizer[..., 0] - (target * np.where(target > 0, logits, 0)).sum(-1)
    losses = losses + z_loss * normalizer[..., 0] ** 2
    weights = np.linspace(1, 2, losses.size).reshape(losses.shape)[..., None]
    by_logits = np.exp(logits - normalizer) * (1 + 2 * z_loss * normalizer) - target
    by_logits = by_logits * weights * slope
    flat = by_logits.reshape(-1, table.shape[1])
    grads = (by_logits @ table.T, x.reshape(-1, x.shape[-1]).T @ flat, flat.sum(0))
    return losses, grads


def assert_near(got, want, rtol):
    """Near compared with the largest: gradients are sums of terms of either sign."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=0, atol=rtol * max(1, np.abs(w).max()))


# Values.


def both(loss_fn, **options):
    """A function that returns what `oracle` does."""
    fn = functools.partial(loss_fn, **options)

    def losses_and_grads(*args):
        *args, labels = args
        return fn(*args, labels), jax.grad(weighted(fn, labels), ALL)(*args)

    return losses_and_grads


def losses_and_grads(**options):
    return reference(both(ours, **options))


def test_it_is_the_loss_of_optax():
    """However many chunks there are, more than classes too."""
    *args, labels = arrays()
    losses, grads = reference(both(optax_loss))(*args, labels)
    for chunks in ("auto", 1, 7, 100):
        got, got_grads = losses_and_grads(chunks=chunks)(*args, labels)
        np.testing.assert_allclose(got, losses, rtol=0, atol=1e-6, err_msg=str(chunks))
        assert_near(got_grads, grads, 1e-6)


@given(
    tokens=st.lists(st.integers(1, 4), max_size=3),
    features=st.integers(1, 9),
    vocab=st.integers(1, 300),
    chunks=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_any_shape(tokens, features, vocab, chunks, seed):
    args = arrays(tuple(tokens), features, vocab, seed)
    losses, got = losses_and_grads(chunks=chunks)(*args)
    assert losses.shape == args[-1].shape
    want, grads = oracle(*args)
    # A logit's rounding: `features` products and the bias; two logits and a logarithm in a loss.
    rtol = 4 * (features + 8) * EPS
    assert_near(losses, want, rtol)
    assert_near(got, grads, rtol * max(losses.size, 1))


def test_options():
    args = arrays()
    for chunks, options in [
        (7, {"z_loss": 1e-2}),
        (7, {"label_smoothing": 0.1}),
        (7, {"soft_cap": 3.0}),
        (1, {"z_loss": 1e-3, "label_smoothing": 0.2, "soft_cap": 30.0}),
        (7, {"z_loss": 1e-3, "label_smoothing": 0.2, "soft_cap": 30.0}),
    ]:
        losses, grads = oracle(*args, **options)
        with case(options):
            got, got_grads = losses_and_grads(chunks=chunks, **options)(*args)
            assert_near(got, losses, 40 * EPS)
            assert_near(got_grads, grads, 400 * EPS)


def test_logits_of_any_size():
    for size in (1.0, 1e2, 1e4):
        x, table, _, labels = arrays(size=size)
        args = x, table, np.zeros(40, np.float32), labels
        losses, grads = oracle(*args)
        got, got_grads = losses_and_grads(chunks=4)(*args)
        # The error of a logit of this size is also that of a probability.
        rounding = 20 * size * EPS
        np.testing.assert_allclose(got, losses, rtol=0, atol=rounding, err_msg=str(size))
        for g, w in zip(got_grads, grads, strict=True):
            scale = np.abs(w).max()
            np.testing.assert_allclose(g, w, rtol=0, atol=(rounding + 100 * EPS) * scale * 2)


def test_ties_and_masks():
    x, table, bias, labels = map(np.array, arrays(vocab=12))
    bias[[0, 1, 2, 7]] = -np.inf  # a whole chunk of 3, and another
    labels[:] = 9
    for options in ({}, {"soft_cap": 5.0}):
        losses, grads = oracle(x, table, bias, labels, **options)
        got, got_grads = losses_and_grads(chunks=4, **options)(x, table, bias, labels)
        assert_near(got, losses, 40 * EPS)
        assert_near(got_grads, grads, 400 * EPS)
    same, _ = losses_and_grads(chunks=4)(x, 0 * table, np.zeros_like(bias), labels)
    np.testing.assert_allclose(same, np.log(12), rtol=2 * EPS)
    masked, _ = losses_and_grads(chunks=4)(x, table, bias, 0 * labels)
    assert np.all(masked == np.inf)


def test_what_does_not_count_is_not_read():
    x, table, bias, labels = map(np.asarray, arrays())
    where, bad = np.ones(labels.shape, bool), x.copy()
    where[1, 2] = where[0, 0] = False
    bad[1, 2], bad[0, 0] = np.nan, np.inf
    fn = functools.partial(ours, where=where)
    odd = np.where(where, labels, -100)
    got, grads = jax.jit(jax.value_and_grad(weighted(fn, odd), ALL))(bad, table, bias)
    want, expected = reference(
        jax.value_and_grad(weighted(lambda *a: jnp.where(where, optax_loss(*a), 0), labels), ALL)
    )(x, table, bias)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert_near(grads, expected, 1e-6)


def test_labels_out_of_range_are_seen():
    *args, labels = arrays()
    for label in (-1, 40, 1000):
        losses, grads = losses_and_grads()(*args, labels.at[1, 1].set(label))
        assert np.isnan(losses).any(), label
        assert all(np.isnan(g).any() for g in grads), label


def test_labels_of_any_integer_dtype():
    *args, labels = arrays(vocab=300)
    labels = np.asarray(labels) % 100
    want, _ = losses_and_grads(chunks=4)(*args, labels)
    for dtype in ("uint8", "int8", "int16", "uint32"):
        got, _ = losses_and_grads(chunks=4)(*args, labels.astype(dtype))
        np.testing.assert_array_equal(got, want, err_msg=dtype)


# Dtypes.


def products(fn, *args):
    """Of each product, the dtypes of operands and result."""
    return {
        tuple(str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))
        for eqn in iter_eqns(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name == "dot_general"
    }


POLICIES = {
    "mixed_bfloat16": "bfloat16",
    "mixed_float16": "float16",
    "mixed_bfloat16,residuals=recompute": "bfloat16",
    "mixed_bfloat16,softmax=bf16": "bfloat16",
    "mixed_float8": "bfloat16",
    "float32": "float32",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy):
    """All products, in both passes, multiply 16 bits and return float32; so do gradients."""
    low = POLICIES[policy]
    *args, labels = arrays()
    loss_fn = weighted(functools.partial(ours, chunks=4), labels)
    fn = jax.grad(jaxmp.autocast(loss_fn, policy, argnums=(1, 2)), ALL)
    around = jaxmp.autocast(jax.grad(loss_fn, ALL), policy, argnums=(1, 2))
    assert products(fn, *args) == products(around, *args) == {(low, low, "float32")}
    _, want = oracle(*args, labels)
    # Two operands rounded, of which the gradient of a logit is up to 2.
    for grads in (fn, around) if policy == "mixed_bfloat16" else (fn,):
        assert_near(reference(grads)(*args), want, 4 * eps(low) + 1e-5)


def test_regions_and_policies_of_float64():
    *args, labels = arrays()
    fn = jaxmp.full_precision(weighted(ours, labels))
    assert products(jaxmp.autocast(fn, "mixed_bfloat16"), *args) == {("float32",) * 3}
    with jax.enable_x64(True):
        wide = [a.astype("float64") for a in args]
        fn = weighted(ours, labels)
        assert products(fn, *wide) == {("float64",) * 3}
        with pytest.warns(UserWarning, match="100% .* are float64"):
            assert products(jaxmp.autocast(fn, "mixed_bfloat16"), *wide) == {("float64",) * 3}
        # It says of casts that are written what it says of float32 arguments.
        with pytest.warns(UserWarning, match="100% .* are float32"):
            assert products(jaxmp.autocast(fn, "p=f64,c=f32,o=f64"), *wide) == {("float32",) * 3}


def test_without_a_policy_the_operands_say():
    for x_dtype, table_dtype, low in [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float16", "float32"),
    ]:
        x, table, bias, labels = arrays()
        x, table = x.astype(x_dtype), table.astype(table_dtype)
        fn = both(ours, chunks=4)
        with case((x_dtype, table_dtype)):
            assert products(fn, x, table, bias, labels) == {(low, low, "float32")}
            losses, grads = reference(fn)(x, table, bias, labels)
            assert losses.dtype == jnp.float32
            assert [g.dtype for g in grads] == [x_dtype, table_dtype, "float32"]
            _, want = oracle(x, table, bias, labels)
            coarsest = max(map(eps, (x_dtype, table_dtype, low)))
            assert_near([g.astype("float32") for g in grads], want, 4 * coarsest)


def test_the_large_logits_of_16_bits_have_the_gradient_of_float32_logits():
    """Probabilities are those of the forward pass: logits are rounded in neither (marin#8217)."""
    x, table, bias, labels = arrays(size=300.0)
    x, table = x.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    _, want = oracle(x, table, bias, labels)
    fn = weighted(functools.partial(ours, chunks=4), labels)
    [by_bias] = reference(jax.grad(fn, (2,)))(x, table, bias)  # sums of what no product rounds
    np.testing.assert_allclose(by_bias, want[2], rtol=0, atol=1e-3)


# Transformations.


def test_transformations():
    args = arrays(tokens=(3, 4))
    fn = functools.partial(ours, chunks=4)

    @jax.jit
    def transformed(x, table, bias, labels):
        scanned = jax.lax.scan(lambda c, row: (c, fn(row[0], table, bias, row[1])), 0, (x, labels))
        loss = jax.checkpoint(weighted(fn, labels))
        return (
            jax.vmap(fn, (0, None, None, 0))(x, table, bias, labels),
            scanned[1],
            jax.vmap(fn, (None, 0, None, None))(x, jnp.stack([table, -table]), bias, labels)[0],
        ), jax.grad(loss, ALL)(x, table, bias)

    want, grads = losses_and_grads(chunks=4)(*args)
    losses, again = transformed(*args)
    for got in losses:
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert_near(again, grads, 1e-6)


def test_second_derivatives_are_right_and_forward_mode_is_refused():
    x, table, bias, labels = arrays(tokens=(3,), features=3, vocab=7)

    def of(loss_fn):
        inner = jax.grad(weighted(loss_fn, labels))
        return reference(jax.grad(lambda x: jnp.sum(jnp.sin(inner(x, table, bias)))))(x)

    got = of(functools.partial(ours, chunks=3, soft_cap=2.0))
    capped = lambda x, t, b, y: optax.softmax_cross_entropy_with_integer_labels(  # noqa: E731
        2 * jnp.tanh((x @ t + b) / 2), y
    )
    np.testing.assert_allclose(got, of(capped), atol=1e-5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: ours(x, table, bias, labels), (x,), (x,))


def test_no_array_of_all_logits():
    """In neither pass; and a chunk is about four times as large as `x`."""
    shapes = [((64, 32), "float32"), ((32, 2**19), "float32"), ((64,), "int32")]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    fn = jax.grad(lambda x, t, y: linear_cross_entropy(x, t, y).mean(), (0, 1))
    sizes = [
        v.aval.size
        for eqn in iter_eqns(jax.make_jaxpr(fn)(*args))
        for v in eqn.outvars
        if v.aval.shape[:1] == (64,)
    ]
    assert max(sizes) == 4 * 64 * 32


# Devices.

SPECS = {
    "tokens": (P("data"), P()),
    "vocabulary": (P(), P(None, "model")),
    "both": (P("data"), P(None, "model")),
    "one axis": (P(), P(None, ("data", "model"))),
}


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


@slow_when(lambda specs, check_vma: specs != "both" and not (check_vma and specs == "one axis"))
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("specs", SPECS)
def test_shard_map(specs, check_vma):
    tokens, columns = SPECS[specs]
    *args, labels = arrays(tokens=(8, 3))
    args[2] = np.where(np.arange(40) < 5, -np.inf, args[2])  # with 8 shards, all of one device
    labels = np.maximum(labels, 5)
    name = columns[1] if columns else None
    local = functools.partial(ours, axis_name=name, chunks=3, z_loss=1e-3, label_smoothing=0)
    fn = jax.shard_map(
        local,
        mesh=mesh(),
        in_specs=(tokens, columns, P(name), tokens),
        out_specs=tokens,
        check_vma=check_vma,
    )
    exact = jax.value_and_grad(weighted(fn, labels), ALL)
    low = jax.grad(jaxmp.autocast(weighted(fn, labels), "mixed_bfloat16", (1, 2)), ALL)
    (got, grads), low_grads = jax.jit(lambda *args: (exact(*args), low(*args)))(*args)
    losses, want = oracle(*args, labels, z_loss=1e-3)
    weights = np.linspace(1, 2, labels.size).reshape(labels.shape)
    np.testing.assert_allclose(got, (losses * weights).sum(), rtol=1e-5)
    assert_near(grads, want, 400 * EPS)
    assert_near(low_grads, want, 0.05)


def test_gradients_inside_of_shard_map():
    *args, labels = arrays(tokens=(8, 3))
    tokens, columns = SPECS["both"]

    def local(x, table, bias, labels):
        def loss_fn(*args):
            losses = ours(*args, labels, axis_name="model", chunks=3)
            return jax.lax.psum(losses.sum(), "data")

        return jax.grad(loss_fn, ALL)(x, table, bias)

    specs = (tokens, columns, P("model"))
    fn = jax.shard_map(local, mesh=mesh(), in_specs=(*specs, tokens), out_specs=specs)
    want = reference(jax.grad(lambda *args: optax_loss(*args, labels).sum(), ALL))(*args)
    assert_near(jax.jit(fn)(*args, labels), want, 1e-5)


COLLECTIVE = r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-permute)\("


@slow_when(lambda specs, kind: specs != "both" and (kind == AxisType.Explicit or specs in SPECS))
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("specs", [*SPECS, "rows"])
def test_jit_over_a_mesh(specs, kind):
    """No table, no gradient of it and no logits are gathered whole."""
    on = mesh(kind)
    tokens, columns = (P("data"), P("data", None)) if specs == "rows" else SPECS[specs]
    if specs == "rows" and kind == AxisType.Explicit:
        pytest.skip("JAX wants the rows of a table gathered by hand there")
    x, table, bias, labels = arrays(tokens=(8, 4), features=8, vocab=4096)
    _, want = oracle(x, table, bias, labels)
    bias_spec = P(*columns[1:2])
    specs = (tokens, columns, bias_spec)
    args = [
        jax.device_put(a, NamedSharding(on, s))
        for a, s in zip((x, table, bias), specs, strict=True)
    ]
    labels = jax.device_put(labels, NamedSharding(on, tokens))
    with jax.set_mesh(on):
        fn = jax.jit(jax.grad(weighted(functools.partial(ours, chunks=8), labels), ALL))
        compiled = fn.lower(*args).compile()
        assert_near(compiled(*args), want, 1e-5)
    moved = re.findall(COLLECTIVE, compiled.as_text())
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for _, shape, _ in moved]
    assert max(sizes, default=0) <= 8 * 4096 // 8


# Wrong uses.

X, TABLE, BIAS, LABELS = (np.asarray(x) for x in arrays())
WRONG = {
    "a table of [vocab, features]": (
        dict(table=TABLE.T),
        r"table has shape \(40, 8\) and x \(2, 6, 8\); .*Give table\.T",
    ),
    "a table of other features": (dict(table=TABLE[:5]), r"table has shape \(5, 40\)"),
    "a stack of tables": (dict(table=TABLE[None]), r"table has shape \(1, 8, 40\)"),
    "labels of floats": (
        dict(labels=np.float32(LABELS)),
        "labels is float32; it must be class numbers",
    ),
    "one-hot labels": (dict(labels=np.eye(40, dtype=int)[LABELS]), "labels has shape"),
    "labels of other tokens": (
        dict(labels=LABELS[:, 1:]),
        r"labels has shape \(2, 5\); .*\(2, 6\)",
    ),
    "a bias of another length": (dict(bias=BIAS[1:]), r"bias has shape \(39,\); .* \(40,\)"),
    "integer features": (dict(x=X.astype(np.int32)), "x is int32; it must be bfloat16"),
    "an 8-bit table": (dict(table=TABLE.astype("float8_e4m3fn")), "table is float8_e4m3fn"),
    "weights as where": (dict(where=ones(2, 6)), "where is float32; .*where != 0"),
    "where of features": (dict(where=ones(2, 6, 1, dtype=bool)), "where has shape"),
    "no chunks": (dict(chunks=0), "chunks must be 'auto' or an int of at least 1; got 0"),
    "words": (dict(chunks="many"), "got 'many'"),
    "a switch": (dict(chunks=True), "got True"),
    "a negative z_loss": (dict(z_loss=-1.0), "z_loss must be a number at least 0; got -1.0"),
    "smoothing everything": (dict(label_smoothing=1.0), "label_smoothing must be a number"),
    "a cap of 0": (dict(soft_cap=0.0), "soft_cap must be a number above 0"),
}


def test_wrong_uses():
    for name, (changed, message) in WRONG.items():
        options = {"x": X, "table": TABLE, "labels": LABELS} | changed
        expected = f"^linear_cross_entropy: .*{message}"
        with case(name), pytest.raises((TypeError, ValueError), match=expected):
            linear_cross_entropy(**options)
