"""`parity`: whether two programs are the same model, and the first layer that differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmp._core.plan.regions import check_callable
from jaxmp._tools.arguments import check_positional, check_progress
from jaxmp._tools.parity.layers import (
    INPUT,
    LayerPair,
    LayerValue,
    Match,
    aligned,
    by_map,
    by_name,
    listed,
)
from jaxmp._tools.parity.report import Parity, ParityRow, row_of
from jaxmp._tools.parity.runs import OUTPUT, RUNS, Program, Spread, program_of
from jaxmp._tools.progress import told
from jaxmp.dtypes import parse_dtype

Saved = Mapping[str, Any]
Progress = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class PreparedParity:
    """Two programs whose layers are matched.

    Attributes:
      this: the first program.
      other: the other, or its saved activations.
      pairs: the layers to compare, in the order in which the first program computes them.
      dtype: as for `parity`, as is `progress`.
    """

    this: Program
    other: Program | Saved
    pairs: tuple[LayerPair, ...]
    dtype: Any = None
    progress: Progress = lambda _line: None

    def run(self, arrays: Sequence[Any] | None = None) -> Parity:
        """Compares the programs, on the arrays that they were prepared with or on others."""
        values = {pair: self.this.layers[pair.this] for pair in self.pairs}
        self.progress(
            f"parity: compiles and runs f: as written, and {RUNS} times rounded at random"
        )
        these = self.this.run({value.name: None for value in values.values()}, arrays, self.dtype)
        others = self._others(values, arrays)
        for pair in sorted(values, key=lambda pair: INPUT in pair.this):  # outputs come first
            check_shapes(pair, these[values[pair].name].value, others[pair][1].value)
        rows: dict[tuple[str, str], tuple[ParityRow, LayerPair]] = {}
        for pair, value in values.items():
            a, (name, b) = these[value.name], others[pair]
            row = row_of(pair.this, pair.other, value, str(b.value.dtype), a, b)
            rows.setdefault((value.name, name), (row, pair))
        first = next(((row, pair) for row, pair in rows.values() if not row.explained), None)
        taken = {pair.this for pair in self.pairs}, {pair.other for pair in self.pairs}
        names = self.this.modules, _modules(self.other)
        return Parity(
            tuple(row for row, _ in rows.values()),
            "" if first is None else self._located(*first, arrays),
            *(tuple(n for n in several if n not in known)
              for several, known in zip(names, taken, strict=True)),
        )  # fmt: skip

    def _others(
        self, values: Mapping[LayerPair, LayerValue], arrays: Sequence[Any] | None
    ) -> dict[LayerPair, tuple[str, Spread]]:
        """Returns the other program's value of each pair, with its name there."""
        if isinstance(self.other, Program):
            names = {pair: self.other.layers[pair.other].name for pair in self.pairs}
            keep = {names[pair]: pair.arrange for pair in self.pairs}
            self.progress("parity: the same of g")
            found = self.other.run(keep, arrays, self.dtype)
            return {pair: (name, found[name]) for pair, name in names.items()}
        # How they were computed is unknown: assume like f, in the coarsest of their dtypes.
        saved = {
            pair: np.asarray((pair.arrange or np.asarray)(self.other[pair.other]))
            for pair in values
        }
        floating = [x.dtype for x in saved.values() if jnp.issubdtype(x.dtype, jnp.floating)]
        coarsest = max(floating, key=lambda dtype: float(jnp.finfo(dtype).eps), default=None)
        keep = {value.name: None for value in values.values()}
        spreads = self.this.run(keep, arrays, self.dtype or coarsest or np.float32)
        return {
            pair: (pair.other, spreads[value.name]._replace(value=saved[pair]))
            for pair, value in values.items()
        }

    def _located(self, row: ParityRow, pair: LayerPair, arrays: Sequence[Any] | None) -> str:
        """Returns the first operation of a layer that differs, of those that both programs have."""
        if not isinstance(self.other, Program):
            return row.where
        self.progress(f"parity: finds the operation that differs in {row.layer}")
        programs = self.this, self.other
        values = self.this.layers[pair.this], self.other.layers[pair.other]
        several = [_operations(*both) for both in zip(programs, values, strict=True)]
        pairs = aligned(*several)
        these = self.this.run({a.name: None for a, _ in pairs}, arrays, self.dtype)
        others = self.other.run({b.name: None for _, b in pairs}, arrays, self.dtype)
        for a, b in pairs:
            x, y = these[a.name], others[b.name]
            if np.shape(x.value) == np.shape(y.value):
                found = row_of(row.layer, row.other, a, b.dtype, x, y)
                if not found.explained:
                    return found.where
        return row.where


def _operations(program: Program, value: LayerValue) -> list[LayerValue]:
    """Returns the values that a module itself computes up to `value`, without casts and copies."""
    names = [one.name for one in program.values]
    end = names.index(value.name) + 1 if value.name in names else len(names)
    return [
        one
        for one in program.values[:end]
        if one.path == value.path and one.op not in ("convert_element_type", "copy")
    ]


def _modules(other: Program | Saved) -> list[str]:
    return other.modules if isinstance(other, Program) else list(other)


def _is_wanted(pair: LayerPair, this: Program, other: Program | Saved) -> bool:
    """Returns whether a pair is of outputs, or of equal shapes: the order of inputs may differ."""
    if INPUT not in pair.this or not isinstance(other, Program):
        return True
    return this.layers[pair.this].shape == other.layers[pair.other].shape


def check_shapes(pair: LayerPair, x: Any, y: Any) -> None:
    """Raises unless two arrays have the same shape, apart from axes of size 1."""
    a, b = (tuple(n for n in np.shape(array) if n != 1) for array in (x, y))
    if a != b:
        shapes = [f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in (x, y)]
        raise ValueError(
            f"parity: {pair.this!r} is {shapes[0]} in f and {shapes[1]} in g ({pair.other!r}): say "
            f"how g's is to be arranged, match={{{pair.this!r}: ({pair.other!r}, function)}}, or "
            "give a match without it"
        )


def prepare(
    f: Callable[..., Any],
    g: Callable[..., Any] | Saved,
    args: Sequence[Any],
    match: Match | None = None,
    dtype: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> PreparedParity:
    """Traces the programs and matches their layers; the arguments are explained at `parity`."""
    this = program_of("parity", f, args, kwargs or {})
    other = g if isinstance(g, Mapping) else program_of("parity", g, args, kwargs or {})
    these = list(this.layers)
    others = list(other.layers if isinstance(other, Program) else other)
    if match is None:
        pairs = [pair for pair in by_name(these, others) if _is_wanted(pair, this, other)]
        named = [pair for pair in pairs if not pair.this.startswith(OUTPUT)]
        if not pairs or (not named and this.modules and _modules(other)):
            raise ValueError(
                "parity: no layer of f has the name of one of g. Say which is which: match={'layer "
                f"of f': 'layer of g'}}. In f there are {listed(this.modules)}; in g "
                f"{listed(_modules(other))}"
            )
    else:
        pairs = list(by_map(match, these, others))
        taken = {pair.this for pair in pairs}
        pairs += [
            LayerPair(result.name, result.name)
            for result in this.results
            if isinstance(other, Program) and result.name not in taken
            and result.shape == getattr(other.layers.get(result.name), "shape", None)
        ]  # fmt: skip
    pairs.sort(key=lambda pair: these.index(pair.this))
    prepared = PreparedParity(this, other, tuple(pairs), dtype)
    return prepared if progress is None else dataclasses.replace(prepared, progress=progress)


def parity(
    f: Callable[..., Any],
    g: Callable[..., Any] | Saved,
    *misplaced: Any,
    match: Match | None = None,
    dtype: DTypeLike | None = None,
    progress: Progress | None = None,
) -> Callable[..., Parity]:
    """Finds the first layer in which two programs differ by more than rounding explains.

    For a port and its original, a policy and float32, a trainer and its sampler. Layers are values
    that Flax modules and `jax.named_scope`s pass to one another, forward and backward: outputs, and
    inputs that a module computes itself. Each is compared as a root mean square over its elements.

    The bound is not a constant. Each program is run eight times more with each rounding drawn up or
    down at random, in the dtype of each operation: how far the runs are apart is what rounding does
    to this program on these numbers. A difference is beyond the bound, in theory, in one layer of
    10,000 that rounding alone explains (Fisher's F for the ratio of variances). The model is Higham
    and Mary's (A new approach to probabilistic rounding error analysis, 2019), made true by
    stochastic rounding (Connolly, Higham and Mary, 2021): errors independent, of mean zero. On GPUs
    and TPUs, float32 products are TF32 or bfloat16 unless `jax.default_matmul_precision` is set.

    Args:
      f: a function, a module's method or a Linen module's `apply`; NNX modules may be arguments.
      g: another, with the same arguments; or saved activations, {name: array}, for example of
        PyTorch, assumed to be computed like `f` in the coarsest of their dtypes.
      misplaced: takes nothing; its error says where further arguments go.
      match: from layers of `f` to those of `g`, or to `(name, function)`, where the function gives
        g's array the shape of f's. Only these and the results are compared. By default, layers of
        equal names, also below the root module or where one name ends with the other.
      dtype: the dtype whose rounding is allowed everywhere: "float32" reveals a hidden bfloat16
        cast. By default, each operation's own.
      progress: called with a line of text before each slow step. By default, lines are printed if
        stderr is a terminal, from the first second on.

    Returns:
      A function of their arguments that returns a `Parity`: print it; it is true if nothing
      differs.

    Raises:
      ValueError: if nothing matches, `match` names a layer that does not exist, or shapes differ.
      TypeError: if `f`, `g` or `progress` is not callable or `match` is not such a map.

    Example:
      >>> import jax, jax.numpy as jnp, jaxmp
      >>> def layer(x, slope=0.01):
      ...     with jax.named_scope("layer"):
      ...         return jax.nn.leaky_relu(2 * x, slope)
      >>> x = jnp.linspace(-1, 1, 100)
      >>> bool(jaxmp.parity(jaxmp.autocast(layer, "bfloat16"), layer)(x))
      True
      >>> jaxmp.parity(layer, lambda x: layer(x, 0.02))(x).first.layer
      'layer'
    """
    check_positional(misplaced, "parity(f, g)(*args)")
    check_progress("parity", progress)
    check_callable("parity", f)
    if isinstance(g, Mapping):
        for name, x in g.items():
            if not isinstance(name, str) or not (hasattr(x, "dtype") and hasattr(x, "shape")):
                raise TypeError(
                    "parity: saved activations are arrays by the names of layers, {'block/dense': "
                    f"array}}; got {name!r}: {type(x).__name__}"
                )
    else:
        check_callable("parity", g)
    if dtype is not None:
        parsed = np.dtype(parse_dtype(dtype, "parity: dtype"))
        if not jnp.issubdtype(parsed, jnp.floating):
            raise ValueError(f"parity: dtype must be a floating-point dtype; got {parsed.name}")
        dtype = parsed

    def compared(*args: Any, **kwargs: Any) -> Parity:
        with told(progress) as tell:
            tell("parity: traces both programs")
            return prepare(f, g, args, match, dtype, kwargs, tell).run()

    return compared
