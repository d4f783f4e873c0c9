"""`PreflightReport.compare`: predictions beside what the device at hand needs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.preflight.report import PreflightReport
from jaxmp._tools.preflight.result import Preflight
from jaxmp._tools.speed.target import parse_target

STATE, X = np.ones((64, 64), np.float32), np.ones((8, 64), np.float32)


def step(state, x):
    return state - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state), x.sum()


def compiled(*, donated=(0,), batch=8):
    return jax.jit(step, donate_argnums=donated).lower(STATE, np.resize(X, (batch, 64))).compile()


def report(*results):
    return PreflightReport(parse_target("gpu-h100"), results or (predicted(),))


def predicted(**changes):
    """Returns a prediction of `step`: arguments and results as they are, temporaries made up."""
    sizes = {
        "argument_bytes": STATE.nbytes + X.nbytes,
        "output_bytes": STATE.nbytes + 4,
        "aliased_bytes": STATE.nbytes,
        "temporary_bytes": 2**20,
        "code_bytes": 512,
    }
    return dataclasses.replace(Preflight(program=read_hlo(""), **sizes), **changes)


def test_sizes_are_those_of_the_compilers():
    executable = compiled()
    found = report().compare(executable)
    analyzed = executable.memory_analysis()
    assert found.same_step
    assert found["arguments"].measured == STATE.nbytes + X.nbytes == found["arguments"].predicted
    assert found["temporaries"].measured == analyzed.temp_size_in_bytes
    assert found["temporaries"].predicted == 2**20
    held = analyzed.argument_size_in_bytes + 4
    made = analyzed.temp_size_in_bytes + analyzed.generated_code_size_in_bytes
    # What is donated is not there twice.
    assert found["peak"].measured == held + made + analyzed.output_size_in_bytes - STATE.nbytes - 4
    assert found["peak"].predicted == predicted().peak_bytes
    assert found["peak"].ratio == found["peak"].measured / found["peak"].predicted


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"donated": ()}, "results in donated arguments differ"),
        ({"batch": 64}, "arguments differ"),
    ],
)
def test_another_program_is_not_compared_in_silence(other, named):
    found = report().compare(compiled(**other))
    assert not found.same_step
    assert named in " ".join(str(found).split())


def test_nothing_is_donated_in_either():
    assert report(predicted(aliased_bytes=0)).compare(compiled(donated=())).same_step


def test_padding_is_not_another_program():
    wider = predicted(argument_bytes=int(1.03 * (STATE.nbytes + X.nbytes)))
    assert report(wider).compare(compiled()).same_step
    wider = predicted(argument_bytes=int(1.08 * (STATE.nbytes + X.nbytes)))
    assert not report(wider).compare(compiled()).same_step


def test_what_was_measured_by_the_caller():
    found = report().compare(compiled(), stats={"peak_bytes_in_use": 2**30}, seconds=0.25)
    assert found["peak of the process"].measured == 2**30
    assert found["step time"].measured == 0.25
    text = str(found)
    assert "1.00 GiB" in text
    assert "250 ms" in text
    assert "not given" not in text
    without = " ".join(str(report().compare(compiled())).split())
    assert "stats=device.memory_stats()" in without
    assert "seconds=" in without


def test_it_says_where_it_was_measured():
    text = str(report().compare(compiled()))
    assert text.startswith("as written: predicted for gpu-h100, measured on cpu")
    assert "cpu is not gpu-h100" in text


def test_wrong_uses():
    two = report(predicted(policy="one"), predicted(policy="two"))
    with pytest.raises(ValueError, match="say which policy was compiled: one of 'one', 'two'"):
        two.compare(compiled())
    assert two.compare(compiled(), "two").policy == "two"
    with pytest.raises(KeyError, match="there is no policy 'three'"):
        two.compare(compiled(), "three")
    with pytest.raises(TypeError, match=r"jax.jit\(step\).lower\(\*arguments\).compile\(\)"):
        report().compare(jax.jit(step))
    with pytest.raises(ValueError, match="failed to compile"):
        report(Preflight(error="it failed")).compare(compiled())
    with pytest.raises(ValueError, match="does not fit"):
        report(Preflight(required_bytes=2**40)).compare(compiled())


@pytest.mark.gpu
def test_on_this_gpu():
    """The compiler that was asked ahead of time is the one that compiles here."""
    from jaxmp import devices, preflight

    device = jax.local_devices()[0]
    target = devices.describe(device).chip
    found = preflight(step, target=target, donate_argnums=0)(STATE, X).compare(
        compiled(), stats=device.memory_stats()
    )
    assert found.same_step
    assert 0.8 < found["peak"].ratio < 1.25
