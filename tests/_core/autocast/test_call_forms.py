"""Every tool is called like a JAX transformation: `tool(fn, policy)(*args)`. Other forms say so."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

from support import case, ones

W, X = ones(16, 16), ones(4, 16)
SECOND_CALL = r"The arguments of a function go into a second call: "


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


TOOLS = [jaxmp.explain, jaxmp.audit, jaxmp.preflight, jaxmp.diagnose, jaxmp.numerics.capture]


@pytest.mark.parametrize("tool", TOOLS)
def test_arguments_beside_the_function_are_told_where_they_go(tool):
    right_form = rf"{SECOND_CALL}{tool.__name__}\(fn, policy\)\(\*args\)"
    with pytest.raises(TypeError, match=rf"^{tool.__name__}: a policy is .*{right_form}"):
        tool(loss, W)
    with pytest.raises(TypeError, match=right_form):
        tool(loss, {"w": W})
    with pytest.raises(TypeError, match=r"^get_policy: a policy is .*ArrayImpl'[.]$"):
        jaxmp.get_policy(W)


def test_training_tools_say_where_arguments_go():
    for tool, args, right_form in [
        (
            jaxmp.validate,
            (lambda policy, seed: None, "mixed_bfloat16", 100),
            r"validate: got 1 .*jaxmp\.validate\(make_step, policy, seeds=3\)\(steps, batches\)",
        ),
        (
            jaxmp.tune,
            (loss, "mixed_bfloat16", W, [X]),
            r"tune: got 2 .*jaxmp\.tune\(loss_fn, candidates, budget=1e-3\)\(params, batches\)",
        ),
        (jaxmp.tune, (loss, {"w": W}), f"tune: a policy is .*{SECOND_CALL}"),
    ]:
        with case(right_form), pytest.raises(TypeError, match=f"^{right_form}"):
            tool(*args)


def test_keyword_arguments_go_to_the_function():
    assert jaxmp.explain(loss, "mixed_bfloat16")(W, x=X).products() == {"bfloat16": 1}
    assert jaxmp.audit(loss, "mixed_bfloat16")(W, x=X).product_share() == {"bfloat16": 1.0}


def test_a_policy_alone_makes_a_decorator():
    for make in (
        jaxmp.autocast("mixed_bfloat16"),
        jaxmp.autocast(policy="mixed_bfloat16"),
        jaxmp.autocast("mixed_bfloat16", argnums=0),
        jaxmp.autocast(jaxmp.get_policy("mixed_bfloat16")),
    ):
        made = make(loss)
        np.testing.assert_array_equal(made(W, X), jaxmp.autocast(loss, "mixed_bfloat16")(W, X))
        assert made.__name__ == "loss"


def test_a_decorator_hands_its_argnums_on():
    def layer(x, w, b):
        return jnp.tanh(x @ w + b) @ w

    def bytes_saved(fn):
        return jaxmp.audit(jax.grad(lambda *args: jnp.sum(fn(*args)), 1))(X, W, X).residual_bytes

    named = bytes_saved(jaxmp.autocast("mixed_bfloat16", argnums=(1, 2))(layer))
    assert named == bytes_saved(jaxmp.autocast(layer, "mixed_bfloat16", (1, 2)))
    assert named != bytes_saved(jaxmp.autocast(layer, "mixed_bfloat16", 1))


@jaxmp.autocast("mixed_bfloat16")
def decorated(w, x):
    return x @ w


def test_a_decorated_function_is_pickled():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert jax.jit(decorated)(W, X).dtype == jnp.float32


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_autocast_is_not_a_context_manager(policy):
    message = r"not a context manager as in PyTorch: .*jaxmp.wrap\(model, 'mixed_bfloat16'\)"
    with pytest.raises(TypeError, match=message), jaxmp.autocast(policy):
        pass


def test_autocast_without_a_policy_or_a_function_says_what_it_takes():
    with pytest.raises(TypeError, match=r"takes a function and a policy: jaxmp.autocast\(fn, "):
        jaxmp.autocast(loss)
    with pytest.raises(TypeError, match="autocast: a policy is a string"):
        jaxmp.autocast()
    with pytest.raises(ValueError, match="mixed_bfloat17"):
        jaxmp.autocast("mixed_bfloat17")


def test_preflight_takes_one_policy_or_several():
    with pytest.raises(ValueError, match="bfloat17"):
        jaxmp.preflight(loss, "bfloat17")
    with pytest.raises(ValueError, match="bfloat17"):
        jaxmp.preflight(loss, ["mixed_bfloat16", "bfloat17"])
    with pytest.raises(TypeError, match="preflight: argnums"):
        jaxmp.preflight(loss, argnums="w")
