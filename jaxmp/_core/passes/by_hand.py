"""The policy of what a derivative rule multiplies outside of modules.

A key of a `PolicyMap` holds for the modules that a rule calls, and for their derivatives. A product
that the author's backward pass writes out is in no module, and has one policy: that of all products
of the function, or else the one around its call. It is refused if keys give them several.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._core.execute.annotations import contracts
from jaxmp._core.jaxprs.attributes import name_stack
from jaxmp._core.jaxprs.place import Place
from jaxmp._core.jaxprs.scopes import LAYERS
from jaxmp._core.jaxprs.source import in_scope, user_line
from jaxmp._core.jaxprs.walk import walk
from jaxmp._core.plan.plan import Plan, Visit
from jaxmp._core.plan.primitives import LOW
from jaxmp._core.plan.rules import governed, region_key, region_rules
from jaxmp._core.printable import printable
from jaxmp.policy import Policy


class RulePolicy(NamedTuple):
    """The policy of a derivative rule's own products.

    Attributes:
      policy: the policy.
      keys: the keys by which products of the function have others: empty, if all have one.
    """

    policy: Policy
    keys: dict[str, Policy]


def rule_policy(plan: Plan) -> RulePolicy:
    """Returns the policy of a rule's own products, from the plan of its function."""
    products = [
        visit
        for visit in plan.walk()
        if contracts(visit.step.eqn) and plan.rules.governs(visit.step.eqn.invars[0])
    ]
    policies = {_rules(plan, visit).policy for visit in products}
    if len(policies) == 1:
        return RulePolicy(policies.pop(), {})
    around = plan.rules.policy
    keys: dict[str, Policy] = {}
    for visit in products:
        key, policy = visit.place.first(_of_key), _rules(plan, visit).policy
        if key and key[0] and _for_products(policy) != _for_products(around):
            keys[key[0]] = policy
    return RulePolicy(around, keys)


def refuse_by_hand(name: str, jaxpr: Any, rule: RulePolicy) -> None:
    """Raises if a backward pass multiplies outside of modules, whose policies differ by key.

    Args:
      name: the function whose derivative rule it is.
      jaxpr: its backward pass, in which modules without a key are marked as well.
      rule: the policy of its own products.

    Raises:
      ValueError: naming the keys, and the line.
    """
    by_hand = [] if not rule.keys else _by_hand(jaxpr)
    if not by_hand:
        return
    keys = " and ".join(f"{key!r} ({policy})" for key, policy in rule.keys.items())
    where = user_line(by_hand[0]) or name
    raise ValueError(
        printable(
            f"wrap: a backward pass by hand ({where}) multiplies outside of modules, where the "
            f"PolicyMap's key{'s' * (len(rule.keys) > 1)} {keys} would have no "
            f"effect: its products would run under {rule.policy}, the policy around the call. Give "
            "all modules that its function calls one policy, by a key for the module around them, "
            "or write the policy into the backward pass: jaxmp.full_precision(fn) or "
            "jaxmp.autocast(fn, policy) around its products."
        )
    )


def _by_hand(jaxpr: Any) -> list[JaxprEqn]:
    """Returns the products of a backward pass that are in no region, and no derivative of JAX's."""

    def attributed(eqn: JaxprEqn) -> bool:
        # One `transpose(` is of the rule itself; more are of a pullback that the rule calls.
        derived = str(name_stack(eqn)).count("transpose(") > 1
        return derived or _of_key(eqn) is not None or in_scope(eqn, LAYERS)

    def inside(place: Place) -> list[Place]:
        return [] if attributed(place.eqn) else list(place.jaxprs())

    found = (place.eqn for place in walk(Place(jaxpr), inside))
    return [eqn for eqn in found if eqn.primitive.name in LOW and not attributed(eqn)]


def _of_key(eqn: JaxprEqn) -> tuple[str] | None:
    """Returns the key of the innermost region, empty if it is of none; None outside of regions."""
    key = region_key(eqn)
    return None if key is None else (key,)


def _rules(plan: Plan, visit: Visit) -> Any:
    return visit.place.first(region_rules) or plan.rules


def _for_products(policy: Policy) -> Hashable:
    """Returns what a policy says of products."""
    dtypes = np.dtype(policy.compute_dtype), np.dtype(policy.reduce_dtype), governed(policy)
    return dtypes, policy.matmul, policy.ops
