"""What autocast costs, beside the same model with dtype=bfloat16 written into every layer.

The figures come from tracing alone, at the sizes of `benchmarks/models.py`: exact, and the same on
every machine. `benchmarks/autocast_aot.py` prints them with what the compilers say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp

from aot import contraction_counts, residual_mib
from cost_table import JAX, ROWS, figures, table
from models import CASES
from support import iter_eqns, jaxpr_of, slow_when

# (model, policy, the hand-written model computes its softmax in float32)
COMPARED = [
    ("lm", "mixed_bfloat16", True),
    ("lm", "mixed_bfloat16,softmax=bf16", False),
    ("lm_scan", "mixed_bfloat16", True),
    ("lm_scan", "mixed_bfloat16,softmax=bf16", False),
    ("lm_post", "mixed_bfloat16", True),
    ("lm_post", "mixed_bfloat16,softmax=bf16", False),
    ("cnn", "mixed_bfloat16", False),
    ("mlp", "mixed_bfloat16", False),
]


# Of the others, the table says by default what is kept.
@slow_when(lambda model: model != "mlp")
@pytest.mark.parametrize(("model", "policy", "float32_softmax"), COMPARED)
def test_the_backward_pass_keeps_no_more_than_hand_written(
    model: str, policy: str, float32_softmax: bool
) -> None:
    case = CASES[model]
    shapes = case.shapes()
    hand = case.loss(dtype=jnp.bfloat16, float32_softmax=float32_softmax)
    ours = jaxmp.autocast(case.loss(), policy)
    assert residual_mib(ours, *shapes) <= residual_mib(hand, *shapes)


@pytest.mark.slow  # by default, the table says what it keeps
def test_the_backward_pass_of_a_small_convolutional_net_keeps_no_more() -> None:
    case = CASES["cnn"]
    shapes = case.shapes(small=True)
    hand = case.loss(small=True, dtype=jnp.bfloat16)
    ours = jaxmp.autocast(case.loss(small=True), "mixed_bfloat16")
    assert residual_mib(ours, *shapes) <= residual_mib(hand, *shapes)


@pytest.mark.slow  # by default, the table says it of the small models
@pytest.mark.parametrize("model", CASES)
def test_every_contraction_is_low_forward_and_backward(model: str) -> None:
    case = CASES[model]
    loss = jaxmp.autocast(case.loss(), "mixed_bfloat16")
    counts = contraction_counts(jax.value_and_grad(loss, has_aux=True), *case.shapes())
    assert set(counts) == {"bfloat16"}
    plain = contraction_counts(jax.value_and_grad(case.loss(), has_aux=True), *case.shapes())
    assert counts.total() == plain.total()


@slow_when(lambda model: model != "mlp")
@pytest.mark.parametrize("model", ["lm_scan", "cnn", "mlp"])
def test_a_wrapped_module_costs_what_autocast_of_its_apply_does(model: str) -> None:
    case = CASES[model]
    shapes = case.shapes(small=True)

    def loss_of(apply: Callable[..., Any]) -> Callable[..., Any]:
        def loss(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
            logits, new_state = apply({"params": params, **state}, inputs, mutable=list(state))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new_state

        return loss

    wrapped = loss_of(jaxmp.wrap(case.model(small=True), "mixed_bfloat16").apply)
    applied = loss_of(jaxmp.autocast(case.model(small=True).apply, "mixed_bfloat16"))
    assert residual_mib(wrapped, *shapes) == residual_mib(applied, *shapes)
    steps = [jax.value_and_grad(loss, has_aux=True) for loss in (wrapped, applied)]
    counts = [Counter(e.primitive.name for e in iter_eqns(jaxpr_of(s, *shapes))) for s in steps]
    assert counts[0] == counts[1]


def test_in_the_table_every_contraction_is_low() -> None:
    for models in table().values():
        for model, policies in models.items():
            assert set(policies["mixed_bfloat16"]["contractions"]) == {"bfloat16"}, model


@slow_when(lambda model: model not in ("lm_scan", "cnn", "mlp"))
@slow_when(lambda model, policy: model == "cnn" and "residuals" in policy)
@slow_when(lambda model, policy: model == "lm_scan" and ("float8" in policy or "softmax" in policy))
@pytest.mark.parametrize(("model", "policy"), ROWS)
def test_the_figures_are_those_of_the_table(model: str, policy: str) -> None:
    """Contractions by dtype, casts and what is kept: none moves by accident."""
    if JAX not in table():
        pytest.skip(f"no figures of JAX {JAX}: python tests/cost_table.py writes them")
    assert figures(model, policy) == table()[JAX][model][policy], (
        "if it is meant, write the table anew under both JAX: python tests/cost_table.py"
    )
