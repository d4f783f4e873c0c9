"""One run of a program, forward and backward, with everything measured that it computes."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp._autocast import autocast
from jaxmp._autocast.nnx_calls import on_a_clone
from jaxmp._autocast.regions import check_callable
from jaxmp._jaxprs.aux_outputs import Extra, Extras
from jaxmp._jaxprs.scopes import SEED
from jaxmp._jaxprs.trace import Traced, is_array, trace
from jaxmp._numerics.arguments import (
    check_arguments,
    check_progress,
    labels_of,
    returns_aux,
)
from jaxmp._numerics.origins import Origin, Walk
from jaxmp._numerics.probe import Probe
from jaxmp._numerics.readings import Readings
from jaxmp._numerics.record import Record, entries
from jaxmp._numerics.statistics import Measurements, Statistics, unpack
from jaxmp._numerics.survey import Site, SurveyedProgram, matches, survey
from jaxmp._training.differentiate import scaled_value_and_grad
from jaxmp._training.loss_scale import static_loss_scale
from jaxmp._training.opt_state import find_scaler
from jaxmp.policy import PolicyLike, get_policy, single_policy


@dataclasses.dataclass(frozen=True)
class Measured:
    """A site, and what was measured of it.

    Attributes:
      site: an operation of the program, or an argument.
      statistics: of its result, over the iterations of the loops around it.
    """

    site: Site
    statistics: Statistics


@dataclasses.dataclass(frozen=True)
class Capture(Readings):
    """What a run of a program computed.

    Attributes:
      policy: under which policy it ran.
      measured_results: what the measured program returned: of a loss, it and its gradients. XLA may
        fuse a program that is measured otherwise, so that last bits differ from `results`.
      sites: what was measured, by name, in the order in which it ran.
      program: what each site reads.
      bytes: of all that was measured.
      loss_scale: what the loss was multiplied by.
      wide: whether it ran in float32 wherever the policy says 16 bits.
    """

    policy: str
    measured_results: Any
    sites: dict[str, Measured]
    program: SurveyedProgram
    bytes: int
    loss_scale: float
    wide: bool
    _unmeasured: Callable[[], Any] = dataclasses.field(repr=False)

    @functools.cached_property
    def results(self) -> Any:
        """What the program returns when nothing is measured: it is run again for that."""
        return self._unmeasured()

    def origins(self) -> list[Origin]:
        """The operations that made what is not finite in the results, in the order they ran."""
        return self._walk().of_results()

    def all_origins(self) -> list[Origin]:
        """Those of everything that is not finite, also of what no result is made of."""
        return self._walk().everywhere()

    def record(self) -> Record:
        """What is kept of it to compare it: see `compare` and `jaxmp.numerics.save`."""
        measured = ((m.site, m.statistics) for m in self.sites.values())
        title = f"{self.policy}, run in float32" if self.wide else self.policy
        sites = entries(self.program, measured, wide=self.wide)
        return Record(title, self.loss_scale, sites)

    def _walk(self) -> Walk:
        return Walk(self.program, {name: m.statistics for name, m in self.sites.items()})


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A program, ready to be run and measured: `step` gives its results, and what `extras` types.

    Where in that a site is measured is in `places`: see `_places`.
    """

    policy: str
    program: SurveyedProgram
    call: Traced
    measured_bytes: int
    step: Callable[..., tuple[list[Any], Extras]]
    extras: Extras
    places: dict[str, tuple[str, int, int | None]]
    loss_scale: float
    wide: bool

    def run(self) -> Capture:
        """Runs it."""
        results, extras = self.step(*self.call.arrays)
        arrays = {name: _by_iteration(extra) for name, extra in extras.items()}
        sites = {
            name: Measured(site, unpack(site.size, _measurements(arrays, *self.places[name])))
            for name, site in self.program.sites.items()
        }
        return Capture(
            policy=self.policy,
            measured_results=self.call.rebuild(results),
            sites=sites,
            program=self.program,
            bytes=self.measured_bytes,
            loss_scale=self.loss_scale,
            wide=self.wide,
            _unmeasured=self.results,
        )

    def results(self) -> Any:
        """What the program returns when nothing is measured."""
        probe = Probe(whole=frozenset().__contains__, looks=False, wide=self.wide)
        step = jax.jit(lambda *arrays: probe.run(self.call.jaxpr, arrays)[0])
        return self.call.rebuild(step(*self.call.arrays))


def prepare(
    fn: Callable[..., Any],
    policy: Any,
    args: Sequence[Any],
    *,
    argnums: int | Sequence[int] = 0,
    grad: bool | None = None,
    loss_scale: float = 1.0,
    wide: bool = False,
    sites: str = "**",
    twins: bool = True,
) -> Prepared:
    """Traces and compiles what `capture` runs; its arguments are explained there."""
    check_callable("capture", fn)
    chosen_args = check_arguments(args, argnums)
    program = on_a_clone(fn)
    if policy is not None:
        program = autocast(program, policy, chosen_args)
    has_aux = returns_aux(program, args)
    if grad is None:
        leaves = filter(is_array, jax.tree.leaves([args[i] for i in chosen_args]))
        floating = any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
        grad = has_aux is not None and floating
    if grad and has_aux is None:
        raise ValueError(
            "capture: grad=True, but the function returns neither one floating number nor such a "
            "number and something else: (loss, aux)"
        )
    if grad:
        scaler = optax.identity()
        if loss_scale != 1:
            scaler = static_loss_scale(scaler, loss_scale)
        state = find_scaler("capture", scaler.init(jnp.zeros(())))
        program = _seeded(program, has_aux=bool(has_aux))
        program = scaled_value_and_grad("capture", program, state, argnums, bool(has_aux))
    elif loss_scale != 1:
        raise ValueError(
            f"capture: loss_scale={loss_scale} scales a loss, but the function is not "
            "differentiated: it does not return one number, or grad=False was given"
        )
    traced = trace(program, args, {})
    labels, owners = labels_of(fn, args)
    weights = [i for i, owner in enumerate(owners) if grad and owner in chosen_args]
    found = survey(traced.jaxpr, labels, weights)
    if not found.sites:
        raise ValueError(
            "capture: there is nothing to measure: the function computes no floating numbers of "
            "arrays. A Python number among its arguments is a constant: give jnp.float32(x)"
        )
    chosen = frozenset(name for name, site in found.sites.items() if matches(site.path, sites))
    if not chosen:
        paths = sorted({site.path for site in found.sites.values() if site.path})
        raise ValueError(
            f"capture: sites={sites!r} matches no module path. There are: {', '.join(paths[:40])}"
        )
    probe = Probe(whole=chosen.__contains__, twins=twins, wide=wide)
    step = jax.jit(lambda *arrays: probe.run(traced.jaxpr, arrays))
    places = _places(found, chosen)
    _, extras = jax.eval_shape(step, *traced.arrays)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(extras))
    said = _said(policy, found)
    return Prepared(said, found, traced, size, step, extras, places, float(loss_scale), wide)


def _seeded(fn: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
    """`fn`, the cotangent of whose loss stands in the scope `SEED`, in moves that cost nothing."""

    @jax.custom_vjp
    def seed(loss: Any) -> Any:
        return loss

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        with jax.named_scope(SEED):
            return (jnp.squeeze(jnp.expand_dims(cotangent, 0), 0),)

    seed.defvjp(lambda loss: (loss, None), backward)

    @functools.wraps(fn)
    def seeded(*args: Any) -> Any:
        out = fn(*args)
        return (seed(out[0]), out[1]) if has_aux else seed(out)

    return seeded


def capture(
    fn: Callable[..., Any],
    policy: PolicyLike | None = None,
    argnums: int | Sequence[int] = 0,
    *,
    grad: bool | None = None,
    loss_scale: float = 1.0,
    wide: bool = False,
    sites: str = "**",
    twins: bool = True,
    limit: int = 2**30,
    progress: Callable[[str], Any] | None = None,
) -> Callable[..., Capture]:
    """Runs a program once under a policy, and measures every number that it computes.

    A loss, a function that returns one number or `(loss, aux)`, is differentiated: forward and
    backward are measured. Anything else, such as a whole training step, runs as it is. Nothing
    leaves the device while it runs: what is measured are further results of the one compiled
    program, through jit, scan (per iteration), while, cond, remat, vmap, shard_map and functions
    with derivative rules of their own.

    Args:
      fn: a function, a bound method of an NNX module, or one of modules. Not a Linen module: its
        `apply`.
      policy: as for `autocast`; None: the program as it is.
      argnums: which argument is differentiated, and holds the parameters; several: a sequence.
      grad: whether to differentiate. By default where `fn` returns a loss.
      loss_scale: what the loss is multiplied by before it is differentiated: a power of two.
      wide: whether to compute in float32 wherever the policy says 16 bits: the same operations, and
        what they would have to hold.
      sites: a glob over module paths, where `**` stands for anything. What it does not match is
        looked at for values that are not finite, and no more.
      twins: whether operations in 16 bits are computed in float32 as well, from the same operands,
        to tell what rounding cost.
      limit: how many bytes may be measured.
      progress: is called with a line on how much is measured, before it is compiled and run, which
        takes several times as long as compiling the program alone.

    Returns:
      A function with the arguments of `fn` (arrays, pytrees, NNX modules) that returns what was
      measured, and what the program returned.

    Raises:
      ValueError: if `sites` matches nothing, nothing is a floating number, `argnums` is out of
        range, or more would be measured than `limit`.
      TypeError: if `fn` is not callable, or an argument is a shape instead of an array.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxmp import numerics
      >>> loss = lambda w, x: jnp.sum(x @ w)
      >>> w = jnp.full((16, 8), 300.0)
      >>> run = numerics.capture(loss, "mixed_float16")(w, 100 * jnp.ones((4, 16)))
      >>> [(o.site.op, o.site.dtype, o.nan) for o in run.origins()]
      [('dot_general', 'float16', False)]
    """
    check_progress("capture", progress)
    if policy is not None:
        single_policy("capture", policy)
    check_callable("capture", fn)

    def captured(*args: Any) -> Capture:
        prepared = prepare(
            fn, policy, args, argnums=argnums, grad=grad, loss_scale=loss_scale, wide=wide,
            sites=sites, twins=twins,
        )  # fmt: skip
        count = len(prepared.program.sites)
        said = f"{count} sites, {prepared.measured_bytes / 2**20:.1f} MiB of measurements"
        if prepared.measured_bytes > limit:
            raise ValueError(
                f"capture: {said}, more than the limit of {limit / 2**20:.1f} MiB. Most of it is "
                f"measured in {_largest(prepared)}: give a glob of module paths, sites='...', or a "
                "larger limit"
            )
        if progress is not None:
            progress(f"capture: compiles and runs the program with {said}")
        return prepared.run()

    return captured


def _said(policy: Any, program: SurveyedProgram) -> str:
    """A policy in words; of a program as it is, which may be a wrapped module's, its dtypes."""
    if policy is not None:
        return str(get_policy(policy))
    return f"as written, in {', '.join(sorted({site.dtype for site in program.sites.values()}))}"


def _places(
    program: SurveyedProgram, whole: Container[str]
) -> dict[str, tuple[str, int, int | None]]:
    """For each site: the jaxpr that it is in, its number there, and that among those measured."""
    places: dict[str, tuple[str, int, int | None]] = {}
    counts: Counter[str] = Counter()
    measured: Counter[str] = Counter()
    for name in program.sites:
        jaxpr = name[: name.rfind("/") + 1]
        number = measured[jaxpr] if name in whole else None
        places[name] = (jaxpr, counts[jaxpr], number)
        counts[jaxpr] += 1
        measured[jaxpr] += name in whole
    return places


def _measurements(
    arrays: dict[str, Any], jaxpr: str, number: int, among: int | None
) -> Measurements:
    """What was measured at a place."""
    top = arrays[f"{jaxpr}tops"][..., number]
    if among is None:
        return Measurements(top)
    names = ("counts", "extremes", "sums", "spread")
    return Measurements(top, *(arrays[f"{jaxpr}{name}"][..., among, :] for name in names))


def _largest(prepared: Prepared) -> str:
    """The modules in which most is measured."""
    sizes: Counter[str] = Counter()
    for name, site in prepared.program.sites.items():
        jaxpr, _, among = prepared.places[name]
        if among is not None:
            value = prepared.extras[f"{jaxpr}spread"].value
            sizes[site.path] += value.size // value.shape[-2] * value.dtype.itemsize
    most = sizes.most_common(3)
    return ", ".join(f"{path or 'no module'} ({size / 2**20:.1f} MiB)" for path, size in most)


def _by_iteration(extra: Extra) -> np.ndarray[Any, Any]:
    """What was measured, over iterations alone: devices are joined."""
    value = np.asarray(extra.value)
    for axis in reversed(range(len(extra.axes))):
        if extra.axes[axis] == "devices":
            summed = extra.join.neutral == 0
            value = value.sum(axis, dtype=value.dtype) if summed else value.max(axis)
    return value
