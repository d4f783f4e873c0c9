"""Two runs, site by site: `compare`, its text, JSON and table; runs that are saved and loaded."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import numerics
from jaxmp._numerics.compare import compare
from jaxmp._numerics.record import Record
from jaxmp._numerics.statistics import Measurements, Statistics, unpack
from jaxmp._numerics.survey import Loop, Site, SurveyedProgram

from support import one_line

NAN = np.float32(np.nan).view("i4")
W = jnp.full((16, 8), 300.0).at[:, 1:].set(0.01)
X = 100 * jnp.ones((4, 16))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(1e-3 * (x @ w)))


@pytest.fixture(scope="module")
def runs() -> dict[str, numerics.Capture]:
    return {
        policy: numerics.capture(loss, policy, twins=False)(W, X)
        for policy in ("mixed_float16", "mixed_bfloat16")
    }


def entry(
    name: str,
    op: str = "mul",
    magnitudes: Any = 1.0,
    *,
    zeros: int = 0,
    dtype: str = "float16",
    bad: Any = None,
    loops: tuple[Loop, ...] = (),
    depth: int = 1,
    scale: float = 0.0,
    runs: int = 1,
    **site: Any,
) -> numerics.Measured:
    """A site of so many iterations, whose results are all of one magnitude in each."""
    each = np.asarray(magnitudes, np.float32)
    of_iteration = [runs, 100, zeros, *[0] * 7]
    statistics = unpack(
        100,
        Measurements(
            top=np.where(np.zeros(each.shape, bool) if bad is None else bad, NAN, each.view("i4")),
            counts=np.broadcast_to(of_iteration, (*each.shape, 10)),
            extremes=np.stack([each, -each], -1),
            sums=np.stack([100 * np.float64(each) ** 2, 0 * each, 0 * each], -1),
            spread=np.zeros((*each.shape, 256 + 4 * 48), np.int32),
        ),
    )
    place = {"path": "Net/layer", "line": "net.py:1", "kind": "activation", "shape": (10, 10)}
    reads = (f"before {depth - 1}",) if depth > 1 else (f"terms {scale}",) if scale else ()
    where = Site(name=name, op=op, dtype=dtype, loops=loops, reads=reads, **place | site)
    return numerics.Measured(where, statistics)


def run(*entries: numerics.Measured, policy: str = "a policy") -> Record:
    """A run of these sites, and of what they read: terms of sums, or a long chain of others."""
    before = []
    for ref in {ref for one in entries for ref in one.site.reads}:
        what, number = ref.split()
        place = {"path": what, "dtype": "float32"}
        if what == "terms":
            before.append(entry(ref, "neg", float(number), **place))
        else:
            names = [f"before {i}" for i in range(int(number) + 1)]
            chain = [entry(name, "neg", **place) for name in names[1:]]
            before += [
                dataclasses.replace(one, site=dataclasses.replace(one.site, reads=(read,)))
                for one, read in zip(chain, names, strict=False)
            ]
    sites = {one.site.name: one for one in (*before, *entries)}
    program = SurveyedProgram({name: one.site for name, one in sites.items()})
    return Record(policy, program, sites, 0, 1.0, False, backend="cpu", jax_version="0")


def matched(a: Record, b: Record) -> list[tuple[str, str]]:
    return [(p.this.site.name, p.other.site.name) for p in compare(a, b).pairs]


# What is the same site.


def test_what_another_policy_adds_shifts_no_pair():
    a = run(entry("1"), entry("2", "add"), entry("3"), entry("4", "tanh"))
    b = run(entry("1"), entry("2", "convert_element_type"), entry("3"), entry("4", "add"),
            entry("5"), entry("6", "tanh"))  # fmt: skip
    # Of the three products of the one and two of the other, each is beside its neighbor's.
    found = compare(a, b)
    assert matched(a, b)[1:] == [("2", "4"), ("3", "5"), ("4", "6")]
    assert len(found.only_other) == 2
    assert found.only_this == ()


def test_lines_may_move_and_sizes_change():
    a = run(entry("1", line="net.py:7"), entry("2", "add", shape=(4,)))
    b = run(entry("1", line="net.py:9"), entry("2", "add", shape=(8,)))
    assert matched(a, b) == [("1", "1"), ("2", "2")]
    assert matched(a, run(entry("1", line="other.py:7"), entry("2", "add", path="Net"))) == []
    # But where nobody knows which is which.
    a = run(entry("1", line="net.py:7"), entry("2", line="net.py:8"))
    assert matched(a, run(entry("1", line="net.py:9"))) == []


def test_forward_is_not_backward_and_one_module_not_another():
    a = run(entry("1"), entry("2", backward=True), entry("3", path="Net/head"))
    b = run(entry("1", path="Net/head"), entry("2"), entry("3", backward=True))
    assert matched(a, b) == [("1", "2"), ("2", "3"), ("3", "1")]
    assert matched(run(entry("1")), run(entry("1", backward=True))) == []


# What is more than rounding.


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        ({}, {"magnitudes": 1 + 3 * 2**-10}, None),
        ({}, {"magnitudes": 1 + 6 * 2**-10}, "rms"),
        # The coarser of two dtypes is what counts.
        ({}, {"magnitudes": 1 + 3 * 2**-7, "dtype": "bfloat16"}, None),
        ({}, {"magnitudes": 1 + 6 * 2**-7, "dtype": "bfloat16"}, "rms"),
        # Longer programs round more often.
        ({"depth": 255}, {"depth": 255, "magnitudes": 1 + 28 * 2**-10}, None),
        ({"depth": 255}, {"depth": 255, "magnitudes": 1 + 36 * 2**-10}, "rms"),
        ({"zeros": 10}, {"zeros": 12}, None),
        ({"zeros": 10}, {"zeros": 15}, "zeros"),
        ({}, {"bad": True}, "not finite"),
        ({"bad": True}, {"bad": True, "magnitudes": 9.0}, None),
        # What a sum's terms left when they cancelled.
        ({"op": "reduce_sum", "magnitudes": 1e-5, "scale": 1.0}, {"op": "reduce_sum"}, "rms"),
        ({"op": "reduce_sum", "magnitudes": 1e-5, "scale": 1.0},
         {"op": "reduce_sum", "magnitudes": 1e-4, "scale": 1.0}, None),
        ({}, {"runs": 0, "magnitudes": 0.0}, "runs"),
        ({"op": "add_any"}, {"op": "add_any", "magnitudes": 2.0}, None),
    ],
)  # fmt: skip
def test_what_diverges(a, b, what):
    for one, two in ((a, b), (b, a)):
        first = compare(run(entry("1", **one)), run(entry("1", **two))).first
        assert (first.what if first else None) == what


def test_the_largest_magnitude_counts_where_the_mean_does_not():
    def peak(x: float) -> numerics.Measured:
        a = entry("1")
        return dataclasses.replace(
            a, statistics=dataclasses.replace(a.statistics, largest=np.asarray(x))
        )

    first = compare(run(peak(1.0)), run(peak(2.1))).first
    assert (first.what, first.this, first.other) == ("amax", 1.0, 2.1)
    assert compare(run(peak(1.0)), run(peak(2.0))).first is None


def test_a_float32_site_after_coarse_ones_is_as_coarse():
    def after(x: float) -> Record:
        return run(entry("1", dtype="bfloat16"), entry("2", "exp", x, dtype="float32"))

    assert compare(after(1.0), after(1.01)).first is None
    assert compare(run(entry("2", dtype="float32")),
                   run(entry("2", magnitudes=1.01, dtype="float32"))).first  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_divergence_is_the_first_that_ran(reverse):
    loop = (Loop("3", reverse=reverse),)
    same = [entry("1"), entry("3.0/0", magnitudes=[1.0] * 5, loops=loop)]
    b = entry("3.0/1", "add", [1.0] * 5, loops=loop)
    first = compare(
        run(*same, b, entry("4", "sub")),
        run(
            same[0],
            entry("3.0/0", magnitudes=[1.0, 1.0, 1.0, 2.0, 2.0], loops=loop),
            entry("3.0/1", "add", [1.0, 1.0, 3.0, 1.0, 1.0], loops=loop),
            entry("4", "sub", 7.0),
        ),
    ).first
    # `3.0/1` is the later in the body, and differs in an earlier iteration.
    assert (first.pair.this.site.name, first.iteration, first.other) == ("3.0/1", (2,), 3.0)
    assert "add (float16, forward), iteration 2" not in str(first)
    assert "iteration 2: rms 1 here, 3 there" in str(first)


def test_loops_of_other_lengths_are_compared_as_a_whole():
    loop = (Loop("3"),)
    a = run(entry("1", magnitudes=[1.0] * 5, loops=loop))
    b = run(entry("1", magnitudes=[1.0] * 6, loops=loop))
    assert compare(a, b).first is None
    c = run(entry("1", magnitudes=[1.0] * 5 + [9.0], loops=loop))
    assert compare(a, c).first.iteration == ()


# Real runs.


def test_two_policies(runs):
    half, low = runs["mixed_float16"], runs["mixed_bfloat16"]
    comparison = half.compare(low)
    first = comparison.first
    assert first.pair.this.site.op == "dot_general"
    assert (first.what, first.this, first.other) == ("not finite", 1.0, 0.0)
    assert first.pair.dtypes == "float16, bfloat16"
    said = r"^first +dot_general \(float16, bfloat16, forward\) in test_numerics_"
    assert re.search(said, str(comparison), re.MULTILINE)
    assert not comparison.only_this + comparison.only_other
    data = json.loads(json.dumps(comparison.to_dict()), parse_constant=pytest.fail)
    assert data["first"]["op"] == "dot_general"
    assert len(data["sites"]) == len(comparison.pairs)
    assert [site["diverges"] for site in data["sites"]].count(True) >= 1
    back = low.compare(half).first
    assert (back.pair.this.site.name, back.this, back.other) == (first.pair.other.site.name, 0, 1)
    same = half.compare(half)
    assert same.first is None
    assert "rounding explains every difference" in str(same)
    assert len(same.pairs) == len(half.sites)
    assert all(p.amax == 0 for p in same.pairs)
    with pytest.raises(TypeError, match=r"compare: other must be what .* not str"):
        half.compare("mixed_bfloat16")
    with pytest.raises(TypeError, match="save: run must be"):
        numerics.save(3, "nowhere")


def test_saved_and_loaded(runs, tmp_path):
    one, two = runs["mixed_float16"], runs["mixed_bfloat16"]
    for name, which in (("one", one), ("two", two)):
        numerics.save(which, tmp_path / name)
    loaded = numerics.load(tmp_path / "one")
    assert loaded.title == one.title
    there = loaded.compare(numerics.load(tmp_path / "two"))
    assert str(there) == str(one.compare(two))
    assert there.to_dict() == one.compare(two).to_dict()
    assert loaded.all_origins() == one.all_origins() != []
    for name, saved in loaded.sites.items():
        assert saved.site == one.sites[name].site
        for field in dataclasses.fields(Statistics):
            a, b = (getattr(m.statistics, field.name) for m in (one.sites[name], saved))
            np.testing.assert_equal(b, a, field.name)
    with pytest.raises(ValueError, match="a loaded capture has no results"):
        loaded.results  # noqa: B018


@pytest.mark.slow
def test_the_float32_run_is_compared_operation_by_operation(tmp_path):
    small = lambda w: jnp.sum(w * jnp.float16(300) * jnp.float16(300))  # noqa: E731
    report = jaxmp.diagnose(small, None)(jnp.ones(3, jnp.float16))
    comparison = report.run.compare(report.wide)
    assert comparison.first.what == "not finite"
    assert comparison.first.pair.other.site.dtype == "float32"
    assert [p.this.site.name for p in comparison.pairs] == list(report.run.sites)
    numerics.save(report, tmp_path / "report.npz")
    loaded = numerics.load(tmp_path / "report.npz")
    assert str(loaded) == str(report)
    assert loaded.faults == report.faults != ()
    assert str(report.faults[0]) in one_line(report.compare(report))


# Files and tables.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00\x01", "was not written by jaxmp.numerics.save"),
        (b"", "was not written by"),
        ({"other": 1}, "was not written by"),
        ({"metadata": "[]"}, "was not written by"),
        (
            {"metadata": '{"jaxmp_numerics": 99}'},
            "is of version 99, and this jaxmp reads version 2",
        ),
        ({"metadata": '{"jaxmp_numerics": 2, "sites": [{}]}'}, "is damaged"),
    ],
)
def test_what_cannot_be_loaded(content, message, tmp_path):
    if isinstance(content, bytes):
        (tmp_path / "run.npz").write_bytes(content)
    else:
        np.savez(tmp_path / "run.npz", **content)
    with pytest.raises(ValueError, match=rf"load: .*run\.npz {message}"):
        numerics.load(tmp_path / "run.npz")


def test_the_table_has_a_row_for_each_site():
    a = run(*(entry(str(i), path=f"a|b/{i}", zeros=i % 7) for i in range(20)),
            entry("alone", "exp"), policy="one")  # fmt: skip
    b = run(*(entry(str(i), path=f"a|b/{i}") for i in range(20)), entry("x"))
    text = compare(a, b).to_markdown()
    assert str(compare(a, b)) in text
    head, rule, *rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 20
    assert {row.replace("\\|", "").count("|") for row in (head, rule, *rows)} == {11}
    marks = [row.split("|")[-2].strip() for row in rows]
    assert marks.count("first") == 1
    assert [i for i, mark in enumerate(marks) if mark] == [i for i in range(20) if i % 7 > 2]
    site = r"mul (float16, forward) in a\|b/3 at net.py:1"
    assert rows[3].startswith(f"| {site} | 1 | 1 | 1 | 1 | 0.03 | 0 |")
