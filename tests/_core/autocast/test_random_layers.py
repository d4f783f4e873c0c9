"""Random networks of layers: their gradients are as near to float32's as those written by hand.

The number of networks is the hypothesis profile's; `-m hypothesis` selects the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from accuracy import TIMES_FLOOR, eps
from contraction_floor import rounded_contractions
from hypothesis import strategies as st
from numeric_kit import Hand, Plain
from numpy_reference import reference
from random_layers import Network
from random_programs import random_settings

import jaxmp

from support import float16_is_slow

LOSS_SCALE = 1024.0  # otherwise gradients of means vanish in float16


@st.composite
def networks(draw: st.DrawFn) -> Network:
    return Network.draw(lambda n: draw(st.integers(0, n - 1)))


def gradients(fn: Callable[..., Any], network: Network) -> np.ndarray:
    """`fn(weights, batch)`, computed in NumPy: a row for each batch."""
    weights, batches = network.inputs()
    run = reference(fn)
    found = [jax.tree.leaves(run(weights, x)) for x in batches]
    return np.stack([np.concatenate([np.float64(g).ravel() for g in grads]) for grads in found])


def errors(network: Network, policy: str) -> dict[str, float]:
    """Relative errors of gradients, in the 2-norm, over all weights.

    Of the batches the median: of one, a row may happen to be so small that normalizing it magnifies
    any error.
    """

    def scaled(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda weights, x: loss(weights, x) * LOSS_SCALE

    dtype = np.dtype(jaxmp.get_policy(policy).compute_dtype).name
    plain = scaled(network.loss(Plain()))
    written = jax.grad(plain)
    exact = gradients(written, network)
    norms = np.linalg.norm(exact, axis=1)
    hypothesis.assume(np.isfinite(norms).all() and norms.all())
    versions = {
        "autocast": jax.grad(jaxmp.autocast(plain, policy)),
        "autocast of the gradient": jaxmp.autocast(written, policy),
        "hand": jax.grad(scaled(network.loss(Hand(dtype)))),
        "floor": rounded_contractions(written, dtype),
    }
    with np.errstate(invalid="ignore"):
        off = {name: gradients(fn, network) - exact for name, fn in versions.items()}
    return {name: float(np.median(np.linalg.norm(x, axis=1) / norms)) for name, x in off.items()}


@float16_is_slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@hypothesis.given(network=networks())
@random_settings(share=6)
def test_gradients_are_no_worse_than_by_hand(policy: str, network: Network) -> None:
    hypothesis.note(str(network))
    found = errors(network, policy)
    hypothesis.assume(np.isfinite(found["hand"]))  # else the loss scale is too large for it
    by_hand = found["hand"], found["floor"], eps(policy)
    for name in ("autocast", "autocast of the gradient"):
        assert found[name] <= TIMES_FLOOR * max(by_hand), found
