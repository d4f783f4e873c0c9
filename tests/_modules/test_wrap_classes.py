"""`wrap` on Linen classes that their authors made in unusual ways; what becomes of the classes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import threading
import weakref
from typing import Any, ClassVar, Generic, TypeVar

import cloudpickle
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp

from linen_models import BF16, X, abstract_variables, counts, variables_of
from support import contraction_dtypes, slow_when

# --- Classes that are made in unusual ways -------------------------------------------------------


def registers_its_config(cls: Any) -> Any:
    """Decorates `__init__` as model hubs do: what a module was made from is its `config`."""
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        names = [f.name for f in dataclasses.fields(self)]
        self._registered = {**dict(zip(names, args, strict=False)), **kwargs}
        original(self, *args, **kwargs)

    cls.__init__ = init
    return cls


class HasConfig:
    @property
    def config(self) -> Any:
        return self._registered


@registers_its_config
class Registered(nn.Module, HasConfig):
    features: int = 8
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.dense = nn.Dense(self.config["features"], dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)[..., : self.config["features"]]


@registers_its_config
class RegisteredChild(Registered):
    more: int = 1

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) * self.config["more"]


class PostInit(nn.Module):
    features: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "doubled", 2 * self.features)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.doubled)(x)


class KeywordOnly(nn.Module):
    _: dataclasses.KW_ONLY
    features: int
    name_of_it: str = "dense"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features, name=self.name_of_it)(x)


class KeywordOnlyClass(nn.Module, kw_only=True):
    features: int = 3
    required: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features + self.required)(x)


T = TypeVar("T")


class Typed(nn.Module, Generic[T]):
    value: T

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.value)(x)


class OwnInit(nn.Module):
    """An `__init__` written by hand, with other parameters than the fields."""

    features: int = 4

    def __init__(self, features: int = 4, parent: Any = None, name: Any = None) -> None:
        self.features, self.parent, self.name = features, parent, name
        self.__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features)(x)


class GetAttr(nn.Module):
    options: Any = flax.core.FrozenDict(width=5)

    def __getattr__(self, name: str) -> Any:
        if name == "width":
            return self.options["width"]
        return super().__getattr__(name)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.width)(x)


class Described(type(nn.Module)):
    """A metaclass, whose classes take a keyword."""

    def __new__(mcs, name: str, bases: Any, members: Any, tag: str = "none", **kwargs: Any) -> Any:
        members.setdefault("tag", tag)
        return super().__new__(mcs, name, bases, members, **kwargs)


class Tagged(nn.Module, metaclass=Described, tag="mine"):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        assert self.tag == "mine"
        return nn.Dense(4)(x)


class Registering(nn.Module):
    """Its subclasses say what they are registered as."""

    registry: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, key: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.registry.setdefault(key or cls.__name__, cls)


class RegisteredAs(Registering, key="this"):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(x)


@flax.struct.dataclass
class Parts:
    body: nn.Module = flax.struct.field(pytree_node=False)
    width: int = flax.struct.field(pytree_node=False, default=4)


class OfParts(nn.Module):
    parts: Parts

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.parts.width)(self.parts.body.clone(parent=self, name="body")(x))


class Slotted(nn.Module):
    __slots__ = ("extra",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(x)


class Base(nn.Module):
    features: int = 4

    def encode(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.encode(x) + 1


class Middle(Base):
    @nn.compact
    def encode(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features)(x)


class Derived(Middle):
    features: int = 6

    @nn.nowrap
    def width(self) -> int:
        return self.features

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x)[:, : self.width()]


ODD = {
    "registered": lambda: Registered(6),
    "registered by keyword": lambda: RegisteredChild(features=6, more=3),
    "post init": PostInit,
    "keyword only": lambda: KeywordOnly(features=5),
    "keyword only class": lambda: KeywordOnlyClass(required=2),
    "generic": lambda: Typed[int](7),
    "own init": OwnInit,
    "getattr": GetAttr,
    "metaclass": Tagged,
    "init_subclass": RegisteredAs,
    "struct": lambda: OfParts(Parts(nn.Dense(8))),
    "slots": Slotted,
    "derived": Derived,
    "jit": lambda: nn.jit(Middle)(),
    "remat": lambda: nn.remat(Middle)(),
    "vmap": lambda: nn.vmap(Middle, variable_axes={"params": 0}, split_rngs={"params": True})(),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_class(name: str) -> None:
    model = ODD[name]()
    if name == "registered":
        # `features` by keyword or position: `config` knows what was given.
        model = Registered(features=6)
    wrapped = jaxmp.wrap(model, BF16)
    variables = variables_of(model, X)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(
        jnp.shape, abstract_variables(wrapped, X)
    )
    number = counts(model, variables, X)["float32"]
    assert counts(wrapped, variables, X) == {"bfloat16": number}
    shapes = [jax.eval_shape(m.apply, variables, X) for m in (wrapped, model)]
    assert shapes[0] == shapes[1]
    assert wrapped.clone() == wrapped.copy() == wrapped

    class Around(nn.Module):
        inner: nn.Module

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(x)

    inside = Around(wrapped)
    assert counts(inside, variables_of(inside, X), X) == {"bfloat16": number}


def test_wrapping_does_not_register_the_class_again() -> None:
    before = dict(Registering.registry)
    jaxmp.wrap(RegisteredAs(), BF16)
    assert Registering.registry["this"] is before["this"]


def test_a_decorated_init_is_called_with_what_the_module_was_made_of() -> None:
    wrapped = jaxmp.wrap(RegisteredChild(features=6, more=3), BF16)
    assert wrapped.config["features"] == 6
    assert wrapped.clone(more=4).config["more"] == 4


# --- Classes live as long as somebody uses them --------------------------------------------------


def local_linen() -> Any:
    class Local(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(3, dtype=jnp.float32)(nn.Dense(64)(x))

    return Local()


@slow_when(lambda mapped: not mapped)
@pytest.mark.filterwarnings("ignore:wrap. 1 layer")
@pytest.mark.parametrize("mapped", [False, True])
def test_a_class_defined_in_a_function_can_be_collected(mapped: bool) -> None:
    gc.freeze()  # else each collection goes through what the tests before this one hold

    def used() -> Any:
        model = local_linen()
        policy = jaxmp.PolicyMap({type(model): BF16}, default=BF16) if mapped else BF16
        wrapped = jaxmp.wrap(model, policy)
        variables = wrapped.init(jax.random.key(0), X)
        jax.block_until_ready(jax.jit(jax.grad(lambda v: wrapped.apply(v, X).sum()))(variables))
        return weakref.ref(type(model)), weakref.ref(type(wrapped))

    refs = used()
    jax.clear_caches()
    for _ in range(2):  # the class is the key of a map that its wrapped class holds
        gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_wrapped_classes_are_one_while_they_live() -> None:
    first, second = jaxmp.wrap(Middle(), BF16), jaxmp.wrap(Middle(), BF16)
    assert type(first) is type(second)
    assert first == second
    found = []

    def wrap() -> None:
        found.append(type(jaxmp.wrap(Derived(), "mixed_float16")))

    threads = [threading.Thread(target=wrap) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


# --- Pickles -------------------------------------------------------------------------------------


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(8, 64, rngs=rngs)
        self.b = nnx.Linear(64, 3, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.a(x))


def local_nnx() -> nnx.Module:
    class Local(Pair):
        pass

    return Local(nnx.Rngs(0))


COPIES = {
    "cloudpickle": lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.filterwarnings("ignore:wrap. 1 layer")
@pytest.mark.filterwarnings("ignore:wrap. the .* is wrapped already")
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_wrapped_nnx_module(how: str) -> None:
    model = Pair(nnx.Rngs(0)) if how == "pickle" else local_nnx()
    once = jaxmp.wrap(model, BF16)
    for wrapped in (once, jaxmp.wrap(once, "mixed_float16")):
        copied = COPIES[how](wrapped)
        assert type(copied).__name__ == type(model).__name__
        assert contraction_dtypes(copied, X) == contraction_dtypes(wrapped, X)
        assert set(contraction_dtypes(copied, X)) > {"float32"}
        np.testing.assert_array_equal(copied(X), wrapped(X))


@pytest.mark.filterwarnings("ignore:wrap. 1 layer")
def test_a_graphdef_and_a_method_of_a_wrapped_nnx_module_in_cloudpickle() -> None:
    wrapped = jaxmp.wrap(local_nnx(), BF16)
    graphdef, state = COPIES["cloudpickle"](nnx.split(wrapped))
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(X), wrapped(X))
    call = COPIES["cloudpickle"](wrapped.__call__)
    np.testing.assert_array_equal(call(X), wrapped(X))


@pytest.mark.filterwarnings("ignore:wrap. 1 layer")
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_wrapped_linen_module(how: str) -> None:
    model = Derived() if how == "pickle" else local_linen()
    wrapped = jaxmp.wrap(model, BF16)
    copied = COPIES[how](wrapped)
    variables = variables_of(model, X)
    assert counts(copied, variables, X) == counts(wrapped, variables, X)
    apply = COPIES[how](wrapped.apply)
    assert contraction_dtypes(apply, variables, X) == counts(wrapped, variables, X)
    if how == "pickle":
        assert copied == wrapped


# --- Threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [False, True])
def test_two_threads_trace_one_wrapped_nnx_module_in_an_autocast(stored: bool) -> None:
    """They meet inside of the model, and who came in first leaves first."""
    together = threading.Barrier(2, timeout=60)
    first_has_left = threading.Event()

    class Meeting(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a = nnx.Linear(8, 8, dtype=jnp.float32, rngs=rngs)
            self.b = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            if together.wait() == 1:
                first_has_left.wait(timeout=60)
            return self.b(self.a(x))

    policies = jaxmp.PolicyMap(
        {"b": "mixed_float16"}, default="p=bf16,c=bf16,o=f32" if stored else BF16
    )
    wrapped = jaxmp.wrap(Meeting(nnx.Rngs(0)), policies)
    classes = type(wrapped.a), type(wrapped.b)
    found: list[Any] = []

    def trace() -> None:
        found.append(jaxmp.explain(lambda x: wrapped(x), BF16)(X).products())
        first_has_left.set()

    threads = [threading.Thread(target=trace) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"float32": 1, "float16": 1}] * 2
    assert (type(wrapped.a), type(wrapped.b)) == classes
