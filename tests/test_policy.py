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

HALF_DTYPES = (np.float16, jnp.float16, jnp.bfloat16)
FULL_DTYPES = (np.float32, jnp.float32)
DTYPES = HALF_DTYPES + FULL_DTYPES
POLICY_DTYPES = tuple(dtypes.DTYPE_NAMES)
NAMES = {np.float16: "float16", jnp.bfloat16: "bfloat16", np.float32: "float32"}

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


@pytest.mark.parametrize(("dtype", "np_"), list(itertools.product(DTYPES, (np, jnp))))
@pytest.mark.parametrize("kind", ["param", "compute", "output"])
def test_jmp_cast(kind, dtype, np_):
    policy = Policy(dtype, dtype, dtype)
    assert getattr(policy, f"{kind}_dtype") == dtype
    cast = getattr(policy, f"cast_to_{kind}")({"a": np_.ones([])})
    assert cast["a"].dtype == np_.ones([], dtype).dtype


@pytest.mark.parametrize(("dtype", "np_"), list(itertools.product(DTYPES, (np, jnp))))
def test_jmp_with_output_dtype(dtype, np_):
    policy = Policy(np_.float32, np_.float32, np_.float32)
    policy = policy.with_output_dtype(dtype)
    assert isinstance(policy, Policy)
    assert policy.output_dtype == dtype
    assert policy.param_dtype == policy.compute_dtype == np_.float32


@pytest.mark.parametrize("dtype", [np.float16, np.float32, jnp.bfloat16])
def test_jmp_get_policy(dtype):
    policy = get_policy(NAMES[dtype])
    assert policy.param_dtype == policy.compute_dtype == policy.output_dtype == dtype


def test_jmp_get_policy_almost_dtype():
    with pytest.raises(ValueError, match="Unknown dtype"):
        get_policy("compute_float16")


@pytest.mark.parametrize(("dtype", "np_"), list(itertools.product(DTYPES, (np, jnp))))
def test_jmp_get_policy_mixed(dtype, np_):
    policy = get_policy(f"c={NAMES[dtype]}")
    assert policy.param_dtype == np_.float32
    assert policy.compute_dtype == policy.output_dtype == dtype


@pytest.mark.parametrize(("dtype", "np_"), list(itertools.product(DTYPES, (np, jnp))))
def test_jmp_get_policy_compute(dtype, np_):
    policy = get_policy(f"c={NAMES[dtype]},o=full")
    assert policy.param_dtype == policy.output_dtype == np_.float32
    assert policy.compute_dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.float32, dtypes.half_dtype()])
def test_jmp_cast_leaves_objects_and_integers(dtype):
    # cast_to_full and cast_to_half there; a policy's cast here.
    tree = {
        "o": object(),
        "h": jnp.ones([], dtypes.half_dtype()),
        "f": jnp.ones([]),
        "i": jnp.ones([], jnp.int16),
    }
    cast = Policy(dtype, dtype, dtype).cast_to_compute(tree)
    assert cast["o"] is tree["o"]
    assert cast["h"].dtype == cast["f"].dtype == dtype
    assert cast["i"].dtype == jnp.int16


# A jmp.Policy, wherever one is taken.


@pytest.mark.parametrize("triple", list(itertools.product(POLICY_DTYPES, repeat=3)))
def test_what_jmp_prints_is_read(triple):
    theirs, ours = jmp.Policy(*triple), Policy(*triple)
    assert isinstance(ours, jmp.Policy)
    assert get_policy(str(theirs)) == ours


@pytest.mark.parametrize(
    "spec",
    ["f32", "full", "bf16", "f64", "c=f16", "p=f16,c=bf16", "p=bf16", "o=bf16", "params=f16,o=f32"],
)
def test_a_jmp_string_means_what_it_means_to_jmp(spec):
    theirs = jmp.get_policy(spec)
    assert get_policy(spec) == get_policy(theirs)
    assert (theirs.param_dtype, theirs.compute_dtype, theirs.output_dtype) == dataclasses.astuple(
        get_policy(spec)
    )[:3]


def test_a_jmp_policy_is_converted():
    theirs = jmp.Policy(np.dtype("float32"), jnp.bfloat16, np.float32)
    ours = get_policy(theirs)
    assert type(ours) is Policy
    assert ours == get_policy("mixed_bfloat16")


def test_a_policy_is_returned_as_it_is():
    policy = get_policy("mixed_float16,ops=exp:low")
    assert get_policy(policy) is policy


def test_haiku_takes_it():
    hk = pytest.importorskip("haiku")

    class Net(hk.Module):
        def __call__(self, x):
            assert x.dtype == jnp.bfloat16
            y = hk.Linear(3)(x)
            assert y.dtype == jnp.bfloat16
            return y

    previous = hk.mixed_precision.get_policy(Net)
    assert previous is None
    hk.mixed_precision.set_policy(Net, get_policy("mixed_bfloat16"))
    try:

        def apply(x):
            return Net()(x)

        net = hk.without_apply_rng(hk.transform(apply))
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
    others = [
        dataclasses.replace(base, param_dtype="bf16"),
        dataclasses.replace(base, compute_dtype="f16"),
        dataclasses.replace(base, output_dtype="bf16"),
        dataclasses.replace(base, softmax_dtype="bf16"),
        dataclasses.replace(base, saturate=True),
        dataclasses.replace(base, ops={"exp": "low"}),
    ]
    assert len({base, *others}) == 7


def test_a_policy_is_not_a_jmp_policy_with_the_same_dtypes():
    # It says more than that one does.
    assert get_policy("bf16") != jmp.get_policy("bf16")


def test_a_policy_is_frozen():
    policy = get_policy("bf16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.compute_dtype = jnp.float32


def test_a_policy_is_a_static_argument_of_jit():
    traces = []

    def run(x, policy):
        traces.append(policy)
        return policy.cast_to_compute(x)

    run = jax.jit(run, static_argnums=1)
    assert run(jnp.ones(2), get_policy("bf16")).dtype == jnp.bfloat16
    assert run(jnp.ones(2), Policy("bf16", jnp.bfloat16, "bf16")).dtype == jnp.bfloat16
    assert len(traces) == 1


def test_refinements_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        Policy("f32", "bf16", "f32", "bf16")


def test_the_dtypes_are_jax_scalar_types():
    policy = Policy(np.float32, np.dtype("float16"), "float32", softmax_dtype="f16")
    assert policy.param_dtype is policy.output_dtype is jnp.float32
    assert policy.compute_dtype is policy.softmax_dtype is jnp.float16


# Refinements.


@pytest.mark.parametrize("compute", POLICY_DTYPES)
@pytest.mark.parametrize("softmax", POLICY_DTYPES)
def test_softmax_is_float32_or_the_compute_dtype(compute, softmax):
    if softmax in (jnp.float32, compute):
        policy = Policy(jnp.float32, compute, jnp.float32, softmax_dtype=softmax)
        assert policy.softmax_dtype is softmax
    else:
        message = rf"softmax_dtype must be .*\({dtypes.dtype_name(compute)}\); got"
        with pytest.raises(ValueError, match=message):
            Policy(jnp.float32, compute, jnp.float32, softmax_dtype=softmax)


def test_ops_take_primitives_and_names_in_any_order():
    mine = Primitive("my_primitive")
    policy = Policy("f32", "bf16", "f32", ops={"tanh": "full", lax.exp_p: "follow", mine: "own"})
    assert policy.ops == (("exp", "follow"), ("my_primitive", "own"), ("tanh", "full"))
    again = Policy("f32", "bf16", "f32", ops=dict(reversed(policy.ops)))
    assert policy == again
    assert hash(policy) == hash(again)


def test_no_ops_is_an_empty_tuple():
    assert Policy("f32", "bf16", "f32").ops == Policy("f32", "bf16", "f32", ops={}).ops == ()


def test_ops_do_not_follow_the_callers_dict():
    ops = {"exp": "low"}
    policy = Policy("f32", "bf16", "f32", ops=ops)
    ops["exp"] = "full"
    assert policy.ops == (("exp", "low"),)


def test_an_unknown_class_is_named_with_the_classes():
    message = r"ops gives 'exp' the unknown class 'half'; the classes are low, full, follow, .*own"
    with pytest.raises(ValueError, match=message):
        Policy("f32", "bf16", "f32", ops={lax.exp_p: "half"})


def test_a_primitive_and_its_name_must_agree():
    with pytest.raises(ValueError, match="ops gives 'exp' two classes, 'low' and 'full'"):
        Policy("f32", "bf16", "f32", ops={lax.exp_p: "low", "exp": "full"})


@pytest.mark.parametrize("key", [jnp.exp, "", 3, None])
def test_an_ops_key_is_a_primitive_or_a_name(key):
    with pytest.raises(TypeError, match="a key of ops must be a primitive or its name"):
        Policy("f32", "bf16", "f32", ops={key: "low"})


@pytest.mark.parametrize("ops", ["exp:low", ["exp"], 3, {"exp"}, ("exp",), (("exp",),)])
def test_ops_are_a_mapping(ops):
    with pytest.raises(TypeError, match="Policy: ops takes a mapping from primitives"):
        Policy("f32", "bf16", "f32", ops=ops)


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype", "softmax_dtype"])
@pytest.mark.parametrize("dtype", [jnp.complex64, "int8", jnp.float8_e4m3fn])
def test_a_dtype_that_no_policy_can_hold_names_the_field(field, dtype):
    with pytest.raises(ValueError, match=f"Policy: {field}: takes a real floating dtype"):
        dataclasses.replace(get_policy("f32"), **{field: dtype})


# Strings.


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("mixed_bfloat16", ("f32", "bf16", "f32")),
        ("mixed_float16", ("f32", "f16", "f32")),
        ("float64", ("f64", "f64", "f64")),
        ("half", ("bf16", "bf16", "bf16")),
        ("c=half", ("f32", "bf16", "bf16")),
        ("p=f32,c=bf16,o=f32", ("f32", "bf16", "f32")),
        ("params=float32,compute=bfloat16,output=float32", ("f32", "bf16", "f32")),
        ("o=f32,c=bf16", ("f32", "bf16", "f32")),
        ("p=bf16", ("bf16", "bf16", "bf16")),
        ("mixed_bfloat16,o=bf16", ("f32", "bf16", "bf16")),
        ("bf16,params=f32", ("f32", "bf16", "bf16")),
        (" p = f32 , c = bf16 ", ("f32", "bf16", "bf16")),
        ("mixed_half", ("f32", "bf16", "f32")),
        (jnp.bfloat16, ("bf16", "bf16", "bf16")),
        (np.dtype("float32"), ("f32", "f32", "f32")),
    ],
)
def test_what_a_spec_means(spec, expected):
    assert get_policy(spec) == Policy(*expected)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("mixed_bfloat16,softmax=bf16", Policy("f32", "bf16", "f32", softmax_dtype="bf16")),
        ("mixed_bfloat16,softmax=f32", Policy("f32", "bf16", "f32")),
        ("softmax=f16,c=f16", Policy("f32", "f16", "f16", softmax_dtype="f16")),
        (
            "mixed_float16,ops=exp:follow|my_prim:full",
            Policy("f32", "f16", "f32", ops={"exp": "follow", "my_prim": "full"}),
        ),
        ("bf16, ops = a%3Ab : low", Policy("bf16", "bf16", "bf16", ops={"a:b": "low"})),
    ],
)
def test_refinements_in_a_string(spec, expected):
    assert get_policy(spec) == expected


@pytest.mark.parametrize(
    ("spec", "printed"),
    [
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
    ],
)
def test_a_policy_prints_as_it_was_named(spec, printed):
    assert str(get_policy(spec)) == printed
    assert get_policy(printed) == get_policy(spec)


def test_the_table_has_every_field():
    assert [field.name for field in FIELDS] == [f.name for f in dataclasses.fields(Policy)]


@hypothesis.given(policies)
def test_str_is_the_name_of_a_region(policy):
    """Name stacks tell one scope from the next by these characters."""
    assert not {*"/()"} & {*str(policy)}


@hypothesis.given(policies)
def test_str_reads_back(policy):
    assert get_policy(str(policy)) == policy
    assert str(get_policy(str(policy))) == str(policy)


@hypothesis.given(policies)
def test_repr_evaluates(policy):
    assert eval(repr(policy), {"get_policy": get_policy}) == policy


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


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [("mixed_bf17", "mixed_bfloat16"), ("Mixed_Float1", "mixed_float16"), ("bfloat", "bfloat16")],
)
def test_an_unknown_name_lists_the_names_and_the_nearest(spec, nearest):
    message = (
        rf"get_policy: Unknown dtype or policy name '{spec}' \(did you mean '{nearest}'\?\); "
        r"the names are bf16, .*half, mixed_bfloat16, mixed_float16, mixed_float8, mixed_half"
    )
    with pytest.raises(ValueError, match=message):
        get_policy(spec)


@pytest.mark.parametrize("spec", ["complex64", "int8", "float8_e4m3fn"])
def test_a_name_of_another_kind_of_dtype_says_so(spec):
    with pytest.raises(ValueError, match=f"takes a real floating dtype .*; got '{spec}'"):
        get_policy(spec)


@pytest.mark.parametrize(
    ("spec", "position", "reason"),
    [
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
        ("mixed_bfloat16,ops=exp:low|", 27, "expected primitive:class, got ''"),
        ("mixed_bfloat16,ops=a:b:low", 19, "expected primitive:class"),
        ("mixed_bfloat16,ops=exp:half", 23, "unknown class 'half'; the classes are low, "),
        ("mixed_bfloat16,ops=exp:low|exp:full", 27, "the primitive 'exp' is set twice"),
    ],
)
def test_a_malformed_string_says_where(spec, position, reason):
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


@pytest.mark.parametrize("name", ["mixed_bfloat16", "p=f32,c=bf16,o=f32", "bf16-mixed"])
def test_a_policys_name_is_no_dtype(name):
    with pytest.raises(ValueError, match=re.escape(f"jaxmp.get_policy({name!r})")):
        Policy(name)


def test_a_contradictory_string_is_refused():
    with pytest.raises(ValueError, match=r"softmax_dtype must be .* \(bfloat16\); got float16"):
        get_policy("mixed_bfloat16,softmax=f16")


@pytest.mark.parametrize("spec", [None, 16, 1.0, float, [], {}, np.ones(2)], ids=repr)
def test_the_wrong_type_says_what_it_takes(spec):
    message = (
        r"get_policy: a policy is a string such as .*, a Policy, a jmp.Policy or a dtype; got .* of"
    )
    with pytest.raises(TypeError, match=message):
        get_policy(spec)


@pytest.mark.parametrize(
    "fn", [jaxmp.autocast, jaxmp.wrap, jaxmp.explain, jaxmp.diagnose, jaxmp.audit, jaxmp.preflight]
)
def test_swapped_arguments_are_told(fn):
    with pytest.raises(TypeError, match="the policy second: are the two swapped"):
        fn("mixed_bfloat16", np.sin)
