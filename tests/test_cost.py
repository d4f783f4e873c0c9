"""What autocast costs, beside the same model with dtype=bfloat16 written into every layer.

The figures come from tracing alone, at the sizes of `benchmarks/models.py`: exact, and the same on
every machine. `benchmarks/autocast_aot.py` prints them with what the compilers say.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxmp

from aot import contraction_counts, residual_mib
from models import CASES

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


@pytest.mark.parametrize(("model", "policy", "float32_softmax"), COMPARED)
def test_the_backward_pass_keeps_no_more_than_hand_written(
    model: str, policy: str, float32_softmax: bool
) -> None:
    case = CASES[model]
    shapes = case.shapes()
    hand = case.loss(dtype=jnp.bfloat16, float32_softmax=float32_softmax)
    ours = jaxmp.autocast(case.loss(), policy)
    assert residual_mib(ours, *shapes) <= residual_mib(hand, *shapes)


@pytest.mark.parametrize("model", CASES)
def test_every_contraction_is_low_forward_and_backward(model: str) -> None:
    case = CASES[model]
    loss = jaxmp.autocast(case.loss(), "mixed_bfloat16")
    counts = contraction_counts(jax.value_and_grad(loss, has_aux=True), *case.shapes())
    assert set(counts) == {"bfloat16"}
    plain = contraction_counts(jax.value_and_grad(case.loss(), has_aux=True), *case.shapes())
    assert counts.total() == plain.total()
