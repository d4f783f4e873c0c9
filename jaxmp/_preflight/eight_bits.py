"""The 8-bit products of a compiled program, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from jaxmp._preflight.hlo import Multiplied, Program

# More lines than these are not printed.
MOST = 20
_NUMBER = re.compile(r"_\d+\b")


def share_of_8_bits(program: Program) -> str:
    """How many products are in 8 bits, of how many: ``48 of 66``."""
    return f"{len(program.products_in_8_bits)} of {len(program.products)}"


def lines_of_8_bits(program: Program) -> Iterator[str]:
    """A line for each kind of 8-bit product: how many, by what, of what, where; then what is left.

    Layers that differ in a number alone are one kind.
    """
    kinds = Counter(map(_kind, program.products_in_8_bits))
    for kind, count in kinds.most_common(MOST):
        yield f"  {count} x {kind}"
    if len(kinds) > MOST:
        yield f"  and {len(kinds) - MOST} kinds more"
    left = Counter(p.dtype for p in program.products if not p.in_8_bits)
    if left:
        words = ", ".join(
            f"{count} {dtype or 'of an unknown dtype'}" for dtype, count in left.items()
        )
        yield f"  not in 8 bits: {words}"


def _kind(product: Multiplied) -> str:
    place = str(product.place._replace(path=_NUMBER.sub("_*", product.place.path)))
    return f"{product.op} {' x '.join(product.operands)} -> {product.result}: {place}"
