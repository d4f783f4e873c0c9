"""Reading compiled programs: collectives of many arrays, started ones, comments in shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmp._preflight.hlo import read_hlo


def test_a_collective_of_many_arrays_is_counted():
    """From the sixth on, XLA numbers the members of a tuple in comments: `/*index=5*/`."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    arrays = [jnp.ones((8 * (i + 1), 16)) for i in range(7)]

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("data"),) * 7, out_specs=P())
    def summed(*arrays):
        return lax.psum(arrays, "data")

    text = summed.lower(*arrays).compile().as_text()
    assert "/*index=5*/" in text  # otherwise this tests nothing
    size = sum(x.nbytes for x in arrays) // 8
    assert read_hlo(text).collectives == {("all-reduce", "float32"): (1, size)}


@pytest.mark.parametrize(
    ("shape", "op", "collectives"),
    [
        # Operands and results, each a tuple.
        (
            "((bf16[2,4]{1,0}, f32[3]{0}), (bf16[16,4]{1,0:T(8,128)(2,1)S(1)}, f32[24]{0}))",
            "all-gather-start",
            {("all-gather", "bfloat16"): (1, 128), ("all-gather", "float32"): (1, 96)},
        ),
        ("(f32[2]{0}, f32[16]{0})", "all-gather-start", {("all-gather", "float32"): (1, 64)}),
        # Results alone.
        (
            "(f32[2]{0}, f32[16]{0})",
            "all-reduce-start",
            {("all-reduce", "float32"): (1, 8 + 64)},
        ),
        ("f32[16]{0}", "all-reduce-start", {("all-reduce", "float32"): (1, 64)}),
        # Operand, result and two handles.
        (
            "(bf16[8]{0}, bf16[8]{0}, u32[]{:S(2)}, u32[]{:S(2)})",
            "collective-permute-start",
            {("collective-permute", "bfloat16"): (1, 16)},
        ),
        # An operation made asynchronous.
        (
            "((f32[32,16]{1,0}), f32[4,16]{1,0})",
            "reduce-scatter-start",
            {("reduce-scatter", "float32"): (1, 256)},
        ),
        (
            "((f32[8]{0}, f32[8]{0}), (f32[8]{0}, f32[8]{0}), u32[])",
            "all-to-all-start",
            {("all-to-all", "float32"): (1, 64)},
        ),
        # As the tuple form of a whole program's collective, longer than a comment's distance.
        (
            "(f32[1]{0}, f32[1]{0}, f32[1]{0}, f32[1]{0}, f32[1]{0}, /*index=5*/s4[8]{0})",
            "all-to-all",
            {("all-to-all", "float32"): (1, 20), ("all-to-all", "int4"): (1, 4)},
        ),
        ("f32[16]{0}", "all-gather-done", {}),
    ],
)
def test_what_a_collective_returns(shape, op, collectives):
    assert read_hlo(f"  %x.1 = {shape} {op}(%a, %b), channel_id=1").collectives == collectives


def test_comments_among_the_operands_of_a_product_are_skipped():
    text = """
      %a = bf16[8,8]{1,0} parameter(0)
      %t = (f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}, /*index=5*/bf16[8,8]{1,0}) \
custom-call(%a), custom_call_target="__cublas$lt$matmul"
      %g = bf16[8,8]{1,0} get-tuple-element(%t), index=5
      ROOT %dot = f32[8,8]{1,0} dot(/*left*/%g, %a), lhs_contracting_dims={1}
    """
    program = read_hlo(text)
    assert program.contractions == {"bfloat16": 2}
    assert program.library_calls == {"__cublas$lt$matmul": 1}
