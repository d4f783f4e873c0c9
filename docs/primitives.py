"""Writes docs/reference/primitives.md: which dtype each of JAX's primitives runs in, by policy.

    python docs/primitives.py

The primitives are those of the table that autocast decides by; the dtypes are what `explain` says
of a small program for each class.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxmp
from jaxmp._core.jaxprs.primitive_table import of_kind

PAGE = Path(__file__).parent / "reference" / "primitives.md"
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
TOP = """\
# Primitives by policy

Which dtype each of JAX's primitives runs in under autocast. Change one with `ops=`:
`"mixed_bfloat16,ops=exp:promote"` puts `exp` into the class `promote`. This page is written by
`python docs/primitives.py`.
"""


class Kind(NamedTuple):
    """A class of primitives: one of them, and a program with it."""

    heading: str
    text: str
    primitive: str
    fn: Callable[[jax.Array, jax.Array], jax.Array]

    def dtypes(self) -> list[str]:
        """What the primitive runs in, by policy."""
        w, x = jnp.ones((16, 16)), jnp.ones((32, 16))
        plans = (jaxmp.explain(self.fn, policy)(w, x) for policy in POLICIES)
        return [next(r.dtype for r in p.rows if r.op == self.primitive) for p in plans]


KINDS = {
    "compute": Kind(
        "Compute dtype",
        "Multiply in the policy's compute dtype, and accumulate in float32.",
        "dot_general",
        lambda w, x: x @ w,
    ),
    "full_precision": Kind(
        "Always float32",
        "Numerically sensitive. Under `softmax=bf16`, a softmax but its sum runs in 16 bits.",
        "exp",
        lambda w, x: jnp.exp(x @ w) @ w,
    ),
    "promote": Kind(
        "Dtype of the operands",
        "In 16 bits if an operand is and a matmul wants the result, by [these "
        "rules](../concepts/plan.md#when-a-float32-value-is-narrowed); otherwise in float32.",
        "tanh",
        lambda w, x: jnp.tanh(x @ w) @ w,
    ),
    "move": Kind(
        "No arithmetic",
        "In the dtype of the value, or of the matmul that reads it.",
        "rev",
        lambda w, x: jnp.flip(x @ w) @ w,
    ),
    "as_written": Kind(
        "As written",
        "Never changed: every primitive that is on no list above.",
        "fft",
        lambda w, x: jnp.fft.rfft(x @ w).real,
    ),
}


def page() -> str:
    """The whole page."""
    rows = [("class, and an example", *(f"`{policy}`" for policy in POLICIES))]
    rows += [tuple(":--" for _ in rows[0])]
    rows += [(f"`{name}`: `{kind.primitive}`", *kind.dtypes()) for name, kind in KINDS.items()]
    parts = [TOP, "".join(f"| {' | '.join(row)} |\n" for row in rows)]
    for name, kind in KINDS.items():
        parts += [f"## {kind.heading}\n", f"Class `{name}`. {kind.text}\n"]
        if name != "as_written":
            primitives = ", ".join(f"`{primitive}`" for primitive in sorted(of_kind(name)))
            parts += [textwrap.fill(primitives, 120, break_on_hyphens=False) + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
