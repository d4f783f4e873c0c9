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


def median_step_seconds(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> float:
    """The median of `repeats` steps, each waited for, after three to warm up."""
    found = []
    for step in range(repeats + 3):
        started = time.perf_counter()
        wait(call())
        if step >= 3:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


# The least share of FLOPs that a row in 16 or 8 bits multiplies in them. Flax's softmax in float32
# leaves those of probabilities and values mixed.
LEAST_LOW = 0.8
EIGHT_BITS = ("float8", "int8")


def not_as_named(variant: str, shares: dict[str, float]) -> str:
    """What of a row's contractions contradicts its name; empty if nothing does.

    Args:
      variant: The row.
      shares: By the dtypes multiplied, shares of the FLOPs; calls of a library's own products
        are in none.
    """
    names = {dtypes: dtypes.split("*") for dtypes in shares}
    low = sum(n for d, n in shares.items() if not {"float32", "float64"} & set(names[d]))
    eight = sum(n for d, n in shares.items() if any(x.startswith(EIGHT_BITS) for x in names[d]))
    said = ", ".join(f"{n:.0%} {dtypes}" for dtypes, n in shares.items())
    if variant.startswith(("float32", "PyTorch float32")):
        return f"audit: not float32 throughout: {said}" if low else ""
    if low < LEAST_LOW:
        return f"audit: {low:.0%} in 16 or 8 bits: {said}"
    if (
        any(
            word.startswith(("float8", "int8", "mixed_float8", "mixed_int8"))
            for word in variant.split()
        )
        and not eight
        and not variant.startswith("TransformerEngine")
    ):
        return f"audit: nothing is multiplied in 8 bits: {said}"
    return ""


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


def jax_step(job: dict[str, Any]) -> None:
    import jax

    import gpu_steps

    made = gpu_steps.program(job["variant"], job["policy"], job["size"])
    shares = gpu_steps.multiplied(made)
    if wrong := not_as_named(job["variant"], shares):
        put(error=wrong, multiplied=shares)
        return
    trained, *batch = jax.jit(made.start)(jax.random.key(0))
    started = time.perf_counter()
    with gpu_steps.precision_of(made):
        compiled = jax.jit(made.step, donate_argnums=0).lower(trained, *batch).compile()
    seconds_to_compile = time.perf_counter() - started
    state = [trained]
    del trained
    state[0], loss = compiled(state[0], *batch)
    first = float(loss)  # every row's, at the same parameters and batch: they should agree

    def call() -> Any:
        state[0], loss = compiled(state[0], *batch)
        return loss

    seconds = median_step_seconds(call, jax.block_until_ready, job["repeats"])
    put(
        seconds=seconds,
        compiled=seconds_to_compile,
        peak=peak(),
        loss=first,
        multiplied=shares,
        **where(),
    )


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

        put(**gpu_torch.step(job, median_step_seconds, not_as_named))
    else:
        jax_step(job)


if __name__ == "__main__":
    main()
