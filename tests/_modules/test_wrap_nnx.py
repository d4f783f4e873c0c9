"""A wrapped NNX module is used as the module itself: one behavior, one test.

What a call of it changes, and how it is called, is in `test_wrap_nnx_calls.py`; what runs in which
precision in `test_wrap_nnx_policies.py`.
"""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp

from nnx_models import (
    CNN,
    IMAGES,
    MLP,
    POLICY,
    ROWS,
    WIDTH,
    abstract,
    assert_close,
    assert_same,
    made,
    pair,
    runs_low,
    uniform,
)
from support import slow_when

LABELS = np.arange(6) % 3


def loss_fn(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# What it is.


def test_it_is_an_instance_of_the_class_and_named_so():
    model, wrapped = pair("mlp")
    assert isinstance(wrapped, MLP)
    assert (type(wrapped).__name__, type(wrapped).__module__) == ("MLP", "nnx_models")
    assert type(wrapped).__qualname__ == MLP.__qualname__
    assert type(wrapped).__doc__ == MLP.__doc__
    assert type(model) is MLP, "the original stays what it was"
    # One class per class and policy, or jit would compile for each module.
    assert type(jaxmp.wrap(model, POLICY)) is type(wrapped)
    assert type(jaxmp.wrap(model, "mixed_float16")) is not type(wrapped)


def test_it_shares_the_variables_at_the_same_paths():
    model = made("cnn")
    wrapped = jaxmp.wrap(model, POLICY)
    ours = dict(nnx.iter_graph(wrapped))
    found = 0
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            assert ours[path] is node
            found += 1
    assert found > 10
    assert nnx.to_flat_state(nnx.state(model)).paths == nnx.to_flat_state(nnx.state(wrapped)).paths


def test_a_change_of_either_shows_in_the_other():
    model = made("mlp")
    wrapped = jaxmp.wrap(model, POLICY)
    before = wrapped(ROWS)
    model.head.bias[...] += 1.0
    np.testing.assert_allclose(wrapped(ROWS), before + 1.0, rtol=1e-5, atol=1e-5)
    wrapped.head.bias[...] -= 1.0
    np.testing.assert_array_equal(model.head.bias[...], 0.0)


def test_repr_and_display(capsys):
    model, wrapped = pair("mlp")
    text = repr(wrapped)
    assert text.startswith("MLP(")
    assert text == repr(model)
    nnx.display(wrapped)
    assert "MLP" in capsys.readouterr().out


def test_tabulate():
    _, wrapped = pair("cnn")
    table = nnx.tabulate(wrapped, IMAGES, console_kwargs={"width": 200})
    assert "BatchNorm" in table
    assert "conv2" in table


def test_copies_have_variables_of_their_own():
    _, wrapped = pair("mlp")
    for copied in (
        pickle.loads(pickle.dumps(wrapped)),
        copy.deepcopy(wrapped),
        nnx.clone(wrapped),
        jax.tree.map(jnp.copy, wrapped),
    ):
        assert type(copied) is type(wrapped)
        assert_same(copied(ROWS), wrapped(ROWS))
        copied.head.bias[...] += 1
        assert wrapped.head.bias[0] == 0


def test_pickle_of_a_graphdef_and_of_a_module_wrapped_twice():
    with pytest.warns(UserWarning, match="wrapped already"):
        twice = jaxmp.wrap(jaxmp.wrap(made("mlp"), POLICY), "float32")
    loaded = pickle.loads(pickle.dumps(twice))
    assert type(loaded) is type(twice)
    graphdef = nnx.graphdef(twice)
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


# nnx.split and its kin.


def test_split_and_merge():
    model = made("mlp")
    wrapped = jaxmp.wrap(model, POLICY)
    graphdef, params, rest = nnx.split(wrapped, nnx.Param, ...)
    assert_same(params, nnx.state(model, nnx.Param))
    merged = nnx.merge(graphdef, params, rest)
    assert type(merged) is type(wrapped)
    assert_same(merged(ROWS), wrapped(ROWS))


def test_the_state_of_one_merges_into_the_other():
    model = made("mlp")
    wrapped = jaxmp.wrap(model, POLICY)
    assert_same(nnx.merge(nnx.graphdef(model), nnx.state(wrapped))(ROWS), model(ROWS))
    assert_same(nnx.merge(nnx.graphdef(wrapped), nnx.state(model))(ROWS), wrapped(ROWS))


def test_graphdef_is_hashable_and_equal_for_equal_wraps():
    model = made("mlp")
    graphdef = nnx.graphdef(jaxmp.wrap(model, POLICY))
    assert graphdef == nnx.graphdef(jaxmp.wrap(model, POLICY))
    assert hash(graphdef) == hash(nnx.graphdef(jaxmp.wrap(model, POLICY)))
    assert graphdef != nnx.graphdef(model)


def test_an_abstract_module():
    wrapped = jaxmp.wrap(abstract("mlp"), POLICY)
    out = nnx.eval_shape(lambda m: m(jnp.ones((4, WIDTH))), wrapped)
    assert (out.shape, out.dtype) == ((4, 4), jnp.float32)


def test_jax_treats_it_as_a_pytree():
    model, wrapped = pair("mlp")
    assert_close(jax.jit(lambda m, x: m(x))(wrapped, ROWS), model(ROWS))


# Transformations.


def test_jax_jit_over_the_split_state():
    model, wrapped = pair("cnn")
    graphdef, state = nnx.split(wrapped)

    @jax.jit
    def step(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    out, state = step(state, IMAGES)
    assert_close(out, model(IMAGES))
    nnx.update(wrapped, state)
    assert_close(nnx.state(wrapped, nnx.BatchStat), nnx.state(model, nnx.BatchStat))


def test_value_and_grad_with_state_changed_inside():
    model, wrapped = pair("cnn")
    grad = nnx.value_and_grad(loss_fn)
    both = nnx.jit(lambda a, b, *args: (grad(a, *args), grad(b, *args)))
    low, full = both(wrapped, model, IMAGES, LABELS)
    assert_close(low[0], full[0])
    assert jax.tree.structure(low[1]) == jax.tree.structure(full[1])
    assert_close(nnx.state(wrapped, nnx.BatchStat), nnx.state(model, nnx.BatchStat))


TRANSFORMED = {
    "scan over steps": nnx.scan(
        lambda m, x: m(x), in_axes=(nnx.StateAxes({...: nnx.Carry}), 0), out_axes=0
    ),
    "grad of remat": nnx.grad(lambda m, x: nnx.remat(lambda m, x: m(x))(m, x).sum()),
    "vmap over the batch": nnx.vmap(lambda m, x: m(x), in_axes=(None, 0)),
    "cond": lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: -m(x), m, x),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_transforms_of_nnx(how):
    model, wrapped = pair("mlp")
    fn, x = TRANSFORMED[how], uniform(3, 4, WIDTH)
    low, full = nnx.jit(lambda a, b: (fn(a, x), fn(b, x)))(wrapped, model)
    assert_close(low, full)


@pytest.mark.slow
def test_vmap_over_models():
    models = nnx.vmap(MLP, in_axes=0)(nnx.Rngs(0).split(2))
    run = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))
    assert_close(run(jaxmp.wrap(models, POLICY), ROWS), run(models, ROWS))


@slow_when(lambda policy: policy != POLICY)
@pytest.mark.parametrize(
    "transformed",
    [
        lambda m: jax.jit(lambda x: m(x)),
        lambda m: jax.vmap(m),
        lambda m: jax.jit(jax.grad(lambda x: m(x).sum())),
        lambda m: lambda x: jax.lax.scan(lambda c, x: (c, m(x)), None, x)[1],
    ],
    ids=["jit", "vmap", "grad", "scan"],
)
@pytest.mark.parametrize("policy", [POLICY, "bfloat16"])
def test_a_jax_transformation_closes_over_it(transformed, policy):
    # Lifted as by nnx.remat, a module that is only read could not be closed over.
    model = made("mlp")
    before = nnx.state(model)
    out = transformed(jaxmp.wrap(model, policy))(ROWS)
    assert_close(out.astype("float32"), transformed(model)(ROWS))
    assert_same(nnx.state(model), before)


def test_a_closed_over_module_that_changes_is_refused_as_by_flax():
    model, wrapped = pair("cnn")
    for m in (model, wrapped):
        with pytest.raises(Exception, match=r"Cannot mutate .* from a different trace level"):
            jax.jit(lambda x, m=m: m(x))(IMAGES)


# Training.


def test_model_and_optimizer():
    _, wrapped = pair("mlp")
    optimizer = nnx.ModelAndOptimizer(wrapped, optax.sgd(0.5))

    @nnx.jit
    def step(optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_fn)(optimizer.model, x, y)
        optimizer.update(grads)
        return loss

    losses = [float(step(optimizer, ROWS, LABELS)) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.2
    assert type(optimizer.model) is type(wrapped)
    assert runs_low(optimizer.model)


def test_train_and_eval():
    model, wrapped = pair("cnn")
    for m in (model, wrapped):
        m.eval()
    statistics = nnx.state(wrapped, nnx.BatchStat)
    assert_close(wrapped(IMAGES), model(IMAGES))
    assert_same(wrapped(IMAGES), wrapped(IMAGES))
    assert_same(nnx.state(wrapped, nnx.BatchStat), statistics)
    assert int(wrapped.dropout.rngs.count[...]) == int(model.dropout.rngs.count[...])
    wrapped.train()
    wrapped(IMAGES)
    assert not np.array_equal(wrapped.norm.mean[...], model.norm.mean[...])


def test_view_of_another_mode():
    model, wrapped = pair("cnn")
    evaluated = nnx.view(wrapped, deterministic=True, use_running_average=True)
    assert type(evaluated) is type(wrapped)
    expected = nnx.view(model, deterministic=True, use_running_average=True)(IMAGES)
    assert_close(evaluated(IMAGES), expected)
    assert not wrapped.norm.use_running_average


def test_orbax_round_trip(tmp_path):
    import orbax.checkpoint as ocp

    model, wrapped = pair("cnn")
    model.head.bias[...] += 1.0
    wrapped.head.bias[...] += 2.0
    with ocp.StandardCheckpointer() as checkpointer:
        for name, source, target in (
            ("unwrapped", model, jaxmp.wrap(CNN(nnx.Rngs(1)), POLICY)),
            ("wrapped", wrapped, CNN(nnx.Rngs(1))),
        ):
            saved = nnx.state(source, nnx.Any(nnx.Param, nnx.BatchStat))
            checkpointer.save(tmp_path / name, saved)
            checkpointer.wait_until_finished()
            like = nnx.state(target, nnx.Any(nnx.Param, nnx.BatchStat))
            nnx.update(target, checkpointer.restore(tmp_path / name, like))
            assert_same(nnx.state(target, nnx.Any(nnx.Param, nnx.BatchStat)), saved)
