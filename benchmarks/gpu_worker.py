"""Runs one row of `gpu.py` and prints it: a process of its own, so that its memory is, too."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def median_seconds(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> float:
    """The median of `repeats`, each of as many calls as take 1/20 s, after two to warm up."""
    wait(call()), wait(call())
    started = time.perf_counter()
    wait(call())
    calls = max(1, math.ceil(0.05 / (time.perf_counter() - started)))
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            out = call()
        wait(out)
        found.append((time.perf_counter() - started) / calls)
    return statistics.median(found)


def put(**row: Any) -> None:
    print("ROW " + json.dumps(row), flush=True)


def where() -> dict[str, Any]:
    import flax
    import jax

    device = jax.devices()[0]
    versions = f"JAX {jax.__version__}, Flax {flax.__version__}"
    return {"device": device.device_kind, "versions": versions}


def peak() -> int | None:
    """The most memory that was in use on the device; None where the backend keeps no count."""
    import jax

    stats = jax.devices()[0].memory_stats()
    return stats and stats.get("peak_bytes_in_use")


def step_program(variant: str, policy: str, size: dict[str, int]) -> tuple[Any, Any]:
    """`start(key) -> (params, opt_state, tokens, labels)`, and the step of these, with its loss."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxmp

    from models import TransformerLM

    config = {name: n for name, n in size.items() if name != "batch"}
    hand = variant.startswith("hand")
    softmax = {"float32_softmax": not variant.endswith("softmax too")} if hand else {}
    model = TransformerLM(**config, dtype=jnp.bfloat16 if hand else None, **softmax)
    if policy:
        model = jaxmp.wrap(model, policy)
    tx = optax.adamw(3e-4)

    def loss_fn(params: Any, tokens: Any, labels: Any) -> Any:
        logits = model.apply({"params": params}, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params: Any, opt_state: Any, tokens: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def start(key: Any) -> Any:
        keys = jax.random.split(key, 3)
        shape = size["batch"], size["seq"]
        tokens, labels = (jax.random.randint(k, shape, 0, size["vocab"]) for k in keys[1:])
        params = model.init(keys[0], tokens[:1])["params"]
        return params, tx.init(params), tokens, labels

    return start, step


def jax_step(job: dict[str, Any]) -> None:
    import jax

    start, step = step_program(job["variant"], job["policy"], job["size"])
    *state, tokens, labels = jax.jit(start)(jax.random.key(0))
    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, tokens, labels).compile()
    seconds_to_compile = time.perf_counter() - started
    *state, loss = compiled(*state, tokens, labels)
    first = float(loss)  # every row's, at the same parameters and tokens: they should agree

    def call() -> Any:
        *state[:], loss = compiled(*state, tokens, labels)
        return loss

    seconds = median_seconds(call, jax.block_until_ready, job["repeats"])
    put(seconds=seconds, compiled=seconds_to_compile, peak=peak(), loss=first, **where())


def products(job: dict[str, Any]) -> None:
    import jax

    import gpu_products

    for index in job["indices"]:
        _, m, k, n = job["shapes"][index]
        try:
            fn, args = gpu_products.program(job["variant"], job["recipe"], m, k, n)
            started = time.perf_counter()
            compiled = jax.jit(fn).lower(*args).compile()
            seconds_to_compile = time.perf_counter() - started

            def call(compiled: Any = compiled, args: Any = args) -> Any:
                return compiled(*args)

            seconds = median_seconds(call, jax.block_until_ready, job["repeats"])
        except Exception as error:  # noqa: BLE001 - of any kind: the other shapes are measured
            full = "RESOURCE_EXHAUSTED" in str(error)
            what = "out of memory" if full else f"{type(error).__name__}: {str(error)[:120]}"
            put(shape=index, error=what)
            continue
        put(shape=index, seconds=seconds, compiled=seconds_to_compile, **where())


def main() -> None:
    job = json.loads(sys.argv[1])
    if job["kind"] == "products":
        products(job)
    elif job["variant"].startswith("PyTorch"):
        import gpu_torch

        put(**gpu_torch.step(job, median_seconds))
    else:
        jax_step(job)


if __name__ == "__main__":
    main()
