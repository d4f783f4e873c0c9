"""The collectives of compiled programs: each once, over which axes, and as often as loops run."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.preflight.hlo_collectives import (
    Collective,
    axes_of,
    remark_on_collectives,
    rows_of_collectives,
)

MESH = (("data", 4), ("model", 2))


def over_mesh(fn, *shapes, sizes=(4, 2), names=("data", "model")):
    """What is read of `fn` on one device's part of arrays, compiled here for eight."""
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False)
    arrays = [jax.ShapeDtypeStruct((8 * n, *rest), jnp.float32) for n, *rest in shapes]
    text = jax.jit(mapped).lower(*arrays).compile().as_text()
    return read_hlo(text, tuple(zip(names, sizes, strict=True)))


# Which axes.


@pytest.mark.parametrize(
    ("text", "axes", "without"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "model", "groups of 2"),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", "data", "groups of 4"),
        ("replica_groups={{6,2,0,4},{7,1,3,5}}", "data", "groups of 4"),  # in whatever order
        ("replica_groups={}", "data+model", "groups of 8"),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", "groups of 4", "groups of 4"),  # half of data
        ("replica_groups={{0,1,2},{3,4,5},{6,7}}", "groups of 2 to 3", "groups of 2 to 3"),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", "groups of 1", "groups of 1"),
        ("replica_groups=[4,2]<=[8]", "model", "groups of 2"),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", "data", "groups of 4"),
        ("replica_groups=[1,8]<=[8]", "data+model", "groups of 8"),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", "groups of 2", "groups of 2"),
        # Shardy's, by name; the names are not always those of the arguments' mesh.
        ("replica_groups=mesh['data'=4,'model'=2] {'data'}", "data", "groups of 4"),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", "model", "groups of 2"),
        ("replica_groups=mesh[a=4,b=2] {a,b}", "data+model", "groups of 8"),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", "model", "groups of 2"),
        ("replica_groups=mesh['a'=8] {'a':(1)4}", "data", "groups of 4"),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", "groups of 2", "groups of 2"),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(<=[4,2]T(1,0)) {'b'}", "data",
         "groups of 4"),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", "data",
         "groups of 4"),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", "model",
         "groups of 2"),
        ("source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", "data",
         "groups of 4"),
        ("source_target_pairs={{0,2},{1,3}}", "data", "groups of 2"),  # not a ring
        ("source_target_pairs={{0,7},{7,0}}", "data+model", "groups of 2"),
        ("dimensions={0}", "", ""),
    ],
)  # fmt: skip
def test_the_axes_that_groups_are(text, axes, without):
    rest = f"%x), channel_id=1, {text}, use_global_device_ids=true"
    assert axes_of(rest, MESH) == axes
    assert axes_of(rest, devices=8) == without
    # A mesh of other devices than the program's: no axis of it.
    assert axes_of(rest, (("data", 2),), devices=8) in ("", "data", without)


def test_axes_as_compiled_here():
    """Each subset of a mesh's axes, as JAX and XLA write it today."""
    names = ("a", "b", "c")
    subsets = [s for n in (1, 2, 3) for s in itertools.combinations(names, n)]

    def fn(x):
        return sum((lax.psum(x * i, subset) for i, subset in enumerate(subsets, 2)), x)

    program = over_mesh(fn, (4,), sizes=(2, 2, 2), names=names)
    assert {one.axes for one in program.moved} == {"+".join(subset) for subset in subsets}


# Each once.


def test_collectives_of_one_channel_are_each_counted():
    """`shard_map` gives all its collectives channel 1."""

    def fn(x):
        return lax.psum(x, "model") * lax.pmax(x, "data") + lax.ppermute(x, "model", [(0, 1)])

    program = over_mesh(fn, (2, 16))
    assert sorted(program.moved) == [
        Collective("all-reduce", "float32", "data", 128),
        Collective("all-reduce", "float32", "model", 128),
        Collective("collective-permute", "float32", "model", 128),
    ]


FUSIONS = """
HloModule step, num_partitions=8

%start (p: bf16[8,2]) -> (bf16[8,2], bf16[8,8]) {
  %p = bf16[8,2]{1,0} parameter(0)
  %ag.1 = bf16[8,8]{1,0} all-gather(%p), channel_id=14, replica_groups=[2,4]<=[4,2]T(1,0), \
frontend_attributes={chain_id="0"}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %s = (bf16[8,2]{1,0}, bf16[8,8]{1,0}) custom-call(%ag.1), \
custom_call_target="AsyncCollectiveStart"
}

%middle (p: bf16[8,2]) -> bf16[8,8] {
  %p = bf16[8,2]{1,0} parameter(0)
  ROOT %ag.2 = bf16[8,8]{1,0} all-gather(%p), channel_id=14, replica_groups=[2,4]<=[4,2]T(1,0), \
frontend_attributes={chain_id="0"}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
}

%done (p: bf16[8,2]) -> bf16[8,8] {
  %p = bf16[8,2]{1,0} parameter(0)
  %ag.3 = bf16[8,8]{1,0} all-gather(%p), channel_id=14, replica_groups=[2,4]<=[4,2]T(1,0), \
frontend_attributes={chain_id="0"}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %d = bf16[8,8]{1,0} custom-call(%p, %ag.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.2 (p: f32[8,8]) -> (f32[2,8], f32[8,2]) {
  %p = f32[8,8]{1,0} parameter(0)
  %ar = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-reduce(%p, %p), channel_id=1, \
replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %g.0 = f32[8,8]{1,0} get-tuple-element(%ar), index=0
  %g.1 = f32[8,8]{1,0} get-tuple-element(%ar), index=1
  %table = u32[8]{0} constant({0, 0, 1, 1, 2, 2, 3, 3})
  %i = u32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %d.0 = f32[2,8]{1,0} dynamic-slice(%g.0, %i, %zero), dynamic_slice_sizes={2,8}
  %d.1 = f32[8,2]{1,0} dynamic-slice(%g.1, %zero, %i), dynamic_slice_sizes={8,2}
  ROOT %t = (f32[2,8]{1,0}, f32[8,2]{1,0}) tuple(%d.0, %d.1)
}

%wrapped (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %a2a = f32[8,8]{1,0} all-to-all(%p), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

ENTRY %main (a: bf16[8,2], b: f32[8,8]) -> bf16[8,8] {
  %a = bf16[8,2]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %as = (bf16[8,2]{1,0}, bf16[8,8]{1,0}) fusion(%a), kind=kCustom, calls=%start
  %m = bf16[8,8]{1,0} fusion(%a), kind=kOutput, calls=%middle
  %rs = (f32[2,8]{1,0}, f32[8,2]{1,0}) fusion(%b), kind=kCustom, calls=%all-reduce-scatter.2
  %w = ((f32[8,8]{1,0}), f32[8,8]{1,0}, u32[]) async-start(%b), calls=%wrapped
  %u = ((f32[8,8]{1,0}), f32[8,8]{1,0}, u32[]) async-update(%w), calls=%wrapped
  %x = f32[8,8]{1,0} async-done(%u), calls=%wrapped
  ROOT %ad = bf16[8,8]{1,0} fusion(%a), kind=kCustom, calls=%done
}
"""


def test_what_no_fusion_starts_is_counted_once_too():
    text = FUSIONS.replace("AsyncCollectiveStart", "Other")
    assert sorted(read_hlo(text, MESH).moved) == sorted(read_hlo(FUSIONS, MESH).moved)
    both = FUSIONS.replace('chain_id="0"', 'chain_id="1"', 1).replace("AsyncCollectiveStart", "O")
    assert read_hlo(both).collectives["all-gather", "bfloat16"] == (2, 256)


def test_groups_of_replicas_are_of_all_their_devices():
    """Without `use_global_device_ids`, numbers are of replicas; there is one."""
    rest = "%x), channel_id=2, replica_groups={{0}}"
    assert axes_of(rest, MESH) == "data+model"
    assert axes_of(f"{rest}, use_global_device_ids=true", MESH) == "groups of 1"
    assert axes_of("%x), replica_groups={{0}}", MESH) == "groups of 1"


def test_what_tpus_fuse_is_counted_once():
    """A gather that fusions carry on, a reduce-scatter in a fusion, an operation made async."""
    assert read_hlo(FUSIONS, MESH).moved == (
        Collective("all-gather", "bfloat16", "data", 128),
        Collective("reduce-scatter", "float32", "data", 2 * 64),
        Collective("all-to-all", "float32", "model", 256),
    )


def test_what_is_made_asynchronous_is_a_kernel_of_its_own():
    """What an asynchronous pair, or a triple, wraps runs once; a collective is not a kernel."""
    copied = FUSIONS.replace("all-to-all(%p), channel_id=3,", "copy(%p),")
    before, after = (read_hlo(text, MESH).traffic for text in (FUSIONS, copied))
    assert after.kernels == before.kernels + 1
    assert after.others == before.others + 2 * 256


# As often as loops run.


def test_a_loops_collectives_count_as_often_as_it_runs():
    def fn(x):
        def inner(x, _):
            return lax.psum(x, "model") / 2, None

        def outer(x, _):
            x, _ = lax.scan(inner, x, None, length=3)
            return lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), None

        x, _ = lax.scan(outer, x, None, length=5)
        return lax.psum(x, ("data", "model"))

    program = over_mesh(fn, (2, 16))
    assert sorted(program.moved) == [
        Collective("all-reduce", "float32", "data+model", 128, 1),
        Collective("all-reduce", "float32", "model", 128, 15),
        Collective("collective-permute", "float32", "data", 128, 5),
    ]
    assert program.collectives == {
        ("all-reduce", "float32"): (16, 16 * 128),
        ("collective-permute", "float32"): (5, 5 * 128),
    }


def test_what_is_not_known_is_said():
    """A loop until something is reached, and what is inside; a branch."""

    def fn(x, y):
        def body(x):
            return lax.fori_loop(0, 3, lambda _, x: lax.psum(x, "model") + 1, x)

        x = lax.while_loop(lambda x: x.sum() < 100, body, x)
        y = lax.cond(y.sum() > 0, lambda y: lax.psum(y, "data"), jnp.sin, y)
        return x + lax.psum(y, ("data", "model"))

    program = over_mesh(fn, (2, 16), (2, 16))
    assert sorted(program.moved) == [
        Collective("all-reduce", "float32", "data", 128, 1, known=False),
        Collective("all-reduce", "float32", "data+model", 128),
        Collective("all-reduce", "float32", "model", 128, 3, known=False),
    ]
    assert rows_of_collectives(program.moved)["all-reduce float32 model"] == "3 x, 384 B (1 ?)"
    assert remark_on_collectives(program.moved).startswith(
        "2 of the collectives (?) are counted once"
    )


# As TPUs' compiler leaves a loop: its trips are not said, but can be read.
LOOP = """
%body (s: (s32[], f32[8], s32[], s32[])) -> (s32[], f32[8], s32[], s32[]) {
  %one = s32[] constant(1)
  %s = (s32[], f32[8]{0}, s32[], s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %i.copy = s32[]{:T(128)S(6)} copy(%i)
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %by = s32[] get-tuple-element(%s), index=3
  %y = f32[8]{0} all-reduce(%x), channel_id=4, replica_groups=[1,8]<=[8], to_apply=%add
  %next = s32[]{:T(128)} add(%i.copy, %one), metadata={op_name="while/body/add"}
  ROOT %t = (s32[], f32[8]{0}, s32[], s32[]) tuple(%next, %y, %n, %by)
}

%test (s.1: (s32[], f32[8], s32[], s32[])) -> pred[] {
  %most = s32[]{:T(128)} constant(6)
  %s.1 = (s32[], f32[8]{0}, s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=2
  ROOT %lt = pred[] compare(%i.1, %most), direction=LT
}

ENTRY %main (a: f32[8]) -> (s32[], f32[8], s32[], s32[]) {
  %a = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %nine = s32[] constant(9)
  %two = s32[] constant(2)
  %zero.copy = s32[] copy(%zero)
  %init = (s32[], f32[8]{0}, s32[], s32[]) tuple(%zero.copy, %a, %nine, %two)
  ROOT %w = (s32[], f32[8]{0}, s32[], s32[]) while(%init), condition=%test, body=%body
}
"""


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({}, 6),
        ({"constant(6)": "constant(-1)"}, 0),
        ({"compare(%i.1, %most)": "compare(%i.1, %n.1)"}, 9),  # from the loop's own state
        ({"add(%i.copy, %one)": "add(%one, %i.copy)"}, 6),
        ({"%one = s32[] constant(1)": "%one = s32[] constant(4)"}, 2),
        ({"add(%i.copy, %one)": "add(%i.copy, %by)"}, 3),
        ({"%zero = s32[] constant(0)": "%zero = s32[] constant(2)"}, 4),
        # What is said goes first.
        ({"body=%body": 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'}, 7),
        # What cannot be read is not guessed.
        ({"direction=LT": "direction=GT"}, None),
        ({"compare(%i.1, %most)": "compare(%most, %i.1)"}, None),
        ({"%zero = s32[] constant(0)": "%zero = s32[] custom-call()"}, None),
        ({"%one = s32[] constant(1)": "%one = s32[] constant(-1)"}, None),
        ({"%one = s32[] constant(1)": "%one = s32[] constant(0)"}, None),
        ({"add(%i.copy, %one)": "add(%i.copy, %i)"}, None),
        ({"add(%i.copy, %one)": "multiply(%i.copy, %one)"}, None),
        ({"add(%i.copy, %one)": "add(%by, %one)"}, None),
        ({"compare(%i.1, %most)": "compare(%i.1, %n.1)", "tuple(%next, %y, %n": "tuple(%next, %y, "
          "%next"}, None),
        ({"while(%init)": "while(%a)"}, None),
    ],
)  # fmt: skip
def test_the_trips_of_a_loop_as_tpus_leave_it(changes, times):
    text = LOOP
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    [found] = read_hlo(text, (("data", 8),)).moved
    assert found == Collective(
        "all-reduce", "float32", "data", 32, 1 if times is None else times, times is not None
    )


def test_a_loops_condition_runs_once_more_than_its_body():
    text = LOOP.replace(
        "  ROOT %lt", "  %sum = f32[8]{0} all-reduce(%z), replica_groups={}\n  ROOT %lt"
    )
    assert [one.times for one in read_hlo(text).moved] == [6, 7]
