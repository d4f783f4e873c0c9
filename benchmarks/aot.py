"""Compiling for accelerators that are not there, and reading what the compilers say.

TPU needs libtpu (jax >= 0.12, Python >= 3.12); GPU needs the CUDA plugin of jaxlib's own version,
and neither a driver nor CUDA's libraries: `pip install -e ".[tpu-aot,gpu-aot]"`.

What can be trusted: memory, HLO text, and on TPU bytes accessed and the sum of the schedule's
`estimated_cycles`. On GPU nothing is autotuned and no cost model runs, so only memory is reported.
A loop's body is counted once, however often it runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from jaxmp._core.plan.flops import contraction_flops
from jaxmp._tools.preflight.aot_worker import topology_devices
from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.speed.target import parse_target

TARGETS = ("tpu-v5e", "gpu-h100")
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiler says about a program; None where it says nothing.

    Attributes:
        gb_accessed: Bytes accessed, in 10^9.
        temp_mib: Temporary memory, in 2^20 bytes.
        peak_mib: The most memory at any time, arguments and results included, in 2^20 bytes.
        mcycles: The schedule's estimated cycles, in 10^6.
    """

    gb_accessed: float | None
    temp_mib: float
    peak_mib: float
    mcycles: float | None


def target_device(target: str) -> Any:
    """One described (not present) device of `target`, any chip that `preflight` takes."""
    chip = parse_target(target)
    job = {"platform": chip.compiler, "topology": chip.topology, "config": chip.config}
    return topology_devices(job)[0]


# Keeps every array in HBM. By default the TPU compiler copies operands to and from VMEM around the
# operations that read them, wherever there is room, and "bytes accessed" counts the copies too.
NO_PREFETCH = {"xla_vf_vmem_memory_space_assignment": False}


def compile_for(
    target: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Compiles `fn` of `ShapeDtypeStruct`s for one device of `target`, with compiler options."""
    compiled = compile_on(target, fn, args, donate, options)
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis()
    cycles = read_hlo(compiled.as_text()).cycles
    return Compiled(
        gb_accessed=cost["bytes accessed"] / 1e9 if cost else None,
        temp_mib=memory.temp_size_in_bytes / 2**20,
        peak_mib=memory.peak_memory_in_bytes / 2**20,
        mcycles=cycles / 1e6 if cycles else None,
    )


def hlo_for(
    target: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any] | None = None,
) -> str:
    """The optimized program of `fn` of `ShapeDtypeStruct`s, compiled for one device of `target`."""
    return compile_on(target, fn, args, (), options).as_text()


def compile_on(
    target: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    donate: tuple[int, ...],
    options: dict[str, Any] | None,
) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(target_device(target))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    platform = "tpu" if target.startswith("tpu") else "cuda"
    traced = jax.jit(fn, donate_argnums=donate).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).compile(compiler_options=options)


def residual_mib(loss_fn: Callable[..., Any], params: Any, *rest: Any) -> float:
    """What the forward pass of `loss_fn(params, *rest) -> (loss, aux)` saves, in 2^20 bytes.

    These are the leaves of the function that `jax.vjp` returns, without those that are parameters
    themselves: a float32 weight is there anyway, a 16-bit copy of it is not.
    """
    return sum(residuals_by_dtype(loss_fn, params, *rest).values())


def residuals_by_dtype(loss_fn: Callable[..., Any], params: Any, *rest: Any) -> Counter[str]:
    """The same by dtype."""
    closed = jax.make_jaxpr(
        lambda params, *rest: jax.vjp(lambda p: loss_fn(p, *rest), params, has_aux=True)[1]
    )(params, *rest)
    here_anyway = {id(v) for v in closed.jaxpr.invars[: len(jax.tree.leaves(params))]}
    saved = {id(v): v.aval for v in closed.jaxpr.outvars if id(v) not in here_anyway}
    sizes: Counter[str] = Counter()
    for aval in saved.values():
        sizes[str(aval.dtype)] += math.prod(aval.shape) * aval.dtype.itemsize / 2**20
    return sizes


def contraction_counts(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often each dtype is multiplied in one call of `fn`; mixed operands read "a*b"."""
    return _contractions(fn, args, lambda _: 1)


def low_share(fn: Callable[..., Any], *args: Any) -> float:
    """The share of the FLOPs of contractions in `fn` whose operands both have at most 16 bits."""
    flops = contraction_flops_by_dtype(fn, *args)
    low = sum(n for dtypes, n in flops.items() if is_low(dtypes))
    return low / sum(flops.values())


def contraction_flops_by_dtype(fn: Callable[..., Any], *args: Any) -> Counter[str]:
    """FLOPs of the contractions in one call of `fn` by the dtypes multiplied."""
    return _contractions(fn, args, contraction_flops)


def is_low(dtypes: str) -> bool:
    """Whether all of the dtypes in "a*b" have at most 16 bits."""
    return all(jnp.dtype(dtype).itemsize <= 2 for dtype in dtypes.split("*"))


def _contractions(
    fn: Callable[..., Any], args: tuple[Any, ...], cost: Callable[[Any], int]
) -> Counter[str]:
    """A cost of one call's contractions, by what they multiply; a scan's as often as it runs."""

    def count(jaxpr: Any, times: int) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name in CONTRACTIONS:
                dtypes = {str(v.aval.dtype) for v in eqn.invars[:2]}
                counts["*".join(sorted(dtypes))] += times * cost(eqn)
            inner_times = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
            for inner in jex_core.jaxprs_in_params(eqn.params):
                count(inner, inner_times)

    counts: Counter[str] = Counter()
    count(jax.make_jaxpr(fn)(*args), 1)
    return counts


def relative_error(got: Any, want: Any) -> float:
    """The relative L2 error of a whole pytree, in float64."""
    norm = error = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if g.dtype != jnp.float32:
            raise TypeError(f"relative_error: a gradient is {g.dtype}, not float32.")
        g, w = jax.device_get((g, w))
        error += float(((g.astype("float64") - w) ** 2).sum())
        norm += float((w.astype("float64") ** 2).sum())
    return math.sqrt(error / norm)
