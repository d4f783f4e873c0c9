"""Does a precision lock see what it is for? Faults and refactorings, planted into public models.

    python benchmarks/precision_lock.py

Each of twelve dtype faults is planted into five public models, and the training step is compared
with the lock of the sound one: is the fault seen, and does the difference name the module it is
in? Ten refactorings that change no dtype follow: nothing may be different. The models are those of
`tests/public_models`: two are written in bfloat16 by hand, by the `dtype=` of their layers; three
are float32 models under `jaxmp.wrap`. The step is data parallel under `jax.shard_map`, with
gradients that cross in bfloat16, and Adam. Nothing is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._tools.lock.check import check

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from public_models import attention, configured, decoders, vision

BF16, F32 = jnp.bfloat16, jnp.float32
POLICY = "mixed_bfloat16"


class Subject(NamedTuple):
    """A public model, and where faults are planted: the ends of module paths.

    `head` makes logits of which the sound model takes the float32 sums.
    """

    room: Any
    dense: str
    norm: str
    attention: str
    by_hand: bool = False
    head: str = "(none)"


SUBJECTS = {
    "configured_lm": Subject(
        configured, "Block_1/_Mlp_0/Dense_0", "Block_1/LayerNorm_0", "_Attention_0", by_hand=True
    ),
    "configured_translator": Subject(
        configured,
        "decoder/_Block_1/_Mlp_0/Dense_0",
        "encoder/_Block_0/LayerNorm_1",
        "_Attention_0",
        by_hand=True,
        head="decoder/Dense_0",
    ),
    "t5_decoder": Subject(decoders, "Layer_1/_DenseGeneral_4", "Layer_0/_T5Norm_1", "Layer_1"),
    "vit": Subject(
        vision,
        "_TransformerBlock_1/Dense_0",
        "_TransformerBlock_0/LayerNorm_1",
        "_TransformerBlock_1/MultiHeadDotProductAttention_0",
    ),
    "scanned_lm": Subject(
        attention,
        "_TransformerBlock_0/Dense_0",
        "_TransformerBlock_0/LayerNorm_1",
        "_TransformerBlock_0/MultiHeadDotProductAttention_0",
    ),
}

# Faults, and where the difference must name them: a field of `Subject`, or a part of a path.
FAULTS = {
    "a NumPy float32 constant": "dense",
    "a cast back that was dropped": "dense",
    "a kernel's weight gradient in float32": "dense",
    "softmax in 16 bits": "attention",
    "a normalization in 16 bits": "norm",
    "gradients of one layer in 16 bits": "dense",
    "an optimizer's moment in bfloat16": "/mu",
    "a collective widened": "dense",
    "the upcast in the loss dropped": "(no module)",
    "logits rounded": "logits",
    "a layer in float32": "dense",
    "the policy of one path changed": "dense",
}
REFACTORINGS = (
    "other names, other lines",
    "leaves of the gradient in another order",
    "jit around a block",
    "jit around the step",
    "another batch size",
    "a helper function",
    "a print of a float16 mean",
    "a float32 metric that nothing reads",
    "a float32 metric that is returned",
    "another learning rate",
)
REMAT = "remat around the loss"


@jax.custom_vjp
def float32_gradient(x, kernel):
    """A product whose gradient by the weights is summed, and returned, in float32."""
    return x @ kernel.astype(x.dtype)


def _float32_gradient_backward(saved, g):
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    dw = lax.dot_general(x, g, ((rows, rows), ((), ())), preferred_element_type=F32)
    return g @ kernel.astype(g.dtype).T, dw


float32_gradient.defvjp(
    lambda x, kernel: (float32_gradient(x, kernel), (x, kernel)), _float32_gradient_backward
)


def low_norm(module, x):
    x16 = x.astype(BF16)
    centered = x16 - x16.mean(-1, keepdims=True)
    scale = module.variables["params"]["scale"].astype(BF16)
    return (centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(
        x.dtype
    )


def product(module, x, multiply):
    params = module.variables["params"]
    y = multiply(x.astype(module.dtype or x.dtype), params["kernel"])
    return y + params["bias"].astype(y.dtype) if "bias" in params else y


def sums(x, kernel):
    return jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=F32)


def highest(x, kernel):
    return jnp.dot(x.astype(F32), kernel, precision=lax.Precision.HIGHEST).astype(x.dtype)


def constant(call, _module, x):
    y = call(x)
    return y + np.linspace(0, 300, y.shape[-1], dtype=np.float32)


def printed(logits):
    jax.debug.print("{}", logits.astype(jnp.float16).mean())
    return logits.astype(F32)


def measured(call, _module, x):
    x.astype(F32).std()
    return call(x)


# What becomes of the call of one layer.
LAYER = {
    "a NumPy float32 constant": constant,
    "a cast back that was dropped": lambda call, _, x: call(x.astype(BF16).astype(F32)).astype(F32),
    "a kernel's weight gradient in float32": lambda _, of, x: product(of, x, float32_gradient),
    "a layer in float32": lambda _, of, x: product(of, x, highest),
    "jit around a block": lambda call, _, x: jax.jit(call)(x),
    "a float32 metric that nothing reads": measured,
}
LOGITS = {
    "logits rounded": lambda logits: logits.astype(BF16).astype(F32),
    "the upcast in the loss dropped": lambda logits: logits.astype(BF16),
    "a print of a float16 mean": printed,
}


def planted(subject: Subject, change: str):
    """What becomes of the calls of modules."""

    def intercept(call, args, kwargs, context):
        path = "/".join(context.module.path)
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if not path:
            return LOGITS.get(change, lambda logits: logits.astype(F32))(call(*args, **kwargs))
        if path.endswith(subject.norm) and change == "a normalization in 16 bits":
            return low_norm(context.module, *args)
        if path.endswith(subject.head) and change != "logits rounded":
            return product(context.module, *args, sums)
        if path.endswith(subject.dense) and change in LAYER:
            return LAYER[change](call, context.module, *args)
        return call(*args, **kwargs)

    return intercept


@contextlib.contextmanager
def written_in_bfloat16(change: str):
    """The models of `configured`, in bfloat16, with a float32 softmax."""
    config = functools.partial(configured.Config, dtype=BF16)
    softmax = change != "softmax in 16 bits"
    layer = functools.partial(nn.MultiHeadDotProductAttention, force_fp32_for_softmax=softmax)
    plain = vars(configured)["_Mlp"]
    changed = change == "the policy of one path changed"
    mlp = (lambda of: plain(dataclasses.replace(of, dtype=F32))) if changed else plain
    with (
        mock.patch.object(configured, "Config", config),
        mock.patch.object(configured, "_Mlp", mlp),
        mock.patch.object(nn, "MultiHeadDotProductAttention", layer),
    ):
        yield


def policy_of(subject: Subject, change: str):
    changed = {
        "softmax in 16 bits": (subject.attention, f"{POLICY},softmax=bf16"),
        "the policy of one path changed": (subject.dense, "float32"),
    }
    if change not in changed:
        return POLICY
    end, policy = changed[change]
    return jaxmp.PolicyMap({f"**/{end}": policy}, default=POLICY)


def make(name: str, change: str):
    """The training step of a model, changed, and its arguments."""
    subject = SUBJECTS[name]
    with contextlib.ExitStack() as stack:
        abstract = lambda model, *x: jax.eval_shape(model.init, jax.random.key(0), *x)  # noqa: E731
        stack.enter_context(mock.patch.object(subject.room, "init", abstract))
        if subject.by_hand:
            stack.enter_context(written_in_bfloat16(change))
        model = getattr(subject.room, name)()
        if not subject.by_hand:  # the model that the loss closes over, wrapped
            cell = dict(zip(model.loss.__code__.co_freevars, model.loss.__closure__, strict=True))
            cell["model"].cell_contents = jaxmp.wrap(
                cell["model"].cell_contents, policy_of(subject, change)
            )

    def loss_fn(params, batch):
        context = written_in_bfloat16(change) if subject.by_hand else contextlib.nullcontext()
        with context, nn.intercept_methods(planted(subject, change)):
            return model.loss(params, batch)

    moment = {"mu_dtype": BF16} if "moment" in change else {}
    tx = optax.adam(1e-2 if change == "another learning rate" else 1e-3, **moment)
    batch = model.batch(0)
    if change == "another batch size":
        batch = jax.tree.map(lambda x: jnp.concatenate([x] * 4), batch)
    args = (model.params, jax.eval_shape(tx.init, model.params), batch)
    return sharded(step_of(loss_fn, tx, subject, change), change), args


def step_of(loss_fn, tx, subject: Subject, change: str):
    def reduced(path, g):
        here = subject.dense in jax.tree_util.keystr(path, simple=True, separator="/")
        if here and change == "a collective widened":
            return lax.pmean(g.astype(F32), "data")
        g = lax.pmean(g.astype(BF16), "data")
        return g if here and change == "gradients of one layer in 16 bits" else g.astype(F32)

    def reduce(grads):
        leaves, tree = jax.tree_util.tree_flatten_with_path(grads)
        backward = -1 if "another order" in change else 1
        return tree.unflatten([reduced(path, g) for path, g in leaves[::backward]][::backward])

    def step(params, opt_state, batch):
        rematted = jax.checkpoint(loss_fn) if change == REMAT else loss_fn
        loss, grads = jax.value_and_grad(rematted)(params, batch)
        updates, opt_state = tx.update(reduce(grads), opt_state, params)
        params = optax.apply_updates(params, updates)
        metric = optax.global_norm(params) if "is returned" in change else loss
        return params, opt_state, lax.pmean(loss, "data"), metric

    def renamed(weights, moments, data):
        # Another line, other names.
        value, slopes = jax.value_and_grad(loss_fn)(weights, data)
        changes, moments = tx.update(reduce(slopes), moments, weights)
        weights = optax.apply_updates(weights, changes)
        return weights, moments, lax.pmean(value, "data"), value

    def with_a_helper(params, opt_state, batch):
        def differentiate(params):
            return jax.value_and_grad(lambda params: loss_fn(params, batch))(params)

        loss, grads = differentiate(params)
        return *apply(params, opt_state, grads), lax.pmean(loss, "data"), loss

    def apply(params, opt_state, grads):
        updates, opt_state = tx.update(reduce(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return {"other names, other lines": renamed, "a helper function": with_a_helper}.get(
        change, step
    )


def sharded(step, change: str):
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices("cpu")[:2], axis_types=(AxisType.Auto,)
    )
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    sharded = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    return jax.jit(sharded) if change == "jit around the step" else sharded


def compared(name: str, change: str, folder: Path):
    """The differences between a model that was changed and the lock of the sound one."""
    step, args = make(name, change)
    return check(step, folder / f"{name}.lock", update=not change)(*args)


def is_named(name: str, change: str, module: str) -> bool:
    """Whether the path of a difference is that of the module the fault is in."""
    where = FAULTS[change]
    if where == "logits":  # of the outermost module, or behind it
        return "/" not in module or module.endswith(SUBJECTS[name].head)
    if where == "dense" and change == "the policy of one path changed" and SUBJECTS[name].by_hand:
        return "_Mlp_0" in module
    return getattr(SUBJECTS[name], where, where) in module


def main(names=tuple(SUBJECTS), faults=tuple(FAULTS), harmless=(*REFACTORINGS, REMAT)) -> int:
    jax.config.update("jax_num_cpu_devices", 2)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for name in names:
            compared(name, "", folder)
        print(f"| fault | {' | '.join(names)} |\n| :-- |{' :-- |' * len(names)}")
        caught = first = 0
        for change in faults:
            cells = []
            for name in names:
                found = compared(name, change, folder).differences
                named = [d for d in found if is_named(name, change, d.module)]
                foremost = bool(named) and named[0] is found[0]
                caught, first = caught + bool(named), first + foremost
                cells.append(
                    f"{len(found)}{', named first' if foremost else ', named' * bool(named)}"
                )
            print(f"| {change} | {' | '.join(cells)} |", flush=True)
        print(
            f"\n{caught} of {len(faults) * len(names)} caught and named, {first} of them first.\n"
        )
        print(f"| refactoring | {' | '.join(names)} |\n| :-- |{' :-- |' * len(names)}")
        unchanged = 0
        for change in harmless:
            cells = []
            for name in names:
                found = compared(name, change, folder).differences
                unchanged += not found and change != REMAT
                kinds = ", ".join(sorted({d.what for d in found}))
                cells.append(f"{len(found)}: {kinds}" if found else "0")
            print(f"| {change} | {' | '.join(cells)} |", flush=True)
        wanted = len(set(harmless) - {REMAT}) * len(names)
        print(f"\n{unchanged} of {wanted} refactorings change nothing.")
    return int(caught < len(faults) * len(names))


if __name__ == "__main__":
    sys.exit(main())
