"""What `import jaxmp` loads, and what is loaded when it is first used."""

from __future__ import annotations

import ast
import json
import pydoc

import jaxmp

from support import ROOT, run_python

ROOT_SOURCE = (ROOT / "jaxmp" / "__init__.py").read_text(encoding="utf-8")
# Of these, what is used decides what is loaded.
LATE = """
    flax.nnx jaxmp._modules.nnx jaxmp._tools jaxmp.losses jaxmp.numerics jaxmp.testing scipy tomllib
    tqdm treescope
"""


def answer(program: str) -> object:
    """What a program in a process of its own prints, as JSON."""
    run = run_python("-c", program, folder=ROOT)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_type_checker_sees_the_names_that_are_loaded_late():
    """They are imported under `TYPE_CHECKING`, and nowhere else."""
    [block, *_] = [n for n in ast.parse(ROOT_SOURCE).body if isinstance(n, ast.If)]
    assert ast.unparse(block.test) == "typing.TYPE_CHECKING"
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name for name, module in seen.items() if module == "jaxmp"}
    assert modules == set(jaxmp._SUBMODULES)
    functions = {name: module for name, module in seen.items() if name not in modules}
    assert functions == {name: f"jaxmp.{where}" for name, where in jaxmp._FUNCTIONS.items()}
    assert set(seen) <= set(jaxmp.__all__)


LOADED = f"""
import json, sys
import jax, flax, optax
before = set(sys.modules)
import jaxmp
late = {LATE.split()}
loaded = [m for m in late if m in sys.modules.keys() - before]
"""


USED = """
import json, pickle, sys
import jaxmp
listed = dir(jaxmp)
from jaxmp import audit, numerics, parity, tune
import jaxmp.losses, jaxmp.testing as testing
late = [*jaxmp._SUBMODULES, *jaxmp._FUNCTIONS]
found = {name: getattr(jaxmp, name) for name in late}
assert all(found[name] is getattr(jaxmp, name) for name in late)
assert found["audit"] is audit and found["numerics"] is numerics and found["testing"] is testing
assert pickle.loads(pickle.dumps(jaxmp.validate)) is jaxmp.validate
from jaxmp import *
assert preflight is jaxmp.preflight
public = [name for name in dir(jaxmp) if not name.startswith("_")]
assert public == [name for name in listed if not name.startswith("_")]
print(json.dumps(set(jaxmp.__all__) <= set(listed)))
"""


def test_names_that_are_loaded_late_are_there():
    assert answer(USED) is True
    text = pydoc.plain(pydoc.render_doc(jaxmp))
    assert all(f"{name}(" in text for name in jaxmp._FUNCTIONS)


LINEN = """
import flax.linen as nn, jax, jax.numpy as jnp, optax

class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))

def main():
    model, tx = jaxmp.prepare(Model(), optax.adam(1e-3), "mixed_float16")
    x = jnp.ones((4, 8))
    params = jaxmp.wrap(Model(), "mixed_bfloat16").init(jax.random.key(0), x)["params"]
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, batch):
        return jnp.mean(model.apply({"params": params}, batch) ** 2)

    @jax.jit
    def step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    state, loss = step(state, x)
    several = jaxmp.accumulate_gradients(state.value_and_grad(loss_fn), 2)
    loss, grads = several(state.params, x)
    state.apply_gradients(grads=grads)
    fast = jaxmp.autocast(lambda w, x: jnp.tanh(x @ w), "mixed_bfloat16")
    fast(jnp.ones((8, 8)), x)
    jax.value_and_grad(lambda w: fast(w, x).sum())(jnp.ones((8, 8)))
    jaxmp.value_and_grad(lambda p: loss_fn(p, x), opt_state=state.opt_state)(state.params)
    fast(jaxmp.quantize({"w": jnp.ones((64, 64))}, "int8")["w"], jnp.ones((4, 64)))
    masters = jaxmp.master_weights(optax.adam(1e-3))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    masters.update(low, masters.init(low), low)
    jaxmp.store_state(optax.adam(1e-3), "int8").init(jnp.ones((64, 64)))
    ref = jax.new_ref(jnp.ones(()))
    jaxmp.autocast(lambda w, r: w * r[...], "mixed_bfloat16")(jnp.ones(2), ref)

jax.eval_shape(main)
of_linen = "flax.nnx" in sys.modules
"""
NNX = """
from flax import nnx

model = jaxmp.wrap(nnx.Linear(8, 2, rngs=nnx.Rngs(0)), "mixed_bfloat16")
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
loss = lambda model, x: jnp.mean(model(x) ** 2)
_, grads = jaxmp.accumulate_gradients(nnx.value_and_grad(loss), 2)(model, jnp.ones((4, 8)))
optimizer.update(model, grads)
products = jaxmp.explain(loss, "float32")(model, jnp.ones((4, 8))).products()
print(json.dumps([loaded, of_linen, products]))
"""


def test_a_program_loads_nnx_when_it_imports_it():
    """One process, which imports jaxmp, trains a model of Linen, and then one of NNX.

    accumulate_gradients failed in one of Linen alone: it called functions of classes that were not
    there.
    """
    loaded_by_import, nnx_for_linen, products = answer(LOADED + LINEN + NNX)
    assert loaded_by_import == []
    assert nnx_for_linen is False
    assert products == {"bfloat16": 1}
