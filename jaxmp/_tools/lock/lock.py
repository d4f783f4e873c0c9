"""A lock: the dtypes of a program's operations, by module, without sizes or addresses.

The primitives that a function consists of, and their number, change from one JAX to the next. So
a lock counts what is written out (products, casts, collectives), and of all other operations
records only the dtypes that occur, by kind.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._core.autocast.nnx_calls import with_module
from jaxmp._core.autocast.transform import watched
from jaxmp._core.execute.annotations import kept_at
from jaxmp._core.flax import is_graph_node
from jaxmp._core.jaxprs.attributes import is_inexact
from jaxmp._core.jaxprs.compat import called, dtype_of, shape_of
from jaxmp._core.jaxprs.equation_parameters import precision
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.primitive_table import TABLE, Flag, flagged, of_kind
from jaxmp._core.jaxprs.scopes import TESTED, UNSCALE
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.jaxprs.trace import is_array, trace
from jaxmp._core.plan.plan import Plan
from jaxmp._core.plan.primitives import CALLED, LOW
from jaxmp._core.plan.regions import check_callable
from jaxmp._core.plan.rules import author_keeps
from jaxmp._core.plan.why import Kind
from jaxmp._core.quantize.select import names_of
from jaxmp._tools.arguments import check_sizes
from jaxmp._tools.audit.follow import float32_region
from jaxmp._tools.audit.scaling import is_scale, of_optax
from jaxmp._tools.explain.explain import planned, warn_overruled
from jaxmp._tools.lock.values import (
    BACKWARD,
    FORWARD,
    PASSES,
    UPDATE,
    LockFollower,
    LockValue,
    Seen,
    live_equations,
    module_of,
)
from jaxmp.policy import PolicyLike, single_policy

PRODUCTS = {
    "dot_general": "matmul",
    "conv_general_dilated": "conv",
    "ragged_dot_general": "ragged_matmul",
}
CASTS, COLLECTIVES, SAVED, SUMS = "casts", "collectives", "saved", "sums"
COUNTED = frozenset({*PRODUCTS.values(), CASTS, COLLECTIVES})

# Primitive → the name of the JAX function that binds it.
_COLLECTIVES = {
    **{name: name for name in (*flagged(Flag.SENDING), "psum", "pmax", "pmin", "all_gather")},
    "ragged_all_to_all": "all_to_all",
    "reduce_scatter": "psum_scatter",
    **dict.fromkeys(CALLED["psum"], "psum"),
    **dict.fromkeys(CALLED["all_gather"], "all_gather"),
    **dict.fromkeys(CALLED["reduce_scatter"], "psum_scatter"),
}
_SUMS = flagged(Flag.SUMMING | Flag.STATISTIC | Flag.CUMULATIVE | Flag.POOLING)
_SUMS = (_SUMS & of_kind("full_precision")) | {"reduce_window_sum", "select_and_scatter_add"}
_FUNCTIONS = (
    (of_kind("full_precision") - _SUMS - {"reduce_precision"}) | flagged(Flag.SOLVING) | {"fft"}
)
_ARITHMETIC = of_kind("promote") - flagged(Flag.MOVING | Flag.JOINING)
OUTSIDE = "(no module)"
# A lock omits results of this dtype, and sums of it outside the modules after the backward pass
# (such as a norm), so that one more metric does not change it.
DEFAULT_DTYPE = "float32"
# Module path → pass and kind, as "forward.matmul" → operation in words → count.
Operations = Mapping[str, Mapping[str, Mapping[str, int]]]


def of_equation(eqn: JaxprEqn, place: Place) -> tuple[str, str] | None:
    """Returns the kind of an equation, and what it does in words; None if a lock omits it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((2, 2), jnp.bfloat16)
      >>> [eqn] = jax.make_jaxpr(lambda x: x @ x)(x).jaxpr.eqns
      >>> of_equation(eqn, Place())
      ('matmul', 'bfloat16*bfloat16 -> bfloat16')
    """
    name = eqn.primitive.name
    ins, outs = ([str(v.aval.dtype) for v in vs if is_inexact(v.aval)] for vs in _atoms(eqn))
    if name in LOW:
        said = f"{'*'.join(str(dtype_of(v)) for v in eqn.invars[:2])} -> {dtype_of(eqn.outvars[0])}"
        return PRODUCTS[name], said + _precision(eqn) + _reason(eqn, place)
    if name == "convert_element_type":
        return (CASTS, f"{ins[0]} -> {outs[0]}") if ins and outs and ins != outs else None
    if name == "reduce_precision" and ins:
        bits, kept = eqn.params, jnp.finfo(ins[0])
        lossy = bits["exponent_bits"] < kept.nexp or bits["mantissa_bits"] < kept.nmant
        to = f"e{bits['exponent_bits']}m{bits['mantissa_bits']}"
        return (CASTS, f"{ins[0]} -> {to}") if lossy else None
    if name in _COLLECTIVES:
        return (COLLECTIVES, f"{_COLLECTIVES[name]} {ins[0]}") if ins else None
    if not outs:
        return None
    for kind, names in ((SUMS, _SUMS), ("functions", _FUNCTIONS), ("arithmetic", _ARITHMETIC)):
        if name in names:
            return kind, outs[0]
    if name in TABLE or not ins:
        return None
    return "kernels", f"{called(eqn)} {'*'.join(dict.fromkeys(ins))} -> {outs[0]}"


def count(eqn: JaxprEqn) -> int:
    """Returns how many operations an equation counts as: a collective, one per floating operand."""
    if eqn.primitive.name not in _COLLECTIVES:
        return 1
    return sum(is_inexact(v.aval) for v in eqn.invars)


def _atoms(eqn: JaxprEqn) -> tuple[Any, Any]:
    return eqn.invars, eqn.outvars


def _precision(eqn: JaxprEqn) -> str:
    """Returns the precision, or the preset with its accumulation dtype, that a product asks for."""
    asked = precision(eqn)
    several = asked if isinstance(asked, tuple) else (asked,)
    names = dict.fromkeys(str(getattr(p, "name", p)) for p in several if p is not None)
    return "".join(f", precision={name}" for name in names if name != "DEFAULT")


def _reason(eqn: JaxprEqn, place: Place) -> str:
    """Returns why a product is float32, in parentheses, if a policy or the author asks for it."""
    if "float32" not in map(str, map(dtype_of, eqn.invars[:2])):
        return ""
    region, kept = float32_region(place), place.first(kept_at)
    why = kept.kind if kept else None
    if why is None and region is not None:
        why = region.why_float32 or Kind.REGION
    if why is None and (asked := author_keeps(eqn)) is not None:
        why = asked.kind
    return f" ({why.name.lower()})" if why else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Lock:
    """The operations of a program, by module, and their dtypes.

    Attributes:
      policy: the policy that the program was traced under; empty: as written.
      scaling: how the program handles the loss scale, in words.
      arguments: the dtype of each array in the arguments, by its path.
      results: the same for the results.
      operations: by module, pass and kind; operations that are not counted have the count 1.
      lines: by module, kind and words, the lines where the operations are written, each with its
        position in the program; not written to the file.
    """

    policy: str
    scaling: tuple[str, ...]
    arguments: Mapping[str, str]
    results: Mapping[str, str]
    operations: Operations
    lines: Mapping[tuple[str, str, str], Mapping[str, int]] = dataclasses.field(
        default_factory=dict
    )


def lock(fn: Callable[..., Any], policy: PolicyLike | None = None) -> Callable[..., Lock]:
    """Returns a function that locks `fn`; see `jaxmp.testing.assert_precision_locked`."""
    asked = None if policy is None else single_policy("lock", policy)
    check_callable("lock", fn)

    def locked(*args: Any, **kwargs: Any) -> Lock:
        check_sizes("lock", args, kwargs)
        program, modules = with_module(fn)
        args = (*modules, *args)
        if asked is None:
            return _locked(program, "", args, kwargs)
        plans: list[Plan] = []
        found = _locked(watched(program, asked, 0, plans.append), str(asked), args, kwargs)
        if not plans:  # the policy changes nothing, but may differ from the one in force
            plans.append(planned(program, asked, 0, args, kwargs)[0])
        warn_overruled("lock", plans[-1])
        return found

    return locked


def _locked(fn: Callable[..., Any], policy: str, args: Any, kwargs: Any) -> Lock:
    def with_changes(*args: Any, **kwargs: Any) -> Any:
        """Returns the NNX modules too: what `fn` changes in them is a result as well."""
        out = fn(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_graph_node)
        return out, [leaf for leaf in leaves if is_graph_node(leaf)]

    traced = trace(with_changes, args, kwargs)
    given = jax.tree_util.tree_leaves_with_path((args, kwargs))
    given = [(path, leaf) for path, leaf in given if is_array(leaf)]
    reader = _Reader(live_equations(traced.jaxpr), any(is_scale(path) for path, _ in given))
    states = filter(of_optax, jax.tree.leaves((args, kwargs), is_leaf=of_optax))
    of_states = set(map(id, jax.tree.leaves(list(states))))
    known = [
        LockValue(parameter="" if id(leaf) in of_states else _name(path[2:]))
        for path, leaf in given
    ]
    LockFollower(reader.visit).run(Place(traced.jaxpr), known)
    outs: list[Any] = list(map(dtype_of, traced.jaxpr.jaxpr.outvars))
    return Lock(
        policy=policy,
        scaling=tuple(reader.scaling),
        arguments={_name(path[1:]): str(leaf.dtype) for path, leaf in given if _plain(leaf.dtype)},
        results={
            ("(modules)/" * path[0].idx + _name(path[1:])) or "(all)": str(dtype)
            for path, dtype in zip(traced.structure.paths, outs, strict=True)
            if _plain(dtype) and jnp.issubdtype(dtype, jnp.inexact)
        },
        operations={module: dict(kinds) for module, kinds in reader.operations.items()},
        lines=reader.lines,
    )


class _Reader:
    """The collector of a lock's contents, which a `LockFollower` calls for each equation."""

    def __init__(self, live: set[int], scale_given: bool) -> None:  # noqa: FBT001
        self._live = live
        self.operations: dict[str, dict[str, Counter[str]]] = defaultdict(
            lambda: defaultdict(Counter)
        )
        self.lines: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
        self._order = itertools.count()
        self.scaling = dict.fromkeys(["the scale is an argument"] if scale_given else [])

    def visit(self, seen: Seen) -> None:
        """Records an equation, if it is live."""
        eqn, place = seen.place.eqn, seen.place
        if id(eqn) not in self._live:
            return
        if in_scope(eqn, UNSCALE):
            self.scaling["gradients are divided by it"] = None
        if in_scope(eqn, TESTED):
            self.scaling["gradients are tested"] = None
        if seen.stage == BACKWARD:
            self._saved(seen)
        if place.again or all(value.fixed for value in seen.known):
            return
        if (said := of_equation(eqn, place)) is None:
            return
        kind, words = said
        module = seen.module if kind in COUNTED else module_of(place)
        if (kind, seen.stage, module, words) == (SUMS, UPDATE, "", DEFAULT_DTYPE):
            return
        self._add(module, f"{PASSES[seen.stage]}.{kind}", words, place.source, count(eqn))

    def _saved(self, seen: Seen) -> None:
        for value, var in zip(seen.known, seen.place.eqn.invars, strict=True):
            dtype = dtype_of(var)
            if value.stage != FORWARD or value.fixed or not shape_of(var) or dtype is None:
                continue
            if jnp.issubdtype(dtype, jnp.inexact):
                self._add(value.module, SAVED, str(dtype), seen.place.source)

    def _add(self, module: str, key: str, words: str, source: str, count: int = 1) -> None:
        said = self.operations[module or OUTSIDE][key]
        said[words] = said[words] + count if key.partition(".")[2] in COUNTED else 1
        self.lines[module or OUTSIDE, key, words].setdefault(source, next(self._order))


def _plain(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype)


def _name(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf, ``0/layers/1/kernel``; an NNX Variable's without ``/value``."""
    return "/".join(names_of(path))
