"""Scans over layers with several policies, split before they are planned.

A scan of layers is one body, and a plan is one per body. Where some layers have policies of their
own, the scan becomes consecutive scans over slices of its stacks: of each, every iteration has the
same policies. The values are those of the one scan, and derivatives are JAX's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.attributes import renamed, scope_names
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.jaxprs.scopes import LAYERS, REGION
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.layer_range import ranged


def split_layers(jaxpr: Any) -> Any:
    """Returns an equivalent closed jaxpr in which every scan has one policy for all its layers.

    Raises:
      ValueError: if a range of layers is not within its scan, or no scan is where it should be.
    """
    program = list(equations(compat.closed(jaxpr).jaxpr.eqns))
    marked = [eqn for eqn in program if in_scope(eqn, LAYERS)]
    if not marked:
        return jaxpr
    scans = {_scanned(eqn) for eqn in program}
    for name in itertools.chain.from_iterable(map(scope_names, marked)):
        path, *policy = _parts(name)
        if policy and path not in scans:
            raise ValueError(
                f"wrap: the PolicyMap's key {_key(path, policy[0])} is for some of the layers that "
                "a scan runs, and that module is not called in an nn.scan, so it would have no "
                "effect. Without a scan, layers have names of their own, which keys match."
            )

    def split(eqn: JaxprEqn) -> JaxprEqn:
        path = _scanned(eqn)
        return eqn if path is None else _split(eqn, path)

    return compat.with_changed_equations(jaxpr, split)


def _parts(name: str) -> tuple[str | None, ...]:
    """Returns the path, range and policy in a scope; the path alone where layers are scanned."""
    return tuple(name.removeprefix(LAYERS).split("|", 2)) if name.startswith(LAYERS) else (None,)


def _scanned(eqn: JaxprEqn) -> str | None:
    """Returns the path of the module that the body of a scan calls, if it has ranges; or None.

    That is the innermost scan around it: a scan inside the module is in the scope itself.
    """
    if compat.kind(eqn) != "scan":
        return None
    for inner in _called(compat.closed(inside(eqn)[0].jaxpr).jaxpr.eqns):
        names = scope_names(inner)
        at = next((i for i, name in enumerate(names) if name.startswith(LAYERS)), None)
        # Flax names the module that it scans, and none around it, in the body.
        if at is not None and at <= 1:
            return _parts(names[at])[0]
    return None


def _called(eqns: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields equations, and those inside them, but for inside scans."""
    for eqn in eqns:
        yield eqn
        if compat.kind(eqn) != "scan":
            for jaxpr in compat.inner_jaxprs(eqn):
                yield from _called(compat.closed(jaxpr).jaxpr.eqns)


def _key(path: object, layers: object) -> str:
    return repr(f"{path}[{layers}]".replace(".", "/"))


def _split(eqn: JaxprEqn, path: str) -> JaxprEqn:
    """Returns a call of consecutive scans in place of one over the layers of a module."""
    [loop] = inside(eqn)
    length, body, unroll = loop.trips, loop.jaxpr, compat.scan_options(eqn)["unroll"]
    inner = equations(compat.closed(body).jaxpr.eqns)
    texts = {
        parts[1]: None
        for name in itertools.chain.from_iterable(map(scope_names, inner))
        if len(parts := _parts(name)) == 3 and parts[0] == path
    }
    layers = {text: _layers(str(text), path, length) for text in texts}

    def has(i: int) -> frozenset[str | None]:
        return frozenset(text for text, found in layers.items() if i in found)

    pieces = [(key, list(run)) for key, run in itertools.groupby(range(length), has)]
    if loop.reverse:
        pieces.reverse()

    def resolved(eqn: JaxprEqn, key: frozenset[str | None]) -> JaxprEqn:
        def rename(name: str) -> str | None:
            parts = _parts(name)
            if parts[0] != path:
                return name
            return f"{REGION}{parts[2]}" if len(parts) == 3 and parts[1] in key else None

        return renamed(eqn, rename) if in_scope(eqn, LAYERS) else eqn

    n_consts, n_carry = compat.scan_split(eqn)
    first = n_consts + n_carry

    def scans(*operands: Any) -> list[Any]:
        with compat.source_of(eqn):  # the call around it has none
            return in_parts(operands)

    def in_parts(operands: Sequence[Any]) -> list[Any]:
        consts, carry, stacks = operands[:n_consts], operands[n_consts:first], operands[first:]
        results: list[tuple[int, list[Any]]] = []
        for key, run in pieces:
            change = functools.partial(resolved, key=key)
            outs = compat.bind(
                eqn,
                [*consts, *carry, *(lax.slice_in_dim(x, run[0], run[-1] + 1) for x in stacks)],
                jaxpr=compat.with_changed_equations(body, change),
                length=len(run),
                unroll=min(unroll, len(run)),
            )
            carry = tuple(outs[:n_carry])
            results.append((run[0], outs[n_carry:]))
        in_order = [stacked for _, stacked in sorted(results, key=lambda result: result[0])]
        return [*carry, *(_joined(parts) for parts in zip(*in_order, strict=True))]

    scans.__name__ = "layers"
    avals = [var.aval for var in eqn.invars]
    [call] = jax.make_jaxpr(jax.jit(scans))(*avals).jaxpr.eqns
    new: JaxprEqn = call.replace(invars=eqn.invars, outvars=eqn.outvars)
    return new


def _joined(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


def _layers(text: str, path: str, length: int) -> range:
    """Returns the layers that the text of a range is among those of a scan."""
    key = ranged(f"{path}[{text}]")
    layers = key.layers.within(length) if key else None
    if layers is None:
        raise ValueError(
            f"wrap: the range of the PolicyMap's key {_key(path, text)} is not within the "
            f"{length} layers that are scanned there; take a range between 0 and {length}."
        )
    return layers
