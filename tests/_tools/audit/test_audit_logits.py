"""`audit` of logits that a loss saves for its gradient."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxmp
from jaxmp._tools.audit.report import PrecisionError
from jaxmp.losses import linear_cross_entropy

TOKENS, FEATURES, WORDS = (8, 256), 64, 16384


def structs(words=WORDS, tokens=TOKENS):
    def float32(*sizes):
        return jax.ShapeDtypeStruct(sizes, "float32")

    table = {"table": float32(FEATURES, words)}
    return table, float32(*tokens, FEATURES), jax.ShapeDtypeStruct(tokens, "int32")


def large_logits(fn, *args, policy=None):
    return [f for f in jaxmp.audit(fn, policy)(*args).findings if f.kind == "large-logits"]


def with_logits(params, x, labels):
    logits = jnp.tanh(x) @ params["table"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_an_embedding(params, x, labels):
    logits = jnp.einsum("vf,btf->btv", params["table"].T, x)
    return -jnp.take_along_axis(nn.log_softmax(logits), labels[..., None], -1).mean()


def flattened(params, x, labels):
    logits = x.reshape(-1, FEATURES) @ params["table"]
    one_hot = jax.nn.one_hot(labels.reshape(-1), logits.shape[-1])
    return optax.softmax_cross_entropy(logits, one_hot).mean()


def without(params, x, labels):
    return linear_cross_entropy(x, params["table"], labels).mean()


def in_rematerialized_chunks(params, x, labels):
    """By hand, tokens in chunks."""

    @jax.checkpoint
    def add(total, chunk):
        return total + with_logits(params, *chunk), None

    return lax.scan(add, 0.0, (x, labels))[0]


def other_losses(params, x, labels):
    """Least squares: what reads the product is no cross-entropy."""
    return ((x @ params["table"]) ** 2).mean() + labels.sum()


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16", "mixed_float16,residuals=recompute"])
def test_saved_logits_are_found_at_their_line(policy):
    for loss in (with_logits, of_an_embedding, flattened):
        gradient = jax.grad(loss if policy is None else jaxmp.autocast(loss, policy))
        report = jaxmp.audit(gradient)(*structs())
        [found] = [f for f in report.findings if f.kind == "large-logits"]
        assert found.source == f"test_audit_logits.py:{loss.__code__.co_firstlineno + 1}"
        assert f"logits of {WORDS:,} words" in found.what
        assert "linear_cross_entropy" in found.fix
        assert found.unit == "bytes"
    assert ("first: logits saved for the backward pass" in str(report)) == (policy is not None)
    with pytest.raises(PrecisionError, match="linear_cross_entropy"):
        report.assert_no("large-logits")


def test_a_sum_over_parts_of_a_batch_saves_them_as_well():
    def step(params, x, labels):
        def add(grads, batch):
            new = jax.grad(with_logits)(params, *batch)
            return jax.tree.map(jnp.add, grads, new), None

        return lax.scan(add, params, (x, labels))[0]

    params, x, labels = structs(tokens=(4, *TOKENS))
    assert len(large_logits(step, params, x, labels)) == 1


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_what_saves_no_logits_has_no_finding(policy):
    for loss in (without, in_rematerialized_chunks, other_losses):
        gradient = jax.grad(loss if policy is None else jaxmp.autocast(loss, policy))
        assert not large_logits(gradient, *structs()), loss.__name__


def test_where_little_or_nothing_is_saved_there_is_no_finding():
    assert not large_logits(with_logits, *structs())  # a forward pass
    small_vocabulary = structs(4 * FEATURES, (64, 4096))
    for args in (small_vocabulary, structs(tokens=(1, 256))):
        assert not large_logits(jax.grad(with_logits), *args)


def test_what_is_less_than_a_quarter_of_all_is_no_finding():
    """Layers before the loss that save more than three times as much."""

    def deep(params, x, labels):
        for _ in range(8):  # a derivative of sin saves cos, half as large as the logits
            x = jnp.sin(x @ params["up"]) @ params["down"]
        return with_logits(params, x, labels)

    params, x, labels = structs()
    up = jax.ShapeDtypeStruct((FEATURES, WORDS // 2), "float32")
    down = jax.ShapeDtypeStruct((WORDS // 2, FEATURES), "float32")
    params |= {"up": up, "down": down}
    assert not large_logits(jax.grad(deep), params, x, labels)
