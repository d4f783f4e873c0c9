"""Number formats: every name means one of them, and what it can hold is what its standard says."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import recipes
from jaxmp.dtypes import DTYPE_NAMES, dtype_name, parse_format
from jaxmp.formats import ALL_FORMATS

# Bits, bits of the fraction, the smallest number and the largest one: IEEE 754, and the tables of
# OFP8 (https://arxiv.org/abs/2209.05433), of Microscaling Formats 1.0, and of the fnuz formats
# (https://arxiv.org/abs/2206.02915).
HOLDS = {
    "bf16": (16, 7, 2.0**-133, (2 - 2.0**-7) * 2.0**127),
    "f16": (16, 10, 2.0**-24, 65504.0),
    "f32": (32, 23, 2.0**-149, (2 - 2.0**-23) * 2.0**127),
    "f64": (64, 52, 2.0**-1074, np.finfo(np.float64).max),
    "e4m3": (8, 3, 2.0**-9, 448.0),
    "e5m2": (8, 2, 2.0**-16, 57344.0),
    "e4m3b11": (8, 3, 2.0**-13, 30.0),
    "e4m3fnuz": (8, 3, 2.0**-10, 240.0),
    "e5m2fnuz": (8, 2, 2.0**-17, 57344.0),
    "e2m1": (4, 1, 0.5, 6.0),
    "int8": (8, 0, 1.0, 127.0),
    "int4": (4, 0, 1.0, 7.0),
}


@pytest.mark.parametrize("short", ALL_FORMATS)
def test_what_a_format_can_hold(short):
    fmt = ALL_FORMATS[short]
    assert (fmt.bits, fmt.fraction_bits, fmt.step, fmt.largest) == HOLDS[short]
    assert fmt.dtype == jnp.dtype(fmt.name)
    assert fmt.scaled == (fmt.bits <= 8)
    assert fmt.integer == short.startswith("int")


def test_every_name_means_one_format():
    for fmt in ALL_FORMATS.values():
        for name in (*fmt.names, fmt.name.upper(), fmt.dtype):
            assert parse_format(name, ALL_FORMATS.values(), "format") is fmt


def test_one_table_for_policies_and_recipes():
    assert [*map(dtype_name, DTYPE_NAMES)] == ["bfloat16", "float16", "float32", "float64"]
    for short, fmt in recipes.FORMATS.items():
        assert fmt.dtype == ALL_FORMATS["e4m3" if short == "float8" else short].dtype


def test_what_is_no_format_is_refused():
    known = [ALL_FORMATS["int8"], ALL_FORMATS["e4m3"]]
    with pytest.raises(ValueError, match=r"here is 'e4m4', which .* 'e4m3'\?\); .* int8, e4m3. So"):
        parse_format("e4m4", known, "here", " So.")
    with pytest.raises(ValueError, match="here is 'bfloat16', which names no format"):
        parse_format(jnp.bfloat16, known, "here")
    for value in (None, 8, np.ones(2)):
        with pytest.raises(TypeError, match=r"here takes a format \(int8, e4m3\) or its dtype"):
            parse_format(value, known, "here")
