"""`diagnose` on public architectures: what float32 predicts is what float16 does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from public_models import build

import jaxmp
from jaxmp.numerics import Measured

pytestmark = pytest.mark.slow

# Batch statistics, a recurrence, experts, a graph, a kernel with a derivative rule of its own.
MODELS = ("resnet_batchnorm", "lstm_seq2seq", "mixture_of_experts", "gnn", "flash_attention")


@pytest.mark.parametrize("name", MODELS)
def test_public_models_are_measured_and_nothing_is_found(name: str) -> None:
    model = build(name)
    report = jaxmp.diagnose(model.loss, "mixed_bfloat16")(model.params, model.batch(0))
    assert report.faults == ()
    assert report.predicted == ()
    ran = [m for m in report.run.sites.values() if (m.statistics.joined().runs or 0) > 0]
    assert {m.site.backward for m in ran} == {True, False}
    assert any(m.site.dtype == "bfloat16" for m in ran)


@pytest.mark.parametrize("name", ["scanned_lm", "resnet_batchnorm"])
def test_float32_predicts_what_overflows_in_float16(name: str) -> None:
    model = build(name)
    # Some kernels so large that what they multiply leaves float16.
    leaves, tree = jax.tree.flatten(model.params)
    grown = [x * 3e4 if x.ndim > 1 and i % 3 == 0 else x for i, x in enumerate(leaves)]
    grown = [jnp.clip(x, -6e4, 6e4) for x in grown]
    report = jaxmp.diagnose(model.loss, "mixed_float16")(
        jax.tree.unflatten(tree, grown), model.batch(0)
    )
    found = (*report.faults, *report.contained)
    overflowed = {f.site.name for f in found if f.kind == "overflow" and not f.site.backward}
    predicted = {site.name for site in report.predicted if not site.backward}
    assert predicted & overflowed
    # What reads something that is not finite already is not asked: it has no number to overflow.
    asked = {name for name in predicted | overflowed if not spoilt(report.run.sites, name)}
    assert predicted & asked == overflowed & asked


def spoilt(sites: dict[str, Measured], name: str) -> bool:
    """Whether what a site reads is not finite."""
    reads = [sites[ref].statistics.joined() for ref in sites[name].site.reads if ref in sites]
    return any(s.is_nan or s.is_infinite for s in reads)
