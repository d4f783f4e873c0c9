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
from jaxmp._core.jaxprs.attributes import in_context, renamed, scope_names
from jaxmp._core.jaxprs.higher_order import inside
from jaxmp._core.jaxprs.scopes import LAYERS, REGION
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.jaxprs.walk import equations
from jaxmp._core.policy_keys import ranged


def split_layers(jaxpr: Any, rule_of: str = "") -> Any:
    """Returns an equivalent closed jaxpr in which every scan has one policy for all its layers.

    Args:
      jaxpr: the closed jaxpr.
      rule_of: the function whose derivative rule it is, if it is one.

    Raises:
      ValueError: if a range of layers is not within its scan, no scan is where it should be, or it
        cannot be split.
    """
    if not any(in_scope(eqn, LAYERS) for eqn in equations(compat.closed(jaxpr).jaxpr.eqns)):
        return jaxpr
    _check(jaxpr, rule_of)

    def split(eqn: JaxprEqn) -> JaxprEqn:
        path = _scanned(eqn)
        return eqn if path is None else _split(eqn, path)

    return compat.with_changed_equations(jaxpr, split)


def _check(jaxpr: Any, rule_of: str) -> None:
    """Raises where ranges would have no effect, or could be of several scans."""
    program = list(equations(compat.closed(jaxpr).jaxpr.eqns))
    scanned = {_scanned(eqn) for eqn in program}
    for eqn in program:
        for path, layers in _ranges([eqn]):
            if path not in scanned and rule_of:
                raise ValueError(
                    f"wrap: the PolicyMap's range {_key(path, layers)} is for a module that the "
                    f"derivative rule of {rule_of} calls inside the layers, where a rule has the "
                    "policy around it: give a key of whole layers."
                )
            if path not in scanned:
                raise ValueError(
                    f"wrap: the PolicyMap's range {_key(path, layers)} is for some layers "
                    "that a scan runs, and that module is not called in an nn.scan, so it would "
                    "have no effect. Without a scan, layers have names of their own, which keys "
                    "match."
                )
        if compat.is_next_generation(eqn):
            held = (compat.closed(inner).jaxpr.eqns for inner in compat.inner_jaxprs(eqn))
            for path, layers in _ranges(equations(itertools.chain.from_iterable(held))):
                raise ValueError(
                    f"wrap: the PolicyMap's range {_key(path, layers)} is for some layers "
                    f"that a scan runs, which is not supported with {compat.called(eqn)}; turn off "
                    "JAX's settings for it (jax_remat3, jax_custom_vjp3 and the like)."
                )
        for inner, named in _body(eqn):
            if not named and (twice := _scanned(inner)) is not None:
                raise ValueError(
                    f"wrap: a PolicyMap's key has a range of the layers of {_shown(twice)!r}, "
                    "which scans inside each other run, as nn.remat_scan with several lengths "
                    "does: the range could be of either. Scan them once, or give these layers one "
                    "policy."
                )


def _ranges(eqns: Iterable[JaxprEqn]) -> Iterator[tuple[str, str]]:
    """Yields the paths and ranges in the scopes around equations."""
    for name in itertools.chain.from_iterable(map(scope_names, eqns)):
        if name.startswith(LAYERS) and "|" in name:
            path, layers, _ = name.removeprefix(LAYERS).split("|", 2)
            yield path, layers


def _parts(name: str) -> tuple[str | None, ...]:
    """Returns the path, range and policy in a scope; the path alone where layers are scanned."""
    return tuple(name.removeprefix(LAYERS).split("|", 2)) if name.startswith(LAYERS) else (None,)


def _scanned(eqn: JaxprEqn) -> str | None:
    """Returns the path of the module that the body of a scan calls, if it has ranges; or None.

    That is the innermost scan around it: a scan inside the module is in the scope itself.
    """
    for inner, _ in _body(eqn):
        names = scope_names(inner)
        at = next((i for i, name in enumerate(names) if name.startswith(LAYERS)), None)
        # Flax names the module that it scans, and none around it, in the body.
        if at is not None and at <= 1:
            return _parts(names[at])[0]
    return None


def _body(eqn: JaxprEqn) -> Iterator[tuple[JaxprEqn, bool]]:
    """Yields what a scan runs, but for inside scans; and whether it is in a scope of the body."""
    if compat.kind(eqn) == "scan":
        yield from _called(inside(eqn)[0].jaxpr)


def _called(jaxpr: Any, *, around: bool = False) -> Iterator[tuple[JaxprEqn, bool]]:
    for eqn in compat.closed(jaxpr).jaxpr.eqns:
        named = around or bool(scope_names(eqn))
        yield eqn, named
        if compat.kind(eqn) != "scan":
            for inner in compat.inner_jaxprs(eqn):
                yield from _called(inner, around=named)


def _shown(path: str) -> str:
    return path.replace(".", "/")


def _key(path: str, layers: str) -> str:
    return repr(_shown(f"{path}[{layers}]"))


def _split(eqn: JaxprEqn, path: str) -> JaxprEqn:
    """Returns a call of consecutive scans in place of one over the layers of a module."""
    [loop] = inside(eqn)
    length, body, unroll = loop.trips, loop.jaxpr, compat.scan_options(eqn)["unroll"]
    ranges = {
        text: _layers(text, path, length)
        for at, text in _ranges(equations(compat.closed(body).jaxpr.eqns))
        if at == path
    }

    def has(i: int) -> frozenset[str]:
        return frozenset(text for text, layers in ranges.items() if i in layers)

    pieces = [(key, list(run)) for key, run in itertools.groupby(range(length), has)]
    if loop.reverse:
        pieces.reverse()

    def resolved(eqn: JaxprEqn, key: frozenset[str]) -> JaxprEqn:
        def rename(name: str) -> str | None:
            parts = _parts(name)
            if parts[0] != path:
                return name
            return f"{REGION}{parts[2]}" if len(parts) == 3 and parts[1] in key else None

        return renamed(eqn, rename) if in_scope(eqn, LAYERS) else eqn

    n_consts, n_carry = compat.scan_split(eqn)
    first = n_consts + n_carry

    def scans(*operands: Any) -> list[Any]:
        consts, stacks = operands[:n_consts], operands[first:]
        carry: Sequence[Any] = operands[n_consts:first]
        stacked = {}
        for key, run in pieces:
            outs = compat.bind(
                eqn,
                [*consts, *carry, *(lax.slice_in_dim(x, run[0], run[-1] + 1) for x in stacks)],
                jaxpr=compat.with_changed_equations(body, functools.partial(resolved, key=key)),
                length=len(run),
                unroll=min(unroll, len(run)),
            )
            carry, stacked[run[0]] = outs[:n_carry], outs[n_carry:]
        in_order = [outs for _, outs in sorted(stacked.items())]
        return [*carry, *(lax.concatenate(parts, 0) for parts in zip(*in_order, strict=True))]

    def layers(*operands: Any) -> list[Any]:  # the call is named after it, and has no source
        with compat.source_of(eqn):
            return scans(*operands)

    with in_context(eqn):
        [call] = jax.make_jaxpr(jax.jit(layers))(*(var.aval for var in eqn.invars)).jaxpr.eqns
    new: JaxprEqn = call.replace(invars=eqn.invars, outvars=eqn.outvars)
    return new


def _layers(text: str, path: str, length: int) -> range:
    """Returns the layers that the text of a range is among those of a scan."""
    key = ranged(f"{path}[{text}]")
    layers = key.layers.within(length) if key else None
    if layers is None:
        raise ValueError(
            f"wrap: the PolicyMap's range {_key(path, text)} is not within the "
            f"{length} layers that are scanned there; take a range between 0 and {length}."
        )
    return layers
