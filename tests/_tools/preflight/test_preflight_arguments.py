"""What `preflight` says that a program's arguments are for, and the bytes of each."""

from __future__ import annotations

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._tools.preflight.hlo import read_hlo
from jaxmp._tools.preflight.program import bytes_by_purpose
from jaxmp._tools.preflight.report import PreflightReport
from jaxmp._tools.preflight.result import Preflight
from jaxmp._tools.preflight.size_search import Largest
from jaxmp._tools.speed.target import parse_target

N = 64 * 128
BATCH = jax.ShapeDtypeStruct((16, 64), "float32")


def weights(dtype="float32"):
    """As Linen has them; an optimizer's moments have the same names."""
    return {"params": {"w": jax.ShapeDtypeStruct((64, 128), dtype)}}


def state_of(tx, dtype="float32"):
    return jax.eval_shape(tx.init, weights(dtype))


def sizes(*args, params=(0,), batch=(-1,)):
    """The bytes of what is not a counter, a key or a scale."""
    found = bytes_by_purpose(args, params, batch)
    large = {p: {d: n for d, n in of.items() if n >= 512} for p, of in found.items()}
    return {purpose: of for purpose, of in large.items() if of}


ADAM = optax.adam(1e-3)
REMAINDERS = jaxmp.master_weights(jaxmp.store_state(ADAM, "int8"), remainder=True)


@pytest.mark.parametrize(
    ("tx", "dtype", "expected"),
    [
        (ADAM, "float32", {"optimizer state": {"float32": 8 * N}}),
        (jaxmp.store_state(ADAM, "bfloat16"), "float32", {"optimizer state": {"bfloat16": 4 * N}}),
        (
            jaxmp.master_weights(jaxmp.dynamic_loss_scale(ADAM)),
            "float16",
            {"master weights": {"float32": 4 * N}, "optimizer state": {"float32": 8 * N + 4}},
        ),
        (
            REMAINDERS,
            "bfloat16",
            {
                "master weights": {"uint16": 2 * N},
                "optimizer state": {"int8": 2 * N, "float32": 2 * 128 * 4},
            },
        ),
        (
            optax.MultiSteps(jaxmp.store_state(ADAM, "bfloat16"), 4),
            "float32",
            {"optimizer state": {"bfloat16": 4 * N, "float32": 4 * N}},
        ),
    ],
    ids=["adam", "bfloat16", "masters", "remainders", "sums"],
)
def test_states_of_optimizers(tx, dtype, expected):
    params = {"parameters": {dtype: N * jnp.dtype(dtype).itemsize}}
    found = sizes(weights(dtype), state_of(tx, dtype), BATCH)
    assert found == {**params, **expected, "batch": {"float32": 16 * 64 * 4}}


def test_train_states_and_nnx_models_and_optimizers():
    linen, model = nn.Dense(128), nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    params = linen.init(jax.random.key(0), jnp.ones((1, 64)))["params"]
    for state in (
        *(
            (kind.create(apply_fn=linen.apply, params=params, tx=ADAM),)
            for kind in (train_state.TrainState, jaxmp.TrainState)
        ),
        (model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)),
    ):
        found = sizes(*state, BATCH)
        assert found["parameters"] == {"float32": 4 * (N + 128)}
        assert found["optimizer state"] == {"float32": 8 * (N + 128)}


def test_averages_of_a_batch_norm_are_no_parameters():
    model = nn.Sequential([nn.Dense(128), nn.BatchNorm(use_running_average=True)])
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 64)))
    found = sizes(variables, BATCH)
    assert found["parameters"] == {"float32": 4 * (N + 3 * 128)}
    assert found["other arguments"] == {"float32": 4 * 2 * 128}


def test_keys_and_numpy_and_what_has_no_bytes():
    found = bytes_by_purpose([np.ones(256, np.float16), jax.random.key(0)], [], [])
    assert list(found) == ["other arguments"]
    assert found["other arguments"]["float16"] == 512
    assert bytes_by_purpose([None, 3, "a", {}], [0], [-1]) == {}
    assert bytes_by_purpose([], [0], [-1]) == {}


def test_sizes_are_of_one_device():
    mesh = AbstractMesh((64,), ("data",), axis_types=(AxisType.Auto,))
    over = NamedSharding(mesh, P("data"))
    split = jax.ShapeDtypeStruct((64, 128), "float32", sharding=over)
    assert sizes(split) == {"parameters": {"float32": 4 * N // 64}}


def test_rows_of_the_report():
    moments = {"int8": 3 * 2**28, "float32": 2**20}
    arguments = {"parameters": {"float32": 2**28}, "optimizer state": moments}
    results = (
        Preflight(policy="one", argument_bytes=2**30, program=read_hlo("")),
        Preflight(policy="two", error="it failed"),
    )
    report = PreflightReport(parse_target("gpu-h100"), results, arguments)
    rows = [re.sub("  +", " | ", line.strip()) for line in str(report).splitlines()]
    first = rows.index("arguments | 1.00 GiB | -")
    assert rows[first + 1 : first + 4] == [
        "parameters float32 | 256.0 MiB | -",
        "optimizer state int8 | 0.75 GiB | -",
        "temporaries | 0 B | -",
    ]
    assert report.to_dict()["arguments"]["optimizer state"]["float32"] == 2**20


def test_the_parts_of_a_small_model_have_a_size_and_add_up():
    """Not seven rows of "0.0 MiB"; what the compiler pads, and results, are rows of their own."""
    one = Preflight(
        policy="one",
        argument_bytes=1536,
        output_bytes=31_024,
        aliased_bytes=1024,
        temporary_bytes=2048,
        code_bytes=600_000,
        program=read_hlo(""),
    )
    arguments = {"parameters": {"float32": 1024}, "other arguments": {"int32": 4}}
    report = PreflightReport(parse_target("gpu-h100"), (one,), arguments)
    rows = dict(
        line.strip().rsplit("  ", 1) for line in str(report).splitlines() if "  " in line.strip()
    )
    sizes = {name.strip(): size.strip() for name, size in rows.items()}
    assert sizes["others, padding"] == "0.5 KiB"
    assert sizes["results"] == "29.3 KiB"
    assert sizes["code"] == "0.6 MiB"
    assert "0.0 MiB" not in str(report)
    assert "Reported by the compiler: memory, products. What is in a loop counts once." in str(
        report
    )


def test_a_search_without_a_limit_says_so():
    assert str(Largest(2097152, None)) == "2097152 or more"
