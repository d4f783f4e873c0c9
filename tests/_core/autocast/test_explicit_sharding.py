"""Meshes whose axes are explicit: types say how arrays are sharded, and every one keeps it.

The weights are split over the devices, as FSDP splits them, and gathered where they are used by
`jax.sharding.reshard`: Flax's layers name no sharding of their results, which JAX then wants for
other placements (`test_what_flax_leaves_to_the_caller`).
"""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy_reference import reference

import jaxmp
from jaxmp import TrainState, accumulate_gradients, dynamic_loss_scale, master_weights
from jaxmp._tools.preflight.hlo import read_hlo

from support import slow_when

EXPLICIT = AxisType.Explicit
BOTH = (EXPLICIT, EXPLICIT)
RNG = np.random.default_rng(0)


def mesh(types=BOTH):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


def normal(*shape, scale=1.0):
    return (RNG.normal(size=shape) * scale).astype(np.float32)


def put(tree, on, spec):
    """Places a pytree: one spec for all, or a function from arrays to specs."""

    def place(x):
        return jax.device_put(x, NamedSharding(on, spec(x) if callable(spec) else spec))

    return jax.tree.map(place, tree)


def split(x):
    """FSDP: the last axis that the devices divide, over them."""
    axes = [i for i, size in enumerate(x.shape) if size % 8 == 0]
    return P(*(("data", "model") if [i] == axes[-1:] else None for i in range(x.ndim)))


def gathered(tree):
    return jax.tree.map(lambda x: jax.sharding.reshard(x, P()), tree)


def specs(tree):
    """Where the type of each array says that it is."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def placed(tree):
    """Where each array is, one entry for each axis."""

    def where(x):
        spec = tuple(x.sharding.spec)
        return spec + (None,) * (x.ndim - len(spec))

    return jax.tree.map(where, tree)


# Accumulating gradients.

W1, W2, B1 = normal(16, 32, scale=0.25), normal(32, 8, scale=0.25), normal(32)
BATCH = {"x": normal(32, 16), "y": normal(32, 8)}


def arguments(on):
    params = {
        "w1": put(W1, on, P("data", "model")),
        "b1": put(B1, on, P("model")),
        "w2": put(W2, on, P("model", None)),
    }
    return params, put(BATCH, on, P("data"))


def loss_fn(params, batch):
    """Columns of the first weight over the devices, rows of the second: the author says where."""
    on = jax.typeof(params["w1"]).sharding.mesh
    explicit = [n for n, t in zip(on.axis_names, on.axis_types, strict=True) if t == EXPLICIT]

    def over(*axes):
        return NamedSharding(on, P(*(axis if axis in explicit else None for axis in axes)))

    hidden = jnp.dot(batch["x"], params["w1"], out_sharding=over("data", "model")) + params["b1"]
    out = jnp.dot(jnp.tanh(hidden), params["w2"], out_sharding=over("data", None))
    return jnp.mean(jnp.square(out - batch["y"]))


@slow_when(lambda types, in_mesh: (types == BOTH) != in_mesh or types == (EXPLICIT, AxisType.Auto))
@pytest.mark.parametrize("in_mesh", [True, False], ids=("set_mesh", "plain"))
@pytest.mark.parametrize(
    "types", [BOTH, (EXPLICIT, AxisType.Auto), (AxisType.Auto, EXPLICIT)], ids=str
)
def test_accumulated_gradients_lie_where_the_parameters_do(types, in_mesh):
    on = mesh(types)
    params, batch = arguments(on)
    grad_fn = jax.value_and_grad(loss_fn)
    with jax.set_mesh(on) if in_mesh else contextlib.nullcontext():
        want = jax.jit(grad_fn)(params, batch)
        for microbatches in (1, 2, 8) if types == BOTH else (2,):
            got = jax.jit(accumulate_gradients(grad_fn, microbatches))(params, batch)
            for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert g.ndim == 0 or g.sharding.is_equivalent_to(w.sharding, g.ndim)
                bound = 16 * np.finfo("float32").eps * np.abs(w).max()
                np.testing.assert_allclose(g, w, rtol=0, atol=bound)


def test_accumulated_gradients_have_the_type_that_they_are_made_with():
    """Within a step and outside of jit, also where no device knows of it yet."""
    with jax.set_mesh(mesh()):
        params, batch = arguments(mesh())
        grad_fn = accumulate_gradients(jax.value_and_grad(loss_fn), 2)
        assert placed(grad_fn(params, batch)[1]) == placed(params)
        types = []

        @jax.jit
        def step(params, batch):
            types.append(specs(grad_fn(params, batch)[1]))

        step.lower(params, batch)
        assert types == [specs(params)]


def test_unreduced_gradients_are_reduced_once():
    """Of parameters marked as `reduced` JAX leaves the sum over devices to the caller."""
    params, batch = put(W1, mesh(), P(reduced={"data"})), put(BATCH["x"], mesh(), P("data"))

    def loss_fn(w, x):
        return jnp.mean(jnp.square(jnp.dot(x, w, out_sharding=P("data"))))

    @jax.jit
    def step(params, batch):
        _, grads = accumulate_gradients(jax.value_and_grad(loss_fn), 4)(params, batch)
        assert jax.typeof(grads).sharding.spec.unreduced == {"data"}
        return jax.sharding.reshard(grads, P())

    with jax.set_mesh(mesh()):
        compiled = step.lower(params, batch).compile()
        got = compiled(params, batch)
        # The same of a product with a parameter, whose gradient leaves it in `reduce_dtype`.
        mixed = jax.grad(jaxmp.autocast(loss_fn, "mixed_bfloat16"))
        assert jax.eval_shape(mixed, params, batch).sharding.spec.unreduced == {"data"}
    # The loss is not returned; were the gradients summed in the loop, it would be there four times.
    assert read_hlo(compiled.as_text()).collectives == {("all-reduce", "float32"): (1, W1.nbytes)}
    want = reference(jax.grad(lambda w: jnp.mean(jnp.square(BATCH["x"] @ w))))(W1)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_pieces_that_the_devices_do_not_divide_are_refused():
    params, batch = arguments(mesh())
    for spec, microbatches, ways in (
        (P("data"), 16, 4),
        (P("data"), 32, 4),
        (P(("data", "model")), 8, 8),
    ):
        given = {"x": put(batch["x"], mesh(), spec), "y": batch["y"]}
        grad_fn = accumulate_gradients(jax.value_and_grad(loss_fn), microbatches)
        message = (
            rf"\(argument 1\['x'\]\) has a leading axis of 32, sharded {ways} ways over an "
            rf"explicit mesh, which does not divide the pieces of {32 // microbatches} that "
            rf"microbatches={microbatches} makes"
        )
        with jax.set_mesh(mesh()), pytest.raises(ValueError, match=message):
            jax.eval_shape(grad_fn, params, given)


# Whole steps.


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dense(16)(h), None


class LM(nn.Module):
    """Scanned, rematerialized layers; the lookup says where its result is, as `nn.Embed` cannot."""

    @nn.compact
    def __call__(self, tokens):
        table = self.param("table", nn.initializers.normal(0.5), (32, 16))
        x = table.at[tokens].get(out_sharding=P(("data", "model")))
        layers = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return layers(name="layers")(x, None)[0] @ table.T


TOKENS = RNG.integers(32, size=(32, 9), dtype=np.int32)


def optimizer(policy, masters=None):
    tx = jaxmp.loss_scale_for(policy, optax.adamw(1e-2), init_scale=1024.0)
    return tx if masters is None else master_weights(tx, stochastic_rounding=masters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "masters"), [("mixed_float16", None), ("float16", False), ("bfloat16", True)]
)
def test_a_linen_step_keeps_every_leaf_where_it_is(policy, masters):
    on = mesh()
    model = jaxmp.wrap(LM(), policy)
    with jax.set_mesh(on):
        tokens = put(TOKENS, on, P(("data", "model")))
        params = put(jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])["params"], on, split)
        tx = optimizer(policy, masters)
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        assert state.params["table"].dtype == jaxmp.get_policy(policy).param_dtype

        def loss_fn(params, tokens):
            logits = model.apply({"params": gathered(params)}, tokens[:, :-1])
            logits = logits.astype(jnp.float32)  # a policy of pure 16 bits returns 16
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        @jax.jit(donate_argnums=0)
        def step(state, tokens):
            grad_fn = accumulate_gradients(state.value_and_grad(loss_fn), 2)
            loss, grads = grad_fn(state.params, tokens)
            assert specs(grads) == specs(state.params)
            return state.apply_gradients(grads=grads), loss

        before, losses = placed(state), []
        assert before.params["layers"]["Dense_0"]["kernel"] == (None, None, ("data", "model"))
        for _ in range(3):
            state, loss = step(state, tokens)
            losses.append(float(loss))
            assert placed(state) == before
        assert losses[2] < losses[0]
        assert (int(state.step), int(state.skipped_count)) == (3, 0)
    # JAX 0.10 spells the sharding of a key that it is given otherwise than of one that it returns.
    assert step._cache_size() == 1 or masters


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.second = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


@pytest.mark.slow
def test_an_nnx_step_keeps_every_leaf_where_it_is():
    on = mesh()
    with jax.set_mesh(on):
        batch = put((normal(32, 16), normal(32, 8)), on, P(("data", "model")))
        model = jaxmp.wrap(Net(), "mixed_float16")
        nnx.update(model, put(nnx.state(model, nnx.Param), on, split))
        trained = nnx.Optimizer(model, optimizer("mixed_float16"), wrt=nnx.Param)

        def loss_fn(model, batch):
            x, y = batch
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            whole = nnx.merge(graph, gathered(params), rest)
            loss = jnp.mean(jnp.square(whole(x) - y))
            nnx.update(model, nnx.state(whole, nnx.BatchStat))
            return loss

        @nnx.jit(donate_argnums=(0, 1))
        def step(model, trained, batch):
            grad_fn = jaxmp.value_and_grad(loss_fn, trained.opt_state)
            loss, grads = accumulate_gradients(grad_fn, 2)(model, batch)
            trained.update(model, grads)
            return loss

        before = placed(nnx.state((model, trained))), nnx.state(model, nnx.BatchStat)
        means = np.asarray(model.norm.mean[...])
        losses = [float(step(model, trained, batch)) for _ in range(3)]
        assert placed(nnx.state((model, trained))) == before[0]
        assert model.second.kernel[...].sharding.spec == P(None, ("data", "model"))
        assert losses[2] < losses[0]
        assert not np.array_equal(means, model.norm.mean[...])


def test_an_overflow_on_one_device_skips_everywhere():
    on = mesh()
    with jax.set_mesh(on):
        params, batch = arguments(on)
        tx = dynamic_loss_scale(optax.sgd(0.1), init_scale=8.0)
        fn = jaxmp.autocast(loss_fn, "mixed_float16")
        state = TrainState.create(apply_fn=None, params=params, tx=tx)

        @jax.jit
        def step(state, batch):
            loss, grads = accumulate_gradients(state.value_and_grad(fn), 2)(state.params, batch)
            return state.apply_gradients(grads=grads), loss

        batch["y"] = put(np.where(np.eye(32, 8, -26), np.inf, batch["y"]), on, P("data"))
        after, _ = step(state, batch)
        assert placed(after) == placed(state)
        assert (int(after.step), int(after.skipped_count), float(after.loss_scale)) == (0, 1, 4)
        for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(a, b)


# What JAX asks for, and Flax's layers do not say: in plain Flax first, and the same with jaxmp.

IMAGES = np.ones((8, 8, 8, 4), np.float32)
ROWS = np.ones((8, 8, 16), np.float32)
LAYERS = {
    "Dense": (nn.Dense(8), ROWS, "split"),
    "LayerNorm": (nn.LayerNorm(), ROWS, "split"),
    "Conv": (nn.Conv(8, (3, 3)), IMAGES, "split"),
    "MultiHeadDotProductAttention": (nn.MultiHeadDotProductAttention(4), ROWS, "split"),
    "Embed": (nn.Embed(32, 16), np.ones((8, 8), np.int32), "whole"),
    "Dropout": (nn.Dropout(0.5, deterministic=False), ROWS, "whole"),
    "RNN": (nn.RNN(nn.LSTMCell(16)), ROWS, "whole"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_what_flax_leaves_to_the_caller(name):
    """Weights split as the batch is: none; whole: all but the last three."""
    plain, x, fails = LAYERS[name]
    rngs = {"dropout": jax.random.key(1)}
    for layer in (plain, jaxmp.wrap(plain, "mixed_bfloat16")):
        with jax.set_mesh(mesh()):
            whole = layer.init({"params": jax.random.key(0), **rngs}, x)
            batch = put(x, mesh(), P(("data", "model")))
            run = jax.jit(lambda v, x, layer=layer: layer.apply(v, x, rngs=rngs))
            if fails == "split":
                assert run(whole, batch).sharding.spec[0] == ("data", "model")
            # Its type is one of JAX's private names, or a TypeError of `lax.scan`.
            with pytest.raises(Exception, match=r"(?i)shard|must have equal types"):
                run(put(whole, mesh(), split) if fails == "split" else whole, batch)
