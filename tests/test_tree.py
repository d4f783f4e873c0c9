"""Which leaves a cast touches, the exact finite test, and selecting between trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp.tree import all_finite, cast_floating, select, widen_floating

from support import case

HALVES = (jnp.bfloat16, jnp.float16)
TARGETS = (*HALVES, jnp.float32)


class Opaque:
    dtype = np.dtype("float32")  # looks like an array, is none


FLOATING = {
    "jax array": lambda: jnp.ones((2, 3)),
    "jax 16-bit array": lambda: jnp.ones(3, jnp.bfloat16),
    "weak jax array": lambda: jnp.asarray(2.0),
    "numpy array": lambda: np.ones((2, 3), np.float32),
    "numpy float64 array": lambda: np.ones(2),
    "numpy 0-d array": lambda: np.ones([], np.float16),
    "numpy bfloat16 array": lambda: np.ones(2, ml_dtypes.bfloat16),
    "np.float32": lambda: np.float32(1.5),
    "np.float64": lambda: np.float64(1.5),  # which is also a Python float
    "bfloat16 scalar": lambda: ml_dtypes.bfloat16(1.5),
    "empty array": lambda: jnp.ones((0, 4)),
}
OTHERS = {
    "int array": lambda: jnp.ones(2, jnp.int32),
    "numpy int array": lambda: np.ones(2, np.int64),
    "np.int32": lambda: np.int32(3),
    "bool array": lambda: jnp.ones(2, bool),
    "key": lambda: jax.random.key(0),
    "raw key": lambda: jax.random.PRNGKey(0),
    "complex array": lambda: jnp.ones(2, jnp.complex64),
    "np.complex64": lambda: np.complex64(1j),
    "float8 array": lambda: jnp.ones(2, jnp.float8_e4m3fn),
    "numpy float8 array": lambda: np.ones(2, ml_dtypes.float8_e5m2),
    "float0": lambda: np.zeros(2, jax.dtypes.float0),
    "Python float": lambda: 0.5,
    "Python int": lambda: 10**400,
    "Python complex": lambda: 1j,
    "bool": lambda: True,
    "str": lambda: "float32",
    "numpy strings": lambda: np.array(["a", "b"]),
    "numpy objects": lambda: np.array([1.0, None], object),
    "callable": lambda: jnp.tanh,
    "dtype": lambda: np.dtype("float32"),
    "ref": lambda: jax.new_ref(jnp.ones(2)),
    "opaque": Opaque,
    "int spec": lambda: jax.ShapeDtypeStruct((2,), jnp.int32),
    "float8 spec": lambda: jax.ShapeDtypeStruct((2,), jnp.float8_e4m3fn),
}


@pytest.mark.parametrize("target", TARGETS)
def test_floating_leaves_are_cast(target):
    for name, make in FLOATING.items():
        leaf = make()
        cast = cast_floating({"x": [leaf]}, target)["x"][0]
        with case(name):
            assert cast.dtype == target
            assert cast.shape == leaf.shape
            assert isinstance(cast, jax.Array) == isinstance(leaf, jax.Array)
            assert not getattr(cast, "weak_type", False)
            np.testing.assert_array_equal(np.asarray(cast), np.asarray(leaf).astype(target))


def test_other_leaves_are_returned_as_they_are():
    for name, make in OTHERS.items():
        leaf = make()
        assert cast_floating([leaf], jnp.bfloat16)[0] is leaf, name
        assert widen_floating([leaf])[0] is leaf, name


def test_none_and_structure_are_kept():
    tree = {"a": None, "b": (np.float32(1), [None]), "c": ()}
    cast = cast_floating(tree, "bf16")
    assert jax.tree.structure(cast) == jax.tree.structure(tree)
    assert cast["a"] is None


def test_a_leaf_of_the_dtype_is_not_copied():
    for leaf in (np.ones(3, np.float32), jnp.ones(3), jax.ShapeDtypeStruct((3,), jnp.float32)):
        assert cast_floating(leaf, jnp.float32) is leaf


def test_a_sharding_is_kept():
    sharding = NamedSharding(jax.make_mesh((8,), ("d",)), PartitionSpec("d"))
    spec = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding, weak_type=True)
    cast = cast_floating(spec, jnp.bfloat16)
    assert isinstance(cast, jax.ShapeDtypeStruct)
    assert (cast.shape, cast.dtype, cast.sharding) == ((16,), jnp.bfloat16, sharding)
    assert not cast.weak_type
    cast = cast_floating(jax.device_put(jnp.ones(16), sharding), jnp.bfloat16)
    assert cast.sharding.is_equivalent_to(sharding, cast.ndim)


def test_casting_traces_and_differentiates():
    def loss(tree):
        return jnp.sum(cast_floating(tree, jnp.bfloat16)["w"].astype(jnp.float32) ** 2)

    gradient = jax.jit(jax.grad(loss))({"w": jnp.full(3, 1.5), "b": None})
    assert gradient["w"].dtype == jnp.float32
    np.testing.assert_array_equal(gradient["w"], np.full(3, 3.0))


def test_an_unknown_dtype_names_the_function():
    with pytest.raises(ValueError, match="cast_floating: dtype: Unknown dtype 'bf61'"):
        cast_floating({}, "bf61")


@pytest.mark.parametrize("dtype", [*TARGETS, jnp.complex64])
@pytest.mark.parametrize("jit", [False, True])
def test_one_bad_element_in_any_leaf_is_found(dtype, jit):
    check = jax.jit(all_finite) if jit else all_finite
    good = {"a": jnp.ones(4, dtype), "b": (jnp.ones((2, 3), dtype), jnp.arange(3))}
    assert check(good).item() is True
    for bad in (np.nan, np.inf, -np.inf):
        assert check({**good, "a": good["a"].at[3].set(bad)}).item() is False
        assert check({**good, "b": (good["b"][0].at[1, 2].set(bad), good["b"][1])}).item() is False


def test_all_finite_is_a_strong_scalar_bool():
    for tree in ({}, {"a": 1}, {"a": jnp.ones(2)}, {"a": np.ones(2)}, 1.0):
        flag = all_finite(tree)
        assert isinstance(flag, jax.Array)
        assert (flag.shape, flag.dtype, flag.weak_type) == ((), jnp.bool_, False)
        assert flag


def test_what_is_finite_is_not_mistaken():
    for tree in (
        jnp.full(4, 1e20),  # whose sum of squares overflows
        jnp.full(4, 3e38),
        np.full(2, 1e300),  # infinite if narrowed to float32
        [None, "inf", jax.random.key(0), 10**400, np.zeros(2, jax.dtypes.float0)],
        jnp.zeros((0, 3)),
        [jnp.full(2, 448, jnp.float8_e4m3fn)],
        [np.array(["nan"]), np.array([None, np.nan], object)],
    ):
        assert all_finite(tree), tree


def test_every_kind_of_number_is_tested():
    for leaf in (
        float("inf"),
        complex(0, float("nan")),
        np.float32(np.inf),
        np.array([1, np.nan]),
        np.array(1e5).astype(ml_dtypes.float8_e5m2),
        jnp.full(2, jnp.nan, jnp.float8_e4m3fn),
        jnp.full(2, jnp.inf, jnp.float8_e5m2),
        ml_dtypes.bfloat16(np.nan),
    ):
        assert not all_finite({"x": leaf, "y": jnp.ones(2)}), leaf


def test_a_shape_dtype_struct_has_no_values():
    with pytest.raises(TypeError, match=r"leaf at \['a'\]\[0\] is a ShapeDtypeStruct"):
        all_finite({"a": [jax.ShapeDtypeStruct((2,), jnp.float32)]})


def test_sharded_leaves_give_one_answer():
    sharding = NamedSharding(jax.make_mesh((8,), ("d",)), PartitionSpec("d"))
    bad = jax.device_put(jnp.ones(16).at[13].set(jnp.inf), sharding)
    assert not all_finite([bad, jnp.ones(3)])
    assert not jax.jit(all_finite)([bad, jnp.ones(3)])


def test_widening_casts_16_bits_and_nothing_else():
    for name, make in FLOATING.items():
        leaf = make()
        wide = widen_floating({"x": leaf})["x"]
        if leaf.dtype.itemsize == 2:
            assert wide.dtype == jnp.float32, name
            np.testing.assert_array_equal(np.asarray(wide), np.asarray(leaf).astype("float32"))
        else:
            assert wide is leaf, name


@pytest.mark.parametrize("jit", [False, True])
def test_select_takes_one_tree_or_the_other(jit):
    choose = jax.jit(select) if jit else select
    dtypes = (*TARGETS, jnp.complex64, jnp.int32, jnp.bool_)
    new = [{"a": jnp.ones((2, 3), dtype), "b": [jnp.ones((), dtype), None]} for dtype in dtypes]
    old = jax.tree.map(jnp.zeros_like, new)
    for condition, want in ((True, new), (False, old)):
        got = choose(jnp.asarray(condition), new, old)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_select_does_not_let_the_other_trees_nan_through():
    np.testing.assert_array_equal(select(False, jnp.full(3, jnp.nan), jnp.ones(3)), jnp.ones(3))


def test_select_takes_keys_scalars_and_numpy():
    keys = jax.random.key(0), jax.random.key(1)
    assert jax.random.key_data(select(jnp.array(False), *keys)).tolist() == [0, 1]
    got = select(jnp.array(True), [np.ones(2, np.float32), 3, 1.5], [np.zeros(2, np.float32), 4, 2])
    assert [x.tolist() for x in got] == [[1, 1], 3, 1.5]
    wide = select(jnp.array(True), jnp.ones(2, jnp.bfloat16), jnp.ones(2))
    assert wide.dtype == jnp.float32


def test_select_returns_leaves_without_values_as_they_are():
    float0 = np.zeros(2, jax.dtypes.float0)
    same = jnp.tanh
    got = select(jnp.array(False), [float0, same], [np.zeros(2, jax.dtypes.float0), same])
    assert got[0] is float0
    assert got[1] is same


def test_select_maps_over_stacked_conditions():
    got = jax.vmap(select)(jnp.array([True, False]), jnp.ones((2, 3)), jnp.zeros((2, 3)))
    np.testing.assert_array_equal(got, [[1, 1, 1], [0, 0, 0]])


def test_select_names_leaves_that_differ_and_are_no_numbers():
    with pytest.raises(TypeError, match=r"the leaves at \['f'\] differ and are not numbers"):
        select(jnp.array(True), {"f": "a"}, {"f": "b"})
