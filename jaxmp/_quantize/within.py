"""Dequantization inside loops, branches and calls, which get quantized weights as they are stored.

Dequantized before a loop, a stack of layers would be in 16 bits as a whole while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import explicit_sharding, filled
from jaxmp._jaxprs.higher_order import inside, rebuild
from jaxmp.quantized import QuantizedArray, array_of, is_quantized

Known = Sequence[QuantizedArray | None]
# The results of an open jaxpr, given its constants, its operands, and the weights in their place.
Run = Callable[[Any, Sequence[Any], Sequence[Any], Known], list[Any]]

# The primitives that are bound again with extra operands, which all their jaxprs share.
_SHARING: Final = frozenset({"cond", "jit", "remat2"})


def dequantized_inside(
    eqn: JaxprEqn, operands: Sequence[Any], known: Known, run: Run
) -> list[Any] | None:
    """Runs an equation whose inner jaxprs dequantize the weights that they read.

    Args:
      eqn: the equation.
      operands: its operands; None for a weight.
      known: for each operand, the weight that it stands for; None for others.
      run: evaluates a jaxpr.

    Returns:
      Its results; None where it has no jaxprs, or they do not get a weight as it is stored.
    """
    kind = compat.kind(eqn)
    stored = [x if q is None else q for x, q in zip(operands, known, strict=True)]
    if kind == "scan":
        return _scan(eqn, stored, run)
    if kind == "while":
        return _while(eqn, stored, run)
    return _sharing(eqn, stored, run) if kind in _SHARING else None


def _body(jaxpr: Any, run: Run) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function of its operands, some of them weights as they are stored."""
    opened, consts = compat.closed(jaxpr)

    def body(*operands: Any) -> list[Any]:
        known = [x if is_quantized(x) else None for x in operands]
        return run(opened, consts, [None if is_quantized(x) else x for x in operands], known)

    return body


def _array(x: Any) -> Any:
    return array_of(x) if is_quantized(x) else x


def _scan(eqn: JaxprEqn, stored: Sequence[Any], run: Run) -> list[Any] | None:
    """Runs a scan whose iterations get their slice of a stack's values and scales."""
    n_consts, n_carry = compat.scan_split(eqn)
    first = n_consts + n_carry
    consts, carry = stored[:n_consts], list(map(_array, stored[n_consts:first]))
    slices = [x if _sliced_alike(x) else _array(x) for x in stored[first:]]
    if not any(map(is_quantized, (*consts, *slices))):
        return None
    body = _body(inside(eqn)[0].jaxpr, run)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*consts, *carry, *slices)
        return results[:n_carry], results[n_carry:]

    carry, stacked = lax.scan(step, carry, slices, **compat.scan_options(eqn))
    return [*carry, *stacked]


def _sliced_alike(x: Any) -> bool:
    """Returns whether slices along the first axis have their own scales, if they have any."""
    return not is_quantized(x) or x.scale.shape[0] == x.shape[0]


def _while(eqn: JaxprEqn, stored: Sequence[Any], run: Run) -> list[Any] | None:
    test, body = inside(eqn)
    n_test, n_body = test.shared or 0, body.shared or 0
    given, start = stored[: n_test + n_body], list(map(_array, stored[n_test + n_body :]))
    if not any(map(is_quantized, given)):
        return None
    goes_on, step = _body(test.jaxpr, run), _body(body.jaxpr, run)
    return list(
        lax.while_loop(
            lambda carry: goes_on(*given[:n_test], *carry)[0],
            lambda carry: step(*given[n_test:], *carry),
            start,
        )
    )


def _sharing(eqn: JaxprEqn, stored: Sequence[Any], run: Run) -> list[Any] | None:
    """Rebinds an equation with the weights as extra operands, and unread zeros in their place."""
    extra = {i: q for i, q in enumerate(stored) if is_quantized(q)}
    if any(explicit_sharding(eqn.invars[i]) for i in extra):
        return None
    operands = [filled(v.aval, 0) if i in extra else stored[i] for i, v in enumerate(eqn.invars)]

    def of(inner: Any) -> Any:
        body = _body(inner.jaxpr, run)

        def replaced(weights: Sequence[Any], *arrays: Any) -> tuple[list[Any], dict[str, Any]]:
            given = dict(zip(extra, weights, strict=True))
            pairs = zip(inner.operands, arrays, strict=True)
            return body(*(given.get(i, x) for i, x in pairs)), {}

        return replaced

    replacements = [of(inner) for inner in inside(eqn)]
    flat, tree = jax.tree.flatten(list(extra.values()))
    unflat = [
        lambda parts, *arrays, r=r: r(jax.tree.unflatten(tree, parts), *arrays)
        for r in replacements
    ]
    return rebuild(eqn, operands, unflat, flat)[0]
