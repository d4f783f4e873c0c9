"""Checks of loss scaling: the loss is multiplied and its gradients are divided by it, once each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.jaxprs.scopes import TESTED, UNSCALE
from jaxmp._core.jaxprs.source import in_scope
from jaxmp._core.plan.primitives import LOW as CONTRACTIONS
from jaxmp._tools.audit.follow import Known, Observed
from jaxmp._tools.audit.report import Operation

FLOAT16 = np.dtype(np.float16)
NOT_SCALED = "not-scaled"
NOT_UNSCALED = "not-unscaled"
SCALED_TWICE = "scaled-twice"
NO_SCALE = "no-scale"
UNNEEDED = "unneeded-scale"


def is_scale(path: tuple[Any, ...]) -> bool:
    """Returns whether a leaf is the scale of a `LossScaleState`, by the name of its field."""
    return any(getattr(key, "name", None) == "loss_scale" for key in path)


def of_optax(node: Any) -> bool:
    """Returns whether a node of a pytree is the state of an optax transformation."""
    return isinstance(node, tuple) and type(node).__module__.startswith("optax.")


def has_optimizer(tree: Any) -> bool:
    """Returns whether a pytree contains the state of an optax transformation."""
    return any(map(of_optax, jax.tree.leaves(tree, is_leaf=of_optax)))


class Scaling:
    """The findings on loss scaling, collected while a program is walked."""

    def __init__(self) -> None:
        self._backward = False
        self._unscales = False
        self._in_float16: list[Operation] = []
        self._narrow = False  # some product has 16-bit operands, or 8-bit ones
        self._float16 = False  # something in the backward pass is float16
        self._of_scaler: list[Operation] = []

    def visit(self, seen: Observed, operation: Operation) -> tuple[str, str] | None:
        """Checks the power of the loss scale in the gradients that an equation reads.

        An equation that unscales them must read gradients of a loss that was scaled once; a
        scaler's test for finite gradients, those of the unscaled loss.

        Returns:
          The kind of finding, and the finding in words; None if there is none.
        """
        eqn = seen.eqn
        if operation.backward and str(FLOAT16) in (*operation.in_dtypes, *operation.out_dtypes):
            self._float16 = True
        if eqn.primitive.name in CONTRACTIONS:
            self._narrow |= any(jnp.dtype(d).itemsize <= 2 for d in operation.in_dtypes[:2])
        if eqn.primitive.name in CONTRACTIONS and operation.backward:
            self._backward = True
            if FLOAT16 in map(dtype_of, eqn.invars[:2]) and not seen.out.scaled:
                self._in_float16.append(operation)
        if eqn.primitive.name == "mul" and in_scope(eqn, UNSCALE):
            self._unscales = True
            self._of_scaler.append(operation)
            return self._divided(*seen.known) if self._backward else None
        if eqn.primitive.name == "is_finite" and in_scope(eqn, TESTED):
            self._of_scaler.append(operation)
            return self._tested(*seen.known) if self._backward else None
        return None

    def _divided(self, grad: Known, inverse: Known) -> tuple[str, str] | None:
        if not inverse.scaled:
            return None
        if not grad.scaled:
            what = "gradients are divided by a loss scale that the loss was not multiplied by"
            return NOT_SCALED, what
        if inverse.degree != -1 or not isinstance(grad.degree, int) or grad.degree == 1:
            return None
        if grad.degree < 1:
            what = "gradients were divided by the loss scale before"
        else:
            what = f"the loss was multiplied by the loss scale {grad.degree} times, and its "
            what += "gradients are divided by it once"
        return SCALED_TWICE, what

    def _tested(self, grad: Known) -> tuple[str, str] | None:
        if not self._unscales and not grad.scaled:
            what = "the optimizer has a loss scale, and the loss is not multiplied by it"
            return NOT_SCALED, what
        if not isinstance(grad.degree, int) or grad.degree == 0:
            return None
        if grad.degree < 0:
            what = "gradients are divided by the loss scale more often than the loss is multiplied"
            return SCALED_TWICE if self._unscales else NOT_SCALED, what
        what = "the loss is multiplied by the loss scale more often than its gradients are divided"
        return SCALED_TWICE if self._unscales else NOT_UNSCALED, what

    def of_program(self) -> Iterator[tuple[str, str, list[Operation]]]:
        """Yields findings on the whole program: kind, words, and the operations concerned.

        These are a float16 backward pass of a loss without a scale, and a scaler in a program in 16
        bits whose backward pass has no float16.
        """
        if not self._of_scaler:
            yield (
                NO_SCALE,
                "the loss is not scaled: gradients below 6e-8 become 0",
                self._in_float16,
            )
        elif self._backward and self._narrow and not self._float16:
            what = "the optimizer has a loss scale, and no gradient is float16: it only costs"
            yield UNNEEDED, what, self._of_scaler
