"""The reasons for steps: a kind, for code to test, and a sentence, for people to read.

All sentences are here. Named scopes carry the kind and its details, so that `audit` can read from a
traced program, or from its derivative, what autocast decided (`annotations`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.StrEnum):
    """The kind of a reason; its value is the sentence, with ``{}`` for each detail."""

    # Matmuls and convolutions.
    CONTRACTION = "matmul or convolution"
    ASKED = "ops={{{!r}: 'low'}}"
    PRECISION = "precision={}, as the author asked"
    OPERANDS = "operands are {}, not {}"
    MIXED = "multiplies {} by {}"
    UPCAST_OPERAND = "the author upcast an operand to float32"
    SOLUTION = "an operand is the solution of a linear system"
    SIGNAL = "an operand is made of constants"
    SCALAR_PRODUCT = "a scalar product"
    COORDINATES = "a small product: contracts {} elements, neither operand of parameters alone"
    POSE = "a small product: a matrix of {} rows, and as few columns"
    NORMALIZER = "float16: multiplies by one float32 vector, and only float32 ops want the result"
    ITERATED = "a product of one parameter with itself, which costs the same for any batch"
    ANGLES = "only angles or a linear solver want the result"

    # Elementwise operations.
    SUMMED = "summed in float32 from iteration to iteration"
    RECURRENCE = "a recurrence: combined in float32"
    POSITION = "a position: it becomes an index"
    FLOAT32_READERS = "only float32 ops want the result"
    NO_LOW_OPERAND = "no 16-bit operand"
    LEAVES_NORMALIZATION = "leaves a normalization towards a matmul or convolution"
    ENDS_NORMALIZATION = "ends a normalization: leaves in 16 bits"
    NORMALIZES = "normalizes: meets a statistic of its own operand"
    DIVIDES = "divides by a 16-bit value, of which the derivative may overflow"
    DATA = "float32 data wins over 16 bits"
    LARGE_SUMMAND = "a large constant, or a position, wins over 16 bits as a summand"
    SHARED_SUMMAND = "a value that many share wins over 16 bits as a summand"
    STEEP = "an angle, a logarithm or a root wants the result as well"
    VANISHES = "the constant {} vanishes in {}"
    OUT_OF_RANGE = "the constant {} is beyond {}"
    CHOOSES = "chooses among 16-bit values"
    LOW = "computed from 16-bit values"
    PARAMETER = "a parameter beside a 16-bit value"
    COMPUTED = "made from 16-bit values, beside one"
    SHARED_FACTOR = "made from 16-bit values, as a factor of one"
    CONSTANT = "a constant beside a 16-bit value"
    LARGE_FACTOR = "a constant or a position as a factor of a 16-bit value"

    # Data movement and conversions.
    MOVES = "moves values: as they are"
    MOVES_NARROWED = "moves what a matmul or convolution reads"
    MOVES_WIDENED = "moves what float32 ops read: widened once"
    REPEATS = "repeats values: its gradient is summed in float32"
    UPCAST = "the author's upcast"
    CONVERSION = "the author's conversion"

    # Equations that run in float32, or as written, whatever their operands are.
    SENSITIVE = "sensitive op: float32"
    NOT_FLOAT32 = "no float32 operand"
    AS_WRITTEN = "runs as written"
    REGION = "float32 region"
    LAYERS_OWN = "float32: the layer's own dtype"
    UNLISTED = "not classified: runs as written"
    NOT_LOOKED_INSIDE = "not classified, not looked inside: runs as written"
    CLOSES_OVER = "a derivative rule closes over a traced value, and the program runs as written"

    # Equations with jaxprs inside.
    INSIDE = "looked inside"
    WHILE = "looked inside; a while loop carries float32"

    # Notes.
    EXACTLY = ": multiplied in float32, then narrowed"
    DROPPED = "part of the attention that {} computes"
    RECIPE = ", {}"
    CHOSEN = ": {}"
    NOT_QUANTIZED = "; not {1}: {0}"
    INTENDED = ""  # not quantized on purpose: it is not a layer, or the last one
    STORED = " (stored values, scaled after)"
    SOFTMAX = " (of a softmax: its probabilities are kept in 16 bits, and nothing else of it)"
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

    def __str__(self) -> str:
        return self.kind.value.format(*self.details) + "".join(map(str, self.notes))


def is_unknown(why: Why) -> bool:
    """Returns whether the primitive is not in the table: contractions may be inside it."""
    return why.kind in (Kind.UNLISTED, Kind.NOT_LOOKED_INSIDE)


class Skipped(NamedTuple):
    """The reason why the recipe of a policy does not multiply a contraction.

    Attributes:
      why: the reason, in words.
      intended: whether that is intended: it is not a layer, or the last one.
    """

    why: str
    intended: bool = False


def skipped(why: Why) -> Skipped | None:
    """Returns why the recipe of a policy does not multiply the contraction of a step, or None."""
    note = why.note(Kind.NOT_QUANTIZED)
    return note and Skipped(note.details[0], intended=why.note(Kind.INTENDED) is not None)


def unfused(why: Why) -> str:
    """Returns why no kernel computes a step's attention, though a policy asks for it; or empty."""
    note = why.note(Kind.NOT_FUSED, Kind.NO_KERNEL)
    return str(note).partition(": ")[2] if note else ""
