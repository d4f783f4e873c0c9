"""The table of JAX's primitives, each with its class and flags: the only list of them.

The classes say what autocast does with a primitive:

* ``compute``: a contraction. Its float32 operands are multiplied in the compute dtype.
* ``full_precision``: numerically sensitive; runs in float32.
* ``promote``: elementwise; runs low with a low operand when a contraction wants the result.
* ``move``: moves or selects values without changing them; runs in the dtype they have, or in
  that of the products that read them.
* ``as_written``: runs exactly as written, as does a primitive that is not listed.

The flags are further properties; `flagged` returns the primitives that have one.
Higher-order primitives (scan, cond, …) are not listed: `jaxmp._core.jaxprs.higher_order` has their
inner jaxprs.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterator
from typing import NamedTuple


class Flag(enum.Flag):
    """A property that a primitive of any class may have."""

    # --- numerics ---

    # `x - mean(x)`, `x * rsqrt(var(x))`, `x / norm(x)`: combines a value with its own statistic.
    NORMALIZING = enum.auto()
    # The affine end of a normalization. The first `promote` op without this flag, on the way to a
    # contraction, is where a float32 value may be narrowed (`relu(batch_norm(x))`).
    AFFINE = enum.auto()
    # Selects among its operands: exact if these are low or constants.
    CHOOSING = enum.auto()
    # Rounds to integers, or takes a remainder: its operand is a position, as of a cast to integers.
    ROUNDING = enum.auto()
    # Compares its operands: one that is compared with integers is a position as well.
    COMPARING = enum.auto()
    # A linear system or decomposition: amplifies small errors of its operand, and may return large
    # numbers that cancel.
    SOLVING = enum.auto()
    # A function of an angle, whose errors it amplifies.
    PERIODIC = enum.auto()
    # One of `PERIODIC` that turns a position into an entry of a table.
    SINUSOID = enum.auto()
    # A function whose domain has a boundary, where it is steep.
    BOUNDED_DOMAIN = enum.auto()
    # A running sum or product: of positions, times or knots, whose differences are taken.
    CUMULATIVE = enum.auto()
    # A sum by index (`segment_sum`). Its summands are arrays in memory, like operands of products.
    POOLING = enum.auto()
    # May exceed float16's range with operands within it, as contractions may: policies that
    # `saturate` clip its results. Infinities of others, as log(0), are infinite in every dtype.
    MAY_OVERFLOW = enum.auto()
    # Its operands are terms, which may cancel.
    SUMMING = enum.auto()
    # Its result has the loss scale as a factor to the same power as its operands. So have the
    # results of all `move` ones, which do not need this flag.
    LINEAR = enum.auto()

    # --- arrays ---

    # Looks up rows of a table by index.
    LOOKING_UP = enum.auto()
    # A move that changes neither values nor their order of magnitude.
    MOVING = enum.auto()
    # One of `MOVING` that neither drops nor repeats an element.
    REORDERING = enum.auto()
    # Its result is its operand, in another dtype, layout or place perhaps.
    IDENTITY = enum.auto()
    # Takes or joins parts of values, each unchanged.
    IN_PARTS = enum.auto()
    # Joins operands, or an operand and its padding.
    JOINING = enum.auto()
    # Sends values from device to device, or declares where they are.
    CROSSING = enum.auto()
    # One of `CROSSING` that hands a value on to another device.
    SENDING = enum.auto()
    # Its transpose sums over what it repeats, so a 16-bit operand is widened around it: the values
    # are the same and the sum in the backward pass is float32.
    REPEATING = enum.auto()
    # Elementwise, and broadcasts operands of size 1, so its transpose sums.
    BROADCASTING = enum.auto()
    # One of `BROADCASTING` whose operands are residuals: `bind.rescaled` saves them before they are
    # broadcast.
    SCALING = enum.auto()
    # Writes one operand into another, and keeps the dtype of the first.
    WRITING = enum.auto()
    # Reduces the rows of an array to statistics of them.
    STATISTIC = enum.auto()

    # --- programs ---

    # Bound again each time: it has effects, names an axis, or its parameters are not hashable.
    UNCACHED = enum.auto()
    # Evaluated when a program is planned, where its operands are known numbers.
    FOLDED = enum.auto()
    # Cheap to rematerialize in the backward pass. Or complex, as `fft` and `eig`: `jax.checkpoint`
    # rounds the values that it saves by `lax.reduce_precision`, which takes no complex ones
    # (JAX 0.10 to 0.12).
    CHEAP = enum.auto()
    # Computes in the dtype of its operands, whichever it is; its only dtype parameter, if any, is
    # that of the result.
    POLYMORPHIC = enum.auto()
    # Its results are elements of its operands, unchanged: there is nothing to measure.
    UNMEASURED = enum.auto()

    # Its results are elements of its operands, or of a given dtype next to them: no error is made
    # in computing them. So are those of all `move` ones, which do not need this flag.
    EXACT = enum.auto()

    # As arithmetic and moves are.
    SIMPLE = CHEAP | POLYMORPHIC


# Class → its rows: primitives, and their flags after a colon.
_ROWS = {
    # Multiply-accumulate: what the matrix units of a TPU or GPU are for.
    "compute": """
        dot_general conv_general_dilated ragged_dot_general: polymorphic
    """,
    # Wide dynamic range, cancellation or long sums: the lists of torch.amp and of Micikevicius et
    # al. (2018), extended to every primitive of jax.lax.
    "full_precision": """
        exp exp2 expm1 sinh cosh: simple may_overflow
        log log1p log2 cbrt asin acos acosh atanh: simple bounded_domain
        pow sqrt rsqrt: simple bounded_domain folded
        erf_inv lgamma digamma: polymorphic bounded_domain
        sin cos: simple periodic sinusoid
        tan: simple periodic
        atan atan2 asinh polynomial: simple
        polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta
        bessel_i0e bessel_i1e
        random_gamma: uncached
        # sums, products and everything that accumulates
        reduce_sum: polymorphic summing linear statistic
        reduce_prod: polymorphic statistic
        cumsum: polymorphic cumulative summing linear
        cumprod cumlogsumexp: polymorphic cumulative
        reduce_window_sum: linear
        select_and_scatter_add select_and_gather_add scatter-sub: uncached linear
        scatter: uncached linear exact
        scatter-add: uncached pooling linear
        scatter-mul: uncached
        scatter-min scatter-max: uncached exact
        reduce reduce_window select_and_scatter: uncached
        # sums across devices
        psum psum_invariant unreduced_psum: uncached polymorphic summing linear
        reduce_scatter unreduced_reduce_scatter: uncached polymorphic summing linear
        # order and rounding: a rounded key permutes near-ties, and the author's rounding is his own
        sort: polymorphic exact
        top_k: exact
        approx_top_k mulhi
        rem: simple rounding
        nextafter: simple exact
        reduce_precision: simple exact identity
    """,
    # Elementwise, bounded error: as good in 16 bits as their operands are.
    "promote": """
        add: simple affine may_overflow summing linear broadcasting folded
        add_any: simple affine may_overflow summing linear broadcasting
        sub: simple normalizing affine may_overflow summing linear broadcasting folded
        mul div: simple normalizing affine may_overflow broadcasting scaling folded
        square integer_pow: simple may_overflow folded
        tanh logistic erf erfc one_minus_square: simple
        max min: simple choosing linear broadcasting
        select_n: simple choosing linear
        clamp: simple choosing
        concatenate: simple unmeasured choosing linear moving in_parts joining
        pad: simple unmeasured affine choosing linear in_parts joining
        stack: simple unmeasured affine choosing linear moving
    """,
    # Exact on whatever they are given.
    "move": """
        neg: simple affine folded
        abs sign: simple
        floor ceil round: simple rounding
        eq ne lt le gt ge: cheap comparing
        eq_to le_to lt_to is_finite: cheap
        reduce_max reduce_min: polymorphic repeating statistic
        cummax cummin: polymorphic
        argmax argmin reduce_window_max reduce_window_min
        reshape transpose squeeze rev: simple unmeasured moving reordering in_parts
        slice dynamic_slice split: simple unmeasured moving in_parts
        broadcast_in_dim: simple unmeasured moving in_parts repeating folded
        tile: simple unmeasured moving repeating
        unstack: simple unmeasured moving
        copy: simple unmeasured moving identity
        stop_gradient: simple unmeasured identity
        gather: simple looking_up in_parts repeating
        dynamic_update_slice: polymorphic writing
        # Of those, what names its operand, or places it on devices.
        name optimization_barrier: uncached simple unmeasured identity
        sharding_constraint pvary: uncached simple unmeasured crossing identity
        reshard: uncached polymorphic unmeasured crossing identity
        ppermute all_to_all: uncached polymorphic crossing sending
        all_gather all_gather_invariant all_gather_reduced: uncached polymorphic crossing
        pmax pmin: uncached polymorphic
        pbroadcast: uncached crossing
        # …_p: as JAX 0.10 spells it, and the next
        reduced_vary_cast reduced_vary_cast_p: uncached cheap crossing
        vary_unreduced_cast vary_unreduced_cast_p: uncached cheap
        layout_constraint: uncached cheap identity
        ragged_all_to_all: uncached writing
        device_put: uncached identity
        pbroadcast_dynamic: uncached
    """,
    # On purpose: another kind of number, a solver, randomness, state, tokens, callbacks.
    "as_written": """
        convert_element_type: simple linear folded exact identity
        bitcast_convert_type iota: cheap exact
        empty empty2 and or xor not clz population_count: cheap
        shift_left shift_right_arithmetic shift_right_logical complex conj fft: cheap
        real imag: cheap linear exact
        reduce_and reduce_or: statistic
        reduce_xor
        eig: cheap solving
        cholesky cholesky_update eigh hessenberg householder_product lu ormqr qr: solving
        schur svd triangular_solve tridiagonal tridiagonal_solve: solving
        custom_linear_solve: solving
        lu_pivots_to_permutation symmetric_product
        linear_solve  # of lineax
        random_bits random_seed random_split random_fold_in random_wrap random_clone: cheap
        random_unwrap rng_bit_generator threefry2x32: cheap
        rng_uniform axis_index platform_index create_token after_all dce_sink stage
        get swap addupdate new_ref freeze custom_lin
        pure_callback io_callback debug_callback debug_print
    """,
}


class Prim(NamedTuple):
    """The class and the flags of a primitive."""

    kind: str
    flags: Flag


def _parsed() -> Iterator[tuple[str, Prim]]:
    for kind, rows in _ROWS.items():
        for row in rows.splitlines():
            names, _, flags = row.partition("#")[0].partition(":")
            having = (Flag[flag.upper()] for flag in flags.split())
            prim = Prim(kind, functools.reduce(operator.or_, having, Flag(0)))
            yield from ((name, prim) for name in names.split())


TABLE = dict(_parsed())


def of_kind(*kinds: str) -> frozenset[str]:
    """Returns the primitives of some classes."""
    return frozenset(name for name, prim in TABLE.items() if prim.kind in kinds)


def flagged(flags: Flag) -> frozenset[str]:
    """Returns the primitives that have any of these flags.

    Example:
      >>> sorted(flagged(Flag.SINUSOID | Flag.LOOKING_UP))
      ['cos', 'gather', 'sin']
    """
    any_of = flags.value  # integers: dozens of sets are made when jaxmp is imported
    return frozenset(name for name, prim in TABLE.items() if prim.flags.value & any_of)
