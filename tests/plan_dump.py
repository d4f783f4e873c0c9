"""What autocast decides for every program of the tests, as text: the gate of a rearrangement.

    export PYTHONPATH=.:tests JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8
    python tests/plan_dump.py > plans.txt
    python tests/plan_dump.py public/gpt2 numeric/ > some.txt
    python tests/plan_dump.py --write  # tests/plans/*.txt, which tests compare with

A line per equation: its primitive, the dtypes it reads its operands in and keeps its results in,
and why; what is inside an equation follows it, indented. Then the number of equations of each kind
in the gradient that JAX makes of the program under autocast: derivative rules are planned when they
are asked for. Two dumps, before and after, are compared as text (`diff`): what keeps every plan
changes no line. Nothing is compiled. No line has anything of the machine or of source lines in it.

In `tests/plans`, a plan under the first policy is written out, and one under another is what
differs from it: nothing (`=`), the name of the dtype alone (`= f16`), or the hunks of a diff. They
are of the newest JAX that is tested, as versions lower library functions differently.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numeric_programs  # noqa: F401
from numeric_kit import PROGRAMS, Plain, inputs
from public_models import BUILDERS, REQUIRES, build

import jaxmp
from jaxmp._core.autocast.program import plan_program, trace_program
from jaxmp._core.jaxprs.compat import dtype_of
from jaxmp._core.plan.parameters import by_position
from jaxmp._core.plan.plan import Plan, Step

from constructs import CONSTRUCTS, Construct
from support import iter_eqns

POLICIES = ("mixed_bfloat16", "mixed_float16")
MORE = (
    "bfloat16",
    "mixed_bfloat16,softmax=bf16",
    "mixed_bfloat16,residuals=recompute",
    "mixed_float8",
)
PLANS: Final = Path(__file__).with_name("plans")
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


class Program(NamedTuple):
    """A program of the corpus: a function, its arguments, and which of them are parameters."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int | tuple[int, ...]


def corpus() -> Iterator[tuple[str, Callable[[], Program]]]:
    """Every program by its name, made when it is asked for."""
    for case in CONSTRUCTS:
        name = case.fn.__name__
        yield f"construct/{name}", functools.partial(_of_construct, case)
    for name, program in PROGRAMS.items():
        loss = functools.partial(program.loss, Plain())
        yield f"numeric/{name}", lambda n=name, f=loss: Program(f, inputs(n)[0], 0)
    for name in BUILDERS:
        if name not in REQUIRES:
            yield f"public/{name}", functools.partial(_of_model, name)


def _of_construct(case: Construct) -> Program:
    return Program(case.fn, case.args, tuple(range(1, len(case.args))))  # the first is data


def _of_model(name: str) -> Program:
    model = build(name)
    return Program(model.loss, (model.params, model.batch(0)), 0)


def lines(program: Program, policy: str) -> Iterator[str]:
    """The plan of a program, and what its gradient is made of."""
    fn, args, argnums = program
    policy_ = jaxmp.get_policy(policy)
    traced = trace_program(fn, args, {}, policy_)
    given = by_position(fn, argnums)(args, {})
    yield from _of_plan(plan_program(traced.jaxpr, policy_, given), "")
    leaves, tree = jax.tree.flatten(args)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    cast = jaxmp.autocast(fn, policy, argnums)

    def gradient(values: list[Any]) -> Any:
        def total(values: list[Any]) -> jax.Array:
            given = list(leaves)
            for i, x in zip(floats, values, strict=True):
                given[i] = x
            out = jax.tree.leaves(cast(*jax.tree.unflatten(tree, given)))
            real = [jnp.real(x).astype(jnp.float32).sum() for x in out if x.dtype.kind in "fcV"]
            return sum(real, jnp.float32(0))

        return jax.grad(total)(values)

    try:
        jaxpr = jax.make_jaxpr(gradient)([leaves[i] for i in floats])
    except Exception as error:  # noqa: BLE001 (JAX has no derivative of some constructs)
        yield f"  gradient: {type(error).__name__}"
        return
    counts: Counter[str] = Counter()
    for eqn in iter_eqns(jaxpr):
        ins, outs = (" ".join(_short(dtype_of(v)) for v in vs) for vs in (eqn.invars, eqn.outvars))
        counts[f"{eqn.primitive.name}  {ins} -> {outs}"] += 1
    yield from (f"  gradient: {n:4} {kind}" for kind, n in sorted(counts.items()))


def _of_plan(plan: Plan, indent: str) -> Iterator[str]:
    for step in plan.steps:
        yield f"{indent}  {_of_step(step)}"
        for inner in step.plans:
            yield from _of_plan(inner, indent + "  |")


def _of_step(step: Step) -> str:
    eqn = step.eqn
    reads = " ".join(_cast(v, d) for v, d in zip(eqn.invars, step.ins, strict=True))
    kept = " ".join(_cast(v, d) for v, d in zip(eqn.outvars, step.outs, strict=True))
    return f"{eqn.primitive.name}  {reads} -> {kept}  {step.why}"


def _cast(atom: Any, dtype: Any) -> str:
    """The dtype of a value in the program, and that in which it is read or kept."""
    own, kept = _short(dtype_of(atom)), _short(dtype)
    return own if dtype is None or own == kept else f"{own}:{kept}"


def _short(dtype: Any) -> str:
    return SHORT.get(str(dtype), str(dtype)) if dtype is not None else "-"


def policies_of(name: str) -> tuple[str, ...]:
    """Those under which a program is planned: constructs under more of them."""
    return POLICIES + MORE if name.startswith("construct/") else POLICIES


def text_of(name: str, make: Callable[[], Program], policy: str) -> str:
    """The plan of a program under a policy."""
    text = [f"# {name}  {policy}"]
    try:
        text += lines(make(), policy)
    except Exception as error:  # noqa: BLE001 (is a result, too)
        text.append(f"  {type(error).__name__}: {str(error).splitlines()[0]}")
    return "".join(f"{line}\n" for line in text)


def written() -> tuple[str, dict[str, dict[str, list[str]]]]:
    """The JAX that `tests/plans` are of, and their lines by program and policy."""
    version, plans = "", {}
    for path in sorted(PLANS.glob("*.txt")):
        first, *sections = re.split(r"^# ", path.read_text(), flags=re.MULTILINE)[1:]
        version = first.split()[-1]
        for section in sections:
            title, *found = section.splitlines()
            name, policy = title.split("  ")
            of_program = plans.setdefault(name, {})
            base = of_program.get(POLICIES[0], [])
            of_program[policy] = _full(found, base) if base else found
    return version, plans


def _full(found: list[str], base: list[str]) -> list[str]:
    """The lines of a plan of which what differs from another was written."""
    match found:
        case ["="]:
            return base
        case ["= f16"]:
            return _in_float16(base)
    out: list[str] = []
    at = 0
    for line in found:
        if hunk := re.match(r"@@ -(\d+)(?:,(\d+))? ", line):
            count = int(hunk[2] or 1)
            start = int(hunk[1]) - (count > 0)  # what is only inserted follows the line named
            out += base[at:start]
            at = start + count
        elif line[0] == "+":
            out.append(line[1:])
    return out + base[at:]


def _in_float16(plan: list[str]) -> list[str]:
    return [re.sub(r"\bbf16\b", "f16", line).replace("bfloat16", "float16") for line in plan]


def _short_of(plan: list[str], base: list[str]) -> list[str]:
    """What `_full` reads."""
    if plan == base:
        return ["="]
    if plan == _in_float16(base):
        return ["= f16"]
    return list(difflib.unified_diff(base, plan, n=0, lineterm=""))[2:]


def write() -> None:
    """Writes `tests/plans`."""
    PLANS.mkdir(exist_ok=True)
    texts: dict[str, list[str]] = {}
    for name, make in corpus():
        if (kind := name.partition("/")[0]) == "public":
            continue
        text = texts.setdefault(kind, [f"# JAX {jax.__version__}"])
        plans = {policy: text_of(name, make, policy).splitlines() for policy in policies_of(name)}
        _, *base = plans[POLICIES[0]]
        for policy, (title, *plan) in plans.items():
            text += [title, *(plan if policy == POLICIES[0] else _short_of(plan, base))]
    for kind, text in texts.items():
        (PLANS / f"{kind}.txt").write_text("".join(f"{line}\n" for line in text))


def main(words: list[str]) -> None:
    warnings.simplefilter("ignore")
    if words == ["--write"]:
        write()
        return
    for name, make in corpus():
        if not words or any(word in name for word in words):
            for policy in policies_of(name):
                sys.stdout.write(text_of(name, make, policy))


if __name__ == "__main__":
    main(sys.argv[1:])
