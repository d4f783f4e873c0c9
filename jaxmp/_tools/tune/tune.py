"""`tune`: precision by sensitivity."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core.flax import nnx
from jaxmp._core.jaxprs.trace import is_array, trace
from jaxmp._core.plan.regions import check_callable
from jaxmp._tools.arguments import check_positional, check_progress, check_sizes, mismatch
from jaxmp._tools.explain.explain import explain
from jaxmp._tools.files import DamagedError, RunCache, bytes_of, digest, text_of
from jaxmp._tools.progress import told
from jaxmp._tools.tune.paths import (
    FLOAT32,
    Costs,
    Loss,
    Path,
    PreparedLoss,
    ProductFormat,
    TunedProduct,
    prepared,
    products,
    under_map,
)
from jaxmp._tools.tune.report import (
    Group,
    Scored,
    Tuned,
    Verified,
    check_budget,
    check_ratio,
    grouped,
)
from jaxmp._tools.tune.scores import Scorer, compiled, formats_of, gradients, is_product
from jaxmp._tools.tune.search import MAX_RATIO, Choice, front
from jaxmp._tools.validate.numerics import describe_numerics
from jaxmp.policy import Policy, PolicyLike, PolicyMap, single_policy

# The names of sibling modules whose results are multiplied with each other.
_TOGETHER = re.compile(r"(query|key|value|q|k|v|[qkv]_proj|to_[qkv]|w[qkv])")
_NUMBERED_EXPERT = re.compile(r"(experts?)_?\d+")


def tied(path: str) -> Hashable:
    """Returns a key that modules of one attention, or experts of one layer, have in common.

    Example:
      >>> tied("block_0/attention/query") == tied("block_0/attention/value")
      True
      >>> tied("block_0/expert_3/up") == tied("block_0/expert_4/up")
      True
      >>> tied("block_0/attention/query") == tied("block_1/attention/query")
      False
    """
    names = [_NUMBERED_EXPERT.sub(r"\1", name) for name in path.split("/")]
    for i, name in enumerate(names[:-1]):
        if name in ("expert", "experts") and names[i + 1].isdigit():
            names[i + 1] = ""
    if _TOGETHER.fullmatch(names[-1]):
        names[-1] = "q, k and v"
    return "/".join(names)


def tune(
    loss_fn: Callable[[Any, Any], Any],
    candidates: PolicyLike | Sequence[PolicyLike] = "mixed_bfloat16",
    *misplaced: Any,
    budget: float = 1e-3,
    max_ratio: float = MAX_RATIO,
    tie: Callable[[str], Hashable] = tied,
    target: str | None = None,
    loss_scale: float | None = None,
    probes: int = 4,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[str], Any] | None = None,
) -> Callable[..., Tuned]:
    """Finds a policy for each module: the cheapest whose gradients are close to float32's.

    The loss is given in float32. Each batch takes one backward pass, through the loss and its
    gradients: it scores every candidate at every module that has products, by how far their
    rounding turns the gradient. The cheapest of all assignments within the budget is chosen, run,
    and made more precise if it is not within the budget after all.

    Fewer bits must pay. From float32, the candidates of 16 bits are tried, and from what was chosen
    of them, those of 8: a step is taken if it saves at least 2.5 % of the cost, as 5 % of the FLOPs
    do in half the bits, within the budget and within `max_ratio` times the error so far. Where one
    is not taken, the result prints "no change pays" and why. So give the policy that you have as a
    candidate, next to cheaper ones.

    Args:
      loss_fn: from params and a batch to the loss, or to it and something else; float32 throughout,
        not wrapped, and twice differentiable. A batch that is a tuple may also be several
        arguments, ``loss_fn(params, x, y)``. Modules are identified by their named scopes: Flax
        Linen's and those of `jax.named_scope`; of an NNX module given as `params`, by its
        attributes. A function without any is one module.
      candidates: one policy, or several; float32 always is one.
      budget: the largest 1 - cosine allowed between the gradients and float32's, for each batch.
      max_ratio: the largest ratio of that error to the one of the chosen candidates of more bits.
        16 is two bits of the gradients: ``float("inf")`` leaves the budget alone.
      misplaced: takes nothing; its error says where further arguments go.
      tie: from a module's path to a key; modules with equal keys get one policy. By default query,
        key and value of one attention, and the experts of one layer.
      target: a chip, such as "tpu-v5e": costs are the estimated times of products on it. By
        default, their operations, of which one in 16 bits costs a half, in 8 bits a quarter, in 4
        bits an eighth.
      loss_scale: the factor of the loss. By default 2^15 if a candidate computes in float16, else
        1.
      probes: the number of random directions for each batch: more are more exact.
      out: a folder for the scores of each batch, from which another call continues. A batch is
        scored again when it has changed, or the loss, `params`, `candidates`, `loss_scale`,
        `probes` or jaxmp.
      progress: called with a line of text before each slow step. By default, lines are printed if
        stderr is a terminal, from the first second on.

    Returns:
      A function of ``(params, batches)`` that returns the result: its `policy` is for `jaxmp.wrap`.
      Print it for the table. ``params`` is a pytree of float arrays, such as Linen's parameters,
      or an NNX module; ``batches`` are a few training batches, preferably from mid-training.

    Raises:
      ValueError: if there are no batches or candidates, no module has products, the model is
        wrapped already, the budget or ratio is negative, float32's gradients are not finite or
        all 0, or `out` is a file.
      TypeError: if `loss_fn` is not callable or returns no loss, params are integers, or a
        candidate is a `PolicyMap`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxmp
      >>> model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)])
      >>> x = jax.random.normal(jax.random.key(0), (32, 8))
      >>> params = model.init(jax.random.key(1), x)
      >>> found = jaxmp.tune(lambda p, x: jnp.mean(model.apply(p, x) ** 2))(params, [x])
      >>> found.policy
      PolicyMap({}, default='mixed_bfloat16')
      >>> f"{found.low_share:.0%}"
      '100%'

    Source: Model-Optimizer's AutoQuantize; see `jaxmp/_tools/tune/scores.py`.
    """
    check_callable("tune", loss_fn)
    check_positional(misplaced, "tune(loss_fn, candidates, budget=1e-3)(params, batches)")
    check_progress("tune", progress)
    if probes < 1:
        raise ValueError(f"tune: probes must be at least 1; got {probes}")
    check_budget(budget)
    check_ratio(max_ratio)
    names = _named(candidates)
    policies = tuple(names)
    if loss_scale is None:
        halves = any(np.dtype(p.compute_dtype) == np.float16 for p in policies)
        loss_scale = 2.0**15 if halves else 1.0
    scale, costs = loss_scale, Costs(target)

    def tuned(params: Any, batches: Iterable[Any] = (), *more: Any) -> Tuned:
        """Scores the candidates with these batches."""
        with told(progress) as say:
            batches = _batches(batches, more)
            call = _taking(loss_fn, batches[0])
            check_sizes("tune", (params, batches[0]))
            _check_params(params)
            try:
                loss = prepared(call, params, batches[0])
            except TypeError as error:
                error.add_note(f"tune: {_CALLED}")
                raise
            jaxpr = trace(gradients(loss.loss, scale), (loss.params, batches[0]), {}).jaxpr
            found = list(products(jaxpr))
            of_module = _by_module(loss, found)
            plans = {p: explain(loss.loss, p)(loss.params, batches[0]) for p in policies}
            lowest = min(policies, key=lambda policy: np.dtype(policy.compute_dtype).itemsize)
            if said := plans[lowest].overruled:
                raise ValueError(f"tune: {said}.")
            ways = formats_of(loss.places, plans, list(of_module))
            exact = compiled(gradients(loss.loss, scale))
            scorer = Scorer(loss, ways, scale, probes, exact)
            say(
                f"tune: {len(ways)} modules, {len(policies) - 1} candidates, {len(batches)} batches"
            )
            scores = _scores(scorer, batches, policies, jaxpr, RunCache("tune", out), say)
            groups = _groups(of_module, grouped(list(of_module), tie), ways, scores, costs)
            total = sum(p.flops for p in found)
            scored = Scored(
                loss.places,
                policies,
                tuple(names.values()),
                groups,
                front([g.costs for g in groups], [g.errors for g in groups]),
                _levels(ways),
                total,
                costs.unit,
                _verifier(loss, batches, scale, exact, say),
            )
            return Tuned(budget, max_ratio, scored, Choice((0,) * len(groups))).solve(budget)

    return tuned


def _by_module(loss: PreparedLoss, found: Iterable[TunedProduct]) -> dict[Path, list[TunedProduct]]:
    """Groups the float32 products in the model by the module that they are in."""
    of_module: dict[Path, list[TunedProduct]] = {}
    for product in found:
        path = loss.places.of(product.scopes)
        if path is not None and is_product(product.eqn):
            of_module.setdefault(path, []).append(product)
    if not of_module:
        raise ValueError(
            "tune: the loss has no float32 matmul in the model. Give the model unwrapped. "
            "Modules are found by named scopes: those of Flax Linen, of jax.named_scope, "
            "and of an NNX module that is given as params"
        )
    return dict(sorted(of_module.items()))


_CALLED = (
    "loss_fn is called as loss_fn(params, batch), where a batch is one item of batches; of a tuple "
    "(x, y) each part may be an argument. A loss of several arguments is given as "
    "tune(loss_fn)(params, [(x, y), ...]), and one with others, such as a key, as "
    "tune(lambda params, batch: loss_fn(params, *batch, key))(params, batches)"
)


def _batches(batches: Iterable[Any], more: Sequence[Any]) -> list[Any]:
    if more:
        raise TypeError(
            f"tune: takes params and batches, and got {len(more)} more: one sequence has all "
            f"batches. {_CALLED}"
        )
    if not isinstance(batches, Iterable) or isinstance(batches, Mapping) or is_array(batches):
        got = "an array" if is_array(batches) else repr(type(batches).__name__)
        raise TypeError(f"tune: batches must be a sequence, as in [batch]; got {got}")
    several = list(batches)
    if not several:
        raise ValueError("tune: batches is empty; give at least one batch")
    return several


def _taking(loss_fn: Loss, batch: Any) -> Loss:
    """Returns `loss_fn` as loss_fn(params, batch), also one that takes the parts of a batch."""
    wrong = mismatch(loss_fn, None, batch)
    if not wrong:
        return loss_fn
    if isinstance(batch, (tuple, list)) and not mismatch(loss_fn, None, *batch):
        return lambda params, parts: loss_fn(params, *parts)
    raise TypeError(f"tune: {_CALLED}. This loss_fn{wrong}")


def _check_params(params: Any) -> None:
    """Raises if a pytree has leaves of integers; of an NNX module, only parameters are taken."""
    if isinstance(params, nnx.Module):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, np.floating):
            raise TypeError(
                f"tune: params{jax.tree_util.keystr(path)} has {dtype}; params are differentiated: "
                "close over the rest, or put it into the batches"
            )


def _named(candidates: PolicyLike | Sequence[PolicyLike]) -> dict[Policy, str]:
    """Returns the policies to try, float32 first, and their names."""
    several = candidates if isinstance(candidates, (list, tuple)) else [candidates]
    names = {FLOAT32: "float32"}
    for candidate in several:
        policy = single_policy("tune", candidate)
        names.setdefault(policy, candidate if isinstance(candidate, str) else str(policy))
    if len(names) == 1:
        raise ValueError(
            f"tune: candidates={candidates!r} has only float32, which is always a candidate: "
            "give cheaper ones, such as 'mixed_bfloat16'"
        )
    return names


def _groups(
    of_module: Mapping[Path, Sequence[TunedProduct]],
    decided: Iterable[tuple[Path, ...]],
    ways: dict[Path, tuple[ProductFormat, ...]],
    scores: np.ndarray[Any, Any],
    costs: Costs,
) -> tuple[Group, ...]:
    """Returns the groups of modules to decide on, with each candidate's costs and errors."""
    number = {path: i for i, path in enumerate(ways)}
    full = sum(costs(p, ProductFormat()) for several in of_module.values() for p in several)
    groups = []
    options = range(scores.shape[1])
    for members in decided:
        inside = [(p, ways[m]) for m in members for p in of_module[m]]
        low = [
            [p.flops for p, way in inside if way[i].format_of(backward=p.backward).bits < 32]
            for i in options
        ]
        groups.append(
            Group(
                paths=members,
                flops=sum(p.flops for p, _ in inside),
                ways=tuple(zip(*(ways[m] for m in members), strict=True)),
                low_flops=tuple(map(sum, low)),
                costs=tuple(sum(costs(p, way[i]) for p, way in inside) / full for i in options),
                errors=tuple(float(sum(scores[number[m], i] for m in members)) for i in options),
            )
        )
    return tuple(groups)


def _levels(ways: Mapping[Path, Sequence[ProductFormat]]) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of candidates by the fewest bits of their products, most bits first."""
    fewest = [min(way.bits for way in several) for several in zip(*ways.values(), strict=True)]
    by_bits = sorted({bits for bits in fewest[1:] if bits < 32}, reverse=True)
    return ((0,), *(tuple(i for i, b in enumerate(fewest) if b == bits) for bits in by_bits))


def _scores(
    scorer: Scorer,
    batches: Sequence[Any],
    policies: Sequence[Policy],
    jaxpr: Any,
    kept: RunCache,
    say: Callable[[str], Any],
) -> np.ndarray[Any, Any]:
    """Returns the mean of the scores of all batches; cached batches are not scored again."""
    run_key, made_by, found = "", "", []
    if kept.folder is not None:
        said = list(map(str, policies)), scorer.ways, scorer.loss_scale, scorer.probes
        run_key = repr((said, describe_numerics()))
        run_key += digest([*text_of(jaxpr), *bytes_of(scorer.loss.params)])
    for i, batch in enumerate(batches):
        if kept.folder is not None:
            made_by = digest([run_key.encode(), *bytes_of(batch)])
        scores = kept.get(f"batch {i}", made_by, functools.partial(_read_scores, scorer))
        if scores is None:
            say(f"tune: scoring batch {i + 1} of {len(batches)}")
            scores = scorer(batch, i)
            kept.put(f"batch {i}", made_by, scores.tolist())
        found.append(scores)
    return np.asarray(np.mean(found, axis=0))


def _read_scores(scorer: Scorer, value: Any) -> np.ndarray[Any, Any]:
    scores, shape = (
        np.asarray(value, np.float64),
        (len(scorer.ways), len(next(iter(scorer.ways.values())))),
    )
    if scores.shape != shape:
        raise DamagedError(f"it has scores of shape {scores.shape}, not {shape}")
    return scores


def _verifier(
    loss: PreparedLoss,
    batches: Sequence[Any],
    scale: float,
    exact: Callable[[Any, Any], Any],
    say: Callable[[str], Any],
) -> Callable[[PolicyMap], Verified]:
    """Returns a function that compares the loss and gradients under a map with float32's."""

    def verify(policies: PolicyMap) -> Verified:
        say(f"tune: verifying {policies}")
        program = compiled(gradients(under_map(loss.loss, policies, loss.places), scale))
        cosines, errors = [], []
        for batch in batches:
            (value, g), (low_value, low) = exact(loss.params, batch), program(loss.params, batch)
            cosines.append(_cosine(g, low))
            errors.append(abs(float(low_value) - float(value)) / (abs(float(value)) or 1.0))
        return Verified(float(np.min(cosines)), float(np.max(errors)))

    return verify


def _cosine(a: Any, b: Any) -> float:
    """Returns the cosine of two trees, in float64; NaN if one is not finite, or only one is 0."""
    dots = np.zeros(3)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        u, v = (np.asarray(z, np.float64).ravel() for z in (x, y))
        dots += [u @ v, u @ u, v @ v]
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(dots[0] / np.sqrt(dots[1] * dots[2])) if dots[1:].any() else 1.0
