"""The same model and batch as other libraries train them, each as its documentation does it.

* jmp: a `jmp.Policy` with bfloat16 for its compute dtype casts parameters and inputs of the float32
  model, and its output back, inside of the gradient.
* mpx: `mpx.cast_tree` casts every argument of the float32 loss, as mpx's `filter_value_and_grad`
  does before it takes the gradient. Loss scaling, which bfloat16 does not need, is left out.
* Qwix: `qwix.quantize_model` of the hand-written bfloat16 model, weights, activations and gradients
  in 8 bits. It has no 16-bit mode. jaxmp's row beside it is `mixed_int8` or `mixed_float8`.
* Flax: the hand-written rows are Flax's own `dtype=`; see `models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import Case, loss_of

LossFn = Callable[..., tuple[jax.Array, Any]]

JMP, MPX, QWIX_INT8, QWIX_FLOAT8 = "jmp", "mpx", "Qwix int8", "Qwix float8"
PEERS = (JMP, MPX, QWIX_INT8, QWIX_FLOAT8)

# What is installed under which name, where that is not the peer's own.
PACKAGES = {"jmp": "jmp", "mpx": "mixed-precision-for-JAX", "qwix": "qwix"}


def module_of(peer: str) -> str:
    """The module that a peer's rows import."""
    return peer.split(maxsplit=1)[0].lower()


def available(peer: str) -> bool:
    return find_spec(module_of(peer)) is not None


def loss(case: Case, peer: str, *, small: bool = False) -> LossFn:
    """A case's loss, in 16 or 8 bits by a peer."""
    if peer == JMP:
        return _jmp(case, small=small)
    if peer == MPX:
        return _mpx(case.loss(small=small))
    dtype = "int8" if peer == QWIX_INT8 else "float8_e4m3fn"
    return case.loss_with(qwix_model(case.model(small=small, dtype=jnp.bfloat16), dtype))


def _jmp(case: Case, *, small: bool) -> LossFn:
    import jmp

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    model = case.model(small=small)

    def apply(params: Any, state: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
        params, inputs = policy.cast_to_compute((params, inputs))
        variables = {"params": params, **state}
        logits, new_state = model.apply(variables, inputs, mutable=list(state))
        return policy.cast_to_output(logits), new_state

    return loss_of(apply)


def _mpx(loss_fn: LossFn) -> LossFn:
    import mpx

    def cast(params: Any, state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        loss, new_state = loss_fn(*mpx.cast_tree((params, state, inputs, labels), jnp.bfloat16))
        return loss, mpx.cast_to_full_precision(new_state)

    return cast


def qwix_model(model: nn.Module, dtype: str) -> nn.Module:
    """A model whose layers multiply in an 8-bit dtype, forward and backward, by Qwix."""
    import qwix

    rule = qwix.QtRule(weight_qtype=dtype, act_qtype=dtype, bwd_qtype=dtype)
    return qwix.quantize_model(model, qwix.QtProvider([rule]))
