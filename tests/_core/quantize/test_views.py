"""`View`: an array that was moved, rebuilt from the pieces that the view says it is of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmp._core.quantize.views import View


def view_of(fn, shape):
    """The view of the result of a function that moves its argument; None where one is lost."""
    view = View.of(0, shape)
    for eqn in jax.make_jaxpr(fn)(np.zeros(shape, np.float32)).jaxpr.eqns:
        view = view and view.moved(eqn)
    return view


def rebuilt(view, array):
    """The array that a view says it is, of the weight."""
    sizes = [size for _, size in view.pieces]
    order = view.pieces_of(range(len(view.dims)))
    rest = [i for i in range(len(sizes)) if i not in order]
    assert all(sizes[i] == 1 for i in rest)
    shape = [int(np.prod(view.sizes(dim))) for dim in view.dims]
    return array.reshape(sizes).transpose(*rest, *order).reshape(shape)


MOVES = {
    "as it is": lambda x: x.astype(jnp.bfloat16),
    "merged and cut again": lambda x: x.reshape(-1).reshape(2, 12, -1),
    "cut, transposed, merged": lambda x: (
        x.reshape(2, 2, 6, 5).transpose(2, 0, 3, 1).reshape(12, 10)
    ),
    "cut twice": lambda x: (
        x.reshape(2, 2, 30).transpose(1, 0, 2).reshape(2, 2, 3, 10).reshape(2, -1, 5)
    ),
    "axes of size 1": lambda x: jnp.squeeze(x[:, None].swapaxes(0, 1)[..., None], 0),
    "merged after a transpose": lambda x: x.T.reshape(-1).reshape(5, 6, 2, 2),
    "a barrier": lambda x: lax.optimization_barrier(lax.stop_gradient(x)).T,
}


@pytest.mark.parametrize("name", MOVES)
def test_a_view_is_the_array(name):
    shape = (4, 6, 5)
    array = np.arange(120.0).reshape(shape)
    view = view_of(MOVES[name], shape)
    np.testing.assert_array_equal(rebuilt(view, array), np.float64(MOVES[name](jnp.asarray(array))))


def test_random_moves():
    array = np.arange(24.0).reshape(4, 6)
    count = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        steps = []
        for _ in range(3):
            cuts = np.split(rng.permutation([2, 2, 3, 2, 1]), np.sort(rng.integers(0, 6, 2)))
            steps.append(([int(np.prod(c)) for c in cuts], rng.permutation(3)))

        def moved(x, steps=steps):
            for shape, order in steps:
                x = x.reshape(shape).transpose(order)
            return x

        view = view_of(moved, array.shape)
        # A reshape may cut 2 x 3 as 3 x 2, which has parts of both: such a weight has no view.
        if view is not None:
            np.testing.assert_array_equal(rebuilt(view, array), moved(array))
            count += 1
    assert count >= 10


OTHERWISE = {
    "parts of two axes": lambda x: x.reshape(6, 4, 5).transpose(1, 0, 2),
    "a part": lambda x: x[:2],
    "repeated": lambda x: jnp.broadcast_to(x[None], (2, 4, 6, 5)),
    "scaled": lambda x: 2 * x,
    "axes permuted by a reshape": lambda x: lax.reshape(x, (5, 24), (2, 0, 1)),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_no_move_has_no_view(name):
    assert view_of(OTHERWISE[name], (4, 6, 5)) is None


def test_a_loop_slices_the_first_axis():
    view = View.of(3, (7, 4, 6)).in_scan(sliced=True).reshaped((2, 12)).in_scan(sliced=False)
    assert view.loops == (True, False)
    assert view.axes_of(view.stacked) == (0,)
    assert [view.sizes(dim) for dim in view.dims] == [[2], [2, 6]]
    assert view.axes_of(view.dims[0]) is None
    assert view.axes_of(view.pieces_of((0, 1))) == (1, 2)
