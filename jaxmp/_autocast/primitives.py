"""The table: what autocast does with each JAX primitive. Data, and nothing else.

Five classes:

* ``low``: a contraction. Its float32 operands are multiplied in the compute dtype.
* ``full``: numerically sensitive; runs in float32.
* ``follow``: elementwise; runs low beside a low operand when a contraction wants the result.
* ``transparent``: moves or selects values without changing them; runs in the dtype they have, or
  that of the contractions that read them.
* ``own``: runs exactly as written. Also what happens to a primitive nobody listed.

A policy's ``ops`` overrides the table by primitive name. Higher-order primitives (scan, cond, …)
are not classified here: `jaxmp._autocast.planner` looks inside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmp._jaxprs.equation_parameters import exponent

# Multiply-accumulate: what the matrix units of a TPU or GPU are for.
LOW = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

# Wide dynamic range, cancellation or long sums: the lists of torch.amp and of Micikevicius et al.
# (2018), extended to every primitive of jax.lax.
FULL = frozenset(
    # exponentials, logarithms, powers
    "exp exp2 expm1 log log1p log2 pow sqrt rsqrt cbrt polynomial "
    # trigonometric and hyperbolic (tanh is bounded and follows)
    "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh "
    # special functions
    "erf_inv lgamma digamma polygamma zeta igamma igammac igamma_grad_a "
    "regularized_incomplete_beta bessel_i0e bessel_i1e random_gamma "
    # sums, products and everything that accumulates
    "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum reduce_window reduce "
    "select_and_scatter_add select_and_scatter select_and_gather_add "
    "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max "
    # sums across devices
    "psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter "
    # order and rounding: a rounded key permutes near-ties, and the author's rounding is his own
    "sort top_k approx_top_k rem nextafter reduce_precision mulhi".split()
)

# Elementwise, bounded error: as good in 16 bits as their operands are.
FOLLOW = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "max",
        "min",
        "tanh",
        "logistic",
        "erf",
        "erfc",
        "square",
        "integer_pow",
        "one_minus_square",
        "select_n",
        "clamp",
        "concatenate",
        "pad",
        "stack",
    ]
)

# Moves that name their operand, or place it on devices.
PLACING = frozenset(
    [
        "name",
        "optimization_barrier",
        "sharding_constraint",
        "device_put",
        "reshard",
        "layout_constraint",
        "pmax",
        "pmin",
        "ppermute",
        "pbroadcast",
        "pbroadcast_dynamic",
        "pvary",
        "vary_unreduced_cast",
        "vary_unreduced_cast_p",  # as JAX 0.10 spells it, and the next
        "reduced_vary_cast",
        "reduced_vary_cast_p",
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_to_all",
        "ragged_all_to_all",
    ]
)

# Exact on whatever they are given.
TRANSPARENT = PLACING | frozenset(
    [
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "is_finite",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "eq_to",
        "le_to",
        "lt_to",
        "argmax",
        "argmin",
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "rev",
        "slice",
        "split",
        "unstack",
        "tile",
        "copy",
        "dynamic_slice",
        "dynamic_update_slice",
        "gather",
        "reduce_max",
        "reduce_min",
        "reduce_window_max",
        "reduce_window_min",
        "cummax",
        "cummin",
        "stop_gradient",
    ]
)

# As written, on purpose: another kind of number, a solver, randomness, state, tokens, callbacks.
OWN = frozenset(
    "convert_element_type bitcast_convert_type iota empty empty2 "
    "and or xor not shift_left shift_right_arithmetic shift_right_logical clz population_count "
    "reduce_and reduce_or reduce_xor "
    "complex real imag conj fft "
    "cholesky cholesky_update eig eigh hessenberg householder_product lu "
    "lu_pivots_to_permutation ormqr qr schur svd symmetric_product "
    "triangular_solve tridiagonal tridiagonal_solve custom_linear_solve "
    "random_bits random_seed random_split random_fold_in random_wrap random_unwrap random_clone "
    "rng_bit_generator rng_uniform threefry2x32 "
    "axis_index platform_index create_token after_all dce_sink stage "
    "get swap addupdate new_ref freeze "
    "linear_solve "  # of lineax
    "pure_callback io_callback debug_callback debug_print custom_lin".split()
)

TABLE: dict[str, str] = {
    name: kind
    for kind, names in (
        ("low", LOW),
        ("full", FULL),
        ("follow", FOLLOW),
        ("transparent", TRANSPARENT),
        ("own", OWN),
    )
    for name in names
}

# `x - mean(x)`, `x * rsqrt(var(x))`, `x / norm(x)`: where a value meets a statistic of its own.
NORMALIZING = frozenset({"sub", "mul", "div"})

# The affine end of a normalization. The first `follow` op outside this set, on the way to a
# contraction, is where a float32 value may be narrowed (`relu(batch_norm(x))`).
AFFINE = frozenset({"add", "add_any", "sub", "mul", "div", "neg", "pad", "stack"})

# `follow` ops that only choose among their operands: beside constants, exact on low ones.
CHOOSING = frozenset({"max", "min", "select_n", "clamp", "concatenate", "pad", "stack"})

# What rounds to whole numbers, or by them: what reaches one of these is a position. A conversion to
# integers is another, and so is a comparison with a whole number.
ROUNDING = frozenset({"floor", "ceil", "round", "rem"})
COMPARING = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

# Linear systems and decompositions make small errors of their operand large, and what they return
# may be large numbers that cancel.
SOLVING = frozenset(
    [
        "cholesky",
        "cholesky_update",
        "eig",
        "eigh",
        "hessenberg",
        "householder_product",
        "lu",
        "ormqr",
        "qr",
        "schur",
        "svd",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
        "custom_linear_solve",
    ]
)

# So does an angle.
AMPLIFYING = SOLVING | {"sin", "cos", "tan"}

# The sine of a position is an entry of a table.
WAVES = frozenset({"sin", "cos"})

# Functions that end somewhere, and are steep there.
ENDING = frozenset(
    [
        "log",
        "log1p",
        "log2",
        "sqrt",
        "rsqrt",
        "cbrt",
        "pow",
        "acos",
        "asin",
        "acosh",
        "atanh",
        "erf_inv",
        "lgamma",
        "digamma",
    ]
)

# Running sums and products: positions, times, knots, which are differenced.
CUMULATIVE = frozenset({"cumsum", "cumprod", "cumlogsumexp"})

# Sums by index (`segment_sum`). Their summands are arrays in memory, as operands of products are.
POOLING = frozenset({"scatter-add"})

# One operand is taken from another.
SUBTRACTING = frozenset({"sub"})

# Random numbers are data, whatever key they are made from.
RANDOM = ("random_", "threefry", "rng_")

# Rows of a table by their numbers.
LOOKING_UP = frozenset({"gather"})

# Moves that change neither values nor their order of magnitude.
MOVING = frozenset(
    [
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "rev",
        "slice",
        "split",
        "unstack",
        "tile",
        "copy",
        "dynamic_slice",
        "concatenate",
        "stack",
    ]
)

# Of the transparent ops, those that neither drop nor repeat an element: `early_casts`.
REORDERING = frozenset({"reshape", "transpose", "squeeze", "rev"})

# Of the transparent ops, those that send values from device to device, or say that they are there.
CROSSING = frozenset(
    "sharding_constraint reshard pvary all_gather all_gather_invariant all_gather_reduced "
    "reduced_vary_cast reduced_vary_cast_p all_to_all ppermute pbroadcast".split()
)

# Those of them that hand a value on to another device.
HANDING_ON = frozenset({"ppermute", "all_to_all"})

# A function of JAX that is another primitive by what it is given, or is called otherwise.
CALLED = {
    "psum": ("psum_invariant", "unreduced_psum"),
    "pmean": ("psum", "psum_invariant", "unreduced_psum"),
    "psum_scatter": ("reduce_scatter", "unreduced_reduce_scatter"),
    "reduce_scatter": ("unreduced_reduce_scatter",),
    "all_gather": ("all_gather_invariant", "all_gather_reduced"),
}

# Moves on the way to a contraction, which are made in its dtype: those, and what joins operands.
TO_CONTRACTIONS = REORDERING | CROSSING | {"concatenate", "pad"}

# Moves that take a value in parts: `early_casts`.
IN_PARTS = REORDERING | frozenset(
    ["slice", "dynamic_slice", "gather", "split", "concatenate", "pad", "broadcast_in_dim"]
)

# Their transpose sums over what they repeat, so a 16-bit operand is widened around them: the values
# are the same and the sum in the backward pass is float32.
REPEATING = frozenset({"broadcast_in_dim", "gather", "tile", "reduce_max", "reduce_min"})

# Elementwise ops that broadcast operands of size 1 by themselves; so do their transposes sum.
BROADCASTING = frozenset({"add", "add_any", "sub", "mul", "div", "max", "min"})

# Those of them whose operands are saved for the backward pass: `bind.scale` saves them small.
SCALING = frozenset({"mul", "div"})

# Besides contractions, what makes numbers beyond float16's range out of numbers within: policies
# with `saturate` clip their results. What others make infinite, log(0), is so in every dtype.
GROWING = frozenset(
    [
        "add",
        "add_any",
        "sub",
        "mul",
        "div",
        "square",
        "integer_pow",
        "exp",
        "exp2",
        "expm1",
        "sinh",
        "cosh",
    ]
)

# What `bind.apply` may trace once and reuse: no effects, no axis names, hashable parameters.
TRACED_ONCE = (
    (LOW | FULL | FOLLOW | TRANSPARENT)
    - PLACING
    - frozenset(
        [
            "reduce",
            "reduce_window",
            "select_and_scatter",
            "select_and_scatter_add",
            "select_and_gather_add",
            "scatter",
            "scatter-add",
            "scatter-sub",
            "scatter-mul",
            "scatter-min",
            "scatter-max",
            "random_gamma",
            "psum",
            "psum_invariant",
            "reduce_scatter",
            "unreduced_psum",
            "unreduced_reduce_scatter",
        ]
    )
)

# Ops that write one operand into another keep the dtype of the first.
WRITING = frozenset({"dynamic_update_slice", "ragged_all_to_all"})


def classify(name: str, params: Mapping[str, Any]) -> str | None:
    """The class of a primitive, or None when nobody listed it (it then runs as written).

    Args:
      name: the primitive's name, as printed in a jaxpr.
      params: the equation's parameters: `x ** -2` is a division in disguise and runs in float32.

    Example:
      >>> classify("dot_general", {}), classify("integer_pow", {"y": -2}), classify("hash", {})
      ('low', 'full', None)
    """
    if name == "integer_pow" and exponent(params) < 0:
        return "full"
    return TABLE.get(name)
