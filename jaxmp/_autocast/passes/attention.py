"""Softmax followed by a product, as in attention, found and given a derivative that keeps less.

Differentiated one by one, a softmax keeps its exponentials in float32 and the product after it the
probabilities in 16 bits. Where `softmax_vjp` finds the derivative of both at once, the
probabilities in 16 bits are enough. What is computed forward stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxmp._autocast.contract import Dot
from jaxmp._autocast.passes.softmax_vjp import SoftmaxDot
from jaxmp._autocast.passes.softmaxes import Softmax, softmaxes
from jaxmp._autocast.passes.value_refs import Inlined
from jaxmp._autocast.plan import Plan, Step
from jaxmp._autocast.rules import FLOAT32
from jaxmp._autocast.why import Kind
from jaxmp._jaxprs import compat
from jaxmp._jaxprs.attributes import explicit_sharding
from jaxmp._jaxprs.compat import dtype_of


def attend(plan: Plan, _planner: object = None) -> Plan:
    """A plan in which products of a softmax are differentiated together with it.

    That is where nothing else reads the softmax: for others it is kept in float32 anyway.
    """
    if not any(_is_low_product(step, plan) for step in plan.steps):
        return plan
    program = Inlined(plan.jaxpr, plan.consts)
    readers = Counter(v for s in plan.steps for v in s.eqn.invars if not isinstance(v, Literal))
    steps = tuple(_attending(step, program, readers, plan) for step in plan.steps)
    return dataclasses.replace(plan, steps=steps, built={})


def without_attention(step: Step) -> Step:
    """A step that `attend` found, as it was: a product."""
    why = step.why.without(Kind.SOFTMAX)
    return dataclasses.replace(step, op=Dot(step.op.parameters), why=why)


def _is_low_product(step: Step, plan: Plan) -> bool:
    """Whether a step multiplies arrays in 16 bits: no tangents, and by no recipe.

    Nor arrays whose types say how they are sharded.
    """
    if type(step.op) is not Dot or step.eqn.primitive.name != "dot_general" or step.linear:
        return False
    if any(map(explicit_sharding, step.eqn.invars)):
        return False
    return plan.rules.low is not None and {*step.ins, *step.outs} == {plan.rules.low}


def _attending(step: Step, program: Inlined, readers: Mapping[Any, int], plan: Plan) -> Step:
    if not _is_low_product(step, plan):
        return step
    for side, softmax in softmaxes(step.eqn, program):
        values = (softmax.result, *(v for eqn in softmax.eqns for v in eqn.outvars))
        # A softmax of parameters is one itself, with a gradient in float32.
        if side in step.op.parameters or any(readers[var] != 1 for var in values):
            continue
        op = SoftmaxDot(softmax, side, *_between(softmax, program, plan), step.op.parameters)
        return dataclasses.replace(step, op=op, why=step.why.noted(Kind.SOFTMAX))
    return step


def _between(softmax: Softmax, program: Inlined, plan: Plan) -> tuple[Any, tuple[Any, ...]]:
    """What stands between a softmax and its product, as a closed jaxpr, and what else it is of.

    A factor that is made of a mask is rematerialized: of dropout the mask is kept.
    """
    if not softmax.eqns:
        return None, ()
    known = {softmax.result}
    eqns: list[JaxprEqn] = []
    sources: list[Any] = []

    def need(atom: Any) -> None:
        if isinstance(atom, Literal) or atom in known:
            return
        eqn = program.maker(atom)
        if eqn is not None and _is_made_of_mask(atom, program):
            for operand in eqn.invars:
                need(operand)
            eqns.append(eqn)
        else:
            sources.append(atom)
        known.add(atom)

    for eqn in softmax.eqns:
        for operand in eqn.invars:
            need(operand)
        eqns.append(eqn)
        known.update(eqn.outvars)
    operands, results = [softmax.result, *sources], softmax.eqns[-1].outvars[:1]
    between = compat.part(plan.jaxpr, eqns, operands, results)
    return compat.close(between.replace(constvars=[])), tuple(sources)


_ELEMENTWISE = frozenset({"convert_element_type", "broadcast_in_dim", "mul", "div", "reshape"})


def _is_made_of_mask(atom: Any, program: Inlined) -> bool:
    """Whether a float32 value is made of literals and of one mask, element by element."""
    if dtype_of(atom) != FLOAT32:
        return False
    while (eqn := program.maker(atom)) is not None and eqn.primitive.name in _ELEMENTWISE:
        operands = [v for v in eqn.invars if not isinstance(v, Literal)]
        if len(operands) != 1:
            return not operands
        [atom] = operands
        if dtype_of(atom) == np.bool_:
            return True
    return False
