"""`capture`: one run of a program, forward and backward, that measures all of its values."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp._core.autocast import autocast
from jaxmp._core.autocast.nnx_calls import on_scoped_copies
from jaxmp._core.jaxprs.scopes import SEED
from jaxmp._core.jaxprs.trace import Traced, is_array, trace
from jaxmp._core.plan.regions import check_callable
from jaxmp._core.printable import shown
from jaxmp._tools.arguments import check_arguments, check_progress, labels_of, returns_aux
from jaxmp._tools.numerics.measurements import pieces_per_iteration
from jaxmp._tools.numerics.origins import Origin, Walk
from jaxmp._tools.numerics.plots import KINDS, plot_exponents, plot_underflow
from jaxmp._tools.numerics.probe import LOW, Probe, read_out
from jaxmp._tools.numerics.statistics import Record, all_measured
from jaxmp._tools.numerics.survey import Site, SurveyedProgram, survey
from jaxmp._tools.progress import told
from jaxmp._tools.screen import Report, Section, one_a_place
from jaxmp._training.differentiate import scaled_value_and_grad
from jaxmp._training.loss_scale import static_loss_scale
from jaxmp._training.opt_state import find_scaler
from jaxmp.policy import PolicyLike, get_policy, single_policy


class Readings(Report, abc.ABC):
    """A measured run."""

    @abc.abstractmethod
    def runs(self) -> tuple[Record, ...]:
        """Returns the run, and the run of the same operations in float32, if measured."""

    def plot_exponents(
        self, path: Path | str, *, sites: str = "**", kinds: Sequence[str] = KINDS
    ) -> None:
        """Draws the distribution of magnitudes over exponents, above the ranges of the formats.

        Of a report: the magnitudes in float32, which a format would have to hold.

        Args:
          path: the file of the picture; its suffix is the format.
          sites: a pattern of module paths and names of arguments, as for `capture`.
          kinds: which of "activation", "weight" and "gradient".

        Raises:
          ValueError: if nothing was measured there, or a kind is unknown.
          TypeError: if `kinds` is a string.
          ImportError: without Matplotlib.
        """
        plot_exponents(self.runs()[-1], path, sites, kinds)

    def plot_underflow(self, path: Path | str) -> None:
        """Draws the share of each module's values that became 0, forward and backward.

        Each operation in 16 bits is compared with the same in float32, on the same operands.

        Args:
          path: the file of the picture; its suffix is the format.

        Raises:
          ValueError: if nothing was computed in 16 bits.
          ImportError: without Matplotlib.
        """
        plot_underflow(self.runs()[0], path)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Capture(Record, Readings):
    """A measured run of a program: a `Record` of it, and its results.

    Attributes:
      measured_results: the results of the measured program: of a loss, it and its gradients. XLA
        may fuse a measured program differently, so that last bits differ from `results`.
    """

    measured_results: Any
    _unmeasured: Callable[[], Any]

    @functools.cached_property
    def results(self) -> Any:
        """The results of the program when nothing is measured, for which it runs once more."""
        return self._unmeasured()

    def origins(self) -> list[Origin]:
        """Returns the operations that made the results non-finite, in the order they ran."""
        return self._walk().of_results()

    def all_origins(self) -> list[Origin]:
        """Returns the origins of all non-finite values, also of those that no result depends on."""
        return self._walk().everywhere()

    def runs(self) -> tuple[Record, ...]:
        """Returns the run itself."""
        return (self,)

    def _sections(self, *, verbose: bool) -> Iterator[Section]:  # noqa: ARG002
        made = one_a_place(
            (str(origin.site), f"{origin.site}: made {'NaN' if origin.nan else 'an infinity'}")
            for origin in self.origins()
        )
        size = f"{self.bytes / 2**20:.1f} MiB"
        yield {
            "not finite": made or "nothing: every result is finite",
            "policy": self.title,
            "measured": f"{len(self.sites)} sites, {size}; they are in .sites",
        }

    def _walk(self) -> Walk:
        return Walk(self.program, {name: m.statistics for name, m in self.sites.items()})


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A program, ready to be run and measured.

    Attributes:
      policy: the policy, in words.
      program: its sites.
      call: the traced program, and the arrays that it is called with.
      measured: the names of the sites that are measured fully; others, for non-finite values only.
      loss_scale: the factor that the loss is multiplied by.
      reference: as for `capture`.
      wide: as for `capture`.
      limit: as for `capture`.
    """

    policy: str
    program: SurveyedProgram
    call: Traced
    measured: frozenset[str]
    loss_scale: float
    reference: bool
    wide: bool
    limit: int

    def run(self, progress: Callable[[str], Any] | None = None) -> Capture:
        """Compiles and runs the measured program."""
        step = self.step()
        measured = step.out_info[1]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(measured))
        said = f"{len(self.program.sites)} sites, {size / 2**20:.1f} MiB of measurements"
        if size > self.limit:
            raise ValueError(
                f"capture: {said}, more than the limit of {self.limit / 2**20:.1f} MiB. Most of it "
                f"is measured in {self._largest()}: give a glob of module paths, sites='...', or a "
                "larger limit"
            )
        if progress is not None:
            progress(f"capture: compiles and runs the program with {said}")
        results, extras = self.compiled(step)(*self.call.arrays)
        statistics = read_out(self.program, extras, self.measured.__contains__)
        return Capture(
            policy=self.policy,
            measured_results=self.call.rebuild(results),
            sites=all_measured(self.program, statistics, wide=self.wide),
            program=self.program,
            bytes=size,
            loss_scale=self.loss_scale,
            wide=self.wide,
            _unmeasured=self.results,
        )

    def step(self) -> Any:
        """Traces the measured program, which returns its results and the input of `read_out`."""
        probe = Probe(
            whole=self.measured.__contains__,
            returned=self._returned().__contains__,
            reference=self.reference,
            wide=self.wide,
            pieces=lambda name: pieces_per_iteration(self.program.sites[name].iterations),
        )
        return jax.jit(lambda *arrays: probe.run(self.call.jaxpr, arrays)).trace(*self.call.arrays)

    def compiled(self, traced: Any) -> Any:
        """Compiles a traced program; on a CPU without optimizations, since it runs only once."""
        if jax.default_backend() != "cpu":
            return traced.lower().compile()
        options: dict[str, Any] = {"xla_backend_optimization_level": 0}
        if any(carry.loop is None for carry in self.program.carries.values()):
            # A loop of unknown length measures its values in each iteration, of which there may be
            # many.
            options["xla_backend_optimization_level"] = 1
        else:
            # Operations whose results are all returned gain nothing by being fused.
            options["xla_disable_hlo_passes"] = "fusion"
        return traced.lower().compile(compiler_options=options)

    def _returned(self) -> frozenset[str]:
        """Returns the sites whose values are returned: the smallest, up to half of the limit."""
        sizes = {name: self._size_of(self.program.sites[name]) for name in self.measured}
        smallest = sorted(sizes, key=sizes.__getitem__)
        totals = itertools.accumulate(sizes[name] for name in smallest)
        pairs = zip(smallest, totals, strict=True)
        return frozenset(name for name, total in pairs if total <= self.limit // 2)

    def _largest(self) -> str:
        """Describes the modules with the most bytes to measure."""
        sizes: Counter[str] = Counter()
        for name in self.measured:
            site = self.program.sites[name]
            sizes[site.path] += self._size_of(site)
        most = sizes.most_common(3)
        return ", ".join(f"{path or 'no module'} ({size / 2**20:.1f} MiB)" for path, size in most)

    def _size_of(self, site: Site) -> int:
        """Returns the bytes of a site's values, and of their float32 references."""
        low = np.dtype(site.dtype) in LOW
        kept = np.dtype(site.dtype).itemsize + 4 * low * self.reference
        return site.elements * (4 if self.wide and low else kept)

    def results(self) -> Any:
        """Runs the program without measurements."""
        probe = Probe(whole=frozenset().__contains__, looks=False, wide=self.wide)
        step = jax.jit(lambda *arrays: probe.run(self.call.jaxpr, arrays)[0])
        return self.call.rebuild(step(*self.call.arrays))


def prepare(
    fn: Callable[..., Any],
    policy: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "capture",
    argnums: int | Sequence[int] = 0,
    grad: bool | None = None,
    loss_scale: float = 1.0,
    wide: bool = False,
    sites: str = "**",
    reference: bool = True,
    limit: int = 2**30,
) -> Prepared:
    """Traces the program that `capture` runs: its options, and the name of the tool that asks."""
    if not isinstance(sites, str):
        raise TypeError(f"{name}: sites is a pattern of module paths, a string; got {shown(sites)}")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise TypeError(f"{name}: limit is a number of bytes, an integer; got {shown(limit)}")
    chosen_args = check_arguments(name, args, argnums)
    program = on_scoped_copies(fn)
    if policy is not None:
        program = autocast(program, policy, chosen_args)
    if kwargs:
        program = functools.partial(program, **kwargs)
    has_aux = returns_aux(program, args)
    if grad is None:
        leaves = filter(is_array, jax.tree.leaves([args[i] for i in chosen_args]))
        floating = any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
        grad = has_aux is not None and floating
    if grad and has_aux is None:
        raise ValueError(
            f"{name}: grad=True, but the function returns neither a floating-point scalar nor a "
            "pair (loss, aux) with one"
        )
    if grad:
        scaler = optax.identity()
        if loss_scale != 1:
            scaler = static_loss_scale(scaler, loss_scale)
        state = find_scaler(name, scaler.init(jnp.zeros(())))
        program = _seeded(program, has_aux=bool(has_aux))
        program = scaled_value_and_grad(name, program, state, argnums, bool(has_aux))
    elif loss_scale != 1:
        raise ValueError(
            f"{name}: loss_scale={loss_scale} scales a loss, but the function is not "
            "differentiated: it does not return one number, or grad=False was given"
        )
    traced = trace(program, args, {})
    labels, owners = labels_of(fn, args)
    weights = [i for i, owner in enumerate(owners) if grad and owner in chosen_args]
    found = survey(traced.jaxpr, labels, weights)
    if not found.sites:
        raise ValueError(
            f"{name}: there is nothing to measure: the function computes no floating-point "
            "arrays. A Python number among its arguments is a constant: give jnp.float32(x)"
        )
    chosen = frozenset(name for name, site in found.sites.items() if site.is_in(sites))
    if not chosen:
        paths = sorted({site.path for site in found.sites.values() if site.path})
        raise ValueError(
            f"{name}: sites={sites!r} matches no module path. There are: {', '.join(paths[:40])}"
        )
    said = _describe_policy(policy, found)
    return Prepared(said, found, traced, chosen, float(loss_scale), reference, wide, limit)


def _seeded(fn: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
    """Returns `fn` with the cotangent of its loss in the scope `SEED`, in reshapes without cost."""

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
    reference: bool = True,
    limit: int = 2**30,
    progress: Callable[[str], Any] | None = None,
) -> Callable[..., Capture]:
    """Runs a program once under a policy, and measures every number that it computes.

    A loss, which is a function that returns one number or `(loss, aux)`, is differentiated: its
    forward and backward pass are measured. Anything else, such as a whole training step, runs as
    written. Measured values are extra results of the one compiled program, through jit, scan (per
    iteration), while, cond, remat, vmap, shard_map and custom derivative rules: the values
    themselves, measured on the host, or only their measurements, if the values would take up more
    than half of `limit`.

    Args:
      fn: a function, a bound method of an NNX module, or a function of modules. For a Linen module,
        its `apply`.
      policy: as for `autocast`; None: the program as written.
      argnums: which argument is differentiated, and holds the parameters; several: a sequence.
      grad: whether to differentiate. By default, if `fn` returns a loss.
      loss_scale: the factor of the loss before it is differentiated: a power of two.
      wide: whether to compute in float32 wherever the policy says 16 bits: the same operations, and
        the values that they would have to hold.
      sites: a pattern of module paths, as in a `PolicyMap`: `**` stands for any modules, also none.
        Other sites are only checked for non-finite values.
      reference: whether operations in 16 bits are computed in float32 as well, from the same
        operands, to measure their rounding errors.
      limit: the bytes that the program may return along with its results. If values are large, a
        higher limit compiles faster.
      progress: called with a line of text before each slow step, and the last one says how much
        is measured. By default, lines are printed if stderr is a terminal, from the first second
        on.

    Returns:
      A function with the arguments of `fn` (arrays, pytrees, NNX modules) that returns a `Capture`:
      the measurements, and the results of the program.

    Raises:
      ValueError: if `sites` matches nothing, there are no floating-point arrays, `argnums` is out
        of range, or the measurements would exceed `limit`.
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

    def captured(*args: Any, **kwargs: Any) -> Capture:
        with told(progress) as tell:
            tell("capture: traces the program")
            prepared = prepare(
                fn, policy, args, kwargs, argnums=argnums, grad=grad, loss_scale=loss_scale,
                wide=wide, sites=sites, reference=reference, limit=limit,
            )  # fmt: skip
            return prepared.run(tell)

    return captured


def _describe_policy(policy: Any, program: SurveyedProgram) -> str:
    """Describes a policy; without one, as for a wrapped module, the dtypes of the program."""
    if policy is not None:
        return str(get_policy(policy))
    return f"as written, in {', '.join(sorted({site.dtype for site in program.sites.values()}))}"
