"""Words of a policy that may name a chip: ``auto@tpu-v5e``, ``fused@gpu-h100``."""

from __future__ import annotations

from jaxmp._core.printable import shown
from jaxmp.devices import chips
from jaxmp.dtypes import did_you_mean, plain_name


def word_at_chip(text: str, word: str) -> str | None:
    """Reads ``WORD`` or ``WORD@CHIP``: a word of a policy, and the chip that it is meant for.

    Returns:
      The text as a policy keeps it; None if it has another word.

    Raises:
      ValueError: if the chip is not in jaxmp's tables.

    Example:
      >>> word_at_chip("Fused@gpu-h100", "fused"), word_at_chip("float8", "auto")
      ('fused@gpu-h100', None)
    """
    said, at, chip = text.strip().partition("@")
    if plain_name(said) != word:
        return None
    known = chips()
    if at and chip not in known:
        raise ValueError(
            f"{shown(text)} names no chip{did_you_mean(chip, known)}; "
            f"the chips are {', '.join(known)}"
        )
    return f"{word}@{chip}" if at else word


def chip_in(words: str) -> str:
    """Returns the chip that ``WORD@CHIP`` names; empty for the default device's.

    Example:
      >>> chip_in("auto@tpu-v5e"), chip_in("auto")
      ('tpu-v5e', '')
    """
    return words.partition("@")[2]
