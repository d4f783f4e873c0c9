"""What a kernel computes in the place of several equations, as plain data."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxmp._autocast.attention_layout import Layout
from jaxmp._autocast.kernels import Call, Kernel
from jaxmp._autocast.scores import Bias, Mask


class Fused(NamedTuple):
    """Attention: both its products, and what is between them.

    Attributes:
      kernel: what computes it.
      call: how.
      chip: on what it does, by name.
      layout: which axis is which.
      scores: the step of the first product, by which its operands are read.
      side: which operand of the second product the probabilities are.
      biases: what is added to the scores.
      masks: where they are, besides the causal mask.
    """

    kernel: Kernel
    call: Call
    chip: str
    layout: Layout
    scores: Any
    side: int
    biases: tuple[Bias, ...]
    masks: tuple[Mask, ...]
