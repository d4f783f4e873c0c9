"""Wrapped models that leave for serving: `jax.export`, read where jaxmp is not, and ONNX.

docs/how_to/export.md says what these tests find.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import export

import jaxmp

from support import gaussian

BATCHES = 1, 8, 64
X = gaussian(0, 64, 128)
DTYPES = {"bfloat16": "xbf16>", "int8": "xi8>", "int4": "xi4>", "activations": "x256xi32>"}

# Of each program in a folder, the results at each batch, in a process that has neither library.
SERVER = """
import pathlib, sys

class Refused:
    def find_spec(self, name, *args):
        if name.partition(".")[0] in ("jaxmp", "flax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refused())
import numpy as np
from jax import export

folder = pathlib.Path(sys.argv[1])
x = np.load(folder / "x.npy")
for path in folder.glob("*.bin"):
    program = export.deserialize(path.read_bytes())
    for batch in map(int, sys.argv[2:]):
        np.save(f"{path}.{batch}.npy", program.call(x[:batch]))
assert not {"jaxmp", "flax"} & sys.modules.keys()
"""


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.gelu(nn.LayerNorm()(nn.Dense(256)(x))))


class NNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def function(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def served(kind: str, stored: str) -> Any:
    """Returns a trained model of a kind as a function of its input, its weights stored so."""
    policy = "mixed_bfloat16" + ",activations=int8" * (stored == "activations")

    def store(tree: Any) -> Any:
        weights = {"bfloat16": None, "activations": "int8@row"}.get(stored, stored)
        return tree if weights is None else jaxmp.quantize(tree, weights)

    if kind == "nnx":
        return jaxmp.wrap(store(NNX(nnx.Rngs(0))), policy)
    if kind == "linen":
        variables = store(Linen().init(jax.random.key(0), X))
        return lambda x: jaxmp.wrap(Linen(), policy).apply(variables, x)
    shapes = {"up": (128, 256), "down": (256, 32)}
    params = store({name: gaussian(i, *s, scale=0.1) for i, (name, s) in enumerate(shapes.items())})
    return lambda x: jaxmp.autocast(function, policy)(params, x)


def exported(fn: Any, rows: str = "batch") -> Any:
    shape = export.symbolic_shape(f"{rows}, {X.shape[1]}")
    return export.export(jax.jit(fn))(jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.slow
def test_programs_are_served_to_the_bit_where_jaxmp_is_not(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    models = {(k, s): served(k, s) for k in ("linen", "nnx", "function") for s in DTYPES}
    np.save(tmp_path / "x.npy", X)
    for (kind, stored), fn in models.items():
        program = exported(fn)
        assert DTYPES[stored] in program.mlir_module(), (kind, stored)
        (tmp_path / f"{kind}_{stored}.bin").write_bytes(program.serialize())
    command = [sys.executable, "-c", SERVER, tmp_path, *map(str, BATCHES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    for (kind, stored), fn in models.items():
        for batch in BATCHES:
            got = np.load(tmp_path / f"{kind}_{stored}.bin.{batch}.npy")
            np.testing.assert_array_equal(got, jax.jit(fn)(X[:batch]), f"{kind} {stored} {batch}")


def test_one_scale_of_all_inputs_makes_a_row_depend_on_the_others() -> None:
    variables = Linen().init(jax.random.key(0), X)
    outlier = np.concatenate([X[:15], 64 * X[15:16]])

    def depends(policy: str) -> bool:
        fn = exported(lambda x: jaxmp.wrap(Linen(), policy).apply(variables, x), "16*batch").call
        return bool(jnp.any(fn(X[:16])[0] != fn(outlier)[0]))

    assert depends("mixed_float8")
    assert not depends("mixed_bfloat16,matmul=float8@row")
    assert not depends("mixed_bfloat16")


def test_float8_is_that_of_the_chip_that_a_program_is_traced_for() -> None:
    """Of ``platforms=``, tracing knows nothing; a name, or an abstract device, says the chip."""
    variables = Linen().init(jax.random.key(0), X)

    def program(policy: str) -> str:
        fn = jax.jit(jaxmp.wrap(Linen(), policy).apply)
        return export.export(fn, platforms=["tpu"])(variables, X).mlir_module()

    assert "f8E4M3FN>" in program("mixed_float8")
    assert "f8E4M3B11FNUZ>" in program("mixed_bfloat16,matmul=e4m3b11")
    v5e = jax.sharding.AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=v5e)
    with jax.sharding.use_abstract_mesh(mesh):
        assert "f8E4M3B11FNUZ>" in program("mixed_float8")


def on_onnx(fn: Any, x: jax.Array, rows: Any = "B") -> np.ndarray:
    """Runs a function of so many rows as ONNX Runtime does, once jax2onnx has converted it."""
    to_onnx = pytest.importorskip("jax2onnx").to_onnx
    runtime = pytest.importorskip("onnxruntime")
    model = to_onnx(fn, [(rows, x.shape[1])]).SerializeToString()
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    [result] = session.run(None, {session.get_inputs()[0].name: np.asarray(x)})
    return np.asarray(result)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("rows", [1, 8])
def test_onnx_takes_models_in_float32_and_dequantized_weights(rows: int) -> None:
    variables = jaxmp.quantize(Linen().init(jax.random.key(0), X), "int8")
    net = jaxmp.quantize(NNX(nnx.Rngs(0)), "int8")

    def linen(x):
        return Linen().apply(jaxmp.dequantize(variables), x)

    x = X[:rows]
    for fn in (linen, jaxmp.dequantize(net)):
        np.testing.assert_allclose(on_onnx(fn, x), fn(x), rtol=1e-5, atol=1e-5)
    got = on_onnx(linen, x)
    trained = jaxmp.wrap(Linen(), "mixed_bfloat16")
    assert jaxmp.parity(trained.apply, {"Linen": got})(variables, x)
    assert not jaxmp.parity(trained.apply, {"Linen": got + 0.5})(variables, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_has_no_policy() -> None:
    """docs/how_to/export.md says so; when this fails, it says too little."""
    bf16 = jaxmp.wrap(NNX(nnx.Rngs(0)), "mixed_bfloat16")
    with pytest.raises(Exception, match="Could not find an implementation for Gemm"):
        on_onnx(bf16, X)
    with pytest.raises(NotImplementedError, match="with 'initial' is not supported for ONNX"):
        on_onnx(jaxmp.wrap(NNX(nnx.Rngs(0)), "mixed_float8"), X, 64)
    variables = Linen().init(jax.random.key(0), X)
    got = on_onnx(lambda x: jaxmp.wrap(Linen(), "mixed_bfloat16").apply(variables, x), X)
    np.testing.assert_allclose(got, Linen().apply(variables, X), rtol=1e-5, atol=1e-5)
    quantized = jaxmp.quantize(variables, "int8")
    with pytest.raises(ValueError, match="__jax_array__"):
        on_onnx(lambda x: jaxmp.wrap(Linen(), "mixed_bfloat16").apply(quantized, x), X)
