"""`wrap` on Flax Linen: modules inside and around modules, transforms and other policies."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_reference import reference

import jaxmp
from jaxmp import PolicyMap

from linen_models import (
    BF16,
    F16,
    KEY,
    MLP,
    RNGS,
    TOKENS,
    Layer,
    X,
    abstract_variables,
    all_counts,
    assert_close,
    counts,
    gradient_of,
    marked,
    over_layers,
    program,
    run,
    run_all,
    variables_of,
)
from support import assert_same, case, contraction_dtypes, gaussian, ones, slow_when

# --- As a submodule ------------------------------------------------------------------------------


class InSetup(nn.Module):
    policy: str | None = None

    def setup(self) -> None:
        self.inner = marked(MLP(), self.policy)
        self.head = nn.Dense(2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.inner(x))


class InCompact(nn.Module):
    policy: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(marked(MLP(), self.policy)(x))


class AsField(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(self.inner(x))


def test_as_a_submodule() -> None:
    """It has the module's name and variables, and its policy ends where it ends."""
    wrapped, plain = jaxmp.wrap(MLP(), BF16), InCompact()
    for outer, like in [
        (InSetup(BF16), InSetup()),
        (InCompact(BF16), plain),
        (AsField(wrapped), AsField(MLP())),
        (nn.Sequential([wrapped, nn.Dense(2)]), nn.Sequential([MLP(), nn.Dense(2)])),
    ]:
        with case(outer):
            assert program(outer.init, KEY, X) == program(like.init, KEY, X)
            variables = variables_of(outer, X)
            assert counts(outer, variables, X) == {"bfloat16": 2, "float32": 1}
            # Backward: two each, less the gradient of the input.
            assert all_counts(outer, variables, X) == {"bfloat16": 5, "float32": 3}
    variables = variables_of(plain, X)
    assert_close(*run_all([InCompact(BF16), plain], variables, X))


def test_sequential_is_wrapped_as_a_whole() -> None:
    model = nn.Sequential([nn.Dense(8), nn.relu, MLP()])
    variables, wrapped = variables_of(model, X), jaxmp.wrap(model, BF16)
    assert_close(run(wrapped, variables, X), run(model, variables, X))
    assert counts(wrapped, variables, X) == {"bfloat16": 3}


def test_wrapped_modules_in_lists_and_dicts() -> None:
    class Model(nn.Module):
        blocks: list[nn.Module]
        heads: dict[str, nn.Module]

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return self.heads["a"](x)

    def build(mark: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return Model([mark(nn.Dense(8)), nn.Dense(8)], {"a": mark(nn.Dense(2))})

    wrapped = build(lambda m: jaxmp.wrap(m, BF16))
    variables = variables_of(wrapped, X)
    assert abstract_variables(wrapped, X) == abstract_variables(build(lambda m: m), X)
    assert counts(wrapped, variables, X) == {"bfloat16": 2, "float32": 1}


def test_a_shared_module_has_one_set_of_parameters() -> None:
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            dense = jaxmp.wrap(nn.Dense(8), BF16)
            return dense(nn.tanh(dense(x)))

    variables = variables_of(Shared(), X)
    assert set(variables["params"]) == {"Dense_0"}
    assert counts(Shared(), variables, X) == {"bfloat16": 2}


def test_tied_embeddings_of_a_wrapped_embed() -> None:
    class Tied(nn.Module):
        policy: str | None = BF16

        def setup(self) -> None:
            self.embed = marked(nn.Embed(16, 8), self.policy)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.embed.attend(self.embed(tokens))

    variables = variables_of(Tied(), TOKENS)
    assert abstract_variables(Tied(), TOKENS) == abstract_variables(Tied(None), TOKENS)
    assert counts(Tied(), variables, TOKENS) == {"bfloat16": 1}
    assert_close(*run_all([Tied(), Tied(None)], variables, TOKENS))


class Caller(nn.Module):
    @nn.compact
    def __call__(self, layer: nn.Module, x: jax.Array) -> jax.Array:
        return layer(nn.Dense(8)(x))


def test_modules_as_call_arguments() -> None:
    class Model(nn.Module):
        caller: nn.Module

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.caller(nn.Dense(3, name="given"), x)

    wrapped, plain = Model(jaxmp.wrap(Caller(), BF16)), Model(Caller())
    variables = variables_of(wrapped, X)
    assert abstract_variables(wrapped, X) == abstract_variables(plain, X)
    assert counts(wrapped, variables, X) == {"bfloat16": 2}
    assert_close(*run_all([wrapped, plain], variables, X))


def test_a_wrapped_module_as_a_call_argument() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Caller()(jaxmp.wrap(nn.Dense(3, name="given"), BF16), x)

    variables = variables_of(Model(), X)
    assert set(variables["params"]) == {"Caller_0", "given"}
    assert counts(Model(), variables, X) == {"bfloat16": 1, "float32": 1}


def test_share_scope() -> None:
    class Adapter(nn.Module):
        inner: nn.Module

        def setup(self) -> None:
            nn.share_scope(self, self.inner)

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x) + nn.Dense(6, name="extra")(x)

    for adapter, low in (
        (jaxmp.wrap(Adapter(MLP()), BF16), {"bfloat16": 3}),
        (Adapter(jaxmp.wrap(MLP(), BF16)), {"bfloat16": 2, "float32": 1}),
    ):
        variables = variables_of(adapter, X)
        assert set(variables["params"]) == {"Dense_0", "Dense_1", "extra"}
        assert counts(adapter, variables, X) == low


# --- Inside and around the transforms of Flax ----------------------------------------------------


def tanh_of(module: nn.Module, x: jax.Array) -> jax.Array:
    return nn.tanh(module(x))


def by_scan(module: nn.Module, x: jax.Array) -> jax.Array:
    body = nn.scan(
        lambda m, carry, _: (tanh_of(m, carry), None),
        variable_broadcast="params",
        split_rngs={"params": False},
        length=3,
    )
    return body(module, x, None)[0]


def by_while_loop(module: nn.Module, x: jax.Array) -> jax.Array:
    x = module(x)  # creates the parameters
    return nn.while_loop(
        lambda _, carry: carry[0] < 3,
        lambda m, carry: (carry[0] + 1, tanh_of(m, carry[1])),
        module,
        (jnp.int32(0), x),
    )[1]


def by_vmap(module: nn.Module, x: jax.Array) -> jax.Array:
    mapped = nn.vmap(tanh_of, variable_axes={"params": None}, split_rngs={"params": False})
    return mapped(module, x)


def by_vjp(module: nn.Module, x: jax.Array) -> jax.Array:
    x = module(x)  # creates the parameters
    y, backward = nn.vjp(tanh_of, module, x)
    gradients, x_gradient = backward(y)
    return y + x_gradient + gradients["params"]["bias"]


def by_jvp(module: nn.Module, x: jax.Array) -> jax.Array:
    y = module(x)
    tangents = {"params": jax.tree.map(lambda p: 0.5 * p, module.variables["params"])}
    return y + nn.jvp(tanh_of, module, (x,), (x,), variable_tangents=tangents)[1]


def by_value_and_grad(module: nn.Module, x: jax.Array) -> jax.Array:
    value, (gradient,) = nn.value_and_grad(lambda m, x: jnp.sum(tanh_of(m, x) ** 2), module, x)
    return value + gradient


def by_custom_vjp(module: nn.Module, x: jax.Array) -> jax.Array:
    def backward(vjp: Any, gradient: Any) -> Any:
        return jax.tree.map(lambda g: 2 * g, vjp(gradient))

    doubled = nn.custom_vjp(
        tanh_of, forward_fn=functools.partial(nn.vjp, tanh_of), backward_fn=backward
    )
    return doubled(module, x)


TRANSFORMS: dict[str, Callable[[nn.Module, jax.Array], jax.Array]] = {
    "cond": lambda m, x: nn.cond(x.sum() > 0, tanh_of, lambda m, x: -m(x), m, x),
    "custom_vjp": by_custom_vjp,
    "jit": lambda m, x: nn.jit(tanh_of)(m, x),
    "jvp": by_jvp,
    "map_variables": lambda m, x: nn.map_variables(
        tanh_of, "params", lambda v: jax.tree.map(lambda p: 2 * p, v), init=True
    )(m, x),
    "remat": lambda m, x: nn.remat(tanh_of)(m, x),
    "scan": by_scan,
    "switch": lambda m, x: nn.switch(1, [tanh_of, tanh_of, lambda m, x: m(x)], m, x),
    "value_and_grad": by_value_and_grad,
    "vjp": by_vjp,
    "vmap": by_vmap,
    "while_loop": by_while_loop,
}


class Transformed(nn.Module):
    how: str
    policy: str | None = None

    def setup(self) -> None:
        self.inner = marked(nn.Dense(8), self.policy)
        self.head = nn.Dense(2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(TRANSFORMS[self.how](self.inner, x))


@slow_when(lambda how: how in ("switch", "value_and_grad"))  # as `cond` and `vjp` are
@pytest.mark.parametrize("how", TRANSFORMS)
def test_inside_a_transform_and_around_it(how: str) -> None:
    plain, inside = Transformed(how), Transformed(how, BF16)
    around = jaxmp.wrap(plain, BF16)
    variables = variables_of(plain, X)
    total = sum(counts(plain, variables, X).values())
    assert counts(inside, variables, X) == {"bfloat16": total - 1, "float32": 1}
    assert counts(around, variables, X) == {"bfloat16": total}
    *got, want = run_all([inside, around, plain], variables, X)
    for wrapped, out in zip((inside, around), got, strict=True):
        assert abstract_variables(wrapped, X) == abstract_variables(plain, X)
        assert_close(out, want)
    if how != "while_loop":  # has no reverse derivative
        total = sum(all_counts(plain, variables, X).values())
        assert all_counts(around, variables, X) == {"bfloat16": total}
        assert all_counts(inside, variables, X) == {"bfloat16": total - 3, "float32": 3}


def test_wrapped_instances_of_transformed_classes() -> None:
    for model in (
        nn.remat(MLP)(),
        nn.jit(MLP)(),
        nn.vmap(MLP, variable_axes={"params": 0}, split_rngs={"params": True})(),
    ):
        wrapped, variables = jaxmp.wrap(model, BF16), variables_of(model, X)
        with case(model):
            assert program(wrapped.init, KEY, X) == program(model.init, KEY, X)
            assert all_counts(wrapped, variables, X).keys() == {"bfloat16"}
            assert_close(*run_all([wrapped, model], variables, X))


def rolled(*args: Any) -> Any:
    return nn.scan(*args, variable_broadcast="params", split_rngs={"params": False}, length=2)


def test_methods_that_their_author_transformed() -> None:
    for lift in (nn.remat, nn.jit, rolled):

        class Decorated(nn.Module):
            @lift
            @nn.compact
            def __call__(self, x: jax.Array, _: Any) -> Any:
                return nn.Dense(8)(nn.tanh(nn.Dense(8)(x))), None

        variables, wrapped = variables_of(Decorated(), X, None), jaxmp.wrap(Decorated(), BF16)
        assert abstract_variables(wrapped, X, None) == abstract_variables(Decorated(), X, None)
        assert counts(wrapped, variables, X, None) == {"bfloat16": 2}, lift


def test_transforms_of_the_wrapped_modules_class() -> None:
    """A wrapped layer under `nn.scan` of a layer that holds it: one set of parameters per step."""

    class Outer(nn.Module):
        policy: str | None

        @nn.compact
        def __call__(self, x: jax.Array, _: Any = None) -> Any:
            return marked(Layer(), self.policy)(x)

    def build(policy: str | None) -> nn.Module:
        return over_layers(nn.remat(Outer))(policy)

    variables = variables_of(build(None), X, None)
    assert abstract_variables(build(BF16), X, None) == abstract_variables(build(None), X, None)
    (got, _), (want, _) = run_all([build(BF16), build(None)], variables, X, None)
    assert_close(got, want)
    assert counts(build(BF16), variables, X, None) == {"bfloat16": 1}


def test_dropout_in_scanned_layers() -> None:
    """Each step has the mask it has unwrapped."""

    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any) -> Any:
            x = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
            return x, x == 0

    def build(policy: str | None) -> nn.Module:
        scanned = nn.scan(
            nn.remat(Noisy),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return marked(scanned(), policy)

    variables = variables_of(build(None), X, None)
    models = [build(BF16), build(None)]
    (_, got), (_, want) = run_all(models, variables, X, None, rngs=RNGS)
    np.testing.assert_array_equal(got, want)
    assert len({mask.tobytes() for mask in np.asarray(got)}) == 3


# --- Policies inside policies --------------------------------------------------------------------


@pytest.mark.parametrize("outside", ["autocast", "wrap"])
def test_the_inner_policy_wins(outside: str) -> None:
    for inner in ("float32", F16):
        model, low = AsField(jaxmp.wrap(MLP(), inner)), inner.removeprefix("mixed_")
        variables = variables_of(model, X)
        apply = (jaxmp.wrap(model, BF16) if outside == "wrap" else model).apply
        if outside == "autocast":
            apply = jaxmp.autocast(apply, BF16)
        assert contraction_dtypes(apply, variables, X) == {low: 2, "bfloat16": 1}

        def gradients(variables: Any, apply: Any = apply) -> Any:
            return jax.grad(lambda v: jnp.sum(jnp.sin(apply(v, X))))(variables)

        assert contraction_dtypes(gradients, variables) == {low: 5, "bfloat16": 3}


def test_an_inner_policy_does_not_pin_what_follows_to_float32() -> None:
    """Its float32 output is not an upcast of the author's: the next layer stays low."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(3):
                x = nn.tanh(jaxmp.wrap(nn.Dense(8), BF16)(x))
            return nn.Dense(2)(x)

    variables = variables_of(Model(), X)
    assert all_counts(jaxmp.wrap(Model(), BF16), variables, X) == {"bfloat16": 11}


def test_autocast_around_apply_of_a_wrapped_module() -> None:
    wrapped = jaxmp.wrap(MLP(), BF16)
    variables = variables_of(wrapped, X)

    def loss(variables: Any) -> jax.Array:
        return jnp.sum(wrapped.apply(variables, X) @ X[:6])

    assert contraction_dtypes(jaxmp.autocast(loss, F16), variables) == {"bfloat16": 2, "float16": 1}
    assert contraction_dtypes(loss, variables) == {"bfloat16": 2, "float32": 1}


def test_state_changes_inside_an_autocast() -> None:
    """Changed statistics come out of the region, in float32, as they do outside of one."""

    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))

    model = AsField(jaxmp.wrap(Norm(), BF16))
    variables = variables_of(model, X)
    apply = functools.partial(model.apply, mutable=["batch_stats"])
    plain = functools.partial(AsField(Norm()).apply, mutable=["batch_stats"])
    (_, got), (_, want) = reference(lambda *a: (jaxmp.autocast(apply, BF16)(*a), plain(*a)))(
        variables, X
    )
    assert_close(got, want)


def test_wrapping_a_wrapped_module_changes_nothing_inside() -> None:
    """The inner policy wins, here over an outer one with the same extent."""
    with pytest.warns(UserWarning, match="wrapped already, under 'mixed_float16'"):
        twice = jaxmp.wrap(jaxmp.wrap(MLP(), F16), BF16)
    variables = variables_of(twice, X)
    assert counts(twice, variables, X) == {"float16": 2}


def test_parameters_stored_in_16_bits_are_float32_to_the_modules_code() -> None:
    seen = set()

    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            w = self.param("w", nn.initializers.ones, (8, 8))
            seen.add(str(w.dtype))
            return jnp.sum(jnp.exp(x @ w), -1, keepdims=True) * x

    wrapped = jaxmp.wrap(Looks(), "bfloat16")
    variables = variables_of(wrapped, X)
    assert variables["params"]["w"].dtype == jnp.bfloat16
    assert counts(wrapped, variables, X) == {"bfloat16": 1}
    for outer in (None, BF16, "float32"):
        model = marked(AsField(jaxmp.wrap(Looks(), "p=bf16,c=bf16,o=f32")), outer)
        variables = variables_of(model, X)
        low = counts(model, variables, X)
        assert low == ({"bfloat16": 2} if outer == BF16 else {"bfloat16": 1, "float32": 1})
        dtypes = jax.tree.map(lambda p: str(p.dtype), variables["params"])
        assert set(jax.tree.leaves(dtypes["inner"])) == {"bfloat16"}
        assert set(jax.tree.leaves(dtypes["Dense_0"])) == {"float32"}
        grads, _ = jax.eval_shape(gradient_of(model, X), variables)
        assert grads["params"]["inner"]["w"].dtype == jnp.bfloat16
    assert seen == {"float32"}


# --- What is traced again ------------------------------------------------------------------------

TRACES: list[str] = []


@dataclasses.dataclass(frozen=True)
class Width:
    width: int = 8


@dataclasses.dataclass
class Widths:
    """A configuration that has no hash."""

    widths: list[int] = dataclasses.field(default_factory=lambda: [8, 8])


@jax.jit
def traced_helper(x: jax.Array) -> jax.Array:
    TRACES.append("helper")
    return jnp.sin(x)


class Configured(nn.Module):
    config: Any

    @nn.jit
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        TRACES.append("module")
        return traced_helper(nn.Dense(8)(x))


def test_a_call_of_the_same_kind_traces_no_jit_again() -> None:
    gc.freeze()  # else each collection goes through what the tests before this one hold
    by_class = PolicyMap({nn.Dense: F16}, default=BF16)
    # A configuration that no other case has, with a hash or without.
    for policy, around, config in [
        ("float32", None, Widths([0])),
        ("float32", BF16, Width(1)),
        (BF16, None, Width(2)),
        (BF16, None, Widths([3])),
        (BF16, BF16, Widths([4])),
        (by_class, None, Widths([5])),
        (by_class, BF16, Width(6)),
    ]:
        TRACES.clear()
        model = nn.Sequential([Configured(config), nn.tanh, Configured(config)])
        variables = variables_of(model, X)
        model.apply(variables, X)
        before = len(TRACES)
        assert before, "an earlier case has filled the caches"
        wrapped = jaxmp.wrap(model, policy)
        apply = wrapped.apply if around is None else jaxmp.autocast(wrapped.apply, around)
        apply(variables, X)
        after = len(TRACES)
        with case((policy, around, config)):
            assert after > before or (policy == "float32" and around is None)
            held = []
            for _ in range(2):
                apply(variables, X)
                apply(variables, X)
                gc.collect()
                held.append(len(gc.get_objects()))
            assert len(TRACES) == after
            assert held[1] - held[0] < 100


def test_float32_is_the_module_as_written_to_jax() -> None:
    """Not lifted, and in the caches that the module itself has filled."""
    model, x = Configured(Widths()), gaussian(5, 7, 8)
    variables = variables_of(model, x)
    want = model.apply(variables, x)
    wrapped = jaxmp.wrap(model, "float32")
    TRACES.clear()
    assert_same(wrapped.apply(variables, x), want)
    assert_same(wrapped.init(jax.random.key(0), x), model.init(jax.random.key(0), x))
    assert "helper" not in TRACES
    jaxpr = str(jax.make_jaxpr(wrapped.apply)(variables, x))
    assert jaxpr == str(jax.make_jaxpr(model.apply)(variables, x))


def test_a_program_is_planned_once(planned: list[int]) -> None:
    wrapped, variables = jaxmp.wrap(nn.Dense(8), BF16), variables_of(nn.Dense(8), X)
    for _ in range(3):
        wrapped.apply(variables, X)
    assert planned == [1]


class Router(nn.Module):
    """What is traced is the same for every batch size."""

    router: Any = None

    @nn.jit
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(6, use_bias=False, dtype=self.router, name="router")(x)
        return nn.Dense(64, use_bias=False, name="up")(x)


class Routed(nn.Module):
    router: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        routed = Router(self.router, name="routed")(x[:1])
        return nn.Dense(64, use_bias=False, name="down")(x) + routed


@pytest.mark.filterwarnings("ignore:wrap. 1 layer")
def test_equal_layers_share_no_trace_that_was_marked_otherwise() -> None:
    """One process, the same layers: policies, maps, regions and batch sizes in turn."""
    jax.clear_caches()
    float32, low, half = "float32", "bfloat16", "float16"
    cases: list[tuple[Any, Any, Any, dict[str, int]]] = [  # policy, policy around, dtype, expected
        ("float32", None, None, {float32: 3}),
        (BF16, None, None, {low: 3}),
        (F16, None, None, {half: 3}),
        (BF16, F16, None, {low: 3}),
        ("float32", F16, None, {float32: 3}),
        (PolicyMap({"routed/up": F16}, default=BF16), None, None, {low: 2, half: 1}),
        (PolicyMap({"routed/router": F16}, default=BF16), None, None, {low: 2, half: 1}),
        (PolicyMap({"routed/up": F16}, default=BF16), "float32", None, {low: 2, half: 1}),
        (PolicyMap({"routed/up": BF16}, default="float32"), None, None, {float32: 2, low: 1}),
        (PolicyMap({Router: "float32"}, default=BF16), None, None, {low: 1, float32: 2}),
        (PolicyMap({Router: "float32"}, default=BF16), F16, None, {low: 1, float32: 2}),
        (PolicyMap({nn.Dense: F16}, default=BF16), BF16, None, {half: 3}),
        (BF16, None, jnp.float32, {low: 2, float32: 1}),  # the router is singled out
        (BF16, F16, jnp.float32, {low: 2, float32: 1}),
        (F16, None, jnp.float32, {half: 2, float32: 1}),
        (PolicyMap({"routed/router": F16}, default=BF16), None, jnp.float32, {low: 2, half: 1}),
    ]
    wrapped = [jaxmp.wrap(Routed(dtype), policy) for policy, _, dtype, _ in cases]
    variables = variables_of(Routed(), X)
    for size in (2, 3, 2):
        for model, (policy, around, dtype, expected) in zip(wrapped, cases, strict=True):
            x = np.ones((size, X.shape[-1]), np.float32)
            apply = model.apply if around is None else jaxmp.autocast(model.apply, around)
            got = contraction_dtypes(apply, variables, x)
            assert got == expected, (str(policy), around, dtype, size)
            assert contraction_dtypes(Routed(dtype).apply, variables, x) == {float32: 3}


def test_each_init_stores_a_jitted_layer_that_was_singled_out_in_float32() -> None:
    """The second finds the layers in the trace of the first."""
    wrapped = jaxmp.wrap(Routed(jnp.float32), "bfloat16")
    for _ in range(2):
        params = abstract_variables(wrapped, X)["params"]
        assert params["routed"]["router"]["kernel"].dtype == jnp.float32
        assert params["routed"]["up"]["kernel"].dtype == jnp.bfloat16
        assert params["down"]["kernel"].dtype == jnp.bfloat16


def test_the_norm_of_a_spectral_norm_is_estimated_in_float32_and_its_layer_is_not() -> None:
    """Power iteration in 16 bits gives all weights a wrong factor; no warning asks for argnums."""

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.SpectralNorm(nn.Dense(16))(x, update_stats=True)
            return nn.WeightNorm(nn.Dense(16))(x)

    x = ones(64, 16)
    for model in (Normed(), nn.SpectralNorm(nn.Dense(16)), nn.remat(Normed)()):
        options = {"update_stats": True} if isinstance(model, nn.SpectralNorm) else {}
        variables = variables_of(model, x, **options)
        layers = 2 - bool(options)

        def run(model: Any, variables: Any, x: Any) -> Any:
            stats = {"update_stats": True} if isinstance(model, nn.SpectralNorm) else {}
            return model.apply(variables, x, mutable=["batch_stats"], **stats)

        for policy in (BF16, PolicyMap({nn.Dense: BF16}, default=BF16)):
            wrapped = jaxmp.wrap(model, policy)
            found = contraction_dtypes(functools.partial(run, wrapped), variables, x)
            assert found == {"bfloat16": layers, "float32": 4}, (type(model), policy)
    asked = jaxmp.wrap(Normed(), PolicyMap({"SpectralNorm_0": F16}, default=BF16))
    variables = variables_of(Normed(), x)
    found = contraction_dtypes(functools.partial(run, asked), variables, x)
    # The norm itself is a product by one float32 vector, which float16's range is too small for.
    assert found == {"float16": 4, "float32": 1, "bfloat16": 1}
