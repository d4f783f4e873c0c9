"""What a precision lock says of a program, and what it does not depend on."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import lock_models
import optax
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lock_models import BF16, Stack, linen_step

import jaxmp
from jaxmp._tools.lock.check import compare
from jaxmp._tools.lock.file import compressed, expanded, read, text_of
from jaxmp._tools.lock.lock import OUTSIDE, Lock, lock
from jaxmp.testing import PrecisionError, assert_precision_locked

from support import ROOT

LOCKS = ROOT / "tests" / "locks"
LOW = "bfloat16*bfloat16 -> bfloat16"
MODELS = {
    name: getattr(lock_models, name)
    for name in ("linen", "by_hand", "nnx_by_hand", "function", "shard_mapped", "scaled")
}


@functools.cache
def committed(name):
    """The lock of a model, which has a file."""
    return locked(MODELS[name]())


def locked(made, policy=None):
    step, args = made
    return lock(step, policy)(*args)


def changes(before, after):
    """The differences between two locks, as (module, what, was, now)."""
    return [tuple(d[:4]) for d in compare("x.lock", before, after).differences]


# --- equal on every Python and JAX ---------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_the_one_that_is_committed(name):
    """Both Pythons have it, with JAX 0.10 and 0.12. `assert_precision_locked` would pass what is
    equal but for the order; this is the text."""
    file = LOCKS / f"{name}.lock"
    text = file.read_text("utf-8")
    assert text_of(committed(name)) == text
    assert text_of(read(file)) == text
    assert not re.search(r"\.py|0x|\d\d\d\d", text)


def test_every_lock_has_a_model():
    assert {file.stem for file in LOCKS.glob("*.lock")} == {*MODELS}


@pytest.mark.parametrize("name", ["by_hand", "scaled"])
def test_a_norm_more_changes_nothing(name):
    step, args = MODELS[name]()

    def with_norm(*args):
        out = step(*args)
        floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        return *out, jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in floats))

    assert not changes(committed(name), locked((with_norm, args)))


# --- contents -------------------------------------------------------------------------------------


def test_a_model_in_bfloat16_by_hand():
    operations = committed("by_hand").operations
    for layer in ("Stack/Block_0/up", "Stack/Block_1/down", "Stack/head"):
        assert operations[layer]["forward.matmul"] == {LOW: 1}
        assert operations[layer]["backward.matmul"] == {LOW: 2}
        assert operations[layer]["forward.casts"]["float32 -> bfloat16"] == 2  # kernel and bias
    norm = operations["Stack/Block_0/LayerNorm_0"]
    assert norm["forward.sums"] == {"float32": 1}
    assert norm["saved"]
    assert operations[OUTSIDE]["update.arithmetic"] == {"float32": 1}
    text = text_of(committed("by_hand"))  # layers that are alike are one row
    assert '[module."Stack/Block_{0-1}/down"]' in text
    assert "Block_0/down" not in text


def test_an_nnx_model_has_the_names_of_its_parameters():
    """Modules of NNX leave no names in a program. What is changed in place is a result."""
    operations = committed("nnx_by_hand").operations
    assert operations["layers/0/kernel"]["forward.matmul"] == {LOW: 1}
    assert operations["layers/1/kernel"]["backward.matmul"] == {LOW: 2}
    assert operations[OUTSIDE]["update.arithmetic"] == {"float32": 1}


def test_a_function_has_the_names_of_its_parameters():
    operations = committed("function").operations
    assert operations["layers/0/w"]["forward.matmul"] == {LOW: 1}
    assert operations["layers/0/w"]["backward.matmul"] == {LOW: 1}  # not by the data
    assert operations["layers/1/w"]["backward.matmul"] == {LOW: 2}
    assert operations["layers/1/b"]["forward.casts"] == {"float32 -> bfloat16": 1}


def test_why_a_product_is_float32():
    def step(w, x):
        kept = jaxmp.full_precision(lambda x: x @ w)(x)
        return jnp.sum(kept) + jnp.sum(jnp.dot(x, w, precision="highest")) + jnp.sum(x @ w)

    x = lock_models.float32(16, 16)
    said = lock(step, "mixed_bfloat16")(x, x).operations[OUTSIDE]
    words = ", ".join(said["forward.matmul"])
    assert "float32*float32 -> float32 (region)" in words
    assert "float32*float32 -> float32, precision=HIGHEST (precision)" in words
    assert LOW in words


def test_collectives_of_shard_map():
    operations = committed("shard_mapped").operations
    # Of its own gradient, and of that of the bias before it, which has no product to be named by.
    assert operations["head"]["update.collectives"] == {"psum bfloat16": 2}
    widened = locked(lock_models.shard_mapped(widened=True)).operations
    assert widened["head"]["update.collectives"] == {"psum bfloat16": 1, "psum float32": 1}


def test_a_sharded_jit_has_no_collectives_before_it_is_compiled():
    """Its lock is that of one device: the compiler adds collectives, of what products return."""
    step, (params, opt_state, batch) = lock_models.by_hand()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=NamedSharding(mesh, P("data")))
    sharded = lock(jax.jit(step))(params, opt_state, split)
    assert not changes(committed("by_hand"), sharded)
    assert "collectives" not in text_of(sharded)


def test_loss_scaling():
    assert committed("scaled").scaling == (
        "the scale is an argument",
        "gradients are divided by it",
        "gradients are tested",
    )
    found = changes(committed("scaled"), locked(lock_models.scaled(scale=False)))
    assert ("(the program)", "loss scaling") in [row[:2] for row in found]


def test_arguments_and_results():
    def step(state, x):
        return {"state": state, "loss": x.astype(jnp.float16)}

    two = lock_models.float32(2)
    state = {"a": {"w": two, "b": two}, "m": jax.ShapeDtypeStruct((2,), BF16)}
    text = text_of(lock(step)(state, two))
    assert '[arguments]\n"0/a" = "float32"\n"0/m" = "bfloat16"\n"1" = "float32"\n' in text
    assert '[results]\n"loss" = "float16"\n"state/m" = "bfloat16"\n' in text


def test_what_changes_in_a_module_is_not_a_result_of_the_same_place():
    def update(net, x):
        net.kernel = nnx.Param(net.kernel[...].astype(BF16))
        return x.sum(), [{"kernel": x.astype(jnp.float16)}]

    net = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    results = lock(update)(net, jnp.ones(2)).results
    assert results["1/0/kernel"] == "float16"
    assert results["(modules)/0/kernel"] == "bfloat16"


def test_kernels_are_named():
    call = jax.extend.core.Primitive("my_kernel")
    call.def_abstract_eval(lambda x: x)
    [row] = lock(call.bind)(jnp.ones(3, BF16)).operations.values()
    assert row == {"forward.kernels": {"my_kernel bfloat16 -> bfloat16": 1}}


def test_a_pallas_kernel_shows_its_result_and_its_products():
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32).astype(out.dtype)

    def call(x, dtype):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct((16, 16), dtype))(x, x)

    x = jnp.ones((16, 16), BF16)
    [row] = lock(call)(x, BF16).operations.values()
    assert row["forward.kernels"] == {"pallas_call bfloat16 -> bfloat16": 1}
    assert row["forward.matmul"] == {"bfloat16*bfloat16 -> float32": 1}
    found = changes(lock(call)(x, BF16), lock(call)(x, jnp.float32))
    assert "pallas_call bfloat16 -> float32" in found[0]


def test_rounding_to_fewer_bits_is_a_cast():
    def fn(x):
        return jax.lax.reduce_precision(jax.lax.reduce_precision(x, 8, 23), 8, 7)

    assert lock(fn)(jnp.ones(3)).operations[OUTSIDE]["forward.casts"] == {"float32 -> e8m7": 1}


# --- what changes nothing -------------------------------------------------------------------------


def test_another_batch_size_and_jit_change_nothing():
    assert not changes(committed("by_hand"), locked(linen_step(Stack(BF16), rows=64)))
    for name in ("by_hand", "function"):
        step, args = MODELS[name]()
        assert not changes(committed(name), lock(jax.jit(step))(*args))


def test_remat_changes_what_is_saved():
    rematted = jax.value_and_grad(jax.checkpoint(lock_models.loss_of_function))
    found = changes(committed("function"), lock(rematted)(*lock_models.function()[1]))
    assert {row[1] for row in found} <= {"saved"}


def test_prints_and_what_nothing_reads():
    def noisy(out, batch):
        jax.debug.print("{}", out.astype(jnp.float16).std())
        jnp.exp(out.astype(jnp.float16))
        return jnp.mean((out - 1) ** 2)

    assert not changes(committed("by_hand"), locked(linen_step(Stack(BF16), loss=noisy)))


def test_a_loop_and_branches_are_followed():
    def step(w, x):
        def body(x, _):
            return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x), None

        return jnp.sum(jax.lax.scan(body, x, length=3)[0])

    x = jax.ShapeDtypeStruct((8, 8), BF16)
    said = lock(jax.grad(step))({"w": x}["w"], x).operations
    assert sum(row.get("forward.matmul", {}).get(LOW, 0) for row in said.values()) == 1


def test_several_steps_in_a_loop_are_as_one():
    """What is multiplied in the second step depends on the backward pass of the first."""
    step, (params, opt_state, batch) = lock_models.by_hand()

    def steps(params, opt_state, batches):
        def body(carry, batch):
            *carry, value = step(*carry, batch)
            return tuple(carry), value

        return jax.lax.scan(body, (params, opt_state), batches)

    batches = lock_models.float32(3, *batch.shape)
    one, several = committed("by_hand"), lock(steps)(params, opt_state, batches)
    for module in one.operations.keys() - {OUTSIDE}:
        assert several.operations[module] == one.operations[module]


# --- what is different ----------------------------------------------------------------------------


def test_differences_say_module_was_is_and_line(tmp_path):
    def low(out, batch):
        return jnp.mean((out.astype(BF16) - 1) ** 2)

    file = tmp_path / "x.lock"
    step, args = lock_models.by_hand()
    assert_precision_locked(step, file, update=True)(*args)
    assert_precision_locked(step, file)(*args)
    step, args = linen_step(Stack(BF16), loss=low)
    with pytest.raises(PrecisionError) as raised:
        assert_precision_locked(step, file)(*args)
    said = str(raised.value)
    line = 1 + Path(__file__).read_text("utf-8").split("out.astype(BF16)")[0].count("\n")
    assert f"First in the program: (no module), forward.casts at test_lock.py:{line}." in said
    assert re.search(r"forward.arithmetic +was float32\n +is  bfloat16, float32", said)
    assert len(said.splitlines()) <= 40
    assert max(map(len, said.splitlines())) <= 120


def test_an_optimizer_in_bfloat16_is_named():
    model = Stack(BF16)
    found = changes(
        locked(linen_step(model)), locked(linen_step(model, tx=optax.adam(1e-3, mu_dtype=BF16)))
    )
    assert found[0] == ("argument 1/0/mu", "dtype", "float32", "bfloat16")
    assert not any(row[0].startswith("0/") for row in found)  # no row for each array of a state


def test_gradients_of_one_layer_are_named():
    def step(params, x, low):
        loss, grads = jax.value_and_grad(lock_models.loss_of_function)(params, x)
        head = grads["head"].astype(BF16).astype(jnp.float32) if low else grads["head"]
        return loss, {**grads, "head": head}

    args = lock_models.function()[1]
    found = changes(lock(step)(*args, False), lock(step)(*args, True))
    assert {row[0] for row in found} == {"head"}


def test_a_layer_of_an_nnx_model_in_float32_is_named():
    step, args = lock_models.nnx_by_hand()
    before = lock(step)(*args)
    args[0].head.dtype = jnp.float32
    found = changes(before, lock(step)(*args))
    assert ("head/kernel", "forward.matmul", LOW, "float32*float32 -> float32") in found


def test_of_what_is_on_several_lines_they_are_shown():
    def fn(x):
        x = x.astype(jnp.float16)
        return x.astype(jnp.float32).astype(jnp.float16)

    x = jnp.ones(3)
    before = lock(lambda x: x.astype(jnp.float16))(x)
    [first, *_] = compare("x.lock", before, lock(fn)(x)).differences
    assert first.now == "float16 -> float32, float32 -> float16 ×2"
    assert len(first.source.split(", ")) == 2


def test_the_policy_of_the_file_is_the_default(tmp_path):
    file = tmp_path / "x.lock"
    fn, x = jax.grad(lambda w, x: jnp.sum(x @ w)), lock_models.float32(16, 16)
    assert_precision_locked(fn, file, "mixed_bfloat16", update=True)(x, x)
    assert 'policy = "mixed_bfloat16"' in file.read_text("utf-8")
    assert_precision_locked(fn, file)(x, x)
    with pytest.raises(PrecisionError, match=r"policy +was mixed_bfloat16\n +is +mixed_float16"):
        assert_precision_locked(fn, file, "mixed_float16")(x, x)


# --- paths ----------------------------------------------------------------------------------------


def test_patterns():
    for paths, patterns in (
        (["a"], ["a"]),
        (["h_0/q", "h_1/q", "h_3/q"], ["h_{0-1,3}/q"]),
        ([f"h_{i}/d_{j}" for i in range(3) for j in range(2)], ["h_{0-2}/d_{0-1}"]),
        (["h_0/d_0", "h_1/d_0", "h_1/d_1"], ["h_0/d_0", "h_1/d_{0-1}"]),
        (["h_01", "h_02", "w2v"], ["h_01", "h_02", "w2v"]),
        (["layers/0/w", "layers/10/w", "layers/9/w"], ["layers/{0,9-10}/w"]),
    ):
        assert compressed(paths) == patterns
        assert sorted(path for p in patterns for path in expanded(p, most=10)) == sorted(paths)


def test_a_dtype_in_the_place_of_another_is_one_block_after_the_cause() -> None:
    """Of bfloat16 and float16 120 differences were listed, the cause in the second paragraph."""
    layers = {
        f"net/h_{i}": {"forward.matmul": {"bfloat16*bfloat16 -> bfloat16": 2}} for i in range(12)
    }
    was = Lock(
        "mixed_bfloat16", (), {"0": "float32"}, {}, layers | {"net/out": {"saved": {"float32": 1}}}
    )
    layers = {name: {"forward.matmul": {"float16*float16 -> float16": 2}} for name in layers}
    now = Lock(
        "mixed_float16", (), {"0": "float32", "1/loss_scale": "float32", "1/finite": "bool"}, {},
        layers | {"net/out": {"saved": {"float32": 1, "float16": 1}}},
        {("net/out", "saved", "float16"): {"x.py:1": 3}}
        | {(n, "forward.matmul", "float16*float16 -> float16"): {"x.py:2": 2} for n in layers},
    )  # fmt: skip
    found = compare("precision.lock", was, now)
    lines = str(found).splitlines()
    assert lines[0] == (
        "precision.lock: 16 differences. The policy was mixed_bfloat16, and is mixed_float16."
    )
    assert lines[5:8] == [
        "12 differences: float16 in the place of bfloat16, and nothing else",
        "  in net/h_{0-11}",
        "  of forward.matmul",
    ]
    # The model before what the optimizer has more.
    text = "\n".join(lines)
    assert text.index("net/out") < text.index("argument 1/finite")
    assert found.to_text(verbose=True).count("forward.matmul") == 1
    assert "float16*float16 -> float16 ×2" in found.to_text(verbose=True)
