"""The gradient of one element picked from each row: a comparison, the same numbers as a scatter."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference

import jaxmp
from jaxmp._core.passes.take_along_axis import take_by_comparison

from support import autocast_without, iter_eqns, slow_when

ROWS, SEQUENCE, WIDTH, CLASSES = 4, 8, 16, 32
_rng = np.random.default_rng(0)
W = jax.device_put(_rng.normal(size=(WIDTH, CLASSES)))
X = jax.device_put(_rng.normal(size=(ROWS, SEQUENCE, WIDTH)))
LABELS = jax.device_put(_rng.integers(0, CLASSES, (ROWS, SEQUENCE)))


def along_axis(logits, labels, **mode):
    return jnp.take_along_axis(logits, labels[..., None], axis=-1, **mode)[..., 0]


def flat(logits, labels):
    rows = jnp.arange(ROWS * SEQUENCE)
    return logits.reshape(-1, CLASSES)[rows, labels.reshape(-1)]


def numpy_rows(logits, labels):
    return logits.reshape(-1, CLASSES)[np.arange(ROWS * SEQUENCE), labels.reshape(-1)]


def grid(logits, labels):
    return logits[jnp.arange(ROWS)[:, None], jnp.arange(SEQUENCE)[None], labels]


def swapped(logits, labels):
    return logits[jnp.arange(ROWS)[None], jnp.arange(SEQUENCE)[:, None], labels.T]


PICKS = {
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "take_along_axis": along_axis,
    "flat rows": flat,
    "rows of NumPy": numpy_rows,
    "a grid": grid,
    "a transposed grid": swapped,
    "vmap": jax.vmap(jax.vmap(lambda row, label: row[label])),
    "from the end": lambda logits, labels: along_axis(logits, labels - CLASSES),
    "8-bit labels": lambda logits, labels: along_axis(logits, labels.astype(jnp.int8)),
    "unsigned labels": lambda logits, labels: along_axis(logits, labels.astype(jnp.uint32)),
    "beyond the row, clipped": lambda logits, labels: along_axis(logits, labels + 9, mode="clip"),
    "beyond the row, dropped": lambda logits, labels: jnp.nan_to_num(
        along_axis(logits, labels + 9, mode="fill")
    ),
    "a place of every sequence": lambda logits, labels: jnp.take_along_axis(
        logits, labels[:, :1, None] % SEQUENCE, axis=1
    ),
    "of probabilities": lambda logits, labels: along_axis(jax.nn.log_softmax(logits), labels),
}


def loss_of(pick):
    def loss(w, x, labels):
        picked = pick(x @ w, labels)
        return jnp.sum(picked * jnp.cos(jnp.arange(picked.size)).reshape(picked.shape))

    return loss


def scatters(fn, *args) -> list[int]:
    """The sizes of what is scattered into."""
    eqns = iter_eqns(jax.make_jaxpr(fn)(*args))
    return [e.outvars[0].aval.size for e in eqns if e.primitive.name.startswith("scatter")]


@pytest.fixture
def without():
    """autocast without this pass."""
    return autocast_without(take_by_comparison)


def test_nothing_is_scattered(without: Any) -> None:
    for name, pick in PICKS.items():
        loss = loss_of(pick)
        plain, fast = without(loss, "mixed_bfloat16"), jaxmp.autocast(loss, "mixed_bfloat16")
        assert max(scatters(jax.grad(plain), W, X, LABELS), default=0) >= X.size, name
        assert scatters(jax.grad(fast), W, X, LABELS) == [], name


# Others differ in how they are written; indices out of bounds, in what they select.
COMPUTED = {
    *("flat rows", "a transposed grid", "vmap", "from the end", "unsigned labels"),
    *("beyond the row, clipped", "beyond the row, dropped", "a place of every sequence"),
}


@slow_when(lambda name: name not in COMPUTED)
@pytest.mark.parametrize("name", PICKS)
def test_gradients_are_those_of_the_scatter_bitwise(name: str, without: Any) -> None:
    loss = loss_of(PICKS[name])
    plain, fast = without(loss, "mixed_bfloat16"), jaxmp.autocast(loss, "mixed_bfloat16")
    want, got = (reference(jax.value_and_grad(f))(W, X, LABELS) for f in (plain, fast))
    for a, b in zip(want, got, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", ["flat rows", "vmap"])
def test_other_derivatives(name: str, without: Any) -> None:
    loss = loss_of(PICKS[name])
    tangent = np.cos(np.arange(W.size, dtype=np.float32)).reshape(W.shape)
    plain, fast = without(loss, "mixed_bfloat16"), jaxmp.autocast(loss, "mixed_bfloat16")

    def along(fn, w):
        return jax.jvp(lambda w: fn(w, X, LABELS), (w,), (tangent,))

    for want, got in ((plain, fast), (jax.grad(plain), jax.grad(fast))):
        both = (reference(partial(along, fn))(W) for fn in (want, got))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)


def test_nothing_is_kept_but_the_labels() -> None:
    loss = jaxmp.autocast(loss_of(along_axis), "mixed_bfloat16")
    kept = jax.make_jaxpr(lambda *a: jax.vjp(lambda w: loss(w, *a[1:]), a[0])[1])(W, X, LABELS)
    sizes = [v.aval.size for v in kept.jaxpr.outvars]
    assert ROWS * SEQUENCE * CLASSES not in sizes


OTHERS = {
    "two of a row": lambda x, labels: jnp.take_along_axis(x, labels[..., None] + jnp.arange(2), -1),
    "columns": lambda x, labels: x.reshape(-1, CLASSES)[:, labels[0]],
    "rows twice": lambda x, labels: x.reshape(-1, CLASSES)[jnp.arange(8) // 2, labels[0]],
    "rows": lambda x, labels: x.reshape(-1, CLASSES)[labels],
    "rows backward": lambda x, labels: x[0][jnp.arange(8)[::-1], labels[0]],
}


def test_other_lookups_are_scattered() -> None:
    for name, pick in OTHERS.items():
        loss = loss_of(pick)
        gradient = jax.grad(jaxmp.autocast(loss, "mixed_bfloat16"))
        assert scatters(gradient, W, X, LABELS), name
        rows = jaxmp.explain(loss, "mixed_bfloat16")(W, X, LABELS).rows
        assert not any("picks one" in row.reason for row in rows), name


def test_in_a_derivative_rule_tangents_stay_linear() -> None:
    @jax.custom_jvp
    def entropy(logits, labels):
        return jax.nn.logsumexp(logits, -1) - along_axis(logits, labels)

    @entropy.defjvp
    def _(primals, tangents):
        (logits, labels), (of_logits, _) = primals, tangents
        mean = (jax.nn.softmax(logits) * of_logits).sum(-1)
        return entropy(logits, labels), mean - along_axis(of_logits, labels)

    def loss(w):
        return entropy(X @ w, LABELS).mean()

    got = jax.jit(jax.grad(jaxmp.autocast(loss, "mixed_bfloat16")))(W)
    want = jax.jit(jax.grad(loss))(W)
    assert jnp.linalg.norm(got - want) < 0.02 * jnp.linalg.norm(want)


def test_explain_says_so() -> None:
    rows = jaxmp.explain(loss_of(along_axis), "mixed_bfloat16")(W, X, LABELS).rows
    assert sum("picks one element of each row" in row.reason for row in rows) == 1


def test_where_types_say_how_arrays_are_sharded() -> None:
    if jax.__version_info__ < (0, 12):
        pytest.skip("needs jax 0.12")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        labels = jax.device_put(LABELS, NamedSharding(mesh, PartitionSpec("data")))
        loss = loss_of(lambda logits, y: optax.softmax_cross_entropy_with_integer_labels(logits, y))
        got = jax.jit(jax.grad(jaxmp.autocast(loss, "mixed_bfloat16")))(W, x, labels)
    want = jax.jit(jax.grad(jaxmp.autocast(loss, "mixed_bfloat16")))(W, X, LABELS)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)
