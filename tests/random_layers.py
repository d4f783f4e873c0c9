"""Random networks of well-known layers, each written once for the kits of `numeric_kit`.

Where `random_programs` has any operations in any order, these have what models are made of: dense
layers, normalizations, activations, gates, attention, a recurrent layer. By hand each returns 16
bits, as Flax's do with a `dtype`, and normalizes in float32. What `READERS` make of the values on
the way is the loss: it reads in float32 what later layers multiply.

None of them has a kink: what rounding moves across one tells nothing about a transformation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numeric_kit import Plain

ROWS, WIDTH = 32, 8
MATRIX, VECTOR = (WIDTH, WIDTH), (WIDTH,)
BATCHES = 3


class Layer(NamedTuple):
    """`run(kit, h, x, *weights)`: of activations `h` and the network's input `x`."""

    shapes: Sequence[tuple[int, ...]]
    run: Callable[..., jax.Array]


def _normalized(h: jax.Array, axis: int) -> jax.Array:
    return (h - h.mean(axis, keepdims=True)) / (h.std(axis, keepdims=True) + 1e-3)


def _attention(k: Plain, h: jax.Array, _x: jax.Array, w: jax.Array) -> jax.Array:
    scores = k.mm(k.mm(h, w), jnp.swapaxes(h, 0, 1)) / 3
    return k.mm(jax.nn.softmax(k.up(scores)), h)


def _recurrent(k: Plain, h: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    def step(state: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(k.mm(state, w) + row)
        return state, state

    return k.scan(step, jnp.zeros_like(h[0]), h)[1] + k.down(x)


def _elementwise(fn: Callable[[jax.Array], jax.Array]) -> Layer:
    return Layer((), lambda k, h, x: fn(h))


def _in_float32(fn: Callable[[jax.Array], jax.Array]) -> Layer:
    return Layer((), lambda k, h, x: k.down(fn(k.up(h))))


LAYERS: dict[str, Layer] = {
    "product": Layer([MATRIX], lambda k, h, x, w: k.mm(h, w)),
    "dense": Layer([MATRIX, VECTOR], lambda k, h, x, w, b: k.mm(h, w) + k.param(b)),
    "scaled": Layer([VECTOR, VECTOR], lambda k, h, x, g, b: h * k.param(1 + g) + k.param(b)),
    "residual": Layer([MATRIX], lambda k, h, x, w: h + jnp.tanh(k.mm(h, w))),
    "from the input": Layer([MATRIX], lambda k, h, x, w: k.down(x) + k.mm(h, w)),
    "gated": Layer([MATRIX], lambda k, h, x, w: h * jax.nn.sigmoid(k.mm(h, w))),
    "feed forward": Layer(
        [MATRIX, MATRIX], lambda k, h, x, u, v: h + k.mm(jax.nn.gelu(k.mm(h, u)), v)
    ),
    "attention": Layer([MATRIX], _attention),
    "recurrent": Layer([MATRIX], _recurrent),
    "layer norm": _in_float32(lambda h: _normalized(h, -1)),
    "batch norm": _in_float32(lambda h: _normalized(h, 0)),
    "RMS norm": _in_float32(lambda h: h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3)),
    "unit rows": _in_float32(lambda h: h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-3)),
    "softmax": _in_float32(jax.nn.softmax),
    "centered": _in_float32(lambda h: h - h.mean(-1, keepdims=True)),
    "running mean": _in_float32(lambda h: jnp.cumsum(h, 0) / ROWS),
    "differences": _in_float32(lambda h: jnp.roll(h, 1, 0) - h),
    "gelu": _elementwise(jax.nn.gelu),
    "silu": _elementwise(jax.nn.silu),
    "softplus": _elementwise(jax.nn.softplus),
    "log-sigmoid": _elementwise(jax.nn.log_sigmoid),
    "tanh": _elementwise(jnp.tanh),
    "square": _elementwise(lambda h: h**2 / 2),
    "two halves": _elementwise(
        lambda h: jnp.concatenate([h[:, : WIDTH // 2], h[:, WIDTH // 2 :] * 2], -1)
    ),
}

READERS: dict[str, Layer] = {
    "products": Layer([MATRIX], lambda k, h, x, w: jnp.mean(k.up(k.mm(h, w)) ** 2)),
    "logits": Layer(
        [MATRIX], lambda k, h, x, w: jnp.mean(jax.nn.log_softmax(k.up(k.mm(h, w)))[:, 0])
    ),
    "values": Layer((), lambda k, h, x: jnp.mean(jnp.sin(k.up(h)))),
    "logarithms": Layer((), lambda k, h, x: jnp.mean(jnp.log(jax.nn.softplus(k.up(h)) + 1e-2))),
    "sums": Layer((), lambda k, h, x: jnp.mean(jnp.sum(k.up(h), -1) ** 2)),
    "distances": Layer((), lambda k, h, x: jnp.mean((k.up(h) - x) ** 2)),
}


class Network(NamedTuple):
    """Layers by name, some of which a reader follows, and the seed of weights and inputs."""

    layers: tuple[str, ...]
    readers: tuple[str | None, ...]
    seed: int

    @classmethod
    def draw(cls, choose: Callable[[int], int]) -> Network:
        """Draws a network; `choose(n)` is a number below n."""
        names, readers = tuple(LAYERS), tuple(READERS)
        layers = ("product", *(names[choose(len(names))] for _ in range(3 + choose(5))))
        read = [readers[choose(len(readers))] if choose(4) == 0 else None for _ in layers[1:]]
        return cls(layers, (*read, readers[choose(len(readers))]), choose(1 << 16))

    @property
    def _parts(self) -> list[Layer]:
        parts = zip(self.layers, self.readers, strict=True)
        return [
            part
            for layer, reader in parts
            for part in (LAYERS[layer], *([READERS[reader]] if reader else []))
        ]

    def inputs(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The weights, and batches of inputs."""
        rng = np.random.default_rng(self.seed)
        shapes = [shape for part in self._parts for shape in part.shapes]
        weights = [rng.normal(size=s) / (np.sqrt(WIDTH) if len(s) > 1 else 3) for s in shapes]
        batches = [rng.normal(size=(ROWS, WIDTH)) for _ in range(BATCHES)]
        return [w.astype(np.float32) for w in weights], [x.astype(np.float32) for x in batches]

    def loss(self, kit: Plain) -> Callable[[Sequence[jax.Array], jax.Array], jax.Array]:
        """The loss of weights and a batch, as the kit computes it."""

        def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
            left, h, total = list(weights), x, jnp.zeros(())
            for part in self._parts:
                own = [left.pop(0) for _ in part.shapes]
                out = part.run(kit, h, x, *own)
                if out.ndim:
                    h = out
                else:
                    total += out
            return total

        return loss
