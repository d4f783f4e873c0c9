"""Reading jaxprs in tests: every equation, however deeply nested. Running the examples."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.extend import core as jex_core

import jaxmp
from jaxmp._core.autocast.transform import under_policy
from jaxmp._core.passes.order import PASSES
from jaxmp._core.plan.parameters import Argnums, by_position

# A run by default sees every kind of thing once; products of kinds (formats, models, optimizers,
# transformations) are seen under `-m slow`. `@slow_when(lambda policy, case: ...)` marks a test as
# slow where that holds of its parameters, which the condition takes by their names.
slow_when: Callable[[Callable[..., bool]], pytest.MarkDecorator] = pytest.mark.slow_when.with_args

# But for its range, float16 is computed as bfloat16 is: a float16 twin is slow, unless a test is
# about what overflows or saturates.
float16_is_slow = slow_when(lambda policy: policy.startswith("mixed_float16"))

needs_gpu_compiler = pytest.mark.skipif(
    not (importlib.util.find_spec("jax_cuda13_plugin") and importlib.util.find_spec("flatbuffers")),
    reason="needs jaxmp[gpu-aot]",
)

needs_tpu_compiler = pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("flatbuffers")),
    reason="needs jaxmp[tpu-aot]",
)

# A test of what is compiled ahead of time for a chip of each compiler.
of_each_compiler = pytest.mark.parametrize(
    "target",
    [
        pytest.param("gpu-h100", marks=needs_gpu_compiler),
        pytest.param("tpu-v5e", marks=needs_tpu_compiler),
    ],
)

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# Where jaxmp is imported from: the clone, or an environment that it is installed in.
HERE = Path(jaxmp.__file__).parents[1]

LOW_DTYPES = ("bfloat16", "float16")
CONTRACTIONS = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}
)


# Arrays for modules to have: they are moved to the device, and nothing is compiled for them.


def gaussian(seed: int, *shape: int, scale: float = 1.0, dtype: Any = np.float32) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return jax.device_put(values.astype(dtype))


def ones(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.ones(shape, dtype))


def random_key(seed: int) -> jax.Array:
    """`jax.random.key(seed)`, for a seed of 32 bits."""
    return jax.random.wrap_key_data(np.array([0, seed], np.uint32))


def relative(got: Any, want: Any) -> float:
    """The distance of two finite pytrees in the 2-norm, relative to the second."""
    a, b = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)])
        for t in (got, want)
    )
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


class Contraction(NamedTuple):
    """One contraction equation: what it multiplies and what it returns."""

    primitive: str
    in_dtypes: tuple[str, ...]
    out_dtype: str
    highest: bool

    @property
    def exempt(self) -> bool:
        """Whether the author asked for it: HIGHEST precision, complex, integer, float64."""
        return self.highest or any(d not in ("float32", *LOW_DTYPES) for d in self.in_dtypes)


def iter_eqns(jaxpr: Any) -> Iterator[jex_core.JaxprEqn]:
    """Yields every equation of a jaxpr (closed or open), those of nested jaxprs included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from iter_eqns(inner)


def jaxpr_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The closed jaxpr of `fn`, non-array arguments kept static."""
    return jax.make_jaxpr(lambda *a: fn(*a, **kwargs))(*args)


def contractions(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Contraction]:
    """Every contraction in `fn`'s jaxpr, nested ones included."""
    return [
        Contraction(
            eqn.primitive.name,
            tuple(str(v.aval.dtype) for v in eqn.invars[:2]),
            str(eqn.outvars[0].aval.dtype),
            "HIGH" in str(eqn.params.get("precision")),
        )
        for eqn in iter_eqns(jaxpr_of(fn, *args, **kwargs))
        if eqn.primitive.name in CONTRACTIONS
    ]


def autocast_without(
    left_out: Callable[..., Any], *, data: int | None = None
) -> Callable[..., Any]:
    """`jaxmp.autocast` without one of its passes, of functions as `autocast` below takes them.

    Or, if `data` is not given, of functions whose first argument are the parameters.
    """
    passes = tuple(each for each in PASSES if each is not left_out)

    def autocast(fn: Callable[..., Any], policy: str) -> Callable[..., Any]:
        @functools.cache
        def made(argnums: Argnums) -> Callable[..., Any]:
            parameters = by_position(fn, argnums)
            return under_policy(fn, jaxmp.get_policy(policy), parameters, passes=passes)

        def plain(*args: Any) -> Any:
            return made(0 if data is None else tuple(range(data, len(args))))(*args)

        return plain

    return autocast


def contraction_dtypes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Counter[str]:
    """How many contractions multiply in each dtype; mixed operands read `a*b`."""
    return Counter("*".join(sorted(set(c.in_dtypes))) for c in contractions(fn, *args, **kwargs))


def primitives(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Counter[tuple[str, str]]:
    """How often each (primitive, output dtype) stands in `fn`'s jaxpr, nested ones included."""
    return Counter(
        (eqn.primitive.name, str(eqn.outvars[0].aval.dtype))
        for eqn in iter_eqns(jaxpr_of(fn, *args, **kwargs))
        if eqn.outvars and hasattr(eqn.outvars[0].aval, "dtype")
    )


def assert_same_program(fn: Callable[..., Any], other: Callable[..., Any], *args: Any) -> None:
    """Both functions are one jaxpr of the same constants: the same bits, whatever compiles it."""
    one, two = (jaxpr_of(f, *args) for f in (fn, other))
    assert _text(one) == _text(two)
    for a, b in zip(one.consts, two.consts, strict=True):
        a, b = (jax.random.key_data(x) if _is_key(x) else x for x in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _text(jaxpr: Any) -> str:
    # JAX's caches may have an axis from another program, as an equal NumPy integer.
    text = re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr))
    return "".join(re.sub(r"np\.int64\((\d+)\)", r"\1", text).split())


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def cpu_environment() -> dict[str, str]:
    """For processes of their own: this jaxmp on the path; on CPU, and without the fake devices."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env["JAX_PLATFORMS"] = "cpu"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), env.get("PYTHONPATH"))))
    env.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # as in `conftest`
    return env


def run_python(
    *arguments: str, folder: Path, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs Python in `folder` with jaxmp on its path; on CPU, and without the fake devices."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=cpu_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_example(name: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs an example in `folder` as a user does."""
    return run_python(str(EXAMPLES / name), *options, folder=folder)


# Most programs of the tests are functions of data, and then of parameters: `fn(x, w, ...)`. Those
# whose first argument has one of these names are functions of parameters, and then of data.
_PARAMETERS = ("w", "p", "params", "variables", "weights", "stack")


def autocast(fn: Callable[..., Any], policy: Any, *, data: int = 1) -> Callable[..., Any]:
    """`jaxmp.autocast` of a function whose arguments are parameters, but for the first `data`."""
    return _with_parameters(jaxmp.autocast, fn, policy, data)


def explain(fn: Callable[..., Any], policy: Any, *, data: int = 1) -> Callable[..., Any]:
    """`jaxmp.explain` of such a function."""
    return _with_parameters(jaxmp.explain, fn, policy, data)


def _with_parameters(
    transformation: Callable[..., Any], fn: Callable[..., Any], policy: Any, data: int
) -> Callable[..., Any]:
    made = functools.cache(lambda argnums: transformation(fn, policy, argnums=argnums))
    made((0,))  # what is wrong with the policy is said here
    first = next(iter(inspect.signature(fn).parameters), "")

    def call(*args: Any, **kwargs: Any) -> Any:
        named = tuple(range(data, len(args)))
        return made((0,) if first in _PARAMETERS or not named else named)(*args, **kwargs)

    return functools.wraps(fn)(call)


def one_line(report: Any) -> str:
    """What a report prints, without the breaks in its lines."""
    return " ".join(str(report).split())


@contextlib.contextmanager
def case(name: object) -> Iterator[None]:
    """Says of an error in which case of a table it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {name!r}")
        raise


def numbers(tree: Any) -> Any:
    """Leaves as NumPy arrays, keys included."""

    def number(x: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if _is_key(x) else x)

    return jax.tree.map(number, tree)


def assert_same(got: Any, want: Any) -> None:
    """Equal to the bit, in structure and dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(
        jax.tree.leaves_with_path(numbers(got)), jax.tree.leaves(numbers(want)), strict=True
    )
    for (path, a), b in pairs:
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
