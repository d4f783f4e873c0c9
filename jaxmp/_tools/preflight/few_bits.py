"""The products in few bits of compiled programs, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxmp._tools.preflight.hlo import HloProgram, Multiplied
from jaxmp.formats import bits_in_words

# The most lines of products in few bits that are printed.
MOST = 8
_NUMBER = re.compile(r"_\d+\b")
_BITS = re.compile(r"(?:float|int|complex)(\d+)")


def bits_of(dtype: str) -> int:
    """Returns the bits of the narrowest of a product's dtypes: 8 of ``float8_e5m2*float32``."""
    return min(map(int, _BITS.findall(dtype)), default=64)


def in_words(programs: Sequence[HloProgram]) -> str:
    """Returns the bits of the products of few bits of programs: ``8 bits``, ``8 or 4 bits``."""
    each = {bits_of(product.dtype) for p in programs for product in p.products_in_8_bits}
    return bits_in_words(each)


def share_of_8_bits(program: HloProgram) -> str:
    """Formats the number of products in 8 bits, and of all products: ``48 of 66``."""
    return f"{len(program.products_in_8_bits)} of {len(program.products)}"


def lines_of_8_bits(program: HloProgram) -> Iterator[str]:
    """Yields a line for each kind of 8-bit product, and one for the products in other dtypes.

    A kind is an operation, its operands and result, and its place without the number of the layer.
    """
    kinds = Counter(map(_kind, program.products_in_8_bits))
    for kind, count in kinds.most_common(MOST):
        yield f"  {count} x {kind}"
    if len(kinds) > MOST:
        yield f"  and {len(kinds) - MOST} more kinds"
    left = Counter(p.dtype or "of an unknown dtype" for p in program.products if not p.in_8_bits)
    if left:
        others = ", ".join(f"{count} {dtype}" for dtype, count in left.items())
        yield f"  not in {in_words([program])}: {others}"


def _kind(product: Multiplied) -> str:
    place = str(product.place._replace(path=_NUMBER.sub("_*", product.place.path)))
    return f"{product.op} {' x '.join(product.operands)} -> {product.result}: {place}"
