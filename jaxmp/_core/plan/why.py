"""The reasons for steps: a kind, for code to test, and a sentence, for people to read.

All sentences are here. Named scopes carry the kind and its details, so that `audit` can read from a
traced program, or from its derivative, what autocast decided (`annotations`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from jaxmp.formats import bits_in_words


class Kind(enum.StrEnum):
    """The kind of a reason; its value is the sentence, with ``{}`` for each detail.

    ``{wide}``, ``{low}`` and ``{bits}`` are the policy's dtypes: see `Why.said`.
    """

    # Matmuls and convolutions.
    CONTRACTION = "matmul or convolution"
    ASKED = "ops={{{!r}: 'compute'}}"
    PRECISION = "precision={}, as the author asked"
    OPERANDS = "operands are {}, not {}"
    MIXED = "multiplies {} by {}"
    UPCAST_OPERAND = "the author upcast an operand to {wide}"
    SOLUTION = "an operand is the solution of a linear system"
    SIGNAL = "an operand is made of constants"
    SCALAR_PRODUCT = "a scalar product"
    COORDINATES = "a small product: contracts {} elements, neither operand of parameters alone"
    POSE = "a small product: a matrix of {} rows, and as few columns"
    NORMALIZER = "float16: multiplies by one float32 vector, and only float32 ops want the result"
    ITERATED = "a product of one parameter with itself, which costs the same for any batch"
    ANGLES = "only angles or a linear solver want the result"

    # Elementwise operations.
    SUMMED = "summed in {wide} from iteration to iteration"
    RECURRENCE = "a recurrence: combined in {wide}"
    POSITION = "a position: it becomes an index"
    FLOAT32_READERS = "only {wide} ops want the result"
    NO_LOW_OPERAND = "no {low} operand"
    LEAVES_NORMALIZATION = "leaves a normalization towards a matmul or convolution"
    ENDS_NORMALIZATION = "ends a normalization: leaves in {bits}"
    NORMALIZES = "normalizes: meets a statistic of its own operand"
    DIVIDES = "divides by a {low} value, of which the derivative may overflow"
    DATA = "{wide} data wins over {bits}"
    LARGE_SUMMAND = "a large constant, or a position, wins over {bits} as a summand"
    SHARED_SUMMAND = "a value that many share wins over {bits} as a summand"
    STEEP = "an angle, a logarithm or a root wants the result as well"
    VANISHES = "the constant {} vanishes in {}"
    OUT_OF_RANGE = "the constant {} is beyond {}"
    CHOOSES = "chooses among {low} values"
    LOW = "computed from {low} values"
    PARAMETER = "a parameter beside a {low} value"
    COMPUTED = "made from {low} values, beside one"
    SHARED_FACTOR = "made from {low} values, as a factor of one"
    CONSTANT = "a constant beside a {low} value"
    LARGE_FACTOR = "a constant or a position as a factor of a {low} value"

    # Data movement and conversions.
    MOVES = "moves values: as they are"
    MOVES_NARROWED = "moves what a matmul or convolution reads"
    MOVES_WIDENED = "moves what {wide} ops read: widened once"
    REPEATS = "repeats values: its gradient is summed in {wide}"
    UPCAST = "the author's upcast"
    CONVERSION = "the author's conversion"

    # Equations that run in {wide}, or as written, whatever their operands are.
    SENSITIVE = "sensitive op: {wide}"
    NOT_FLOAT32 = "no {wide} operand"
    AS_WRITTEN = "runs as written"
    REGION = "{wide} region"
    OUTSIDE = "outside the model"
    LAYERS_OWN = "{wide}: the layer's own dtype"
    UNLISTED = "not classified: runs as written"
    NOT_LOOKED_INSIDE = "not classified, not looked inside: runs as written"
    CLOSES_OVER = "a derivative rule closes over a traced value, and the program runs as written"

    # Equations with jaxprs inside.
    INSIDE = "looked inside"
    WHILE = "looked inside; a while loop carries {wide}"

    # Notes.
    EXACTLY = ": multiplied in float32, then narrowed"
    DROPPED = "part of the attention that {} computes"
    RECIPE = ", {}"
    CHOSEN = ": {}"
    NOT_QUANTIZED = "; not {1}: {0}"
    INTENDED = ""  # not quantized on purpose: it is not a layer, or the last one
    STORED = " (stored values, scaled after)"
    STORED_WITH = " (stored values, activations in {}, scaled after)"
    STORED_RANGE = " (stored values, activations in {} of a stored range, scaled after)"
    SOFTMAX = " (of a softmax: its probabilities are kept in {bits}, and nothing else of it)"
    PICKS = "; picks one element of each row: its gradient is a comparison, not a scatter"
    FUSED = "; attention, computed by {} on {}"
    NOT_FUSED = "; attention, not fused: {}"
    NO_KERNEL = "; attention, not fused: there is no kernel for {}"
    CLIPPED = "; clipped to float16's range"

    def of(self, *details: object) -> Why:
        """Returns a reason of this kind."""
        return Why(self, tuple(map(str, details)))


class Residual(enum.StrEnum):
    """The fate of a step's results until the backward pass, or what else decides it."""

    SAVED = "saved for the backward pass"
    OFFLOADED = "saved for the backward pass, in host memory"
    REMATERIALIZED = "rematerialized in the backward pass"
    SAVE_POLICY = "the policy here says residuals=save"
    OWN_CHECKPOINT = "a jax.checkpoint of the program itself: it keeps what that one says"
    OWN_RULE = "a function with a custom_vjp: it keeps what its rule returns"
    KERNEL = "attention that a kernel computes: it keeps what its rule returns"
    OPEN_ENDED = "a while loop: has no backward pass"
    EFFECTS = "has side effects: runs once"
    RUNS_ONCE = "not looked inside: runs once"
    IN_PARTS = "in parts"  # each step inside decides for itself


class Why(NamedTuple):
    """The reason for a step; `str` is its sentence.

    Attributes:
      kind: the kind of the reason.
      details: the details in its sentence.
      notes: the reasons that passes add, in order.

    Example:
      >>> why = Kind.POSE.of(3).noted(Kind.CLIPPED)
      >>> print(why)
      a small product: a matrix of 3 rows, and as few columns; clipped to float16's range
      >>> why.note(Kind.SOFTMAX) is None
      True
    """

    kind: Kind
    details: tuple[str, ...] = ()
    notes: tuple[Why, ...] = ()

    def noted(self, kind: Kind, *details: object) -> Why:
        """Returns the reason with a note added."""
        return self._replace(notes=(*self.notes, kind.of(*details)))

    def note(self, *kinds: Kind) -> Why | None:
        """Returns the first note of one of some kinds, or None."""
        return next((note for note in self.notes if note.kind in kinds), None)

    def without(self, kind: Kind) -> Why:
        """Returns the reason without notes of a kind."""
        return self._replace(notes=tuple(note for note in self.notes if note.kind != kind))

    def said(self, wide: str = "float32", low: str = "16-bit", bits: str = "16 bits") -> str:
        """Returns the sentence, in terms of the dtypes of a policy.

        Example:
          >>> Kind.NO_LOW_OPERAND.of().said("float64", "float32", "float32")
          'no float32 operand'
        """
        sentence = self.kind.value.format(*self.details, wide=wide, low=low, bits=bits)
        return sentence + "".join(note.said(wide, low, bits) for note in self.notes)

    def __str__(self) -> str:
        return self.said()


def is_unknown(why: Why) -> bool:
    """Returns whether the primitive is not in the table: contractions may be inside it."""
    return why.kind in (Kind.UNLISTED, Kind.NOT_LOOKED_INSIDE)


class Skipped(NamedTuple):
    """The reason why the recipe of a policy does not multiply a contraction.

    Attributes:
      why: the reason, in words.
      intended: whether that is intended: it is not a layer, or the last one.
      bits: the bits that the recipe multiplies in, in words.
    """

    why: str
    intended: bool = False
    bits: str = bits_in_words(())


def skipped(why: Why) -> Skipped | None:
    """Returns why the recipe of a policy does not multiply the contraction of a step, or None."""
    note = why.note(Kind.NOT_QUANTIZED)
    intended = why.note(Kind.INTENDED) is not None
    return note and Skipped(note.details[0], intended=intended, bits=note.details[2])


def unfused(why: Why) -> str:
    """Returns why no kernel computes a step's attention, though a policy asks for it; or empty."""
    note = why.note(Kind.NOT_FUSED, Kind.NO_KERNEL)
    return str(note).partition(": ")[2] if note else ""
