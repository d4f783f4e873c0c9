"""Names of dtypes, and which half precision a device multiplies."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmp import dtypes

SPELLINGS = {
    jnp.bfloat16: ("bf16", "bfloat16", jnp.bfloat16, ml_dtypes.bfloat16, jnp.dtype("bfloat16")),
    jnp.float16: ("f16", "float16", jnp.float16, np.float16, np.dtype("float16")),
    jnp.float32: ("full", "f32", "float32", jnp.float32, np.float32, np.dtype("float32")),
    jnp.float64: ("f64", "float64", jnp.float64, np.float64, np.dtype("float64")),
}


@pytest.mark.parametrize("dtype", SPELLINGS)
def test_every_spelling_gives_the_same_object(dtype):
    for spelling in (*SPELLINGS[dtype], dtypes.dtype_name(dtype), dtypes.short_dtype_name(dtype)):
        assert dtypes.parse_dtype(spelling) is dtype, spelling
    assert dtypes.dtype_name(dtype) == np.dtype(dtype).name
    assert dtypes.parse_dtype(np.dtype(">f4")) is jnp.float32


def test_no_name_means_two_dtypes():
    names = list(itertools.chain(*dtypes.DTYPE_NAMES.values()))
    assert len(names) == len(set(names))


def test_an_unknown_name_lists_the_names_and_suggests_the_nearest():
    for name in ("bf17", "", "f 32", "f8", "float", "single", "exp"):
        with pytest.raises(ValueError, match=r"here: Unknown dtype .* the names are bf16, .*half"):
            dtypes.parse_dtype(name, "here")
    with pytest.raises(ValueError, match=r"Unknown dtype 'b16' \(did you mean 'bf16'\?\)"):
        dtypes.parse_dtype("b16")


def test_a_dtype_that_is_not_real_floating_is_named():
    for dtype in (
        *("complex64", "int8", "uint32", "bool", "bool_", "float8_e4m3fn", "int4", "floating"),
        *(jnp.complex64, np.int32, jnp.bool_, jnp.float8_e5m2, np.longdouble, np.floating),
        *(np.dtype("int8"), np.dtype("complex64"), np.dtype("U3"), np.dtype("datetime64[s]")),
        np.dtype([("a", np.float32)]),
    ):
        with pytest.raises(ValueError, match=r"here: takes a real floating dtype .*; got '\w+'"):
            dtypes.parse_dtype(dtype, "here")


def test_what_is_no_dtype_is_a_type_error():
    arrays = np.ones(2, np.float32), np.float32(1), jnp.ones(2), jax.random.key(0).dtype
    for value in (None, 16, 1.0, float, int, object, [], *arrays):
        with pytest.raises(TypeError, match=r"here: takes a dtype or the name of one .*; got "):
            dtypes.parse_dtype(value, "here")


def device(platform, capability=None):
    described = SimpleNamespace(platform=platform)
    if capability is not None:
        described.compute_capability = capability
    return described


def test_half_dtype_is_what_the_device_multiplies():
    for platform, capability, expected in (
        ("cpu", None, jnp.bfloat16),
        ("tpu", None, jnp.bfloat16),
        ("gpu", "8.0", jnp.bfloat16),
        ("gpu", "9.0", jnp.bfloat16),
        ("gpu", "10.0", jnp.bfloat16),  # as text "10.0" < "8.0"
        ("gpu", "12.1", jnp.bfloat16),
        ("gpu", "7.5", jnp.float16),
        ("gpu", "7.0", jnp.float16),
        ("gpu", "gfx906", jnp.float16),
        ("gpu", "gfx90a", jnp.bfloat16),
        ("gpu", "gfx942:sramecc+:xnack-", jnp.bfloat16),
        ("gpu", "gfx1030", jnp.float16),
        ("gpu", "gfx1100", jnp.bfloat16),
        ("gpu", None, jnp.float16),
        ("METAL", None, jnp.float16),
    ):
        assert dtypes.half_dtype(device(platform, capability)) is expected, (platform, capability)


def test_multiplies_natively():
    for platform, capability, low in (
        ("cpu", None, {"bf16", "f16"}),
        ("tpu", None, {"bf16"}),
        ("gpu", "9.0", {"bf16", "f16"}),
        ("gpu", "7.5", {"f16"}),
    ):
        chip = device(platform, capability)
        assert {d for d in ("bf16", "f16") if dtypes.multiplies_natively(d, chip)} == low


def test_half_dtype_asks_the_default_device(monkeypatch):
    assert dtypes.half_dtype() is jnp.bfloat16
    monkeypatch.setattr(jax, "local_devices", lambda: [device("gpu", "7.5")])
    assert dtypes.half_dtype() is jnp.float16
    assert dtypes.parse_dtype("half") is jnp.float16


def test_half_dtype_honours_jax_default_device(monkeypatch):
    cpu = jax.local_devices()[3]
    monkeypatch.setattr(jax, "local_devices", lambda: [device("gpu", "7.5")])
    with jax.default_device(cpu):
        assert dtypes.half_dtype() is jnp.bfloat16


@pytest.mark.gpu
def test_half_dtype_on_this_gpu():
    major = int(jax.local_devices()[0].compute_capability.split(".")[0])
    assert dtypes.half_dtype() is (jnp.bfloat16 if major >= 8 else jnp.float16)
