"""What validate keeps through kill -9, what invalidates it, and how parameters are perturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from validate_kit import simulated, validate

import jaxmp
from jaxmp._tools.validate import numerics as validate_numerics
from jaxmp._tools.validate.perturb import perturb

from support import ROOT, cpu_environment

# What is kept.


class Counting:
    """`simulated`, which remembers what it made, and may be killed."""

    def __init__(self, dies_at=None):
        self.made, self.dies_at = [], dies_at

    def __call__(self, policy, seed):
        if len(self.made) == self.dies_at:
            raise KeyboardInterrupt
        self.made.append((policy, seed))
        return simulated(policy, seed)


def test_what_was_interrupted_goes_on_with_the_run_it_was_at(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        validate(Counting(dies_at=5), out=tmp_path, key=1)
    again = Counting()
    report = validate(again, out=tmp_path, key=1)
    assert again.made == [("float32", 2), (0.001, 0), (0.001, 1), (0.001, 2)]
    whole = validate(Counting())
    assert report == whole, "the very same numbers"
    none = Counting()
    assert validate(none, out=tmp_path, key=1) == whole
    assert not none.made
    assert not list(tmp_path.glob("*.new"))


def test_a_new_policy_or_seed_is_added_to_what_is_kept(tmp_path):
    options = {"out": tmp_path, "key": 1}
    validate(Counting(), seeds=2, **options)
    more = Counting()
    report = validate(more, {"it": 0.001, "other": 0.002}, seeds=3, threshold=0.1, **options)
    assert more.made == [
        ("float32", 2),
        ("float32", 2),  # perturbed
        (0.001, 2),
        *[(0.002, seed) for seed in range(3)],
    ]
    assert report.passed


def test_a_change_makes_runs_anew(tmp_path, monkeypatch):
    options = {"out": tmp_path / "runs", "seeds": 1, "key": ("rate", 1)}

    def made(**changed):
        counting = Counting()
        validate(counting, **options | changed)
        return len(counting.made)

    assert made() == 3
    assert made() == 0
    assert made(steps=41) == 3
    assert made(key=("rate", 2)) == 3
    assert made(policies={"it": 0.002}) == 1
    with jax.default_prng_impl("rbg"):
        assert made() == 3
    jax.devices()  # no backend starts with a flag that does not exist
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_something=1")
        assert made() == 3
    with monkeypatch.context() as patch:
        patch.setattr(jaxmp, "__version__", "another")
        assert made() == 3
    assert made() == 0


def test_a_file_that_is_no_run_any_more_is_named_and_made_again(tmp_path):
    report = validate(Counting(), seeds=1, out=tmp_path, key=1)
    [path] = tmp_path.glob("it-*.json")
    text = path.read_text()
    for damaged in (
        text[:100],
        "[]",
        "{}",
        text.replace('"result": {', '"result": [').replace("}}", "]}"),
        text.replace('"losses"', '"Losses"'),
    ):
        path.write_text(damaged)
        with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="damaged"):
            validate(Counting(dies_at=0), seeds=1, out=tmp_path, key=1)
        assert path.read_text() == damaged, "until there is another run"
        again = Counting()
        named = rf"validate: .*{path.name} is damaged .*seed 0 is made"
        with pytest.warns(UserWarning, match=named):
            assert validate(again, seeds=1, out=tmp_path, key=1) == report
        assert again.made == [(0.001, 0)]
        assert path.read_text() == text


class Net(nnx.Module):
    def __init__(self, seed, rate=0.0):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(seed))
        self.rate = rate


def test_what_a_step_is_made_of_is_part_of_a_run(tmp_path):
    """Not only numbers: the runs of another loss function, array, model or data were taken."""

    def made_of(thing, data, *, is_nnx=False):
        def step(state, i):
            made.append(i)
            kernel = state["params"].linear.kernel if is_nnx else state["params"]
            w = kernel[...]
            loss = jnp.mean((w @ thing(data)) ** 2)
            if is_nnx:
                kernel[...] = w - state["params"].rate * w
                return state, loss
            return {"params": w * 0.9}, loss

        def make_step(policy, seed):
            w = jax.random.normal(jax.random.key(seed), (3, 3))
            return {"params": Net(seed, len(data) / 10) if is_nnx else w}, step

        return make_step

    made, one = [], np.ones((3, 20), "f")
    first, second = (lambda x: x + 1), (lambda x: x + 2)
    other = np.where(np.arange(20) == 10, np.float32(2), one)
    cases = [(first, one, 3), (first, one.copy(), 0), (second, one, 3), (second, other, 3)]
    for is_nnx in (False, True):
        for thing, data, runs in cases:
            made.clear()
            validate(made_of(thing, data, is_nnx=is_nnx), steps=4, seeds=1, out=tmp_path)
            assert len(made) == runs * 4 + 3, "each is traced, and some are made"

    def evaluated(batch, factor):
        """The first batch, and what evaluates."""

        def make_step(policy, seed):
            def step(state, x):
                return state * 0.9, jnp.sum(state * x)

            return jnp.ones(3), step, lambda state: factor * jnp.sum(state)

        return make_step, lambda seed: [np.full(3, batch, "f")] * 4

    out = tmp_path / "evaluated"
    for case, kept in (((1, 1), 3), ((1, 1), 3), ((2, 1), 6), ((1, 2), 9)):
        make_step, batches = evaluated(*case)
        validate(make_step, steps=4, seeds=1, out=out, batches=batches)
        assert len(list(out.glob("*.json"))) == kept


def test_what_cannot_be_traced_needs_a_key(tmp_path):
    with pytest.raises(
        TypeError, match=r"float32, seed 0 cannot be traced .*: identify your program and its data"
    ):
        validate(Counting(), out=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_kill_9(tmp_path):
    """In a process that is killed in the middle of its runs."""
    (tmp_path / "program.py").write_text(
        "import sys, time, numpy as np, jaxmp\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "def make_step(policy, seed):\n"
        "    x = np.random.default_rng(seed).random(4).astype('f')\n"
        "    def step(state, i):\n"
        "        time.sleep(0.02)\n"
        "        return state * np.float32(.9), {'loss': 1 + float(abs(state).sum())}\n"
        "    return x, step\n"
        "policies = {'it': 1, 'other': 2}\n"
        "report = jaxmp.validate(make_step, policies, seeds=3, out='runs', key=1)(20)\n"
        "print(report.reference_runs[2].final)\n"
    )
    env = cpu_environment()
    env["XLA_FLAGS"] = validate_numerics.with_cpu_sums("")
    command = [sys.executable, "program.py"]
    runs = tmp_path / "runs"
    with subprocess.Popen(command, cwd=tmp_path, env=env) as process:
        while len(list(runs.glob("*.json"))) < 4:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert len(kept) < 12
    again = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert len(list(runs.glob("*.json"))) == 12
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items())


# Perturbations.


def test_a_perturbation_is_a_last_bit_up_or_down_or_none():
    x = np.random.default_rng(0).normal(size=3000).astype("f")
    after, changed = perturb(x, (0, 1))
    assert changed
    steps = np.asarray(after).view("i4") - np.asarray(x).view("i4")
    counts = np.bincount(steps + 1)
    assert len(counts) == 3
    assert counts.min() > 900
    assert not np.array_equal(after, perturb(x, (0, 2))[0])
    assert not np.array_equal(after, perturb(x, (1, 1))[0])
    assert np.array_equal(after, perturb(x, (0, 1))[0])


def test_parameters_are_perturbed_and_all_else_is_left_alone():
    odd = np.array([0.0, np.inf, np.nan, -np.inf, 1e-45, *[np.finfo("f").max] * 9], "f")
    after, _ = perturb(odd, (0, 1))
    assert np.isfinite(after[5:]).all()
    np.testing.assert_array_equal(after[:5], odd[:5])
    for leaf in (jnp.arange(9), jax.random.key(1), 2.0, "a", jnp.float8_e4m3fn(1)):
        assert perturb([leaf], (0, 1)) == ([leaf], False)
    tx = jaxmp.dynamic_loss_scale(optax.adam(1e-3))
    params = {"w": jnp.ones(50, jnp.bfloat16), "b": jnp.zeros(3)}
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    after, changed = perturb(state, (0, 1))
    assert changed
    assert {float(x) for x in after.params["w"]} == {1 - 2**-8, 1.0, 1 + 2**-7}
    assert all(map(np.array_equal, *map(jax.tree.leaves, (after.opt_state, state.opt_state))))
    (params, opt_state), changed = perturb((state.params, state.opt_state), (0, 1))
    assert changed
    assert opt_state.loss_scale == 2.0**16
    net = Net(0)
    before = jax.tree.map(jnp.copy, nnx.state(net))
    state = (net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param))
    assert perturb(state, (0, 1)) == (state, True)
    after = nnx.state(net)
    assert not np.array_equal(before["linear"]["kernel"][...], after["linear"]["kernel"][...])
    assert np.array_equal(before["norm"]["var"][...], after["norm"]["var"][...])


def test_parameters_that_start_at_zero_are_perturbed_after_the_first_step():
    def make_step(policy, seed):
        def step(w, i):
            new = np.float32(1.1) * w + np.float32(1 + seed)
            return new, {"loss": float(np.sum(new, dtype=float)) + (policy != "float32")}

        return np.zeros(40, "f"), step

    report = validate(make_step, seeds=2)
    assert 0 < report.floor < 1e-5
