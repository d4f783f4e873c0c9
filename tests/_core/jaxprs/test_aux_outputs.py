"""Extra operands and results, threaded through every higher-order primitive and at any depth.

The numbers are compared with loops over NumPy arrays; gradients with those of the program as it is,
bitwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy_reference import reference
from observed import LARGEST, SUM, observe

import jaxmp
from jaxmp._core.jaxprs.aux_outputs import Extra, Join
from jaxmp._core.jaxprs.higher_order import inside, rebuild
from jaxmp._core.jaxprs.source import module_path, user_line

from constructs import CONSTRUCTS, STACK, Construct, W, X, assert_bitwise, assert_close, loss_of
from support import iter_eqns

x, w, stack = (np.asarray(a, np.float64) for a in (X, W, STACK))


def amax(a: np.ndarray) -> float:
    return float(np.max(np.abs(a)))


def values(extras: dict[str, Extra]) -> dict[str, Any]:
    return {name: np.asarray(extra.value) for name, extra in extras.items()}


def assert_found(extras: dict[str, Extra], want: dict[str, Any]) -> None:
    """Compares by how the path ends; float32's own rounding of a few products in a row."""
    found = values(extras)
    assert len(found) == len(want), sorted(found)
    for end, value in want.items():
        [name] = [name for name in found if re.search(end + "$", name)]
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def layers(x: np.ndarray, ws: Any) -> tuple[np.ndarray, list[float]]:
    """tanh(x @ w) layer by layer, and max |x @ w| of each."""
    seen = []
    for w in ws:
        seen.append(amax(x @ w))
        x = np.tanh(x @ w)
    return x, seen


# --- each primitive by itself --------------------------------------------------------------------


def scanned(w, x, *, reverse=False):
    def step(h, s):
        return (jnp.tanh(h @ (s * w)), jnp.sum(h))

    return lax.scan(step, x, jnp.arange(1.0, 4.0), reverse=reverse)


def branched(w, x):
    return lax.switch(jnp.int32(x[0, 0] > 0), [lambda x: x @ w, lambda x: jnp.tanh(x @ w) @ w], x)


@jax.custom_vjp
def reversing(x, w):
    return jnp.tanh(x @ w)


reversing.defvjp(
    lambda x, w: (jnp.tanh(x @ w), (x, w)), lambda r, g: (-(g @ r[1].T), 2 * (r[0].T @ g))
)


@jax.custom_jvp
def tripled(x, w):
    return jnp.tanh(x @ w)


@tripled.defjvp
def tripled_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return tripled(x, w), 3 * (dx @ w + x @ dw)


ONCE = amax(x @ w)
TWICE = amax(np.tanh(x @ w) @ w)
EACH: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "jit": (lambda w, x: jax.jit(lambda x: jnp.tanh(x @ w))(x), {"jit/0.dot_general": ONCE}),
    "remat": (
        lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(x),
        {"remat2/0.dot_general": ONCE, "remat2/2.dot_general": TWICE},
    ),
    "cond": (
        branched,
        {"cond/0.dot_general": 0.0, "cond1/0.dot_general": ONCE, "cond1/2.dot_general": TWICE},
    ),
    "scan": (scanned, {"dot_general": layers(x, [w, 2 * w, 3 * w])[1]}),
    "reversed scan": (
        partial(scanned, reverse=True),
        {"dot_general": layers(x, [3 * w, 2 * w, w])[1][::-1]},
    ),
    "map": (
        lambda w, x: lax.map(lambda row: row @ w, x),
        {"dot_general": np.abs(x @ w).max(axis=1)},
    ),
    "custom_vjp": (lambda w, x: reversing(x, w), {"custom_vjp_call/0.dot_general": ONCE}),
    "custom_jvp": (lambda w, x: tripled(x, w), {"custom_jvp_call/0.dot_general": ONCE}),
}
each = pytest.mark.parametrize("name", EACH)


def with_extras(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss with what was found in it beside."""

    def run(*args: Any) -> Any:
        out, extras = observe(fn)(*args)
        return loss_of(lambda: out)(), extras

    return run


def assert_same(got: Any, want: Any) -> None:
    """But for the last bit: XLA fuses a program otherwise where what is found is returned too."""
    assert_close(got, want, dtype="float32", depth=1)


@each
def test_it_comes_out_and_nothing_else_changes(name: str) -> None:
    fn, want = EACH[name]
    (out, extras), plain = reference(lambda *args: (observe(fn)(*args), fn(*args)))(W, X)
    assert_found(extras, want)
    assert_same(out, plain)


@each
def test_it_comes_out_under_grad_and_the_gradient_is_the_same(name: str) -> None:
    fn, want = EACH[name]
    observed = jax.grad(with_extras(fn), argnums=(0, 1), has_aux=True)
    plainly = jax.grad(loss_of(fn), argnums=(0, 1))
    (gradients, extras), plain = reference(lambda *args: (observed(*args), plainly(*args)))(W, X)
    assert_found(extras, want)
    assert_same(gradients, plain)


@each
def test_it_comes_out_under_vmap_for_each_example(name: str) -> None:
    fn, _ = EACH[name]
    batch = np.stack([s * np.asarray(X) for s in np.float32([1, -2, 0.1])])
    _, extras = reference(jax.vmap(observe(fn), (None, 0)))(W, batch)
    each_alone = reference(observe(fn))
    for i, example in enumerate(batch):
        alone = each_alone(W, example)[1]
        assert alone.keys() == extras.keys()
        for key, extra in alone.items():
            np.testing.assert_allclose(extras[key].value[i], extra.value, rtol=1e-6)


def test_axes_say_what_was_stacked() -> None:
    for fn, axes in ((scanned, "scan"), (partial(scanned, reverse=True), "reversed scan")):
        run = observe(lambda w, x, fn=fn: lax.map(lambda x: fn(w, x), x[None]))
        [extra] = reference(run)(W, X)[1].values()
        assert extra.axes == ("scan", axes)
        assert extra.value.shape == (1, 3)


def test_extra_results_have_no_tangents_whatever_gives_them() -> None:
    def fn(x):
        return lax.map(jnp.sin, x)

    [eqn] = jax.make_jaxpr(fn)(X).jaxpr.eqns

    def run(x):
        def doubled(extra_in, x):
            return ([jnp.sin(x)], {"it": Extra(2 * x)})

        [y], extras = rebuild(eqn, [x], [doubled])
        return y, extras["it"].value

    (_, value), (dy, tangent) = reference(lambda x: jax.jvp(run, (x,), (x,)))(X)
    np.testing.assert_array_equal(value, 2 * np.asarray(X))
    np.testing.assert_array_equal(tangent, 0 * np.asarray(X))
    assert np.any(dy)


# --- while ---------------------------------------------------------------------------------------


def solved(w, x):
    """Doubles until a product is large; how often depends on the values."""

    def go(state):
        return (jnp.max(state[1] @ w) < 40) & (state[0] < 50)

    return lax.while_loop(go, lambda state: (state[0] + 1, 2 * state[1] @ w), (0, x))


def solve(x: np.ndarray, w: np.ndarray) -> tuple[list[float], list[float]]:
    """max |product| in the body and in the condition, each time."""
    body, test = [0.0], []
    while len(body) < 50:
        test.append(amax(x @ w))
        if np.max(x @ w) >= 40:
            break
        body.append(amax(2 * x @ w))
        x = 2 * x @ w
    return body, test


def test_a_while_loop_joins_what_its_iterations_and_its_condition_give() -> None:
    body, test = solve(x, 1.5 * w)
    assert len(body) > 3
    scaled = np.float32(1.5) * np.asarray(W)
    out, extras = reference(observe(solved))(scaled, X)
    assert_found(extras, {"while/0.dot_general": max(test), "while1/2.dot_general": max(body)})
    assert_same(out, reference(solved)(scaled, X))


def test_a_while_loop_that_does_not_run_gives_the_neutral_value() -> None:
    extras = reference(observe(solved))(W, np.float32(1e6) * np.asarray(X))[1]
    assert_found(extras, {"while/0.dot_general": 1e6 * ONCE, "while1/2.dot_general": 0.0})


def test_each_example_of_a_batch_counts_its_own_iterations() -> None:
    count = {"dot_general": lambda x: Extra(jnp.int32(1), SUM)}
    scales = (0.01, 1.0, 1e6)
    batch = np.stack([np.float32(s) * np.asarray(X) for s in scales])
    run = jax.vmap(observe(solved, count), (None, 0))
    extras = jax.jit(run)(3 * np.asarray(W), batch)
    runs = [len(solve(s * x, 3 * w)[1]) for s in scales]
    assert_found(
        extras[1],
        {"while/0.dot_general": runs, "while1/2.dot_general": [n - 1 for n in runs]},
    )


def test_a_while_loop_refuses_what_has_no_join() -> None:
    with pytest.raises(
        ValueError, match=r"rebuild: .*while1/1.dot_general' cannot be stacked .* a Join"
    ):
        observe(
            lambda w, x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ w), (0, x)),
            {"dot_general": lambda x: Extra(jnp.max(x))},
        )(W, X)
    wide = {"dot_general": lambda x: Extra(jnp.int8(1), Join(0, lambda a, b: a + jnp.int32(b)))}
    with pytest.raises(ValueError, match=r"a while loop, combined, is int8.* and is int32"):
        observe(solved, wide)(W, X)


# --- branches ------------------------------------------------------------------------------------


def test_a_branch_without_it_gives_the_neutral_value() -> None:
    probe = {"sin": lambda x: Extra(jnp.max(x, axis=1), Join(neutral=-np.inf))}

    def fn(x):
        return lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

    for value, want in ((X, np.sin(x).max(axis=1)), (-np.asarray(X), np.full(6, -np.inf))):
        assert_found(reference(observe(fn, probe))(value)[1], {"0.sin": want})


def test_branches_that_do_not_agree_are_refused() -> None:
    jaxpr = jax.make_jaxpr(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x))(X)
    [eqn] = [eqn for eqn in jaxpr.jaxpr.eqns if inside(eqn)]

    def named(value):
        return lambda extra_in, x: ([x], {"it": Extra(value)})

    with pytest.raises(ValueError, match=r"'it' of the branches of a cond is float32\[\].*int32"):
        rebuild(eqn, [1, X], [named(jnp.float32(1)), named(jnp.int32(1))])


# --- calls ---------------------------------------------------------------------------------------


def the_eqn(fn: Callable[..., Any], kind: str, *args: Any) -> Any:
    found = [e for e in iter_eqns(jax.make_jaxpr(fn)(*args)) if e.primitive.name == kind]
    assert len(found) == 1
    return found[0]


def test_a_jit_keeps_its_name_its_shardings_and_what_it_donates() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("d"))

    @partial(jax.jit, in_shardings=(None, rows), out_shardings=rows, donate_argnums=1)
    def named(w, x):
        return jnp.tanh(x @ w) + W.sum()

    def fn(w, x):
        return named(w, 2 * x)

    eqns = [the_eqn(f, "jit", W, X) for f in (fn, observe(fn))]
    probed = observe(fn, {"dot_general": lambda x, y: Extra(jnp.max(x) + y)}, [jnp.float32(1)])
    eqns.append(the_eqn(probed, "jit", W, X))
    for eqn in eqns:
        assert eqn.params["name"] == "named"
        assert eqn.params["donated_invars"][-2:] == (False, True)
        assert eqn.params["in_shardings"][-1] == rows
        assert eqn.params["out_shardings"][0] == rows
    assert [len(eqn.outvars) for eqn in eqns] == [1, 2, 2]
    assert len(eqns[2].invars) == len(eqns[1].invars) + 1
    assert_found(reference(observe(fn))(W, X)[1], {"dot_general": 2 * ONCE})


def products(fn: Callable[..., Any], *args: Any) -> int:
    return sum(e.primitive.name == "dot_general" for e in iter_eqns(jax.make_jaxpr(fn)(*args)))


@pytest.mark.parametrize(("policy", "prevent_cse"), [(None, True), ("dots_saveable", False)])
def test_a_remat_keeps_its_policy_and_saves_as_much(policy: str, prevent_cse: bool) -> None:
    policy = policy and getattr(jax.checkpoint_policies, policy)
    remat = partial(jax.checkpoint, policy=policy, prevent_cse=prevent_cse)

    def fn(w, x):
        return remat(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w) @ w)(x)

    gradient = jax.grad(lambda w, x: with_extras(fn)(w, x)[0])
    assert products(gradient, W, X) == products(jax.grad(loss_of(fn)), W, X)
    # Of the backward pass too, which is marked as such, so that XLA does not undo it.
    backward = observe(jax.grad(loss_of(fn)))
    params = the_eqn(jax.grad(loss_of(fn)), "remat2", W, X).params
    for run in (backward, observe(fn)):
        eqn = the_eqn(run, "remat2", W, X)
        assert (eqn.params["policy"], eqn.params["prevent_cse"]) == (policy, prevent_cse)
        assert eqn.params["differentiated"] == (params["differentiated"] and run is backward)


def test_a_rule_that_is_told_what_is_differentiated_is_told_the_same() -> None:
    @jax.custom_vjp
    def picky(x, w):
        return jnp.tanh(x @ w)

    def forward(x, w):
        assert w.perturbed
        assert not x.perturbed
        return jnp.tanh(x.value @ w.value), x.value

    picky.defvjp(forward, lambda x, g: (None, 3 * (x.T @ g)), symbolic_zeros=True)

    def fn(w):
        return picky(X, w)

    gradient, extras = reference(jax.grad(with_extras(fn), has_aux=True))(W)
    assert_same(gradient, reference(jax.grad(loss_of(fn)))(W))
    assert_found(extras, {"dot_general": ONCE})


# --- devices -------------------------------------------------------------------------------------


def on_devices(check_vma: bool, axes: tuple[str, ...] = ("a", "b")) -> Callable[..., Any]:
    spec = PartitionSpec(axes)

    @partial(
        jax.shard_map,
        mesh=jax.make_mesh((2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2),
        in_specs=(PartitionSpec(), spec),
        out_specs=spec,
        check_vma=check_vma,
    )
    def local(w, x):
        x = lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)
        x = lax.fori_loop(0, jnp.int32(2 + 0 * x[0, 0]), lambda _, x: jnp.tanh(x @ w), x)
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]

    return local


@pytest.mark.parametrize(("check_vma", "axes"), [(True, ("a", "b")), (False, ("a",))])
def test_each_device_gives_its_own(check_vma: bool, axes: tuple[str, ...]) -> None:
    blocks = np.split(x, 6 if len(axes) == 2 else 2)
    blocks = blocks if len(axes) == 2 else np.repeat(blocks, 3, axis=0)
    first, loop, scan = [], [], []
    for block in blocks:
        first.append(amax(block @ w) if block[0, 0] > 0 else 0.0)
        block = block @ w if block[0, 0] > 0 else block
        _, seen = layers(block, [w] * 4)
        loop.append(max(seen[:2]))
        scan.append(seen[2:])
    fn = on_devices(check_vma, axes)
    out, extras = jax.jit(observe(fn))(W, X)
    assert_found(
        extras,
        {
            r"cond1/\d+.dot_general": first,
            r"while1/\d+.dot_general": loop,
            r"scan/\d+.dot_general": scan,
        },
    )
    assert {extra.axes for extra in extras.values()} == {("devices",), ("devices", "scan")}
    assert_same(out, jax.jit(fn)(W, X))


# --- scan in cond in remat in custom_vjp ---------------------------------------------------------


def _block(x, ws, flag):
    def block(x):
        def deep(x):
            return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

        return lax.cond(flag, deep, lambda x: 0.5 * x, x)

    return jax.checkpoint(block)(x)


@jax.custom_vjp
def nested(x, ws, flag):
    return _block(x, ws, flag)


def _nested_forward(x, ws, flag):
    return _block(x, ws, flag), (x, ws, flag)


def _nested_backward(saved, g):
    x, ws, flag = saved
    dx, dws = jax.vjp(lambda x, ws: _block(x, ws, flag), x, ws)[1](g)
    return -dx, dws, None


nested.defvjp(_nested_forward, _nested_backward)
SITE = "0.custom_vjp_call/0.remat2/1.cond1/0.scan/0.dot_general"


@pytest.mark.parametrize("flag", [True, False])
def test_it_comes_out_of_a_scan_in_a_cond_in_a_remat_in_a_custom_vjp(flag: bool) -> None:
    flag, want = np.bool_(flag), layers(x, stack)[1] if flag else [0.0] * 3
    out, extras = reference(observe(nested))(X, STACK, flag)
    assert list(extras) == [SITE]
    assert_found(extras, {SITE: want})
    assert_same(out, reference(nested)(X, STACK, flag))
    gradients, extras = reference(jax.grad(with_extras(nested), (0, 1), has_aux=True))(
        X, STACK, flag
    )
    assert_found(extras, {SITE: want})
    assert_same(gradients, reference(jax.grad(loss_of(nested), (0, 1)))(X, STACK, flag))


def test_so_it_does_for_each_example_of_a_batch_under_grad() -> None:
    batch = np.float32([1, 1, -3])[:, None, None] * np.asarray(X), STACK, np.array([1, 0, 1], bool)
    axes = (0, None, 0)
    want = [layers(x, stack)[1], [0.0] * 3, layers(-3 * x, stack)[1]]
    assert_found(reference(jax.vmap(observe(nested), axes))(*batch)[1], {SITE: want})
    run = jax.vmap(jax.grad(with_extras(nested), (0, 1), has_aux=True), axes)
    gradients, extras = reference(run)(*batch)
    assert_found(extras, {SITE: want})
    plain = jax.vmap(jax.grad(loss_of(nested), (0, 1)), axes)
    assert_same(gradients, reference(plain)(*batch))
    # Of a batch seen as a whole, one value; a cond of several minds runs both of its branches.
    extras = reference(observe(jax.vmap(nested, axes)))(*batch)[1]
    assert_found(extras, {"scan/0.dot_general": np.maximum(want[0], want[2])})


def test_and_out_of_the_backward_pass_of_it() -> None:
    h, seen = x, layers(x, stack)[1]
    inputs = [h := np.tanh(h @ w) if i else x for i, w in enumerate([None, *stack[:-1]])]
    g, by_input, by_weight = np.cos(np.arange(48)).reshape(6, 8), [], []
    for h, w in zip(inputs[::-1], stack[::-1], strict=True):
        g = g * (1 - np.tanh(h @ w) ** 2)
        by_weight.append(amax(h.T @ g))
        g = g @ w.T
        by_input.append(amax(g))
    plain = jax.grad(loss_of(nested), (0, 1))
    gradients, extras = reference(observe(plain))(X, STACK, np.bool_(True))
    forward = [e.value for e in extras.values() if e.axes == ("scan",)]
    backward = [e.value for e in extras.values() if e.axes == ("reversed scan",)]
    assert len(forward) + len(backward) == len(extras)
    for value in forward:  # of the forward pass, and again where the backward pass recomputes it
        np.testing.assert_allclose(value, seen, rtol=1e-5)
    for want in (by_input, by_weight):  # row i is the layer i that the forward pass ran
        assert any(np.allclose(value, want[::-1], rtol=1e-4) for value in backward)
    assert_same(gradients, reference(plain)(X, STACK, np.bool_(True)))


def test_an_extra_operand_reaches_all_that_runs_inside() -> None:
    over = {"dot_general": lambda x, limit: Extra(jnp.sum(jnp.abs(x) > limit, dtype="int32"), SUM)}

    def counted(limit, x, flag):
        return observe(nested, over, [limit])(x, STACK, flag)

    def by_hand(limit, x):
        counts = []
        for w in stack:
            counts.append(int(np.sum(np.abs(x @ w) > limit)))
            x = np.tanh(x @ w)
        return counts

    limits = np.float32([0.1, 0.5, 1.0])
    _, extras = reference(jax.vmap(counted, (0, None, None)))(limits, X, np.bool_(True))
    assert_found(extras, {SITE: [by_hand(limit, x) for limit in limits]})
    assert extras[SITE].value.dtype == jnp.int32

    def loss(limit, x):
        out, extras = counted(limit, x, True)
        return loss_of(lambda: out)(), extras

    gradients, extras = reference(jax.grad(loss, (0, 1), has_aux=True))(limits[1], X)
    assert gradients[0] == 0
    plain = reference(jax.grad(lambda x: loss_of(nested)(x, STACK, True)))(X)
    assert_same(gradients[1], plain)
    assert_found(extras, {SITE: by_hand(0.5, x)})


def test_a_program_under_autocast_is_seen_as_well() -> None:
    fast = jaxmp.autocast(lambda x, ws: nested(x, ws, jnp.bool_(True)), "mixed_bfloat16", (0, 1))
    _, extras = reference(jax.grad(with_extras(fast), has_aux=True))(X, STACK)
    [extra] = extras.values()
    assert extra.value.dtype == jnp.bfloat16
    # Two roundings of the operands of each of three products, and one of each result.
    np.testing.assert_allclose(
        np.asarray(extra.value, np.float64), layers(x, stack)[1], rtol=12 * 2**-8
    )


# --- what stays ----------------------------------------------------------------------------------


def text(fn: Callable[..., Any], *args: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(fn)(*args)))


def test_where_nothing_is_threaded_it_is_the_same_program() -> None:
    for fn, _ in EACH.values():
        for run in (fn, jax.grad(loss_of(fn))):
            assert text(observe(run, {}), W, X) == text(run, W, X)


def test_lines_and_module_paths_stay() -> None:
    def dense(x, w):
        with jax.named_scope("dense"):
            return x @ w

    def fn(w, x):
        with jax.named_scope("outer"):
            x = jax.jit(dense)(x, w)
            x = jax.checkpoint(dense)(x, w)
            x = lax.cond(x[0, 0] > 0, dense, lambda x, w: dense(dense(x, w), w), x, w)
            x = lax.scan(lambda h, _: (dense(h, w), None), x, None, length=2)[0]
            return lax.while_loop(lambda x: x[0, 0] < 0, lambda x: dense(x, w), x)

    def places(fn: Callable[..., Any]) -> list[tuple[str, str, str]]:
        return [
            (user_line(eqn), str(eqn.source_info.name_stack), module_path(eqn))
            for eqn in iter_eqns(jax.make_jaxpr(fn)(W, X))
            if eqn.primitive.name == "dot_general"
        ]

    assert places(observe(fn)) == places(fn)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, id=c.fn.__name__) for c in CONSTRUCTS])
def test_every_construct_stays_what_it_is(case: Construct) -> None:
    """Results bitwise; XLA may fuse a program in another way where what is found is returned."""
    run = jax.jit(lambda *args: observe(case.fn)(*args)[0])
    want = jax.jit(lambda *args: observe(case.fn, {})(*args)[0])(*case.args)
    assert_bitwise(run(*case.args), want)
    got, _ = jax.jit(observe(case.fn))(*case.args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    if not case.diff or case.forward_only:
        return
    gradients = [
        jax.jit(jax.grad(loss_of(lambda *a, p=p: observe(case.fn, p)(*a)[0]), case.diff))
        for p in ({}, LARGEST)
    ]
    assert_bitwise(*(gradient(*case.args) for gradient in gradients))
