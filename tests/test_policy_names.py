"""Names of policies: those other libraries use, `"mixed_half"`, and `saturate`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxmp import Policy, dtypes, get_policy


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # Keras', and how people write them
        ("Mixed_BFloat16", "mixed_bfloat16"),
        ("mixed-bfloat16", "mixed_bfloat16"),
        ("mixed_bf16", "mixed_bfloat16"),
        ("MIXED_FP16", "mixed_float16"),
        ("mixed_f16,softmax=f16", "mixed_float16,softmax=f16"),
        ("float16_mixed", "mixed_float16"),
        ("bfloat16-mixed", "mixed_bfloat16"),
        # PyTorch Lightning's
        ("bf16-mixed", "mixed_bfloat16"),
        ("16-mixed", "mixed_float16"),
        ("fp16-mixed", "mixed_float16"),
        ("bf16-true", "bfloat16"),
        ("16-true", "float16"),
        ("32-true", "float32"),
        ("32", "float32"),
        ("64", "float64"),
        # dtypes
        ("BF16", "bfloat16"),
        ("Float32", "float32"),
        ("fp32", "float32"),
        ("p=FP32,c=fp16,o=float32", "mixed_float16"),
        ("HALF", "half"),
    ],
)
def test_other_libraries_names_are_understood(spec, expected):
    assert get_policy(spec) == get_policy(expected)


@pytest.mark.parametrize(
    ("spec", "suggestion"),
    [
        # "fp16" trains in mixed precision in DeepSpeed and Transformers, and is a dtype in PyTorch.
        ("fp16", "'mixed_float16' for float32 parameters and float16 computation, 'float16' for"),
        ("FP16", "'mixed_float16'"),
        ("16", "'mixed_float16'"),
        ("O0", "'float32'"),
        ("O1", "'mixed_float16', or 'mixed_bfloat16'"),
        ("o2", "'mixed_float16', or 'mixed_bfloat16'"),
        ("O3", "'float16'"),
        ("amp", "'mixed_bfloat16', 'mixed_float16', or 'mixed_half'"),
        ("mixed", "'mixed_bfloat16', 'mixed_float16', or 'mixed_half'"),
        ("mixed-precision", "'mixed_bfloat16', 'mixed_float16', or 'mixed_half'"),
        ("TF32", r"'float32' under jax.default_matmul_precision\('tensorfloat32'\)"),
        ("Mixed_Float", "'mixed_bfloat16', 'mixed_float16', or 'mixed_half'"),
        ("fp8", "'mixed_float8': values stay in 16 bits, layers multiply in 8"),
        ("float8", "'mixed_float8'"),
    ],
)
def test_names_that_mean_another_thing_elsewhere_say_what_to_write(spec, suggestion):
    with pytest.raises(ValueError, match=f"get_policy: '{spec}' does not name .*{suggestion}"):
        get_policy(spec)
    for name in suggestion.split("'")[1:2]:
        get_policy(name)  # the suggestion is one


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_mixed_half_is_mixed_in_what_the_device_multiplies(half, monkeypatch):
    monkeypatch.setattr("jaxmp.policy_string.half_dtype", lambda: dtypes.parse_dtype(half))
    policy = get_policy("mixed_half")
    assert policy == get_policy("half-mixed") == get_policy(f"mixed_{half}")
    # The policy has the format in it: its string means the same on another device.
    monkeypatch.undo()
    assert get_policy(str(policy)) == policy


def test_computed_values_are_not_clipped_unless_asked_for():
    assert get_policy("mixed_float16").saturate is False
    assert "saturate" not in str(get_policy("mixed_float16")) + repr(get_policy("mixed_float16"))


def test_saturate_reads_back():
    policy = Policy("f32", "f16", "f32", saturate=True)
    assert str(policy) == "mixed_float16,saturate=true"
    assert repr(policy) == "get_policy('mixed_float16,saturate=true')"
    assert policy == get_policy("mixed_float16,saturate=true") == get_policy(str(policy))
    assert policy == get_policy("mixed_float16, saturate = True")
    assert policy != get_policy("mixed_float16,saturate=false") == get_policy("mixed_float16")
    assert dataclasses.replace(get_policy("mixed_float16"), saturate=np.True_) == policy
    assert dataclasses.replace(policy, saturate=np.True_).saturate is True
    assert policy.with_output_dtype("f16").saturate
    assert hash(policy) != hash(get_policy("mixed_float16"))


@pytest.mark.parametrize("value", [1, None, "true", 0.5])
def test_saturate_is_a_bool(value):
    with pytest.raises(TypeError, match="Policy: saturate must be True or False; got"):
        Policy("f32", "f16", "f32", saturate=value)


@pytest.mark.parametrize("spec", ["mixed_float16,saturate=1", "mixed_float16,saturate=yes"])
def test_saturate_is_true_or_false_in_a_string(spec):
    with pytest.raises(ValueError, match="at position 23: expected true or false, got"):
        get_policy(spec)
    with pytest.raises(ValueError, match="at position 28: saturate is set twice"):
        get_policy("mixed_float16,saturate=true,saturate=true")
