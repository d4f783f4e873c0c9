"""The modules that equations belong to, what their products cost, and a loss under a `PolicyMap`.

In a trace modules are named scopes: Linen's own, those of `jax.named_scope`, and for NNX, which has
none, those that a copy of the module gets here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from jaxmp._core.autocast.nnx_calls import scoped_class
from jaxmp._core.autocast.trained_weights import reading_as_stored
from jaxmp._core.autocast.transform import under_policy
from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs import compat
from jaxmp._core.jaxprs.aux_outputs import Threaded
from jaxmp._core.jaxprs.compat import shape_of
from jaxmp._core.jaxprs.higher_order import rebuild
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.scopes import REGION
from jaxmp._core.jaxprs.trace import is_array, trace
from jaxmp._core.jaxprs.walk import evaluate, walk
from jaxmp._core.plan.flops import contraction_flops
from jaxmp._core.plan.parameters import by_position
from jaxmp._core.speed import Chip, chip_named
from jaxmp._core.speed.estimate import keys_of, product_seconds
from jaxmp.policy import Policy, PolicyMap, get_policy
from jaxmp.recipes import FORMATS, Format, Recipe

Path = tuple[str, ...]
Loss = Callable[[Any, Any], Any]
Bind = Callable[[JaxprEqn, list[Any], Place, Sequence[Any]], Sequence[Any]]

FLOAT32 = get_policy("float32")
_MODULE = "jaxmp_module="  # before the path of an NNX module, in scopes of ours
_DEEPEST_ROOT = 4  # how many scopes may be around a model
_TOP = Place()
# The time of a multiply-add relative to float32, if no chip is named: half the bits take half the
# time, as matrix units are built.
_BY_BITS = {32: 1.0, 16: 0.5, 8: 0.25, 4: 0.125}
# The time in float32 relative to 16 bits, on GPUs whose published matrix units have no float32.
_UNKNOWN_FLOAT32 = 2.0


@dataclasses.dataclass(frozen=True)
class Places:
    """A map from named scopes to modules."""

    modules: frozenset[Path] = frozenset()  # those that are known; empty: every scope is one
    roots: frozenset[Path] = frozenset({()})  # the scopes around the model, no part of paths
    labels: Mapping[str, Path] = dataclasses.field(default_factory=dict)  # of NNX: from scopes

    def of(self, scopes: str) -> Path | None:
        """Returns the innermost module around an equation's scopes; None outside the model."""
        if self.labels:
            found = [part for part in scopes.split("/") if part in self.labels]
            return self.labels[found[-1]] if found else None
        names = _names(scopes)
        root = next((r for r in sorted(self.roots) if names[: len(r)] == r), None)
        if root is None:
            return None
        path = names[len(root) :]
        while self.modules and path not in self.modules:
            path = path[:-1]
        return path


class TunedProduct(NamedTuple):
    """A product of a program, with its scopes, its pass, and how often it runs."""

    eqn: JaxprEqn
    scopes: str
    backward: bool
    times: int

    @property
    def flops(self) -> int:
        """The FLOPs of all its runs."""
        return contraction_flops(self.eqn) * self.times


class PreparedLoss(NamedTuple):
    """A loss as a function of a pytree of float arrays and a batch, and its modules' places."""

    loss: Loss
    params: Any
    places: Places


def prepared(loss_fn: Loss, params: Any, batch: Any) -> PreparedLoss:
    """Converts a loss of a pytree or an NNX module to one of a pytree; finds its modules."""
    if isinstance(params, nnx.Module):
        labels = {_label(path): tuple(map(str, path)) for path, _ in nnx.iter_modules(params)}
        graph, state, *others = nnx.split(params, nnx.Param, ...)

        def of_module(state: Any, batch: Any) -> Any:
            # Variables of this trace, which the model may change: its changes are dropped.
            own = jax.tree.map(lambda x: x, others)
            model = nnx.merge(graph, state, *own)
            for path, module in nnx.iter_modules(model):
                object.__setattr__(module, "__class__", scoped_class(type(module), _label(path)))
            return _loss_of(loss_fn(model, batch))

        return PreparedLoss(of_module, state, Places(labels=labels))

    def of_tree(params: Any, batch: Any) -> Any:
        return _loss_of(loss_fn(params, batch))

    scopes = [product.scopes for product in products(trace(of_tree, (params, batch), {}).jaxpr)]
    return PreparedLoss(of_tree, params, _places(params, scopes))


def products(jaxpr: Any) -> Iterator[TunedProduct]:
    """Yields the products of a program, at any depth."""
    for at in walk(Place(jaxpr)):
        if contraction_flops(at.eqn):
            yield TunedProduct(at.eqn, at.path, at.backward, at.times)


def run_placed(
    jaxpr: Any,
    arrays: Sequence[Any],
    bind: Bind,
    extra: Sequence[Any] = (),
    scope: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
    around: Place = _TOP,
) -> list[Any]:
    """Runs a program; `bind` gets each equation, at any depth, with its place.

    `extra` are arrays that are threaded to all of them; each is bound in the context `scope(path)`.
    """

    def bound(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        at = around.at(eqn)
        with scope(at.path):
            if not (parts := list(map(part, at.jaxprs()))):
                return bind(eqn, operands, at, extra)
            return rebuild(eqn, operands, parts, extra)[0]

    def part(at: Place) -> Threaded:
        return lambda extra_in, *arrays: (
            run_placed(at.jaxpr, arrays, bind, extra_in, scope, at),
            {},
        )

    return evaluate(jaxpr, arrays, bound)


def under_map(loss: Loss, policies: PolicyMap, places: Places) -> Loss:
    """Returns a loss under the policies of a map, by the modules that its equations are in.

    Equations outside of the model stay float32, as they do if the model is wrapped.
    """

    def region(scopes: str) -> AbstractContextManager[Any]:
        place = places.of(scopes)
        policy = FLOAT32 if place is None else policy_for(policies, place)
        return jax.named_scope(f"{REGION}{policy}")

    @functools.wraps(loss)
    def in_regions(*args: Any) -> Any:
        traced = trace(loss, args, {})
        as_it_is: Bind = lambda eqn, operands, at, extra: compat.bind(eqn, operands)  # noqa: E731, ARG005
        return traced.rebuild(run_placed(traced.jaxpr, traced.arrays, as_it_is, scope=region))

    reading = reading_as_stored(in_regions, policies.default, 0)
    return under_policy(reading, policies.default, by_position(loss, 0))


def policy_for(policies: PolicyMap, path: Path) -> Policy:
    """Returns the policy of a module, from the innermost module around it that a key matches."""
    for i in range(len(path), -1, -1):
        policy = policies.policy_at(path[:i])
        if policy is not None:
            return policy
    default: Policy = policies.default
    return default


def _loss_of(out: Any) -> Any:
    """Returns the loss from the results of a loss function."""
    loss = out[0] if isinstance(out, tuple) and out else out
    if getattr(loss, "shape", None) != ():
        raise TypeError(
            "tune: loss_fn must return one number, or it and something else; got "
            f"{f'{loss.dtype}{list(loss.shape)}' if is_array(loss) else type(loss).__name__}"
        )
    return loss


def _places(params: Any, scopes: Sequence[str]) -> Places:
    """Finds the modules that have parameters, and the scopes around the model in a program."""
    modules = frozenset(_modules(params))
    tops = {path[0] for path in modules if path}
    names = [_names(path) for path in scopes]
    counts: Counter[int] = Counter()
    for path in names:
        counts.update(i for i, name in enumerate(path[:_DEEPEST_ROOT]) if name in tops)
    if counts:
        [(at, _)] = counts.most_common(1)
        return Places(modules, frozenset(p[:at] for p in names if len(p) > at and p[at] in tops))
    roots = frozenset(path[:1] for path in names if path)
    if modules == {()} and len(roots) == 1:  # a model that is one layer
        return Places(modules, roots)
    return Places()


def _modules(tree: Any) -> Iterator[Path]:
    """Yields the paths of modules in a tree of parameters, or in Linen's collections of trees."""
    collections = isinstance(tree, Mapping) and "params" in tree
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        names = [str(k.key) for k in keys if isinstance(k, jax.tree_util.DictKey)]
        names = names[collections:]
        yield from (tuple(names[:i]) for i in range(len(names)))


def _names(scopes: str) -> Path:
    """Splits scopes into module names, without methods, up to a scope such as einsum's."""
    names: list[str] = []
    for part in filter(None, scopes.split("/")):
        if "->" in part or "," in part:
            break
        names.append(part.partition(".")[0])
    return tuple(names)


def _label(path: Sequence[Any]) -> str:
    return _MODULE + ".".join(map(str, path))


class ProductFormat(NamedTuple):
    """The dtype of a module's values, and the recipe of the formats that its products multiply."""

    dtype: str = "float32"
    recipe: Recipe | None = None

    @property
    def is_low(self) -> bool:
        """Whether anything is multiplied in less than 32 bits."""
        return self.dtype != "float32" or self.recipe is not None

    @property
    def bits(self) -> int:
        """The fewest bits of its products, forward and backward."""
        return min(self.format_of(backward=backward).bits for backward in (False, True))

    def format_of(self, *, backward: bool) -> Format:
        """Returns the format in which a product multiplies."""
        if self.recipe is None:
            return next(f for f in FORMATS.values() if f.name == self.dtype)
        return FORMATS[self.recipe.grad_input if backward else self.recipe.forward]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of products: their time on a chip, or without one, operations weighted by bits.

    Raises:
      ValueError: if the chip is unknown.
    """

    target: str | None = None

    def __post_init__(self) -> None:
        if self.target is not None:
            chip_named(self.target)

    @property
    def unit(self) -> str:
        """The unit of a cost, in words."""
        return f"time on {self.target}" if self.target else "operations, by their bits"

    def __call__(self, product: TunedProduct, how: ProductFormat) -> float:
        """Returns the cost of all runs of a product: seconds on the chip, if there is one."""
        fmt = how.format_of(backward=product.backward)
        if self.target is None:
            return product.flops * _BY_BITS[fmt.bits]
        chip = chip_named(self.target)
        operands = sum(math.prod(shape_of(atom)) for atom in product.eqn.invars[:2])
        result = math.prod(shape_of(product.eqn.outvars[0]))
        kept = 4 if how.dtype == "float32" else 2
        moved = operands * min(kept, fmt.bits / 8) + result * kept
        flops = contraction_flops(product.eqn)
        seconds = product_seconds(chip, flops, _share(chip, how, fmt, product), moved)
        if fmt.scaled:  # read, and written in few bits
            seconds += operands * (kept + fmt.bits / 8) / (chip.bytes_per_second * chip.memory)
        return product.times * seconds


def _share(chip: Chip, how: ProductFormat, fmt: Format, product: TunedProduct) -> float:
    """Returns the time of a product on a chip over its time in 16 bits."""
    if how.recipe is None or not fmt.scaled:
        if fmt.name in chip.tflops:
            return chip.share(fmt.name)
        known = chip.platform == "tpu" or {"float32", "tfloat32"} & chip.tflops.keys()
        return chip.share("float32") if known else _UNKNOWN_FLOAT32
    keys = keys_of(how.recipe, "grad_input" if product.backward else "forward")
    if not all(key in chip.relative or chip.multiplies(key) for key in keys):
        return 1.0
    return max(map(chip.share, keys))
