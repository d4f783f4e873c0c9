"""The training steps of `gpu.py` in JAX: a row's model, loss, optimizer and step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import jaxmp

import aot
import peers
from convnets import ResNet
from models import Case, Size
from transformer import TransformerLM

LossFn = Callable[..., tuple[jax.Array, Any]]


class Program(NamedTuple):
    """A row's step.

    Attributes:
      start: A key to what is trained and the batch, `((params, carried, state), inputs, labels)`;
        what is carried are the optimizer's state and, for Flax, its loss scale.
      step: Of these, with what is trained again, and the loss.
      precision: What `jax.default_matmul_precision` is while it is traced; None for JAX's own.
    """

    start: Callable[[jax.Array], Any]
    step: Callable[..., tuple[Any, jax.Array]]
    precision: str | None = None


def program(variant: str, policy: str, size: dict[str, Any]) -> Program:
    """The step of a row of `gpu.STEPS`, at a size of `gpu.SIZES`."""
    case = case_of(size)
    model = model_of(case, variant, policy)
    loss_fn = case.loss_with(model)
    if variant.startswith(("jmp", "mpx")):
        loss_fn = peers.loss(case, variant.split(maxsplit=1)[0])
    optimizer = optax.adamw(3e-4)
    if "loss scaling" in variant:
        optimizer = jaxmp.dynamic_loss_scale(optimizer)
    dynamic_scale = "DynamicScale" in variant
    update = _step_of_flax if dynamic_scale else _step

    def start(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        inputs, labels = (
            _draw(k, s, case.full.classes)
            for k, s in zip(keys[1:], (case.full.inputs, case.full.labels), strict=True)
        )
        state = dict(model.init(keys[0], inputs[:1]))
        params = state.pop("params")
        carried: Any = optimizer.init(params)
        if dynamic_scale:
            # Arrays, so that it compiles once; its defaults are Python numbers.
            scale = DynamicScale(fin_steps=jnp.zeros([], jnp.int32), scale=jnp.float32(65536.0))
            carried = carried, scale
        return (params, carried, state), inputs, labels

    precision = "highest" if "TF32 off" in variant else None
    return Program(start, functools.partial(update, loss_fn, optimizer), precision)


def case_of(size: dict[str, Any]) -> Case:
    """A size of `gpu.py` as a case, which has no small one."""
    config = dict(size)
    batch = config.pop("batch")
    if "seq" in config:
        tokens = jax.ShapeDtypeStruct((batch, config["seq"]), jnp.int32)
        full = Size(config, tokens, tokens, config["vocab"])
        return Case("lm", TransformerLM, full, full, has_softmax=True)
    pixels, config["stages"] = config.pop("pixels"), tuple(config["stages"])
    images = jax.ShapeDtypeStruct((batch, pixels, pixels, 3), jnp.float32)
    full = Size(config, images, jax.ShapeDtypeStruct((batch,), jnp.int32), config["classes"])
    return Case("resnet", ResNet, full, full)


def model_of(case: Case, variant: str, policy: str) -> nn.Module:
    """The float32 model, or what a row makes of it."""
    low: dict[str, Any] = {"dtype": jnp.bfloat16}
    if policy:
        return jaxmp.wrap(case.model(), policy)
    if variant.startswith("hand-written"):
        return case.model(**low, float32_softmax=not variant.endswith("softmax too"))
    if variant.startswith("Flax float16"):
        return case.model(dtype=jnp.float16, float32_softmax=True)
    if variant.startswith("Qwix"):
        return peers.qwix_model(case.model(**low), variant.split()[1])
    if variant.startswith("TransformerEngine"):
        from transformer_engine.common.recipe import Float8CurrentScaling
        from transformer_engine.jax import flax as te_flax

        products = te_flax.make_dot_general_cls(Float8CurrentScaling())
        return case.module(**case.full.config, **low, dot_general_cls=products)
    return case.model()


def _draw(key: jax.Array, like: jax.ShapeDtypeStruct, classes: int) -> jax.Array:
    if like.dtype == jnp.int32:
        return jax.random.randint(key, like.shape, 0, classes)
    return jax.random.normal(key, like.shape, like.dtype)


def _step(
    loss_fn: LossFn, optimizer: Any, trained: Any, inputs: jax.Array, labels: jax.Array
) -> Any:
    params, opt_state, state = trained
    # Without a loss scale in the optimizer's state this is `jax.value_and_grad`.
    grad_fn = jaxmp.value_and_grad(loss_fn, opt_state, has_aux=True)
    (loss, state), grads = grad_fn(params, state, inputs, labels)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, state), loss


def _step_of_flax(
    loss_fn: LossFn, optimizer: Any, trained: Any, inputs: jax.Array, labels: jax.Array
) -> Any:
    """As in flax's examples/imagenet/train.py."""
    params, (opt_state, scale), state = trained
    grad_fn = scale.value_and_grad(loss_fn, has_aux=True)
    scale, finite, (loss, state), grads = grad_fn(params, state, inputs, labels)
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    select = functools.partial(jnp.where, finite)
    params = jax.tree.map(select, new_params, params)
    opt_state = jax.tree.map(select, new_opt_state, opt_state)
    return (params, (opt_state, scale), state), loss


def multiplied(made: Program) -> dict[str, float]:
    """The audit: shares of the FLOPs of the step's contractions, by the dtypes multiplied."""
    with precision_of(made):
        arguments = jax.eval_shape(made.start, jax.random.key(0))
        flops = aot.contraction_flops_by_dtype(made.step, *arguments)
    return {dtypes: n / sum(flops.values()) for dtypes, n in flops.most_common()}


def precision_of(made: Program) -> contextlib.AbstractContextManager[None]:
    return (
        jax.default_matmul_precision(made.precision) if made.precision else contextlib.nullcontext()
    )
