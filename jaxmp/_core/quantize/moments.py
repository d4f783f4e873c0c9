"""The second moments and the range of what a program multiplies its weights by, from one run."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import explicit_sharding, on_mesh_of
from jaxmp._core.jaxprs.aux_outputs import Extra, Extras, Join, Out, Threaded, TracedBody
from jaxmp._core.jaxprs.equation_parameters import dot_axes, gather, in_groups, layout, window
from jaxmp._core.jaxprs.higher_order import Inner, inside, rebuild
from jaxmp._core.jaxprs.walk import evaluate
from jaxmp._core.quantize.reads import Lookup, Read, counted_moments
from jaxmp._core.quantize.views import View

_IN_PLACE = compat.CALLS.keys() - {"shard_map"}


class _At(NamedTuple):
    """Where in a program a jaxpr runs.

    Attributes:
      scans: the number of scans around it.
      added: what is added to the rows of each lookup; None in loops, branches and derivative rules.
    """

    scans: int = 0
    added: dict[str, Any] | None = None


class _Weight(NamedTuple):
    """A value that is a weight, moved."""

    value: Any
    view: View


@dataclasses.dataclass(frozen=True)
class Gatherer:
    """Runs a program of weights and other arrays, and gathers the moments of their inputs.

    Attributes:
      reads: how products read the weights, by the name of the extra result; filled by a run.
      others: the primitives by which each weight is read otherwise; filled by a run.
      lookups: the lookups of rows, by their numbers; filled by `run_loss`.
    """

    reads: dict[str, Read] = dataclasses.field(default_factory=dict)
    others: defaultdict[int, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))
    lookups: dict[str, Lookup] = dataclasses.field(default_factory=dict)

    def run(self, jaxpr: Any, operands: Sequence[Any], weights: range) -> dict[str, Any]:
        """Runs a program; returns moments and ranges by the names that are in `reads` then.

        Args:
          jaxpr: the program.
          operands: its arguments.
          weights: the positions of the weights among them.
        """
        return self._whole(jaxpr, operands, weights, _At())[1]

    def run_loss(
        self, jaxpr: Any, operands: Sequence[Any], weights: range
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Does that for a loss; returns also moments of gradients by the names in `lookups`.

        They are of its gradients with respect to the rows: the loss depends on errors of rows, to
        the second order, as a product with its own gradients does (Fisher's information).
        """

        def loss(added: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            self.lookups.clear()
            return self._whole(jaxpr, operands, weights, _At(added=added))

        jax.eval_shape(loss, {})
        zeros = {name: jnp.zeros(x.like.shape, x.like.dtype) for name, x in self.lookups.items()}
        grads, moments = jax.grad(loss, has_aux=True)(zeros)
        found = {}
        for name, grad in grads.items():
            rows = jnp.moveaxis(grad, self.lookups[name].axis, -1).astype(jnp.float32)
            found[name] = counted_moments(rows.reshape(-1, rows.shape[-1]))
        return moments, found

    def merged(self, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        """Merges what two runs of a program, or iterations of a loop, gathered."""
        return {name: self.reads[name].merge(value, new[name]) for name, value in old.items()}

    def _whole(
        self, jaxpr: Any, operands: Sequence[Any], weights: range, at: _At
    ) -> tuple[Any, dict[str, Any]]:
        """Runs a program; returns its first result, and the moments."""
        values = list(operands)
        for number, i in enumerate(weights):
            values[i] = _Weight(operands[i], View.of(number, np.shape(operands[i])))
        results, extras = self._run(jaxpr, values, at)
        first = _plain(results[0]) if results else None
        return first, {name: extra.value for name, extra in extras.items()}

    def _run(self, jaxpr: Any, values: Sequence[Any], at: _At) -> Out:
        """Runs a jaxpr; returns its results, and the extra ones."""
        extras: Extras = {}

        def bound(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            results, more = self._equation(eqn, operands, at)
            for name, extra in more.items():
                old = extras.get(name)
                value = extra.value
                extras[name] = self._extra(
                    name, value if old is None else self.reads[name].merge(old.value, value)
                )
            return results

        return evaluate(jaxpr, values, bound), extras

    def _equation(self, eqn: JaxprEqn, operands: list[Any], at: _At) -> Out:
        kind, plain = compat.kind(eqn), [_plain(x) for x in operands]
        weights = {i: x.view for i, x in enumerate(operands) if isinstance(x, _Weight)}
        inner = inside(eqn) if kind != "shard_map" else ()
        if weights and inner and inner[0].rule:
            return self._with_rule(eqn, inner[0], operands, at)
        if weights and inner and kind in _IN_PLACE:
            return self._run(inner[0].jaxpr, operands, at)
        if weights and inner and kind == "scan":
            return self._scan(eqn, inner[0], operands, at)
        if weights and inner:
            parts = [self._part(each, operands, at) for each in inner]
            return rebuild(eqn, plain, parts)
        results: list[Any] = compat.bind(eqn, plain)
        if not weights:
            return results, {}
        if kind == "gather" and at.added is not None and 0 in weights:
            self._look_up(eqn, weights[0], results, at.added)
        multiplied = {"dot_general": self._product, "conv_general_dilated": self._convolution}
        if kind in multiplied:
            found = [multiplied[kind](eqn, i, view, plain[1 - i]) for i, view in weights.items()]
            return results, {name: extra for each in found for name, extra in each.items()}
        for i, view in weights.items():
            # Equations of several operands that move anything move each to a result of its own.
            several = len(results) == len(operands)
            moved = view.moved(eqn) if several or len(operands) == 1 else None
            if moved is None:
                self.others[view.weight].add(compat.called(eqn))
            else:
                results[i] = _Weight(results[i], moved)
        return results, {}

    def _look_up(
        self, eqn: JaxprEqn, view: View, results: list[Any], added: dict[str, Any]
    ) -> None:
        """Adds to the rows that a lookup returns, if they are whole rows."""
        kept = gather(eqn).sliced
        shapes = compat.shape_of(eqn.invars[0]), compat.shape_of(eqn.outvars[0])
        whole = [(i, k) for i, k in kept.items() if shapes[0][i] == shapes[1][k] > 1]
        if len(kept) != 1 or len(whole) != 1:
            return
        [(axis, of_result)] = whole
        row = view.dims[axis]
        if len(row) != 1 or view.axes_of(row) is None:
            return
        read = Read(view, (), row)
        name = str(len(self.lookups))
        self.lookups[name] = Lookup(read, of_result, eqn.outvars[0].aval)
        if added:
            results[0] = results[0] + added[name]

    def _with_rule(self, eqn: JaxprEqn, inner: Inner, operands: Sequence[Any], at: _At) -> Out:
        """Binds a function with a derivative rule unchanged, and runs its jaxpr for the moments."""
        views = [x.view if isinstance(x, _Weight) else None for x in operands]
        moved: list[View | None] = []

        def run(_: Sequence[Any], *arrays: Any) -> Out:
            given = _viewed(arrays, views)
            results, extras = self._run(inner.jaxpr, given, _At(at.scans))
            moved[:] = [x.view if isinstance(x, _Weight) else None for x in results]
            return [_plain(x) for x in results], extras

        results, extras = rebuild(eqn, [_plain(x) for x in operands], [run])
        return _viewed(results, moved), extras

    def _part(self, inner: Inner, operands: Sequence[Any], at: _At) -> Threaded:
        """Returns the replacement of a branch, or of a part of a while loop."""
        carried = set(inner.carries) if inner.loops else set()
        views = [
            operands[i].view if isinstance(operands[i], _Weight) and k not in carried else None
            for k, i in enumerate(inner.operands)
        ]
        for k in carried:
            self._lost(operands[inner.operands[k]])

        def run(_: Sequence[Any], *arrays: Any) -> Out:
            given = _viewed(arrays, views)
            results, extras = self._run(inner.jaxpr, given, _At(at.scans))
            return [_plain(x) for x in results], extras

        return run

    def _lost(self, operand: Any) -> None:
        if isinstance(operand, _Weight):
            self.others[operand.view.weight].add("the carry of a loop")

    def _scan(self, eqn: JaxprEqn, inner: Inner, operands: list[Any], at: _At) -> Out:
        """Runs a scan: moments of weights that it slices are stacked, those of others added."""
        n_consts, n_carry = compat.scan_split(eqn)
        views: list[View | None] = []
        for i, x in enumerate(operands):
            carried = n_consts <= i < n_consts + n_carry
            if carried:
                self._lost(x)
            known = isinstance(x, _Weight) and not carried
            views.append(x.view.in_scan(sliced=i >= n_consts) if known else None)

        def run(_: Sequence[Any], *arrays: Any) -> Out:
            given = _viewed(arrays, views)
            results, extras = self._run(inner.jaxpr, given, _At(at.scans + 1))
            return [_plain(x) for x in results], extras

        plain = [_plain(x) for x in operands]
        consts, carry = plain[:n_consts], plain[n_consts : n_consts + n_carry]
        slices = plain[n_consts + n_carry :]
        body = TracedBody(run, (), [*consts, *carry, *(x[0] for x in slices)])
        shared = {name for name in body.extras if not self.reads[name].view.loops[at.scans]}
        sums = {name: x.value for name, x in body.neutral().items() if name in shared}

        def step(state: Any, slices: list[Any]) -> Any:
            carry, sums = state
            results, extras = body((), *consts, *carry, *slices)
            found = {name: extra.value for name, extra in extras.items()}
            sums = self.merged(sums, {name: found.pop(name) for name in sums})
            return (results[:n_carry], sums), (results[n_carry:], found)

        state, (stacked, found) = lax.scan(step, (carry, sums), slices, **compat.scan_options(eqn))
        carry, sums = state
        return [*carry, *stacked], {
            name: self._extra(name, value) for name, value in (sums | found).items()
        }

    def _product(self, eqn: JaxprEqn, side: int, view: View, x: Any) -> Extras:
        """Returns the moments of the other operand of a product with a weight."""
        contracted, batch = dot_axes(eqn.params)
        x = _replicated(x)
        axes = (*batch[1 - side], *contracted[1 - side])
        free = [i for i in range(x.ndim) if i not in axes]
        ahead = [x.shape[i] for i in batch[1 - side]]
        order = view.pieces_of(contracted[side])
        moved = jnp.transpose(x, (*batch[1 - side], *free, *contracted[1 - side]))
        rows = moved.reshape(*ahead, -1, *view.sizes(order))
        return self._moments(view, view.pieces_of(batch[side]), order, rows)

    def _convolution(self, eqn: JaxprEqn, side: int, view: View, x: Any) -> Extras:
        """Returns the moments of the patches of an image that a kernel is multiplied by."""
        if side == 0 or in_groups(eqn):
            self.others[view.weight].add("a convolution in groups")
            return {}
        specs, names = layout(eqn), ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
        _, features, *space = specs.rhs_spec
        shape = compat.shape_of(eqn.invars[1])
        patches = lax.conv_general_dilated_patches(
            _replicated(x).astype(jnp.float32),
            [shape[i] for i in space],
            **dict(zip(names, window(eqn), strict=True)),
            dimension_numbers=specs,
            precision=lax.Precision.HIGHEST,
        )
        order = view.pieces_of((features, *space))
        rows = jnp.moveaxis(patches, specs.out_spec[1], -1).reshape(-1, *view.sizes(order))
        return self._moments(view, (), order, rows)

    def _moments(
        self, view: View, batch: tuple[int, ...], order: tuple[int, ...], rows: Any
    ) -> Extras:
        """Returns the moments and the range of rows ``[*batch, rows, *contracted]``.

        Args:
          view: the weight, as the product reads it.
          batch: its pieces that both operands have.
          order: its pieces that are summed over, in the order of the last axes of `rows`.
          rows: the other operand.
        """
        several = view.stacked + batch
        read = Read(view, several, tuple(sorted(order)))
        if view.axes_of(order) is None or view.axes_of(several) is None:
            self.others[view.weight].add("a product that sums over a part of an axis")
            return {}
        if not jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype != np.bool_:
            self.others[view.weight].add(f"a product with {rows.dtype}")
            return {}
        kept = rows.ndim - len(order)
        ascending = [kept + order.index(i) for i in sorted(order)]
        rows = jnp.transpose(rows, (*range(kept), *ascending)).reshape(*rows.shape[:kept], -1)
        # Without tangents, which a backward pass would keep.
        rows = lax.stop_gradient(rows.astype(jnp.float32))
        largest = jnp.abs(rows).max((-2, -1), initial=0)
        found = {read: counted_moments(rows), read._replace(largest=True): largest}
        self.reads.update((repr(each), each) for each in found)
        return {repr(each): self._extra(repr(each), value) for each, value in found.items()}

    def _extra(self, name: str, value: Any) -> Extra:
        return Extra(value, Join(0, self.reads[name].merge))


def _replicated(x: Any) -> Any:
    """Replicates an array whose type has an explicit sharding, which reshapes may not take."""
    if explicit_sharding(x) is None:
        return x
    with on_mesh_of(x):
        return jax.sharding.reshard(x, jax.P())


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, _Weight) else x


def _viewed(arrays: Sequence[Any], views: Sequence[View | None]) -> list[Any]:
    pairs = itertools.zip_longest(arrays, views)
    return [x if view is None else _Weight(x, view) for x, view in pairs]
