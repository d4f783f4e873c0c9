"""Policies: jmp's own cases, equality, the string form and its errors."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import re
import string

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import jaxmp
from jaxmp import Policy, dtypes, get_policy
from jaxmp.policy_fields import FIELDS, OP_CLASSES

DTYPES = {
    np.float16: "float16",
    jnp.float16: "float16",
    jnp.bfloat16: "bfloat16",
    np.float32: "float32",
    jnp.float32: "float32",
}
POLICY_DTYPES = tuple(dtypes.DTYPE_NAMES)

policies = st.tuples(
    st.sampled_from(POLICY_DTYPES),
    st.sampled_from(POLICY_DTYPES),
    st.sampled_from(POLICY_DTYPES),
    st.booleans(),
    st.booleans(),
    st.dictionaries(
        # Not any character: the table of all of Unicode takes seconds to make.
        st.text(string.printable + "ß→\0", min_size=1)
        | st.sampled_from(["exp", "scatter-add", "a,b=c|d:e%3A"]),
        st.sampled_from(OP_CLASSES),
    ),
).map(
    lambda t: Policy(*t[:3], softmax_dtype=t[1] if t[3] else jnp.float32, saturate=t[4], ops=t[5])
)


# The cases of jmp's own policy_test.py, with our Policy and get_policy.


def test_jmps_casts():
    for dtype in DTYPES:
        policy = Policy(dtype, dtype, dtype)
        wider = Policy(np.float32, np.float32, np.float32).with_output_dtype(dtype)
        assert isinstance(wider, Policy)
        assert wider.output_dtype == dtype
        assert wider.param_dtype == wider.compute_dtype == np.float32
        for kind, np_ in itertools.product(("param", "compute", "output"), (np, jnp)):
            assert getattr(policy, f"{kind}_dtype") == dtype
            cast = getattr(policy, f"cast_to_{kind}")({"a": np_.ones([])})
            assert cast["a"].dtype == np_.ones([], dtype).dtype


def test_jmps_strings():
    for dtype, name in DTYPES.items():
        same, computed, mixed = map(get_policy, (name, f"c={name}", f"c={name},o=full"))
        assert same.param_dtype == same.compute_dtype == same.output_dtype == dtype
        assert computed.param_dtype == mixed.param_dtype == mixed.output_dtype == np.float32
        assert computed.compute_dtype == computed.output_dtype == mixed.compute_dtype == dtype
    with pytest.raises(ValueError, match="Unknown dtype"):
        get_policy("compute_float16")


def test_jmps_cast_leaves_objects_and_integers():
    # cast_to_full and cast_to_half there; a policy's cast here.
    half = dtypes.half_dtype()
    tree = {
        "o": object(),
        "h": jnp.ones([], half),
        "f": jnp.ones([]),
        "i": jnp.ones([], jnp.int16),
    }
    for dtype in (jnp.float32, half):
        cast = Policy(dtype, dtype, dtype).cast_to_compute(tree)
        assert cast["o"] is tree["o"]
        assert cast["h"].dtype == cast["f"].dtype == dtype
        assert cast["i"].dtype == jnp.int16


# A jmp.Policy, wherever one is taken.


def test_what_jmp_prints_is_read():
    for triple in itertools.product(POLICY_DTYPES, repeat=3):
        theirs, ours = jmp.Policy(*triple), Policy(*triple)
        assert isinstance(ours, jmp.Policy)
        assert get_policy(str(theirs)) == ours


def test_a_jmp_string_means_what_it_means_to_jmp():
    strings = "f32 full bf16 f64 c=f16 p=f16,c=bf16 p=bf16 o=bf16 params=f16,o=f32"
    for spec in strings.split():
        theirs, ours = jmp.get_policy(spec), get_policy(spec)
        assert ours == get_policy(theirs)
        dtypes_of_theirs = (theirs.param_dtype, theirs.compute_dtype, theirs.output_dtype)
        assert dtypes_of_theirs == dataclasses.astuple(ours)[:3]


def test_a_jmp_policy_is_converted_and_one_of_ours_returned_as_it_is():
    ours = get_policy(jmp.Policy(np.dtype("float32"), jnp.bfloat16, np.float32))
    assert type(ours) is Policy
    assert ours == get_policy("mixed_bfloat16")
    assert get_policy(ours) is ours
    # It says more than one of jmp with the same dtypes does.
    assert get_policy("bf16") != jmp.get_policy("bf16")


def test_haiku_takes_it():
    hk = pytest.importorskip("haiku")

    class Net(hk.Module):
        def __call__(self, x):
            assert x.dtype == jnp.bfloat16
            y = hk.Linear(3)(x)
            assert y.dtype == jnp.bfloat16
            return y

    hk.mixed_precision.set_policy(Net, get_policy("mixed_bfloat16"))
    try:
        net = hk.without_apply_rng(hk.transform(lambda x: Net()(x)))
        params = net.init(jax.random.key(0), jnp.ones((2, 4)))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        assert net.apply(params, jnp.ones((2, 4))).dtype == jnp.float32
    finally:
        hk.mixed_precision.clear_policy(Net)


# Values.


def test_dtypes_mean_the_same_however_they_are_written():
    spellings = [
        Policy("f32", "bf16", "full"),
        Policy(jnp.float32, jnp.bfloat16, jnp.float32),
        Policy(np.float32, ml_dtypes.bfloat16, np.dtype("float32")),
        Policy(np.dtype(np.float32), jnp.dtype(jnp.bfloat16), "float32"),
        get_policy("mixed_bfloat16"),
    ]
    assert len({*spellings}) == 1
    assert all(policy == spellings[0] for policy in spellings)
    assert {repr(policy) for policy in spellings} == {"get_policy('mixed_bfloat16')"}


def test_each_field_tells_policies_apart():
    base = Policy("f32", "bf16", "f32")
    changed = {
        "param_dtype": "bf16",
        "compute_dtype": "f16",
        "output_dtype": "bf16",
        "softmax_dtype": "bf16",
        "saturate": True,
        "ops": {"exp": "compute"},
    }
    others = [dataclasses.replace(base, **{name: value}) for name, value in changed.items()]
    assert len({base, *others}) == 7


def test_a_policy_is_frozen_and_its_refinements_keyword_only():
    policy = get_policy("bf16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = jnp.float32
    with pytest.raises(TypeError, match="positional"):
        Policy("f32", "bf16", "f32", "bf16")


def test_a_policy_is_a_static_argument_of_jit():
    traces = []

    def run(x, policy):
        traces.append(policy)
        return policy.cast_to_compute(x)

    run = jax.jit(run, static_argnums=1)
    assert run(jnp.ones(2), get_policy("bf16")).dtype == jnp.bfloat16
    assert run(jnp.ones(2), Policy("bf16", jnp.bfloat16, "bf16")).dtype == jnp.bfloat16
    assert len(traces) == 1


def test_the_dtypes_are_jax_scalar_types():
    policy = Policy(np.float32, np.dtype("float16"), "float32", softmax_dtype="f16")
    assert policy.param_dtype is policy.output_dtype is jnp.float32
    assert policy.compute_dtype is policy.softmax_dtype is jnp.float16


# Refinements.


def test_softmax_is_float32_or_the_compute_dtype():
    for compute, softmax in itertools.product(POLICY_DTYPES, repeat=2):
        if softmax in (jnp.float32, compute):
            policy = Policy(jnp.float32, compute, jnp.float32, softmax_dtype=softmax)
            assert policy.softmax_dtype is softmax
        else:
            message = rf"softmax_dtype must be .*\({dtypes.dtype_name(compute)}\); got"
            with pytest.raises(ValueError, match=message):
                Policy(jnp.float32, compute, jnp.float32, softmax_dtype=softmax)


def test_ops_take_primitives_and_names_in_any_order():
    mine = Primitive("my_primitive")
    ops = {"tanh": "full_precision", lax.exp_p: "promote", mine: "as_written"}
    policy = Policy("f32", "bf16", "f32", ops=ops)
    ops["tanh"] = "compute"  # it does not follow the caller's dictionary
    assert policy.ops == (
        ("exp", "promote"),
        ("my_primitive", "as_written"),
        ("tanh", "full_precision"),
    )
    again = Policy("f32", "bf16", "f32", ops=dict(reversed(policy.ops)))
    assert policy == again
    assert hash(policy) == hash(again)
    assert Policy("f32", "bf16", "f32").ops == Policy("f32", "bf16", "f32", ops={}).ops == ()


def test_ops_that_say_nothing_are_refused():
    unknown = r"ops gives 'exp' the unknown class 'half'; the classes are compute, .*as_written"
    key = "a key of ops must be a primitive or its name"
    no_mapping = "Policy: ops takes a mapping from primitives"
    for ops, error, message in (
        ({lax.exp_p: "half"}, ValueError, unknown),
        ({lax.exp_p: ["move"]}, ValueError, r"unknown class \['move'\]; the classes are"),
        (
            {lax.exp_p: "compute", "exp": "full_precision"},
            ValueError,
            "ops gives 'exp' two classes, 'compute' and",
        ),
        *(({k: "compute"}, TypeError, key) for k in (jnp.exp, "", 3, None)),
        *((o, TypeError, no_mapping) for o in ("exp:compute", ["exp"], 3, {"exp"}, ("exp",))),
        ((("exp",),), TypeError, no_mapping),
    ):
        with pytest.raises(error, match=message):
            Policy("f32", "bf16", "f32", ops=ops)


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype", "softmax_dtype"])
def test_a_dtype_that_no_policy_can_hold_names_the_field(field):
    for dtype in (jnp.complex64, "int8", jnp.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"Policy: {field}: takes a real floating dtype"):
            dataclasses.replace(get_policy("f32"), **{field: dtype})


# Strings.


def test_what_a_spec_means():
    def low(softmax=None, **options):
        return Policy("f32", "f16", "f32", softmax_dtype=softmax or "f32", **options)

    for spec, expected in (
        ("mixed_bfloat16", Policy("f32", "bf16", "f32")),
        ("mixed_float16", low()),
        ("float64", Policy("f64", "f64", "f64")),
        ("c=half", Policy("f32", "bf16", "bf16")),
        ("p=f32,c=bf16,o=f32", Policy("f32", "bf16", "f32")),
        ("params=float32,compute=bfloat16,output=float32", Policy("f32", "bf16", "f32")),
        ("o=f32,c=bf16", Policy("f32", "bf16", "f32")),
        ("p=bf16", Policy("bf16", "bf16", "bf16")),
        ("mixed_bfloat16,o=bf16", Policy("f32", "bf16", "bf16")),
        ("bf16,params=f32", Policy("f32", "bf16", "bf16")),
        (" p = f32 , c = bf16 ", Policy("f32", "bf16", "bf16")),
        ("mixed_half", Policy("f32", "bf16", "f32")),
        (jnp.bfloat16, Policy("bf16", "bf16", "bf16")),
        (np.dtype("float32"), Policy("f32", "f32", "f32")),
        ("mixed_float16,softmax=f16", low("f16")),
        ("mixed_bfloat16,softmax=f32", Policy("f32", "bf16", "f32")),
        ("softmax=f16,c=f16,o=f32", low("f16")),
        (
            "mixed_float16,ops=exp:promote|my_prim:full_precision",
            low(ops={"exp": "promote", "my_prim": "full_precision"}),
        ),
        ("bf16, ops = a%3Ab : compute", Policy("bf16", "bf16", "bf16", ops={"a:b": "compute"})),
    ):
        assert get_policy(spec) == expected, spec


PRINTED = [
    ("mixed_half", "mixed_bfloat16"),
    ("bf16-mixed", "mixed_bfloat16"),
    ("p=f32,c=f16,o=f32", "mixed_float16"),
    ("mixed_bfloat16,softmax=bfloat16", "mixed_bfloat16,softmax=bf16"),
    ("mixed_bfloat16,reduce_scatter=f32", "mixed_bfloat16"),
    ("mixed_bfloat16,o=bf16", "p=f32,c=bf16,o=bf16"),
    ("c=f16,reduce=f16,reduce_scatter=f16", "p=f32,c=f16,o=f16,reduce=f16,reduce_scatter=f16"),
    ("full", "float32"),
    ("p=bf16", "bfloat16"),
    ("p=f64,c=f32,o=f64", "p=f64,c=f32,o=f64"),
    ("mixed_float8", "mixed_float8"),
    ("mixed_float8,saturate=true", "mixed_float8,saturate=true"),
    ("mixed_bfloat16,matmul=int8", "mixed_int8"),
    ("mixed_float16,matmul=float8", "mixed_float16,matmul=float8"),
    ("mixed_float8,matmul=e4m3:e5m2:e5m2", "mixed_bfloat16,matmul=e4m3:e5m2:e5m2"),
    ("float32,residuals=recompute", "float32,residuals=recompute"),
]


def test_a_policy_prints_as_it_was_named():
    for spec, printed in PRINTED:
        assert str(get_policy(spec)) == printed
        assert get_policy(printed) == get_policy(spec)


def test_the_table_has_every_field():
    assert [field.name for field in FIELDS] == [f.name for f in dataclasses.fields(Policy)]


@hypothesis.given(policies)
def test_what_is_printed_reads_back(policy):
    assert get_policy(str(policy)) == policy
    assert str(get_policy(str(policy))) == str(policy)
    assert eval(repr(policy), {"get_policy": get_policy}) == policy
    # It names a region: name stacks tell one scope from the next by these characters.
    assert not {*"/()"} & {*str(policy)}


@hypothesis.given(policies)
def test_pickles_and_copies(policy):
    for twin in (
        *(pickle.loads(pickle.dumps(policy, protocol)) for protocol in range(2, 6)),
        copy.deepcopy(policy),
        dataclasses.replace(policy),
    ):
        assert type(twin) is Policy
        assert twin == policy
        assert hash(twin) == hash(policy)
        assert twin.compute_dtype is policy.compute_dtype


def test_an_unknown_name_lists_the_names_and_the_nearest():
    for spec, nearest in (
        ("mixed_bf17", "mixed_bfloat16"),
        ("Mixed_Float1", "mixed_float16"),
        ("bfloat", "bfloat16"),
    ):
        message = (
            rf"get_policy: Unknown dtype or policy name '{spec}' \(did you mean '{nearest}'\?\); "
            r"the names are bf16, .*full, mixed_bfloat16, mixed_float16, mixed_float8, mixed_half"
        )
        with pytest.raises(ValueError, match=message):
            get_policy(spec)
    for spec in ("complex64", "int8", "float8_e4m3fn"):
        with pytest.raises(ValueError, match=f"takes a real floating dtype .*; got '{spec}'"):
            get_policy(spec)


MALFORMED = [
    ("", 0, "expected the name of a policy"),
    (",c=f16", 0, "expected the name of a policy"),
    ("p=f32,c", 6, "expected key=value, got 'c'"),
    ("p=f32,", 6, "expected key=value, got ''"),
    ("p=f32,,c=f16", 6, "expected key=value, got ''"),
    ("p=f32, c=", 7, "expected key=value, got 'c='"),
    ("=f32", 0, "expected key=value"),
    ("c=f16=f32", 0, "expected key=value"),
    ("c=f16,bf16", 6, "expected key=value, got 'bf16'"),
    ("p=f32,x=bf16", 6, "unknown key 'x'; the keys are p, params, c, compute, o, output, "),
    ("p=f32,c=b16", 8, r"c: Unknown dtype 'b16' \(did you mean 'bf16'\?\)"),
    ("p=f32,c=int8", 8, "c: takes a real floating dtype"),
    ("p=f32,params=f16", 6, "param_dtype is set twice"),
    ("mixed_bfloat16,ops=exp", 19, "expected primitive:class, got 'exp'"),
    ("mixed_bfloat16,ops=exp:compute|", 31, "expected primitive:class, got ''"),
    ("mixed_bfloat16,ops=a:b:compute", 19, "expected primitive:class"),
    ("mixed_bfloat16,ops=exp:half", 23, "unknown class 'half'; the classes are compute, "),
    ("mixed_bfloat16,ops=exp:follow", 23, "unknown class 'follow', which is promote now; "),
    ("mixed_bfloat16,ops=exp:compute|exp:full_precision", 31, "the primitive 'exp' is set twice"),
    ("mixed_float16,saturate=1", 23, "expected true or false, got"),
    ("mixed_float16,saturate=yes", 23, "expected true or false, got"),
    ("mixed_float16,saturate=true,saturate=true", 28, "saturate is set twice"),
    ("mixed_bfloat16,matmul=int8@tensor", 22, "products: forward is 'int8'"),
]


def test_a_malformed_string_says_where():
    for spec, position, reason in MALFORMED:
        with pytest.raises(ValueError, match=f"at position {position}: {reason}") as caught:
            get_policy(spec)
        quoted, caret = str(caught.value).splitlines()[-2:]
        assert quoted == f"    {spec}"
        assert caret.index("^") == 4 + position


def test_each_dtype_is_float32_unless_it_is_given():
    assert Policy(compute_dtype="bf16") == get_policy("mixed_bfloat16")
    assert Policy(matmul="float8", compute_dtype="bf16") == get_policy(
        "mixed_bfloat16,matmul=float8"
    )
    assert Policy() == get_policy("float32")


def test_a_policys_name_is_no_dtype():
    for name in ("mixed_bfloat16", "p=f32,c=bf16,o=f32", "bf16-mixed"):
        with pytest.raises(ValueError, match=re.escape(f"jaxmp.get_policy({name!r})")):
            Policy(name)


def test_a_contradictory_string_is_refused():
    for key, field in (
        ("softmax", "softmax_dtype"),
        ("reduce", "reduce_dtype"),
        ("reduce_scatter", "reduce_scatter_dtype"),
    ):
        message = rf"{field} must be float32 or the compute dtype \(bfloat16\); got float16"
        with pytest.raises(ValueError, match=message):
            get_policy(f"mixed_bfloat16,{key}=f16")


def test_the_wrong_type_says_what_it_takes():
    message = "a policy is a string such as .*, a Policy, a jmp.Policy or a dtype; got .* of"
    for spec in (None, 16, 1.0, float, [], {}, np.ones(2)):
        with pytest.raises(TypeError, match=f"get_policy: {message}"):
            get_policy(spec)


@pytest.mark.parametrize(
    "fn", [jaxmp.autocast, jaxmp.wrap, jaxmp.explain, jaxmp.diagnose, jaxmp.audit, jaxmp.preflight]
)
def test_swapped_arguments_are_told(fn):
    with pytest.raises(TypeError, match="the policy second: are the two swapped"):
        fn("mixed_bfloat16", np.sin)


# Names that other libraries use.

UNDERSTOOD = {
    # Keras', and how people write them; then PyTorch Lightning's; then those of dtypes
    "mixed_bfloat16": "Mixed_BFloat16 mixed-bfloat16 mixed_bf16 bfloat16-mixed bf16-mixed",
    "mixed_float16": "MIXED_FP16 float16_mixed 16-mixed fp16-mixed p=FP32,c=fp16,o=float32",
    "mixed_float16,softmax=f16": "mixed_f16,softmax=f16",
    "mixed_float8": "fp8-mixed",
    "bfloat16": "bf16-true BF16",
    "float16": "16-true",
    "float32": "32-true 32 Float32 fp32",
    "float64": "64",
}


def test_other_libraries_names_are_understood():
    for expected, specs in UNDERSTOOD.items():
        for spec in specs.split():
            assert get_policy(spec) == get_policy(expected), spec


MIXED = "'mixed_bfloat16', 'mixed_float16', or 'mixed_half'"
NOT_SAID = {
    "half": "'mixed_half' for float32 parameters and 16-bit computation, 'bfloat16' or",
    # "fp16" trains in mixed precision in DeepSpeed and Transformers, and is a dtype in PyTorch.
    "fp16": "'mixed_float16' for float32 parameters and float16 computation, 'float16' for",
    "FP16": "'mixed_float16'",
    "16": "'mixed_float16'",
    "O0": "'float32'",
    "O1": "'mixed_float16', or 'mixed_bfloat16'",
    "o2": "'mixed_float16', or 'mixed_bfloat16'",
    "O3": "'float16'",
    **dict.fromkeys(("amp", "mixed", "mixed-precision", "Mixed_Float"), MIXED),
    "TF32": r"'float32' under jax.default_matmul_precision\('tensorfloat32'\)",
    "fp8": "'mixed_float8': values stay in 16 bits, layers multiply in 8",
    "float8": "'mixed_float8'",
}


def test_names_that_mean_another_thing_elsewhere_say_what_to_write():
    for spec, suggestion in NOT_SAID.items():
        with pytest.raises(ValueError, match=f"get_policy: '{spec}' does not name .*{suggestion}"):
            get_policy(spec)
        get_policy(suggestion.split("'")[1])  # the suggestion is one


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_mixed_half_is_mixed_in_what_the_device_multiplies(half, monkeypatch):
    monkeypatch.setattr("jaxmp.policy_fields.half_dtype", lambda: dtypes.parse_dtype(half))
    policy = get_policy("mixed_half")
    assert policy == get_policy("half-mixed") == get_policy(f"mixed_{half}")
    # The policy has the format in it: its string means the same on another device.
    monkeypatch.undo()
    assert get_policy(str(policy)) == policy


def test_saturate_is_a_bool_and_reads_back():
    plain, policy = get_policy("mixed_float16"), Policy("f32", "f16", "f32", saturate=True)
    assert plain.saturate is False
    assert "saturate" not in str(plain) + repr(plain)
    assert repr(policy) == "get_policy('mixed_float16,saturate=true')"
    assert policy == get_policy("mixed_float16, saturate = True") == get_policy(str(policy))
    assert policy != get_policy("mixed_float16,saturate=false") == plain
    assert dataclasses.replace(plain, saturate=np.True_) == policy
    assert dataclasses.replace(policy, saturate=np.True_).saturate is True
    assert policy.with_output_dtype("f16").saturate
    assert hash(policy) != hash(plain)
    for value in (1, None, "true", 0.5):
        with pytest.raises(TypeError, match="Policy: saturate must be True or False; got"):
            Policy("f32", "f16", "f32", saturate=value)
