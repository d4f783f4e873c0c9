"""Reading compiled programs: collectives of many arrays, started ones, comments in shapes."""

from __future__ import annotations

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmp._tools.preflight.few_bits import MOST, lines_of_8_bits, share_of_8_bits
from jaxmp._tools.preflight.hlo import HloPlace, Multiplied, read_hlo


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


# What is returned, of what, and its collectives with their bytes.
RETURNED = [
    # Operands and results, each a tuple.
    ("((bf16[2,4]{1,0}, f32[3]{0}), (bf16[16,4]{1,0:T(8,128)(2,1)S(1)}, f32[24]{0}))",
     "all-gather-start", "all-gather bfloat16 128, all-gather float32 96"),
    ("(f32[2]{0}, f32[16]{0})", "all-gather-start", "all-gather float32 64"),
    # Results alone.
    ("(f32[2]{0}, f32[16]{0})", "all-reduce-start", "all-reduce float32 72"),
    ("f32[16]{0}", "all-reduce-start", "all-reduce float32 64"),
    # Operand, result and two handles.
    ("(bf16[8]{0}, bf16[8]{0}, u32[]{:S(2)}, u32[]{:S(2)})", "collective-permute-start",
     "collective-permute bfloat16 16"),
    # An operation made asynchronous.
    ("((f32[32,16]{1,0}), f32[4,16]{1,0})", "reduce-scatter-start", "reduce-scatter float32 256"),
    ("((f32[8]{0}, f32[8]{0}), (f32[8]{0}, f32[8]{0}), u32[])", "all-to-all-start",
     "all-to-all float32 64"),
    # As the tuple form of a whole program's collective, longer than a comment's distance.
    ("(f32[1]{0}, f32[1]{0}, f32[1]{0}, f32[1]{0}, f32[1]{0}, /*index=5*/s4[8]{0})", "all-to-all",
     "all-to-all float32 20, all-to-all int4 4"),
    # As started on GPUs, of many arrays: the sixth of each tuple behind a comment.
    (("((bf16[2]{0}, bf16[2]{0}, bf16[2]{0}, bf16[2]{0}, bf16[2]{0}, /*index=5*/f32[4]{0}, "
     "bf16[2]{0}), (bf16[16]{0}, bf16[16]{0}, bf16[16]{0}, bf16[16]{0}, bf16[16]{0}, "
     "/*index=5*/f32[32]{0}, bf16[16]{0}))"),
     "all-gather-start", "all-gather bfloat16 192, all-gather float32 128"),
    # On GPUs since JAX 0.12: the operands in a tuple, and the results.
    ("((f32[256,512]{1,0}), f32[256,512]{1,0})", "all-reduce-start", "all-reduce float32 524288"),
    ("((f32[2]{0}, bf16[4]{0}), (f32[2]{0}, bf16[4]{0}))", "all-reduce-start",
     "all-reduce float32 8, all-reduce bfloat16 8"),
    ("f32[16]{0}", "all-gather-done", ""),
    ("s8[16]{0}", "ragged-all-to-all", "ragged-all-to-all int8 16"),
    ("s8[16]{0}", "collective-broadcast", "collective-broadcast int8 16"),
]  # fmt: skip
# Formats of 8 bits and less, and the bytes of 64 numbers.
FORMATS = {
    "f8e4m3fn": ("float8_e4m3fn", 64),
    "f8e5m2": ("float8_e5m2", 64),
    "f8e8m0fnu": ("float8_e8m0fnu", 64),
    "s8": ("int8", 64),
    "u8": ("uint8", 64),
    "f4e2m1fn": ("float4_e2m1fn", 32),
    "bf16": ("bfloat16", 128),
}


def test_what_a_collective_returns():
    for shape, op, said in RETURNED:
        found = read_hlo(f"  %x.1 = {shape} {op}(%a, %b), channel_id=1").collectives
        assert ", ".join(f"{k} {d} {size}" for (k, d), (_, size) in found.items()) == said, shape
        assert all(count == 1 for count, _ in found.values()), shape
    for dtype, (name, size) in FORMATS.items():
        for shape, op in (
            (f"{dtype}[8,8]{{1,0}}", "all-gather"),
            (f"({dtype}[2,8]{{1,0}}, {dtype}[8,8]{{1,0:T(8,128)(4,1)}})", "all-gather-start"),
        ):
            text = f"  %x.1 = {shape} {op}(%a), channel_id=1"
            assert read_hlo(text).collectives == {("all-gather", name): (1, size)}


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


EIGHT_BITS = """
HloModule jit_step, is_scheduled=true

FileNames
1 "train.py"
2 "LIBRARY/flax/linen/linear.py"

FunctionNames
1 "Model.__call__"
2 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=287 end_line=292 column=8 end_column=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main (a: f8e4m3fn[64,32], b: f8e5m2[32,16], c: bf16[64,32]) -> bf16[64,16] {
  %a = f8e4m3fn[64,32]{1,0} parameter(0)
  %b = f8e5m2[32,16]{1,0} parameter(1)
  %c = bf16[64,32]{1,0} parameter(2)
  %one = f32[] constant(1)
  %y = (bf16[64,16]{1,0}, s8[1024]{0}) custom-call(%a, %b, %one, %one), \
custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(c)/call_exported/jit(f)\
/transpose(jvp(Model))/Block_3/up/dot_general" stack_frame_id=2}
  %dx = (bf16[64,16]{1,0}, u8[0]{0}) custom-call(%a, %a, %one, %one), \
custom_call_target="__cudnn$blockScaledDot", \
metadata={op_name="jit(f)/jvp(Model)/Block_4/up/jvp(jit(_scaled_matmul))/x"}
  %z = s32[64,64]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %w = f32[64,64]{1,0} dot(%c, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
""".replace("LIBRARY", str(Path(jax.__file__).parents[1]))


def test_products_in_8_bits_are_told_one_by_one():
    program = read_hlo(EIGHT_BITS)
    backward, block, unknown, mixed = program.products
    assert backward == Multiplied(
        "__cublas$lt$matmul$f8",
        "float8_e4m3fn*float8_e5m2",
        ("float8_e4m3fn[64,32]", "float8_e5m2[32,16]"),
        "bfloat16[64,16]",
        HloPlace("Model/Block_3/up", "train.py:42", backward=True),
    )
    assert (block.op, block.dtype) == ("__cudnn$blockScaledDot", "float8_e4m3fn")
    assert block.place == HloPlace("Model/Block_4/up", "", backward=False)
    assert mixed.dtype == "bfloat16*float8_e4m3fn"
    assert not unknown.dtype
    assert program.products_in_8_bits == (backward, block)
    assert share_of_8_bits(program) == "2 of 4"


def test_layers_that_differ_in_a_number_are_one_line():
    call = EIGHT_BITS.splitlines()[25]
    assert "blockScaledDot" in call
    text = EIGHT_BITS.replace(call, f"{call}\n{call.replace('Block_4', 'Block_5')}")
    lines = list(lines_of_8_bits(read_hlo(text)))
    blocks, tensor, left = lines
    assert blocks == (
        "  2 x __cudnn$blockScaledDot float8_e4m3fn[64,32] x float8_e4m3fn[64,32] -> "
        "bfloat16[64,16]: Model/Block_*/up forward"
    )
    assert tensor == (
        "  1 x __cublas$lt$matmul$f8 float8_e4m3fn[64,32] x float8_e5m2[32,16] -> "
        "bfloat16[64,16]: train.py:42 Model/Block_*/up backward"
    )
    assert left == "  not in 8 bits: 1 of an unknown dtype, 1 bfloat16*float8_e4m3fn"


def test_more_kinds_than_are_printed_are_counted():
    product = read_hlo(EIGHT_BITS).products[0]
    kinds = [product._replace(result=f"bfloat16[{n},{n}]") for n in range(MOST + 3)]
    program = read_hlo("")._replace(products=tuple(kinds))
    lines = list(lines_of_8_bits(program))
    assert len(lines) == MOST + 1
    assert lines[-1] == "  and 3 more kinds"


def test_cycles_that_the_compiler_does_not_know_are_not_summed():
    line = '  %x.{} = f32[8]{{0}} copy(%a), backend_config={{"estimated_cycles":"{}"}}\n'
    for unknown in (2**63 - 1, 2**64 - 1):
        text = "".join(line.format(i, n) for i, n in enumerate((1200, unknown, 34)))
        program = read_hlo(text)
        assert (program.cycles, program.unknown_cycles) == (1234, 1)
        program = read_hlo(line.format(0, unknown))
        assert (program.cycles, program.unknown_cycles) == (None, 1)
    assert read_hlo("").unknown_cycles == 0


def test_where_a_product_compiled_here_was_written():
    @jax.jit
    @jax.grad
    def program(x):
        with jax.named_scope("layer"):
            y = jnp.tanh(x) @ x  # the line in question
        return y.sum()

    places = [
        p.place for p in read_hlo(program.lower(jnp.ones((32, 32))).compile().as_text()).products
    ]
    line = inspect.getsourcelines(program)[1] + 4
    assert places
    assert {(p.path, p.source) for p in places} == {("layer", f"test_hlo.py:{line}")}


def traffic_of(fn, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(fn).lower(*arrays).compile()
    return read_hlo(compiled.as_text()).traffic, compiled.cost_analysis()["bytes accessed"]


def test_the_traffic_of_a_program_is_that_of_its_kernels():
    found, said = traffic_of(lambda x, w: jnp.tanh(x @ w) + 1, (128, 256), (256, 512))
    assert found.products == 4 * (128 * 256 + 256 * 512 + 128 * 512)
    assert found.others == 4 * 2 * 128 * 512
    assert found.kernels == 1
    assert said == pytest.approx(found.products + found.others, rel=0.01)


LAYERS = """
%body (s: (s32[], f32[8], f32[100,8], f32[100,8])) -> (s32[], f32[8], f32[100,8], f32[100,8]) {
  %s = (s32[], f32[8]{0}, f32[100,8]{1,0}, f32[100,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %w = f32[100,8]{1,0} get-tuple-element(%s), index=2
  %y = f32[100,8]{1,0} get-tuple-element(%s), index=3
  %f = f32[8]{0} fusion(%x, %w, %i), kind=kLoop, calls=%layer
  %u = f32[100,8]{1,0} fusion(%y, %f, %i), kind=kLoop, calls=%kept
  ROOT %t = (s32[], f32[8]{0}, f32[100,8]{1,0}, f32[100,8]{1,0}) tuple(%i, %f, %w, %u)
}

%layer (a: f32[8], b: f32[100,8], n: s32[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[100,8]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %row = f32[1,8]{1,0} dynamic-slice(%b, %n), dynamic_slice_sizes={1,8}
  ROOT %m = f32[8]{0} multiply(%a, %row)
}

%kept (c: f32[100,8], d: f32[8], k: s32[]) -> f32[100,8] {
  %c = f32[100,8]{1,0} parameter(0)
  %d = f32[8]{0} parameter(1)
  %k = s32[] parameter(2)
  %e = f32[1,8]{1,0} bitcast(%d)
  ROOT %v = f32[100,8]{1,0} dynamic-update-slice(%c, %e, %k)
}

%test (q: (s32[], f32[8], f32[100,8], f32[100,8])) -> pred[] {
  %q = (s32[], f32[8]{0}, f32[100,8]{1,0}, f32[100,8]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

ENTRY %main (z: f32[8]) -> f32[8] {
  %z = f32[8]{0} parameter(0)
  %init = (s32[], f32[8]{0}, f32[100,8]{1,0}, f32[100,8]{1,0}) tuple(%z)
  ROOT %loop = (s32[], f32[8]{0}, f32[100,8]{1,0}, f32[100,8]{1,0}) while(%init), \
condition=%test, body=%body, backend_config={"known_trip_count":{"n":"100"}}
}
"""


def test_a_loop_reads_and_writes_slices_of_what_it_stacks_as_often_as_it_runs():
    row, index = 4 * 8, 4
    layer = row + row + row + index  # its result; of its operands, of the weights one row
    kept = row + row + index  # one row written, of what is computed
    found = read_hlo(LAYERS).traffic
    assert found.kernels == 200
    assert found.others == 100 * (layer + kept)
    assert found.products == 0


def test_cycles_count_as_often_as_a_loop_runs():
    text = LAYERS.replace("calls=%layer", 'calls=%layer, backend_config={"estimated_cycles":"7"}')
    assert (read_hlo(text).cycles, read_hlo(text).cycles_run) == (7, 700)


def test_attention_of_a_library_counts_its_products():
    q = "bf16[2,1024,8,64]{3,2,1,0}"
    dims = '"dimensions": ["2", "8", "1024", "1024"]'
    scores = f'"intermediate_tensor_shape": {{"element_type": "BF16", {dims}}}'
    text = f"""
  %q = {q} parameter(0)
  %f = ({q}, f32[2,8,1024]{{2,1,0}}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={{{scores}, "mask_type": "NO_MASK"}}
  %b = ({q}, {q}, {q}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={{{scores}, "mask_type": "CAUSAL"}}
"""
    product = 2 * 2 * 8 * 1024 * 1024 * 64
    assert read_hlo(text).attention_flops == (("bfloat16", 2 * product + 5 * product // 2),)
