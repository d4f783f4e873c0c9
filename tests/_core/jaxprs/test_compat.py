"""What JAX and Flax do not promise and we rely on: that it is there, and means what we think.

One row each, so that a release that changes one fails the row of its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from half_private import read_at_home
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, PartitionSpec

from jaxmp._core import flax as _flax
from jaxmp._core.jaxprs import attributes, compat, equation_parameters
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.jaxprs.parameter_products import Parameter, contract

from support import iter_eqns, ones, random_key

X, W = ones(6, 8), ones(8, 8)
BFLOAT16 = np.dtype(jnp.bfloat16)
DOT = "dot_general"

Row = Callable[[], None]
ROWS: dict[str, Row] = {}
COVERED: set[str] = set()


def relied_on(name: str, *covers: str) -> Callable[[Row], Row]:
    """A row: what it is of, and as what `half_private` finds that in the source."""

    def row(check: Row) -> Row:
        ROWS[name] = check
        COVERED.update(covers)
        return check

    return row


def equations(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return list(jax.make_jaxpr(fn)(*args).jaxpr.eqns)


def equation(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """The last equation of a primitive, however deeply nested."""
    return [e for e in iter_eqns(jax.make_jaxpr(fn)(*args)) if e.primitive.name == name][-1]


def data_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))


# --- values and types -----------------------------------------------------------------------------


@relied_on("jax.core.Tracer", "jax.core", "jax.core.Tracer")
def _() -> None:
    seen: list[bool] = []
    jax.eval_shape(lambda x: seen.append(attributes.is_tracer(x)), X)
    jax.vmap(lambda x: seen.append(attributes.is_tracer(x)))(X)
    assert seen == [True, True]
    assert not attributes.is_tracer(X)


@relied_on("jax.extend.core.concrete_or_error")
def _() -> None:
    seen = {}

    def look(name: str) -> Any:
        def run(x: jax.Array) -> jax.Array:
            seen[name] = attributes.is_abstract(x)
            return jnp.sum(x)

        return run

    jax.grad(look("grad"))(X)
    jax.jit(jax.grad(look("jitted")))(X)
    look("array")(X)
    assert seen == {"grad": False, "jitted": True, "array": False}


@relied_on("AbstractRef.inner_aval", "inner_aval")
def _() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.new_ref(x)[...]

    [new, *_] = equations(fn, X)
    assert attributes.is_reference(new.outvars[0])
    assert not attributes.is_reference(new.invars[0])
    assert compat.dtype_of(new.outvars[0]) == jnp.float32  # why it has to be told apart


@relied_on("Array.weak_type, ShapedArray.weak_type", "weak_type")
def _() -> None:
    assert attributes.is_weak(jnp.asarray(1.0))
    assert not attributes.is_weak(jnp.float32(1))
    for number, weak in ((1.0, True), (jnp.float32(1), False)):
        [var] = jax.make_jaxpr(jnp.sin)(number).jaxpr.outvars
        assert attributes.is_weak(var.aval) is weak


@relied_on("convert_element_type_p", "jax.extend.core.primitives.convert_element_type_p")
def _() -> None:
    weak = attributes.with_weak_type(jnp.float32(1), weak=True)
    assert attributes.is_weak(weak)
    assert (weak + jnp.bfloat16(1)).dtype == jnp.bfloat16
    assert attributes.with_weak_type(weak, weak=False).weak_type is False


@relied_on("remat_p", "jax.extend.core.primitives.remat_p")
def _() -> None:
    def run(x: jax.Array, *, prevent_cse: bool) -> jax.Array:
        body = compat.closed(jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(x)))(x)).jaxpr
        policy = jax.checkpoint_policies.nothing_saveable
        return compat.rematerialize(body, [x], policy, prevent_cse=prevent_cse)[0]

    for prevent_cse in (True, False):
        rematted = partial(run, prevent_cse=prevent_cse)
        [eqn] = jax.make_jaxpr(rematted)(X).jaxpr.eqns
        given = jax.checkpoint(jnp.sin, prevent_cse=prevent_cse)
        [checkpoint] = jax.make_jaxpr(given)(X).jaxpr.eqns
        assert eqn.primitive is checkpoint.primitive
        assert set(eqn.params) == set(checkpoint.params)
        assert eqn.params["prevent_cse"] is prevent_cse
        gradient = jax.grad(lambda x, run=rematted: run(x).sum())(X)
        assert (gradient == jax.grad(lambda x: jnp.sin(jnp.sin(x)).sum())(X)).all()


@relied_on("NameStack.stack")
def _() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            with jax.named_scope("a"):
                x = jnp.sin(x)
            return jnp.cos(x)

    jaxpr = jax.make_jaxpr(fn)(X).jaxpr
    names = attributes.names_around(jaxpr)
    assert [scope.name for scope in names] == ["outer"]
    bare = attributes.without_names(jaxpr, len(names))
    assert [str(attributes.name_stack(eqn)) for eqn in bare.eqns] == ["a", ""]
    again = [str(attributes.name_stack(attributes.scoped(eqn, names))) for eqn in jaxpr.eqns]
    assert again == ["outer/a/outer", "outer/outer"]

    def under(x: jax.Array) -> jax.Array:
        with jax.named_scope("here"), attributes.under(names):
            return jnp.sin(x)

    [eqn] = jax.make_jaxpr(under)(X).jaxpr.eqns
    assert str(attributes.name_stack(eqn)) == "here/outer"


@relied_on("ShapedArray.update, ShapeDtypeStruct.update", "update(dtype=)")
def _() -> None:
    low = attributes.with_dtype(jax.typeof(jnp.asarray(1.0)), BFLOAT16)
    assert (low.dtype, low.weak_type, low.shape) == (BFLOAT16, False, ())
    sharding = jax.NamedSharding(data_mesh(), PartitionSpec("d"))
    like = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)
    assert like.update(dtype=BFLOAT16, weak_type=False).sharding == sharding


@relied_on("aval.to_tangent_aval", "to_tangent_aval")
def _() -> None:
    tangents = map(attributes.tangent_type, map(jax.typeof, (X, jnp.arange(3))))
    assert [(t.shape, t.dtype) for t in tangents] == [
        ((6, 8), np.dtype("float32")),
        ((3,), jax.dtypes.float0),
    ]


@relied_on("aval.str_short", "str_short")
def _() -> None:
    [eqn] = equations(jnp.sin, X)
    assert attributes.short_type(eqn.outvars[0]) == "float32[6,8]"


@relied_on("aval.manual_axis_type.varying", "manual_axis_type")
def _() -> None:
    found: list[Any] = []

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        found.extend(attributes.varying_axes(jax.typeof(v)) for v in (x, w, x + w))
        return x + w

    spec = PartitionSpec("d")
    mapped = jax.shard_map(
        local, mesh=data_mesh(), in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    jax.eval_shape(mapped, jnp.ones(4), jnp.ones(2))
    assert found == [("d",), (), ("d",)]
    assert attributes.varying_axes(jax.ShapeDtypeStruct((2,), jnp.float32)) == ()


# --- equations ------------------------------------------------------------------------------------


@relied_on("eqn.source_info.name_stack", "source_info", "name_stack")
def _() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x)

    stacks = [attributes.name_stack(equation("sin", fn, X)) for _ in range(2)]
    assert str(stacks[0]) == "outer/inner"
    assert hash(stacks[0]) == hash(stacks[1])
    assert stacks[0] == stacks[1]
    derived = equation("mul", lambda x: jax.vjp(fn, x)[1](x), X)
    assert "transpose(" in str(attributes.name_stack(derived))


@relied_on("eqn.source_info.traceback.raw_frames, code_addr2line")
def _() -> None:
    def called(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def written_here(x: jax.Array) -> jax.Array:
        return called(x)

    where = attributes.traceback(equation("sin", written_here, X))
    frames = list(attributes.frames(where))
    names = [code.co_name for code, _ in frames]
    frame = frames[names.index("written_here")]
    assert frame[0] is written_here.__code__
    assert attributes.line_number(where, frame) == frame[0].co_firstlineno + 1
    assert names.index("called") < names.index("written_here")  # innermost first


@relied_on("source_info_util.summarize, register_exclusion", "jax.extend.source_info_util")
def _() -> None:
    folder = Path("/nowhere/jaxmp_excluded")
    scope: dict[str, Any] = {"jnp": jnp}
    exec(compile("def fn(x):\n  return jnp.sin(x)", str(folder / "library.py"), "exec"), scope)

    def user(x: jax.Array) -> jax.Array:
        return scope["fn"](x) * 2

    def files() -> list[str]:
        found = map(attributes.source_summary, equations(user, X))
        return [re.sub(r".*/(\w+\.py):\d+:?.*", r"\1", summary) for summary in found]

    assert files() == ["library.py", "test_compat.py"]
    attributes.leave_out_of_tracebacks(folder)
    assert files() == ["test_compat.py", "test_compat.py"]


@relied_on("source_info_util.user_context, current_name_stack")
def _() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    [old] = equations(fn, X)

    def again(x: jax.Array) -> Any:
        with jax.named_scope("outer"), compat.source_of(old):
            return compat.bind(old, [x])

    [new] = equations(again, X)
    assert str(attributes.name_stack(new)) == "outer/inner"
    assert attributes.source_summary(new) == attributes.source_summary(old)


@relied_on("eqn.ctx, eqn.ctx.manager", "ctx")
def _() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with set_xla_metadata(word="value"):
            return jnp.sin(x)

    [marked], [plain] = equations(fn, X), equations(jnp.sin, X)
    assert attributes.context(marked) != attributes.context(plain)
    assert hash(attributes.context(plain)) == hash(attributes.context(equations(jnp.sin, W)[0]))

    def again(x: jax.Array) -> Any:
        with attributes.in_context(marked):
            return jnp.cos(x)

    assert attributes.context(equations(again, X)[0]) == attributes.context(marked)


@relied_on("eqn.effects", "effects")
def _() -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0])
        return jnp.sin(x)

    effects = {eqn.primitive.name: attributes.has_effects(eqn) for eqn in equations(fn, X)}
    assert effects.pop("sin") is False
    assert sum(effects.values()) == 1


@relied_on("what names an axis of a mesh, as an effect", "effects")
def _() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(lambda _: None, x.sum())
        return lax.psum(x, "d")

    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    [eqn] = equations(mapped, X)
    found = list(compat.closed(eqn.params["jaxpr"]).jaxpr.eqns)
    assert {attributes.runs_once(e) for e in found if "callback" in e.primitive.name} == {True}
    [sent] = [e for e in found if e.primitive.name.startswith("psum")]
    assert attributes.has_effects(sent)
    assert not attributes.runs_once(sent)


@relied_on("Primitive.multiple_results", "multiple_results")
def _() -> None:
    split = equation("split", lambda x: jnp.split(x, 2), X)
    [sin] = equations(jnp.sin, X)
    assert attributes.PrimitiveCall.of(split).returns_several
    assert not attributes.PrimitiveCall.of(sin).returns_several


@relied_on("Primitive.get_bind_params", "get_bind_params")
def _() -> None:
    [out] = compat.bind(equation("custom_jvp_call", jax.nn.relu, X), [-X])
    assert not out.any()


@relied_on("jaxprs_in_params", "jaxprs_in_params")
def _() -> None:
    [jit] = equations(jax.jit(jnp.sin), X)
    cond = equation("cond", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)
    assert attributes.holds_jaxprs(jit.params["jaxpr"])
    assert attributes.holds_jaxprs(cond.params["branches"])
    assert not attributes.holds_jaxprs(jit.params["name"])
    assert len(list(compat.inner_jaxprs(cond))) == 2


@relied_on("jaxpr.debug_info.func_name", "debug_info", "func_name")
def _() -> None:
    def told(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    assert attributes.function_name(jax.make_jaxpr(told)(X).jaxpr) == "told"


@relied_on("get_opaque_trace_state")
def _() -> None:
    found = []
    jax.grad(lambda x: found.append(attributes.evaluates_now()) or x)(1.0)
    jax.jit(lambda: found.append(attributes.evaluates_now()))()
    assert not any(found)
    assert attributes.evaluates_now()


@relied_on("parameters that only transformations read", "params[devices]")
def _() -> None:
    checkpointed = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.nothing_saveable)
    ruled = jax.custom_vjp(jnp.sin)
    ruled.defvjp(lambda x: (x, x), lambda x, g: (x * g,))
    mapped = jax.custom_batching.custom_vmap(jnp.sin)
    mapped.def_vmap(lambda size, batched, x: (x, True))
    for fn in (checkpointed, ruled, jax.nn.relu, mapped):
        [eqn] = equations(fn, X)
        assert compat.TRANSFORMATION_RULES[eqn.primitive.name] <= eqn.params.keys()
    device = jax.devices()[0]
    assert attributes.moves_between_devices(
        equation("device_put", lambda x: jax.device_put(x, device), X)
    )
    assert not attributes.moves_between_devices(equation("device_put", jax.device_put, X))


@relied_on("jaxpr.replace, debug_info._replace")
def _() -> None:
    jaxpr = jax.make_jaxpr(lambda x, y: (jnp.sin(x), jnp.cos(x) * y))(X, X)
    opened = jaxpr.jaxpr
    first = compat.part(opened, opened.eqns[:2], opened.invars[:1], opened.eqns[1].outvars)
    assert [e.primitive.name for e in first.eqns] == ["sin", "cos"]
    assert [attributes.short_type(v) for v in first.outvars] == ["float32[6,8]"]


@relied_on("jax.interpreters.ad.Zero", "jax.interpreters.ad")
def _() -> None:
    _, backward = jax.vjp(lambda x: (jnp.sin(x), jnp.cos(x)), X)
    zero = compat.symbolic_zero(jax.typeof(X))
    with_zero = jax.make_jaxpr(lambda ct: backward((ct, zero)))(X)
    assert "neg" not in str(with_zero)  # nothing of the cosine


@relied_on(
    "jax.interpreters: the rules of a primitive of one's own",
    "jax.interpreters.batching",
    "jax.interpreters.mlir",
)
def _() -> None:
    [eqn] = equations(lambda x, w: x @ w, X, W)

    def product(x: Any, w: Any) -> Any:
        low = [x.astype(BFLOAT16), w.astype(BFLOAT16)]
        return contract(eqn, low, {1: Parameter(w)}, BFLOAT16)

    y, tangent = jax.jvp(lambda w: product(X, w), (W,), (W,))
    np.testing.assert_array_equal(tangent, y)
    gradient = jax.grad(lambda w: jnp.sum(jax.vmap(product, (0, None))(X[None], w)))
    [found] = [e for e in iter_eqns(jax.make_jaxpr(gradient)(W)) if e.primitive.name == DOT][1:]
    assert [v.aval.dtype for v in (*found.invars, *found.outvars)] == [BFLOAT16, BFLOAT16, "f4"]
    np.testing.assert_array_equal(gradient(W), 6)


@relied_on("inline of jax.jit")
def _() -> None:
    inlined = jax.jit(jnp.sin, inline=compat.INLINE)
    assert [e.primitive.name for e in equations(inlined, X)] == ["sin"]


@relied_on("make_user_context is part of a jit's key")
def _() -> None:
    context = jax.make_user_context(default_value=None)
    fn = jax.jit(lambda x: x if context.value is None else jnp.sin(x))
    traces = [str(jax.make_jaxpr(fn)(X))]
    with context("inside"):
        traces.append(str(jax.make_jaxpr(fn)(X)))
    assert ["sin" in trace for trace in traces] == [False, True]


# --- parameters of first-order equations ----------------------------------------------------------


@relied_on("checkpoint_name: name", "params[name]")
def _() -> None:
    name = jax.ad_checkpoint.checkpoint_name
    eqn = equation("name", lambda x: name(x, "kept"), jnp.ones(2))
    assert equation_parameters.checkpoint_name(eqn.primitive, eqn.params) == "kept"
    other = equation("sin", jnp.sin, jnp.ones(2))
    assert equation_parameters.checkpoint_name(other.primitive, {"name": "kept"}) is None


@relied_on("dot_general: dimension_numbers", "params[dimension_numbers]")
def _() -> None:
    eqn = equation("dot_general", lambda a, b: jnp.einsum("bij,bkj->bik", a, b), X[None], X[None])
    (left, right), (batch, other) = equation_parameters.product_axes(eqn)
    assert [*map(list, (left, right, batch, other))] == [[2], [2], [0], [0]]


@relied_on(
    "ragged_dot_general: ragged_dot_dimension_numbers", "params[ragged_dot_dimension_numbers]"
)
def _() -> None:
    sizes = jnp.array([2, 4])
    eqn = equation("ragged_dot_general", lax.ragged_dot, X, jnp.ones((2, 8, 3)), sizes)
    (left, right), (batch, _) = equation_parameters.product_axes(eqn)
    assert [*map(list, (left, right, batch))] == [[1], [1], []]


def _convolution() -> Any:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            (1, 2),
            ((0, 1), (2, 3)),
            (1, 3),
            (4, 1),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    return equation("conv_general_dilated", fn, jnp.ones((1, 9, 9, 3)), jnp.ones((2, 2, 3, 5)))


@relied_on("conv_general_dilated: dimension_numbers")
def _() -> None:
    layout = equation_parameters.layout(_convolution())
    found = (layout.lhs_spec, layout.rhs_spec, layout.out_spec)  # batch, features, space
    assert found == ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))


@relied_on("conv_general_dilated: window_strides, padding, lhs_dilation, rhs_dilation")
def _() -> None:
    assert equation_parameters.window(_convolution()) == ((1, 2), ((0, 1), (2, 3)), (1, 3), (4, 1))


@relied_on("broadcast_in_dim: broadcast_dimensions", "params[broadcast_dimensions]")
def _() -> None:
    [eqn] = equations(lambda x: lax.broadcast_in_dim(x, (2, 6, 3, 8), (1, 3)), X)
    assert equation_parameters.broadcast_axes(eqn) == (1, 3)


@relied_on("transpose: permutation", "params[permutation]")
def _() -> None:
    [eqn] = equations(lambda x: lax.transpose(x, (1, 0)), X)
    assert equation_parameters.permutation(eqn) == (1, 0)


@relied_on("reshape: dimensions", "params[dimensions]")
def _() -> None:
    [plain] = equations(lambda x: lax.reshape(x, (3, 2)), jnp.ones((2, 3)))
    [permuted] = equations(lambda x: lax.reshape(x, (3, 2), (1, 0)), jnp.ones((2, 3)))
    assert not equation_parameters.permutes(plain)
    assert equation_parameters.permutes(permuted)


@relied_on("dot_general: out_sharding, and the sharding of an aval", "params[out_sharding]")
def _() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.sharding.NamedSharding(mesh, PartitionSpec("d", None))
        x = jax.device_put(jnp.ones((4, 4)), rows)
        said = PartitionSpec(None, "d")
        eqn = equation("dot_general", lambda x: jnp.matmul(x, x.T, out_sharding=said), x)
        assert attributes.out_sharding(eqn).spec == said
        assert attributes.explicit_sharding(eqn.invars[0]).spec == rows.spec
        assert attributes.explicit_sharding(x).spec == rows.spec
    assert (
        attributes.out_sharding(equation("dot_general", lambda x: x @ x, jnp.ones((4, 4)))) is None
    )
    assert attributes.explicit_sharding(jnp.ones((4, 4))) is None


@relied_on("gather: slice_sizes", "params[slice_sizes]")
def _() -> None:
    eqn = equation("gather", lambda x, i: x[:, i], jnp.ones((4, 6)), jnp.arange(3))
    found = equation_parameters.gather(eqn)
    assert (found.axes, found.sizes) == ((1,), (4, 1))


@relied_on("gather: dimension_numbers, mode", "params[mode]")
def _() -> None:
    def picked(x: Any, i: Any, mode: str) -> Any:
        return jnp.take_along_axis(x, i, axis=1, mode=mode)

    for mode in ("clip", "fill"):
        eqn = equation("gather", partial(picked, mode=mode), X, jnp.zeros((X.shape[0], 1), int))
        found = equation_parameters.gather(eqn)
        assert found.axes == (1,)
        assert found.batch == (0, 1)
        assert found.shared == {0: 0}
        assert (found.offsets, found.sliced) == ((), {})
        assert found.clamps == (mode == "clip")
    eqn = equation("gather", lambda x, i: x[:, i], jnp.ones((4, 6)), jnp.arange(3))
    found = equation_parameters.gather(eqn)
    assert (found.offsets, found.batch, found.sliced) == ((0,), (1,), {0: 0})


@relied_on(
    "all_gather: all_gather_dimension, axis_name, axis_index_groups, axis_size, tiled",
    *("params[all_gather_dimension]", "params[axis_name]", "params[axis_index_groups]"),
    *("params[axis_size]", "params[tiled]"),
)
def _() -> None:
    rows = PartitionSpec("d")
    gathered = jax.shard_map(
        lambda x: lax.all_gather(x, "d", axis=1), mesh=data_mesh(), in_specs=rows, out_specs=rows
    )
    eqn = equation("all_gather", gathered, X)
    assert equation_parameters.all_gather_of(eqn) == (1, ("d",), None, 2, False)


@relied_on("iota: dimension", "params[dimension]")
def _() -> None:
    [eqn] = equations(lambda: lax.broadcasted_iota(jnp.int32, (2, 3), 1))
    assert equation_parameters.iota_axis(eqn) == 1


@relied_on("reduce_sum: axes", "params[axes]")
def _() -> None:
    eqn = equation("reduce_sum", lambda x: x.sum(1), X)
    assert equation_parameters.reduced_axes(eqn) == (1,)


@relied_on(
    "cumsum: axis; reduce_window_sum: window_dimensions",
    "params[axis]",
    "params[window_dimensions]",
)
def _() -> None:
    x = jnp.ones((4, 6))
    assert equation_parameters.summed(equation("cumsum", lambda x: lax.cumsum(x, axis=1), x)) == 6
    pooled = equation("reduce_window_sum", lambda x: nn.avg_pool(x, (2,), (2,)), x[..., None])
    assert equation_parameters.summed(pooled) == 2
    assert equation_parameters.summed(equation("reduce_sum", jnp.sum, x)) == 24
    assert equation_parameters.summed(equation("dot_general", lambda x: x @ x.T, x)) == 6


@relied_on("convert_element_type: new_dtype", "params[new_dtype]")
def _() -> None:
    [eqn] = equations(lambda x: x.astype(jnp.bfloat16), X)
    assert equation_parameters.converted_dtype(eqn) == BFLOAT16


@relied_on("dot_general: precision", "params[precision]")
def _() -> None:
    def asked(precision: Any) -> str:
        eqn = equation("dot_general", lambda x, w: lax.dot(x, w, precision=precision), X, W)
        precision = equation_parameters.precision(eqn)
        found = precision if isinstance(precision, tuple) else (precision,)
        return " ".join(str(getattr(p, "name", p)) for p in found)

    assert asked(None) == "None"
    assert asked("highest") == "HIGHEST HIGHEST"
    assert asked(lax.DotAlgorithmPreset.BF16_BF16_F32) == "BF16_BF16_F32"


@relied_on("dot_general: preferred_element_type", "params[preferred_element_type]")
def _() -> None:
    dot = equation("dot_general", lax.dot, X, W)
    assert equation_parameters.takes_result_dtype(dot)
    assert equation_parameters.takes_result_dtype(_convolution())
    [out] = compat.bind(dot, [X, W], preferred_element_type=BFLOAT16)
    assert out.dtype == BFLOAT16


@relied_on("integer_pow: y", "params[y]")
def _() -> None:
    [eqn] = equations(lambda x: x**-3, X)
    assert equation_parameters.exponent(eqn.params) == -3


@relied_on("jit: name", "params[name]")
def _() -> None:
    def told(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    [eqn] = equations(jax.jit(told), X)
    assert equation_parameters.jitted_name(eqn) == "told"
    assert not equation_parameters.jitted_name(equations(jnp.sin, X)[0])


@relied_on("custom_linear_solve: jaxprs.solve", "params[jaxprs]")
def _() -> None:
    def fn(b: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(lambda v: v * 2, b, lambda _, b: jnp.tanh(b))

    [solve] = compat.jaxprs_run(equation("custom_linear_solve", fn, X[0]))
    assert [e.primitive.name for e in compat.closed(solve).jaxpr.eqns] == ["tanh"]


# --- parameters of higher-order equations ---------------------------------------------------------


@relied_on("jit, remat2: jaxpr", "params[jaxpr]")
def _() -> None:
    for fn in (jax.jit(jnp.sin), jax.checkpoint(jnp.sin)):
        [eqn] = equations(fn, X)
        inner = compat.closed(compat.call_jaxpr(eqn)).jaxpr
        assert [e.primitive.name for e in inner.eqns] == ["sin"]
        cosine = compat.like(jax.make_jaxpr(jnp.cos)(X), eqn.params["jaxpr"])
        [out] = compat.bind(eqn, [X], jaxpr=cosine)
        np.testing.assert_allclose(out, np.cos(1), rtol=1e-6)


@relied_on("remat2: prevent_cse", "params[prevent_cse]")
def _() -> None:
    [eqn] = equations(jax.checkpoint(jnp.sin, prevent_cse=False), X)
    assert eqn.params["prevent_cse"] is False
    assert compat.widened(eqn, 2, 1) == {}


@relied_on("jit: in_shardings, in_layouts, donated_invars, out_shardings, out_layouts")
def _() -> None:
    eqn = equation("jit", jax.jit(lambda x, w: x @ w, donate_argnums=0), X, W)
    wider = compat.widened(eqn, 1, 2)
    assert wider["donated_invars"] == (False, True, False)
    assert [len(wider[k]) for k in ("in_shardings", "in_layouts")] == [3, 3]
    assert [len(wider[k]) for k in ("out_shardings", "out_layouts")] == [3, 3]


@relied_on("scan: reverse, unroll")
def _() -> None:
    def fn(x: jax.Array) -> Any:
        return lax.scan(lambda c, x: (c, x), 0, x, reverse=True, unroll=2)

    options = compat.scan_options(equation("scan", fn, X))
    assert options == {"length": 6, "reverse": True, "unroll": 2}


def _rule(closed_over: Any = None) -> Any:
    @jax.custom_vjp
    def told(x: jax.Array) -> jax.Array:
        return jnp.sin(x) if closed_over is None else jnp.sin(x) * closed_over

    told.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    return told


@relied_on("custom_jvp_call, custom_vjp_call: call_jaxpr", "params[call_jaxpr]")
def _() -> None:
    for name, fn in (("custom_jvp_call", jax.nn.relu), ("custom_vjp_call", _rule())):
        eqn = equation(name, fn, X)
        assert list(compat.closed(compat.call_jaxpr(eqn)).jaxpr.eqns)
        assert compat.custom_rule(eqn).name == {"custom_vjp_call": "told"}.get(name, "relu")


@relied_on("custom_vmap_call: call", "params[call]")
def _() -> None:
    fn = jax.custom_batching.custom_vmap(jnp.sin)
    fn.def_vmap(lambda _size, has_axis, x: (jnp.sin(x), has_axis[0]))
    eqn = equation("custom_vmap_call", fn, X)
    called = equation_parameters.for_platform(eqn, "cpu")
    [one] = inside(called)
    assert [e.primitive.name for e in compat.closed(one.jaxpr).jaxpr.eqns] == ["sin"]
    assert (called.invars, called.outvars) == (eqn.invars, eqn.outvars)


@relied_on("custom_vjp_call: num_consts")
def _() -> None:
    eqn = equation("custom_vjp_call", lambda x, w: _rule(w)(x), X, X)
    assert compat.custom_rule(eqn).n_consts == 1
    assert eqn.invars[0].aval == eqn.invars[1].aval
    assert compat.custom_rule(equation("custom_vjp_call", _rule(), X)).n_consts == 0


@relied_on("custom_vjp_call, custom_jvp_call: symbolic_zeros", "params[symbolic_zeros]")
def _() -> None:
    def made(symbolic: bool) -> tuple[Any, Any]:
        vjp, jvp = jax.custom_vjp(jnp.sin), jax.custom_jvp(jnp.sin)
        vjp.defvjp(
            lambda x: (jnp.sin(getattr(x, "value", x)), None),
            lambda _, g: (g,),
            symbolic_zeros=symbolic,
        )
        jvp.defjvp(lambda x, t: (jnp.sin(*x), *t), symbolic_zeros=symbolic)
        return equation("custom_vjp_call", vjp, X), equation("custom_jvp_call", jvp, X)

    for symbolic in (True, False):
        found = [compat.custom_rule(eqn).symbolic_zeros for eqn in made(symbolic)]
        assert found == [symbolic, symbolic]


@relied_on(
    "shard_map: mesh, in_specs, out_specs, check_vma, newly_manual_axes",
    *("params[mesh]", "params[in_specs]", "params[out_specs]", "params[check_vma]"),
    "params[newly_manual_axes]",
)
def _() -> None:
    mesh, spec = data_mesh(), PartitionSpec("d")
    mapped = jax.shard_map(
        jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False, axis_names={"d"}
    )
    params = equation("shard_map", jax.jit(mapped), X).params
    assert tuple(params["in_specs"]) == tuple(params["out_specs"]) == (spec,)
    assert params["check_vma"] is False
    assert set(params["newly_manual_axes"]) == {"d"}
    assert params["mesh"].axis_names == ("d",)


@relied_on("cond: branches", "params[branches]")
def _() -> None:
    eqn = equation("cond", lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)
    ops = [[e.primitive.name for e in compat.closed(i.jaxpr).jaxpr.eqns] for i in inside(eqn)]
    assert ops == [["cos"], ["sin"]]  # the false one is the first
    assert len(eqn.invars) == 2  # the index comes before the operands


@relied_on("platform_dependent: a cond that names platforms", "params[branches_platforms]")
def _() -> None:
    fn = partial(lax.platform_dependent, cuda=jnp.sin, default=jnp.cos)
    eqn = equation("cond", fn, X)
    assert eqn.params["branches_platforms"] == (("cuda",), None)
    for platform, op in (("cuda", "sin"), ("tpu", "cos")):
        [one] = inside(equation_parameters.for_platform(eqn, platform))
        assert [e.primitive.name for e in compat.closed(one.jaxpr).jaxpr.eqns] == [op]


def _scan() -> Any:
    def fn(w: jax.Array, c: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(lambda c, x: ((c[0] + 1, c[1] @ w), x), (0, c), xs)

    return equation("scan", fn, W, X, X)


@relied_on(
    "scan: num_consts and num_carry, or ft_in",
    *("params[num_consts]", "params[num_carry]", "params[ft_in]"),
)
def _() -> None:
    assert compat.scan_split(_scan()) == (1, 2)
    shapes = [v.aval.shape for v in _scan().invars]
    assert shapes == [(8, 8), (), (6, 8), (6, 8)]  # constants, carry, what it goes through


@relied_on("scan: length", "params[length]")
def _() -> None:
    assert inside(_scan())[0].trips == 6


def _while() -> Any:
    def fn(limit: jax.Array, w: jax.Array, v: jax.Array, x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c.sum() < limit, lambda c: c @ w + v, x)

    return equation("while", fn, jnp.float32(9), W, X[0], X)


@relied_on("while: cond_nconsts, body_nconsts", "params[cond_nconsts]", "params[body_nconsts]")
def _() -> None:
    test, body = inside(_while())
    shapes = [v.aval.shape for v in _while().invars]
    assert [shapes[i] for i in test.operands] == [(), (6, 8)]
    assert [shapes[i] for i in body.operands] == [(8, 8), (8,), (6, 8)]


@relied_on("while: cond_jaxpr, body_jaxpr", "params[cond_jaxpr]", "params[body_jaxpr]")
def _() -> None:
    last = [compat.closed(inner.jaxpr).jaxpr.eqns[-1] for inner in inside(_while())]
    assert [e.primitive.name for e in last] == ["lt", "add"]


# --- the next generation --------------------------------------------------------------------------


@contextmanager
def next_generation(flag: str) -> Iterator[None]:
    if jax.__version_info__ < (0, 12):
        pytest.skip("looked inside from JAX 0.12 on")
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, False)


@relied_on("call_hi_primitive: _prim", "params[_prim]")
def _() -> None:
    with next_generation("jax_remat3"):
        [eqn] = equations(jax.checkpoint(lambda x: jnp.sin(x)), X)
    assert (compat.kind(eqn), compat.called(eqn)) == ("remat2", "RematTraced")


@relied_on("RematTraced.jaxpr, policy, prevent_cse")
def _() -> None:
    policy = jax.checkpoint_policies.save_anything_except_these_names("kept")
    with next_generation("jax_remat3"):
        [eqn] = equations(jax.checkpoint(lambda x: jnp.sin(x), policy=policy, prevent_cse=False), X)
        [inner] = inside(eqn)
        rematted = compat.rematerialized(eqn, lambda x: [jnp.cos(x)])
        [again] = equations(rematted, X)
    assert [e.primitive.name for e in compat.closed(inner.jaxpr).jaxpr.eqns] == ["sin"]
    assert again.params["_prim"].policy is policy
    assert again.params["_prim"].prevent_cse is False


@relied_on("CheckpointName.name")
def _() -> None:
    with next_generation("jax_remat3"):
        [eqn] = equations(lambda x: checkpoint_name(x, "kept"), X)
        [low] = equations(lambda x: compat.bind(eqn, [x]), X.astype(jnp.bfloat16))
    assert compat.kind(eqn) == compat.kind(low) == "name"
    assert low.params.get("name", getattr(low.params.get("_prim"), "name", None)) == "kept"


@relied_on(
    "CustomVJPTraced.traced, in_avals, symbolic_zeros, traced.fun_name", "traced", "fun_name"
)
def _() -> None:
    with next_generation("jax_custom_vjp3"):
        [eqn] = equations(lambda x: _rule()(x), X)
        [inner] = inside(eqn)
    assert compat.kind(eqn) == "custom_vjp_call"
    assert compat.custom_rule(eqn) == ("told", 0, False)
    assert [e.primitive.name for e in compat.closed(inner.jaxpr).jaxpr.eqns] == ["sin"]


@relied_on("CustomJVPTraced.traced, in_avals, symbolic_zeros")
def _() -> None:
    @jax.custom_jvp
    def told(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    told.defjvp(lambda x, t: (told(*x), *t))
    with next_generation("jax_custom_jvp3"):
        [eqn] = equations(told, X)
        [inner] = inside(eqn)
    assert compat.kind(eqn) == "custom_jvp_call"
    assert compat.custom_rule(eqn).name == "told"
    assert [e.primitive.name for e in compat.closed(inner.jaxpr).jaxpr.eqns] == ["sin"]


# --- what a compiled program says of itself, to a process that imports JAX alone ------------------


@relied_on("Compiled.memory_analysis, cost_analysis")
def _() -> None:
    compiled = jax.jit(lambda x: x @ W).lower(X).compile()
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == X.nbytes
    assert memory.output_size_in_bytes == X.nbytes
    for name in ("temp_size_in_bytes", "generated_code_size_in_bytes", "alias_size_in_bytes"):
        assert getattr(memory, name) >= 0, name
    assert compiled.cost_analysis()["bytes accessed"] >= 2 * X.nbytes


# --- Flax -----------------------------------------------------------------------------------------


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.make_rng("noise")
        return nn.Dense(4)(x)

    @nn.nowrap
    def told(self) -> None: ...


RNGS = {"params": random_key(0), "noise": random_key(1)}


@relied_on("Module methods: method_handler_wrapped", "method_handler_wrapped")
def _() -> None:
    found = {name: _flax.is_managed(getattr(Layer, name)) for name in ("__call__", "told", "apply")}
    assert found == {"__call__": True, "told": False, "apply": False}


@relied_on("module_class_lift_transform, core.lift.pack", "flax.core.lift", "flax.linen.transforms")
def _() -> None:
    seen: list[Any] = []

    def transform(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any) -> Any:
            seen.append(variables)
            scopes = scope_fn(jax.tree.map(jnp.zeros_like, variables), rngs)
            return fn(scopes, *args), repack_fn(scopes)

        return _flax.lifted_scopes(inner)

    variables = Layer().init(RNGS, X)
    lifted = _flax.lifted_class(transform, Layer, ["__call__"])()
    out = lifted.apply(variables, X, rngs=RNGS)
    assert jax.tree.map(jnp.shape, jax.tree.leaves(seen)) == [(4,), (8, 4)]
    assert not out.any()  # the method saw the variables that the transformation gave it


@relied_on("Module: _call_wrapped_method, decorator_lift_transform", "_call_wrapped_method")
def _() -> None:
    """Flax calls all managed methods by it, and a function can be lifted as a method is."""
    called: list[Any] = []

    def watched(cls: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @nn.nowrap
        def call(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
            called.append((cls, fun.__name__))
            return original(self, fun, args, kwargs)

        return call

    watching = type("Watching", (Layer,), _flax.call_of_methods(Layer, watched))
    variables = watching().init(RNGS, X)
    assert (Layer, "__call__") in called
    called.clear()
    Layer.__call__(watching().bind(variables, rngs=RNGS), X)
    assert (Layer, "__call__") in called

    def identity(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _flax.lifted_scopes(
            lambda scope_fn, repack_fn, variables, rngs, *args: (
                fn(scopes := scope_fn(variables, rngs), *args),
                repack_fn(scopes),
            )
        )

    lifted = _flax.lifted_function(identity, lambda module, x: module(x) + 1)
    out = Layer().apply(variables, X, rngs=RNGS, method=lifted)
    np.testing.assert_array_equal(out, Layer().apply(variables, X, rngs=RNGS) + 1)


@relied_on("Scope.rng_counters", "rng_counters")
def _() -> None:
    counters: list[Any] = []

    def transform(fn: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any) -> Any:
            scopes = scope_fn(variables, rngs)
            before = [dict(counter) for counter in _flax.key_counters(scopes)]
            out = fn(scopes, *args)
            after = [dict(counter) for counter in _flax.key_counters(scopes)]
            counters.extend((*before, *after))
            return out, repack_fn(scopes)

        return _flax.lifted_scopes(inner)

    lifted = _flax.lifted_class(transform, Layer, ["__call__"])()
    lifted.apply(Layer().init(RNGS, X), X, rngs=RNGS)
    assert [counter["noise"] for counter in counters] == [0, 1]


@relied_on("InterceptorContext", "flax.linen.module.InterceptorContext")
def _() -> None:
    seen: list[Any] = []

    def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append((type(context), type(context.module), context.method_name))
        return call(*args, **kwargs)

    with nn.intercept_methods(interceptor):
        Layer().init(RNGS, X)
    assert (_flax.InterceptorContext, Layer, "__call__") in seen


@relied_on("core.meta.AxisMetadata", "flax.core.meta.AxisMetadata")
def _() -> None:
    boxed = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "d")))
    params = boxed.init(jax.random.key(0), X)["params"]
    assert isinstance(params["kernel"], _flax.AxisMetadata)
    assert not isinstance(params["bias"], _flax.AxisMetadata)


@relied_on("struct.dataclass: metadata of its fields")
def _() -> None:
    @flax.struct.dataclass
    class State:
        step: int
        name: str = flax.struct.field(pytree_node=False)

    fields = State.__dataclass_fields__
    assert {n: _flax.is_pytree_node(f) for n, f in fields.items()} == {"step": True, "name": False}


@relied_on("nnx.graphlib.is_graph_node", "flax.nnx.graphlib.is_graph_node")
def _() -> None:
    nodes = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Param(X), nnx.Rngs(0))
    assert all(map(_flax.is_graph_node, nodes))
    assert not any(map(_flax.is_graph_node, (X, [X], {"a": X}, None, "text", jnp.sin)))


@relied_on(
    "nnx.transforms.general: split_inputs, merge_inputs",
    "flax.nnx.transforms.general",
)
def _() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(jnp.float32(0))

    def step(counter: Counter, x: jax.Array) -> jax.Array:
        counter.count.set_value(counter.count.get_value() + x)
        return x * 2

    counter = Counter()
    assert _flax.split_inputs(jax.jit(_flax.merge_inputs(step)))(counter, jnp.float32(3)) == 6
    assert counter.count.get_value() == 3


@relied_on("nnx.Module: _pytree__is_pytree", "_pytree__is_pytree")
def _() -> None:
    class Registered(nnx.Module): ...

    class Plain(nnx.Module, pytree=False): ...

    assert [_flax.is_registered(cls) for cls in (Registered, Plain)] == [True, False]


@relied_on("nnx.Variable: get_raw_value, set_raw_value")
def _() -> None:
    param = nnx.Param(X)
    assert param.get_raw_value() is X
    param.set_raw_value(W)
    assert param.get_raw_value() is W


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_is_there_and_means_what_we_think(name: str) -> None:
    ROWS[name]()


def test_each_that_is_read_has_a_row() -> None:
    assert read_at_home() == COVERED
