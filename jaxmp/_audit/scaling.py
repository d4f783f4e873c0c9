"""Whether a loss is multiplied by the scale that its gradients are divided by, or needs one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxmp._audit.follow import Observed
from jaxmp._audit.report import Operation
from jaxmp._autocast.primitives import LOW as CONTRACTIONS
from jaxmp._jaxprs.compat import dtype_of
from jaxmp._jaxprs.scopes import UNSCALE
from jaxmp._jaxprs.source import in_scope

FLOAT16 = np.dtype(np.float16)
NOT_SCALED = "not-scaled"
SCALED_TWICE = "scaled-twice"
NO_SCALE = "no-scale"
FIXES = {
    NOT_SCALED: "differentiate with jaxmp.value_and_grad(loss_fn, opt_state), with the "
    "value_and_grad of the train state, or what jaxmp.scale_loss(loss, opt_state) returns",
    SCALED_TWICE: "scale the loss in one place and divide nothing by hand: the optimizer divides "
    "gradients of a loss that was multiplied once, and clips behind that",
    NO_SCALE: "jaxmp.loss_scale_for(policy, optimizer), and gradients of a scaled loss",
}


def is_scale(path: tuple[Any, ...]) -> bool:
    """Whether a leaf is the scale of a `LossScaleState`, told by the name of the field."""
    return any(getattr(key, "name", None) == "loss_scale" for key in path)


def has_optimizer(tree: Any) -> bool:
    """Whether there is the state of an optax transformation in a pytree."""

    def of_optax(node: Any) -> bool:
        return isinstance(node, tuple) and type(node).__module__.startswith("optax.")

    return any(map(of_optax, jax.tree.leaves(tree, is_leaf=of_optax)))


class Scaling:
    """What is found of loss scaling, while a program is walked."""

    def __init__(self) -> None:
        self._backward = False
        self._unscales = False
        self._in_float16: list[Operation] = []

    def visit(self, seen: Observed, operation: Operation) -> tuple[str, str] | None:
        """Says of an equation that it divides what does not have the scale as its one factor.

        Returns:
          The kind of finding, and the finding in words.
        """
        eqn = seen.eqn
        if eqn.primitive.name in CONTRACTIONS and operation.backward:
            self._backward = True
            if FLOAT16 in map(dtype_of, eqn.invars[:2]) and not seen.out.scaled:
                self._in_float16.append(operation)
        if eqn.primitive.name != "mul" or not in_scope(eqn, UNSCALE):
            return None
        self._unscales = True
        grad, inverse = seen.known
        if not self._backward or not inverse.scaled:
            return None
        if not grad.scaled:
            what = "gradients are divided by a loss scale that the loss was not multiplied by"
            return NOT_SCALED, what
        if inverse.degree != -1 or not isinstance(grad.degree, int) or grad.degree == 1:
            return None
        if grad.degree < 1:
            what = "gradients were divided by the loss scale before the optimizer divides them"
        else:
            what = f"the loss was multiplied by the loss scale {grad.degree} times, and its "
            what += "gradients are divided by it once"
        return SCALED_TWICE, what

    def unscaled(self) -> list[Operation]:
        """Contractions in float16 in the backward pass, of a program without a loss scale."""
        return [] if self._unscales else self._in_float16
