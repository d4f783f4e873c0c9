"""The program that `jaxmp.preflight` compiles: without callbacks, its FLOPs counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._core.jaxprs.compat import with_changed_equations
from jaxmp._core.jaxprs.equation_parameters import on_abstract_meshes
from jaxmp._core.jaxprs.walk import equations
from jaxmp._tools.preflight.compile_ahead import compile_ahead
from jaxmp._tools.preflight.program import traced_program, without_callbacks
from jaxmp._tools.speed.target import parse_target

from support import needs_gpu_compiler


def prints(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    jax.debug.callback(lambda _: None, x)
    jax.debug.inspect_array_sharding(x, callback=lambda _: None)
    return x * 2


def returns(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    pure = jax.pure_callback(lambda x: np.asarray(x) + 1, like, x)
    return pure + io_callback(lambda x: np.asarray(x) + 2, like, x, ordered=True) + x


def loop(x):
    def step(carry, _):
        jax.lax.cond(carry.sum() > 0, lambda: jax.debug.print("positive"), lambda: None)
        return returns(prints(carry)), None

    return jax.lax.scan(step, x, length=3)[0]


def around(x):
    looped = jax.lax.while_loop(lambda x: x.sum() < 100, prints, x)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(prints, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return jax.jit(prints)(looped) + split(x)


def trained(x):
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(prints(x)).sum())(x))(x)


def quiet(x):
    jax.debug.print("{}", x)
    return jnp.sin(x)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (prints, lambda x: x * 2),
        (returns, lambda x: x + 2),
        (loop, lambda x: 8 * x + 14),
        (around, lambda x: 34 * x),
        (trained, lambda x: 2 * jnp.cos(2 * x)),
        (jax.vmap(quiet), jnp.sin),
    ],
    ids=["prints", "returns", "loop", "around", "trained", "mapped"],
)
def test_arrays_stand_for_the_results_of_callbacks(fn, expected):
    x = jnp.arange(1.0, 5.0)
    jaxpr, callbacks = without_callbacks(jax.make_jaxpr(fn)(x))
    assert callbacks
    assert not jaxpr.effects
    text = str(jaxpr)
    assert not any(name in text for name in ("callback", "debug_print", "inspect_sharding"))
    [out] = jax.jit(jaxpr_as_fun(jaxpr))(x)
    np.testing.assert_allclose(out, expected(x), rtol=1e-6)


def test_what_a_callback_reads_is_still_computed():
    def fn(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), x.dtype), (x @ x).sum())

    run = traced_program(fn, (jnp.ones((8, 8)),), "cuda").run
    assert "dot" in run.lower(jnp.ones((8, 8))).compile().as_text()


def test_a_callback_may_read_a_key():
    def fn(key, x):
        return x + jax.pure_callback(lambda _: np.float32(1), x, key)

    program = traced_program(fn, (jax.random.key(0), jnp.float32(2)), "cuda")
    assert program.callbacks == {"pure_callback": 1}
    np.testing.assert_array_equal(program.run(jax.random.key(1), jnp.float32(2)), [3])


def test_a_program_without_callbacks_is_left_alone():
    jaxpr = jax.make_jaxpr(jnp.sin)(1.0)
    assert without_callbacks(jaxpr) == (jaxpr, {})


def test_of_the_branches_for_platforms_one_counts():
    def fn(x):
        return jax.lax.platform_dependent(
            x, cuda=lambda x: x @ x, tpu=lambda x: x @ x @ x, default=lambda x: x
        )

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    flops = {name: traced_program(fn, (x,), name).flops for name in ("cuda", "tpu", "cpu")}
    assert flops == {"cuda": {"float32": 128}, "tpu": {"float32": 256}, "cpu": {}}


def test_shardings_name_no_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))

    def fn(x):
        placed = jax.jit(jnp.sin, in_shardings=sharding, out_shardings=sharding)
        return jax.lax.scan(lambda x, _: (jax.lax.with_sharding_constraint(x, sharding), None),
                            placed(x), length=2)[0]  # fmt: skip

    jaxpr = jax.make_jaxpr(fn)(jnp.ones(4))
    changed = with_changed_equations(jaxpr, on_abstract_meshes)
    found = {type(s.mesh) for program in (jaxpr, changed) for s in shardings_in(program)}
    assert found == {jax.sharding.Mesh, AbstractMesh}
    assert {type(s.mesh) for s in shardings_in(changed)} == {AbstractMesh}
    assert len(shardings_in(changed)) == len(shardings_in(jaxpr)) == 3


def shardings_in(jaxpr):
    values = [v for eqn in equations(jaxpr.eqns) for v in jax.tree.leaves([*eqn.params.values()])]
    return [value for value in values if isinstance(value, NamedSharding)]


# Compiled.


@needs_gpu_compiler
def test_a_step_that_prints_is_compiled():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = jaxmp.preflight(lambda x: returns(prints(x)), target="gpu-h100")(x)
    assert report["as written"].callbacks["debug_print"] == 1
    assert report.fits("as written")
    assert "callbacks are not compiled (1 debug_print," in str(report)


def attention(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))  # of this machine
    if x.shape[0] > 4:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
    q, k, v = jnp.einsum("bld,dthe->tblhe", x, w)
    weights = jax.nn.softmax(jnp.einsum("blhe,bmhe->bhlm", q, k) / 8)
    return jnp.mean(jnp.einsum("bhlm,bmhe->blhe", weights, v) ** 2)


def split(*shape, spec=("data",)):
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


@needs_gpu_compiler
@pytest.mark.slow
def test_fused_attention_on_several_gpus():
    """cuDNN's kernel is partitioned by a Python function, which no other process has."""
    policy = "mixed_bfloat16,attention=fused"
    step = jax.value_and_grad(jaxmp.autocast(attention, policy))
    arguments = split(512, 3, 8, 64, spec=()), split(8, 512, 512)
    [two] = jaxmp.preflight(step, target="gpu-h100:2")(*arguments).policies
    [one] = jaxmp.preflight(step, target="gpu-h100")(
        jax.ShapeDtypeStruct(arguments[0].shape, jnp.float32),
        jax.ShapeDtypeStruct((4, 512, 512), jnp.float32),
    ).policies
    assert two.program.library_calls == one.program.library_calls
    assert two.program.library_calls["__cudnn$fmhaSoftmaxBackward"] == 1
    assert two.argument_bytes == one.argument_bytes
    assert two.program.moved


@needs_gpu_compiler
@pytest.mark.slow
def test_blocks_are_multiplied_on_several_gpus():
    def loss(w, x):
        return jnp.mean((jax.nn.relu(x @ w) @ w) ** 2)

    step = jax.value_and_grad(jaxmp.autocast(loss, "mixed_bfloat16,matmul=mxfp8"))
    report = jaxmp.preflight(step, target="gpu-b200:2")(
        split(1024, 1024, spec=()), split(4096, 1024)
    )
    [result] = report.policies
    assert result.program.library_calls["__cudnn$blockScaledDot"] == 2
    assert result.requested["float8_e4m3fn"] == 3 * 2 * 4096 * 1024**2
    assert not report.emulated("as written")


def test_what_is_partitioned_in_python_is_refused_for_several_tpus():
    fn = custom_partitioning(jnp.sin)
    fn.def_partition(partition=lambda *_: None, sharding_rule="i j -> i j")
    with pytest.raises(ValueError, match="as written cannot be compiled for several TPUs"):
        compile_ahead(parse_target("tpu-v5e:1x2"), [fn], (split(8, 8),), (), ["as written"])


@needs_gpu_compiler
@pytest.mark.slow
def test_shard_map_of_arguments_that_are_not_sharded():
    def fn(x):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        mean = jax.shard_map(
            lambda x: jax.lax.pmean(jnp.mean((x @ x.T) ** 2), "data"),
            mesh=mesh, in_specs=P("data"), out_specs=P(),
        )  # fmt: skip
        return mean(x)

    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    with pytest.raises(ValueError, match="runs on 4 devices, but gpu-h100:2 has 2"):
        jaxmp.preflight(fn, target="gpu-h100:2")(x)
    [result] = jaxmp.preflight(fn, target="gpu-h100:4")(x).policies
    assert not result.error
    assert result.device_count == 4
    assert [collective.kind for collective in result.program.moved] == ["all-reduce"]
