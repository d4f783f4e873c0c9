"""validate: its verdicts, and what it refuses."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from validate_kit import faulty, simulated, validate

import jaxmp
from jaxmp._tools.validate import numerics as validate_numerics
from jaxmp._tools.validate.verdict import FAILS, NOISE, PASSES

from support import cpu_environment, one_line, random_key

# Verdicts.


def test_the_verdict_is_by_the_threshold_where_chance_is_small():
    effects = [(0.004, PASSES), (-0.004, PASSES), (0.006, FAILS), (-0.006, FAILS), (0.0, NOISE)]
    for effect, verdict in effects:
        report = validate(policies={"it": effect})
        result = report["it"]
        assert result.verdict == verdict, effect
        assert report.passed == (verdict == PASSES)
        assert report.failed == (verdict == FAILS)
        assert report.floor < 1e-6
        assert result.check("final loss").difference == pytest.approx(effect, abs=1e-9)
    assert "every loss is float32's to the bit" in one_line(report)
    assert validate(policies={"it": 0.02}, threshold=0.03).passed
    assert not validate(policies={"it": 0.02}, threshold=0.01).passed
    # The curve is as far away as its end.
    assert validate(policies={"it": 0.02}, threshold=0.03, curve_threshold=0.01).failed
    assert validate(policies={"it": 0.02}, threshold=0.03, curve_threshold=None).passed


def test_what_chance_makes_as_well_proves_nothing():
    chaotic = functools.partial(simulated, chaos=0.2)
    report = validate(chaotic, {"small": 0.001, "beyond": 0.008, "large": 0.5})
    assert report.floor > 0.01
    assert report["small"].verdict == NOISE, "within the threshold, but so wide is chance"
    assert report["beyond"].verdict == NOISE, "beyond the threshold, but not beyond chance"
    assert report["large"].verdict == FAILS
    assert not report.passed
    for said in (one_line(report), report.to_markdown()):
        assert "(float32's, perturbed), which is wider than the 0.5% allowed" in said
        assert "proves nothing; more seeds" in said


def test_the_noise_floor_is_the_interval_of_a_mean_of_such_differences():
    chaotic = functools.partial(simulated, chaos=0.2)
    report = validate(chaotic, perturbations=2)
    base = {run.seed: run.final for run in report.reference_runs}
    mean = np.mean(list(base.values()))
    chance = [(run.final - base[run.seed]) / mean for run in report.perturbed_runs]
    assert len(chance) == 6
    # Student's t of six degrees of freedom, 97.5 %.
    floor = 2.447 * np.sqrt(np.mean(np.square(chance))) / np.sqrt(3)
    assert report.floor == pytest.approx(floor)
    assert report["it"].check("final loss").floor == pytest.approx(floor)
    assert report.spread == pytest.approx((max(base.values()) - min(base.values())) / mean)
    assert validate(seeds=1).spread is None


def test_differences_that_scatter_from_seed_to_seed_prove_nothing():
    for effects, verdict in (
        ((0.02, -0.015, 0.004), NOISE),  # each of them is large, and so is their scatter
        ((0.004, -0.004, 0.0), NOISE),  # within the threshold on average, and nobody knows
        ((0.0012, 0.0008, 0.001), PASSES),
        ((0.012, 0.008, 0.01), FAILS),
    ):

        def make_step(policy, seed, effects=effects):
            return simulated("float32" if policy == "float32" else effects[seed], seed)

        report = validate(make_step)
        check = report["it"].check("final loss")
        assert report["it"].verdict == verdict, effects
        runs = report["it"].runs, report.reference_runs
        finals, exact = (np.array([r.final for r in x]) for x in runs)
        differences = (finals - exact) / exact.mean()
        # Student's t of two degrees of freedom, 97.5 %.
        assert check.scatter == pytest.approx(4.303 * np.std(differences, ddof=1) / np.sqrt(3))
        assert check.noise == check.scatter > check.floor
        assert "(from seed to seed)" in one_line(report)


def test_curves_are_judged_by_their_mean_and_their_distance_is_shown():
    def metrics(policy, loss, i):
        there_and_back = 0.0 if policy == "float32" else 0.2 * (-1) ** i
        return {"loss": 2 + there_and_back + loss / 1000}

    def make_step(policy, seed):
        return simulated(0.0, seed, metrics=functools.partial(metrics, policy))

    result = validate(make_step)["it"]
    assert result.verdict == PASSES
    assert abs(result.check("curve").difference) < 1e-6
    assert result.curve_distance == pytest.approx(0.1, rel=1e-3)
    assert result.curve_floor < 1e-6
    assert "training curves 9.99% apart (float32's, perturbed: 0.00%)" in " ".join(result.reasons)


def test_the_loss_that_is_held_out_is_judged():
    def make_step(policy, seed):
        state, step = simulated(0.5 if policy != "float32" else 0.0, seed)
        return state, step, lambda state: np.float32(2 + 0.001 * seed)

    report = validate(make_step, {"it": 0.5}, curve_threshold=None)
    assert report["it"].check("final loss").difference == 0
    assert report["it"].verdict == PASSES
    assert "held out" in one_line(report)
    assert "of training" in str(validate())


def test_without_it_the_last_twentieth_is():
    make_step = functools.partial(simulated, metrics=lambda loss, i: {"loss": 1 + i + 0 * loss})
    report = validate(make_step, {"it": 0.5}, steps=60, seeds=1)
    assert report["it"].final_loss == np.mean([58, 59, 60])


def test_a_loss_that_is_not_finite_fails():
    late = functools.partial(faulty, fault=lambda _, i: {"loss": np.nan} if i >= 30 else {})
    report = validate(late)
    assert report.failed
    assert "the loss of seed 0 is not finite from step 30 on" in one_line(report)
    assert len(report["it"].runs[0].losses) == 40


def test_a_run_that_stays_non_finite_is_given_up():
    lost = functools.partial(faulty, fault=lambda _, i: {"loss": np.inf} if i >= 50 else {})
    report = validate(lost, steps=400, seeds=1)
    assert 150 <= len(report["it"].runs[0].losses) < 200
    assert report.failed
    assert "not finite from step 50 on" in one_line(report)
    # Three quarters of a minute of overflows are a scale that starts high.
    back = functools.partial(faulty, fault=lambda _, i: {"loss": np.inf} if i < 60 else {})
    assert len(validate(back, steps=400, seeds=1)["it"].runs[0].losses) == 400


def test_steps_that_were_left_out_are_counted_and_the_curve_is_not_judged():
    def metrics(policy, loss, i):
        made = policy == "float32" or i not in (3, 39)
        return {"loss": loss if made else np.inf, "finite": jnp.array(made), "loss_scale": 2.0}

    def make_step(policy, seed):
        return simulated(policy, seed, metrics=functools.partial(metrics, policy))

    result = validate(make_step, curve_threshold=1e-9)["it"]
    assert result.skipped_count == 6
    assert result.verdict == PASSES, "the last of them is not in the final loss"
    assert "6 of 120 steps were skipped" in " ".join(result.reasons)
    assert result.check("curve").difference == pytest.approx(0.001)


def with_norms(norm):
    """Gradient norms of `norm(policy, i)`."""

    def make_step(policy, seed):
        def metrics(loss, i):
            return {"loss": loss, "grad_norm": jnp.float32(norm(policy, i))}

        return simulated(policy, seed, metrics=metrics)

    return make_step


def test_gradient_norms_are_judged():
    larger = with_norms(lambda policy, i: 1.2 if policy != "float32" else 1.0)
    report = validate(larger)
    assert report.failed
    assert report["it"].check("gradient norm").difference == pytest.approx(0.2)
    assert "gradient norm +20.00% from float32's: beyond 10%" in one_line(report)
    assert validate(larger, grad_norm_threshold=None).passed
    # A few steps, those that overflow among them, are not the median.
    odd = {0: np.inf, 1: 9.0}
    make_step = with_norms(lambda policy, i: odd.get(i, 1.0) if policy != "float32" else 1.0)
    assert validate(make_step).passed
    for norm, said in (
        (
            lambda policy, i: float(policy == "float32" or i % 4),
            "every gradient is exactly zero in 25% of the steps.*jaxmp.loss_scale_for",
        ),
        (
            lambda policy, i: 1.0 if policy == "float32" or i else 0.2,
            "the first gradient, of equal parameters, is -80.00% in norm: gradients un",
        ),
    ):
        assert re.search(said, one_line(validate(with_norms(norm))))


# What is refused.


def returning(*made):
    return lambda policy, seed: made if len(made) != 1 else made[0]


def stepping(result):
    return lambda policy, seed: (np.float32(1), lambda state, i: result)


COUNTER = itertools.count()


def test_the_step_of_the_readme_is_one():
    """It takes x and y, and returns the loss alone."""

    @functools.cache
    def under(policy):
        model = jaxmp.wrap(nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(1)]), policy)
        tx = jaxmp.loss_scale_for(policy, optax.adamw(1e-2))

        def loss_fn(params, x, y):
            return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

        @jax.jit
        def train_step(state, x, y):
            loss, grads = state.value_and_grad(loss_fn)(state.params, x, y)
            return state.apply_gradients(grads=grads), loss

        return model, tx, train_step

    def make_step(policy, seed):
        model, tx, train_step = under(policy)
        params = jax.jit(model.init)(random_key(seed), np.ones((1, 4), np.float32))["params"]
        return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx), train_step

    def batches(seed):
        draw = np.random.default_rng(seed)
        for i, x in enumerate(draw.normal(size=(40, 16, 4)).astype("f")):
            yield (tuple, list)[i % 2]((x, np.sin(x[:, :1])))

    report = validate(make_step, "mixed_bfloat16", seeds=1, batches=batches)
    assert 0 < report["mixed_bfloat16"].runs[0].final < report.reference_runs[0].losses[0]


def reporting(metrics):
    return lambda policy, seed: simulated(policy, seed, metrics=metrics)


TAKES_X_AND_Y = returning(np.ones(2, "f"), lambda state, x, y: (state, 1.0))
REFERENCE = "is what the others are compared with"
# An option, its value and what is said of it.
TYPE_ERRORS = [
    ("make_step", 3, "make_step must be a function, make_step.policy, seed.; got"),
    ("make_step", lambda policy: 1, r"called as make_step\(policy, seed\), and ta"),
    ("make_step", returning(1), "returned an int; it must return .state, step"),
    ("make_step", returning(1, 2), "its step is an int"),
    ("make_step", returning(len, 2), "are the two swapped?"),
    ("make_step", returning(1.0, len, 3), "its evaluate is an int"),
    ("make_step", returning((), len), "has no leaves"),
    ("make_step", stepping(3), "step must return .state, loss., or .*, metrics.*returned an int"),
    ("make_step", stepping((1, "a")), "has metrics of a str"),
    ("make_step", stepping((1.0, (2.0, 3.0))), "has metrics of a tuple of 2"),
    ("make_step", TAKES_X_AND_Y,
     r"as step\(state, i\); in float32, seed 0 it takes \(state, x, y\): .*\. batches="),
    ("make_step", lambda p, s: (*simulated(p, s), lambda state: np.ones(3)),
     r"evaluate.state. must return the loss, one number.*\(3,\)"),
    ("batches", 3, "batches must be a function, batches.seed.; got a 'int'"),
    ("batches", lambda other=1, /, *, needed: other, r"called as batches\(seed\)"),
    ("batches", lambda seed: 3, r"batches\(0\) returned an int"),
    ("policies", {1: "float16"}, "names of policies must be strings; got 1"),
]  # fmt: skip
VALUE_ERRORS = [
    ("make_step", stepping((1, {"los": 2.0})), "reports 'los', and no \"loss\""),
    ("make_step", stepping((1, {"loss": np.ones(2)})), r"'loss' must be one numb"),
    ("make_step", stepping((1, {"loss": "a"})), "is a str"),
    ("make_step", reporting(lambda loss, i: {"loss": np.nan}),
     "float32, seed 0 does not reach a finite loss itself"),
    ("make_step", reporting(lambda x, i: {"loss": x, **({"finite": True} if i else {})}),
     "step 1 .* reports 'finite', 'loss', and the one before 'loss'"),
    ("make_step", lambda p, s: simulated(p, s + 10 * next(COUNTER)),
     "first loss of float32, seed 0, was .*: make_step must make the same parameters"),
    ("make_step", lambda p, s: simulated(p, 0), "seeds 0 and 1 are bitwise the same run"),
    ("make_step", lambda p, s: (3, lambda state, i: (state, {"loss": 1.0 + s})),
     "no floating parameter to perturb"),
    ("batches", lambda seed: [1] * 7, r"batches\(0\) ended after 7 of 40 batches"),
    ("batches", lambda seed: (next(COUNTER) for _ in range(99)),
     "batch 0 of float32, seed 0, perturbation 1 differs from the first run's of this seed"),
    ("policies", [], "there are no policies"),
    ("policies", "mixed_bflaot16", "mixed_bfloat16"),
    ("policies", ["bf16", "bfloat16"], "'bfloat16' is named twice"),
    ("policies", ["float32"], f"'float32' {REFERENCE}"),
    ("policies", "p=f32,c=f32,o=f32", REFERENCE),
    ("policies", {"float32": 1}, REFERENCE),
    ("steps", 0, "steps must be a number from 1 on; got 0"),
    ("steps", [np.ones((99, 99))], r"got \[array.{,60}\. The call is .*steps, batches"),
    ("seeds", 0, "seeds must be a number of seeds"),
    ("seeds", [1, 1], "distinct seeds from 0 on"),
    ("seeds", [-1], "from 0 on"),
    ("seeds", "3", "got '3'"),
    ("seeds", 2.5, "got 2.5"),
    ("perturbations", 0, "perturbations must be"),
    ("threshold", "0.5%", "threshold must be positive, .*; got '0.5%'"),
    ("threshold", None, "threshold must be positive"),
    ("threshold", 0, "threshold must be positive"),
    ("curve_threshold", -1, "curve_threshold must be positive"),
    ("out", __file__, "is a file; name a folder"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "option", "value", "message"),
    [(TypeError, *row) for row in TYPE_ERRORS] + [(ValueError, *row) for row in VALUE_ERRORS],
)
def test_wrong_uses(error, option, value, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as raised:
        validate(**{option: value})
    assert str(raised.value).startswith(("validate: ", "get_policy: "))


def test_a_step_that_does_not_take_its_batches_is_named():
    said = r"step\(state, batch\), a batch a dict; in float32, seed 0 it takes \(state, x, y\)"
    with pytest.raises(TypeError, match=said):
        validate(TAKES_X_AND_Y, batches=lambda seed: [{"x": 1, "y": 2}] * 40)


def test_batches_of_a_policy_that_differ_are_found():
    """The first batches agree: it is not the first step that tells."""
    calls = itertools.count()

    def batches(seed):
        call = next(calls)
        return ({"x": np.full(3, i + (i == 7 and call == 2))} for i in range(40))

    with pytest.raises(ValueError, match="batch 7 of it, seed 0 differs"):
        validate(batches=batches, seeds=1)


def test_batches_are_compared_by_shape_dtype_and_content():
    for other in (np.ones(4), np.ones((3, 1)), np.ones(3).view("i8"), -np.ones(3)):
        calls = itertools.count()

        def batches(seed, other=other, calls=calls):
            return itertools.repeat({"x": other} if next(calls) else {"x": np.ones(3)}, 40)

        with pytest.raises(ValueError, match="batch 0 of"):
            validate(batches=batches, seeds=1)

    def of_kinds(seed):
        key = jax.random.key(seed)
        return ((jnp.ones(2), jax.random.fold_in(key, i), None, 3) for i in range(40))

    report = validate(batches=of_kinds, seeds=1)
    assert len(set(report.reference_runs[0].data)) == 40


def test_a_loss_that_is_still_scaled_is_found():
    def metrics(policy, loss, i):
        scale = 1.0 if policy == "float32" else 1024.0
        return {"loss": loss * scale, "loss_scale": scale}

    def make_step(policy, seed):
        return simulated(policy, seed, metrics=functools.partial(metrics, policy))

    with pytest.raises(ValueError, match="float32's times the loss scale of 1024: report the loss"):
        validate(make_step)


def test_on_a_cpu_that_sums_in_bfloat16_it_demands_the_flag():
    wanted = "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= in the environment"
    for policies in (
        "mixed_bfloat16",
        "mixed_int8",
        "float32,matmul=f32:bf16:bf16",
        [jaxmp.PolicyMap({"a": "mixed_bfloat16"}, default="mixed_float16")],
        {"known to make_step alone": 3},
    ):
        with pytest.raises(RuntimeError, match=wanted):
            validate(policies=policies, sums_in_bfloat16=True)

    def ignoring(policy, seed):
        return simulated(0.0, seed)

    float16 = jaxmp.get_policy("mixed_float16")
    report = validate(
        ignoring, float16, sums_in_bfloat16=True, reference=jaxmp.get_policy("float32")
    )
    assert report.reference == str(jaxmp.get_policy("float32")), "policies that are no strings"
    assert [result.label for result in report.policies] == [str(float16)]


@pytest.mark.slow
@pytest.mark.parametrize("flag", [True, False])
def test_whether_this_cpu_sums_in_bfloat16_is_tried(flag, tmp_path):
    code = "from jaxmp._tools.validate import numerics as v; print(v._sums_in_bfloat16())"
    env = cpu_environment()
    if flag:
        env["XLA_FLAGS"] = validate_numerics.with_cpu_sums("")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(not flag and jax.__version_info__ >= (0, 12))]


def test_an_error_of_ones_own_says_in_which_run_it_was():
    def fails(loss, i):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        validate(functools.partial(faulty, fault=fails))
    assert caught.value.__notes__ == ["validate: this was in it, seed 0"]

    def make_step(policy, seed):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        validate(make_step)


def test_one_step_is_drawn(tmp_path, monkeypatch):
    axes = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, _: axes.extend(self.axes))
    validate(steps=1, seeds=1).plot(tmp_path / "one.png")
    assert all(line.get_marker() == "o" for line in axes[0].get_lines())
