"""What `preflight` says of the memory of the host, and of the time at its link."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from jaxmp._core.speed import Work
from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.preflight.program import bytes_by_purpose, traced_program
from jaxmp._tools.preflight.report import PreflightReport
from jaxmp._tools.preflight.result import Preflight
from jaxmp._tools.speed.target import parse_target

from support import of_each_compiler

MIB = 2**20
SIZES = {
    "argument_bytes": 10 * MIB,
    "host_argument_bytes": 64 * MIB,
    "host_output_bytes": 64 * MIB,
    "host_aliased_bytes": 64 * MIB,
    "host_temporary_bytes": 32 * MIB,
}


def report(target: str = "gpu-h100", **changes: int) -> PreflightReport:
    result = Preflight(program=read_hlo(""), **{**SIZES, **changes})
    return PreflightReport(parse_target(target), (result,))


def said(found: PreflightReport) -> str:
    return re.sub(r"\s+", " ", str(found))


def test_bytes_on_the_host_are_counted_and_no_part_of_the_peak():
    found = report()
    [result] = found.policies
    assert result.peak_bytes == 10 * MIB
    assert result.host_bytes == (64 + 32) * MIB
    assert result.host_moved_bytes == ((64 + 32) * MIB, (64 + 32) * MIB)
    text = said(found)
    assert "host memory 96.0 MiB" in text
    assert "moved from and to it 192.0 MiB" in text
    plain = said(report(**dict.fromkeys(SIZES, 0)))
    assert "host" not in plain


def test_the_time_is_that_of_the_slower_direction():
    found = report(host_output_bytes=128 * MIB)
    assert found.host_time("as written") == (128 + 32) * MIB / 0.064e12
    assert f"time at its link {1e3 * (128 + 32) * MIB / 0.064e12:.3g} ms" in said(found)


@pytest.mark.parametrize(
    ("step", "words"), [(1.0, "beside 1.00 s of the step, can hide"), (1e-4, "do not hide")]
)
def test_whether_it_hides(step, words, monkeypatch):
    monkeypatch.setattr(Preflight, "work", Work({"bfloat16": step * 989e12 * 0.78}, 0.0, 0.0, 0))
    assert words in said(report())


def test_an_unknown_bandwidth_is_said():
    found = report("tpu-v5e")
    assert found.host_time("as written") is None
    assert "the bandwidth between tpu-v5e and its host is not published" in said(found)


def test_arguments_of_the_host_are_not_among_those_of_the_device():
    x = jax.device_put(jnp.ones((64, 64)), jax.memory.Space.Host)
    assert bytes_by_purpose([x, jnp.ones(4)], [0], []) == {"other arguments": {"float32": 16}}


def test_an_argument_is_traced_as_one_of_the_host():
    x = jax.device_put(jnp.ones((64, 64)), jax.memory.Space.Host)
    structs = x, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    seen = []

    def scaled(*args):
        seen.extend(jax.typeof(arg).memory_space for arg in args)
        return [2 * jax.device_put(arg, jax.memory.Space.Device) for arg in args]

    traced_program(scaled, (*structs, jnp.ones(4)), "tpu")
    assert seen == [jax.memory.Space.Host, jax.memory.Space.Host, jax.memory.Space.Device]


@pytest.mark.slow
@of_each_compiler
def test_a_state_on_the_host_is_compiled_for_there(target):
    """Twelve matrices: their moments move in turn, so that not all are on the device at once."""
    params = {name: jnp.ones((1024, 1024)) for name in "abcdefghijkl"}

    def peaks(memory):
        tx = optax.adam(1e-3)
        if memory is not None:
            tx = jaxmp.store_state(tx, "float32", memory=memory)
        state = tx.init(params)

        def step(params, state, x):
            def loss(params):
                h = x
                for name in params:
                    h = jnp.tanh(h @ params[name])
                return h.sum()

            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        preflighted = jaxmp.preflight(step, target=target, donate_argnums=(0, 1))
        return preflighted(params, state, jnp.ones((256, 1024))).policies[0]

    here, there = peaks(None), peaks("pinned_host")
    moments = 12 * 2 * 4 * 2**20
    assert not here.host_bytes
    assert there.host_argument_bytes == there.host_aliased_bytes == moments
    assert there.host_bytes == moments
    assert there.argument_bytes == here.argument_bytes - moments
    assert there.peak_bytes < here.peak_bytes - moments / 4
