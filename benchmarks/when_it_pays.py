"""What `jaxmp preflight --table` estimates, beside what others have measured and published.

    python benchmarks/when_it_pays.py

It runs anywhere, in no time: nothing is compiled. Speed-ups are over bfloat16, of a layer's three
products forward and backward, quantizing included, with weights stored in bfloat16. The sources:

* TransformerEngine, docs/examples/gemm_profiling (at 8f2e635): the four GEMMs of a layer of a
  5-billion-parameter model, 15,872 tokens, on an H200 NVL and a B300. What a chip here has at hand
  for the B300 is a B200.
* torchao, torchao/float8/README.md (at 0cf1281): on an H100 of 2.4 TB/s (its own figure), and the
  layers that its filter for tensorwise scaling leaves alone, "K <= 4096 and N <= 1024".
"""

from __future__ import annotations

import dataclasses

from jaxmp._core.speed import Chip, chip_named, estimate
from jaxmp._core.speed.choice import WORTH
from jaxmp.recipes import Recipe, float8, mxfp8

LAYER = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
TOKENS = 31 * 512


def speedup(recipe: Recipe, chip: Chip, tokens: int, *shapes: tuple[int, int]) -> float:
    found = [estimate(recipe, chip, tokens, *shape, weight_bytes=2) for shape in shapes]
    return sum(e.seconds_16_bits for e in found) / sum(e.seconds for e in found)


def rows() -> list[tuple[str, float, float | None]]:
    """What it is, what is estimated, what is published."""
    slower = dataclasses.replace(chip_named("gpu-h100"), bytes_per_second=2.4e12)
    h200, b200 = chip_named("gpu-h200"), chip_named("gpu-b200")
    small, large = ((2048, 1024),), ((8192, 16384),)
    return [
        ("H200, float8, 5B layer", speedup(float8(), h200, TOKENS, *LAYER), 1.58),
        ("B200 (B300), mxfp8, 5B layer", speedup(mxfp8(), b200, TOKENS, *LAYER), 1.42),
        ("B200 (B300), float8, 5B layer", speedup(float8(), b200, TOKENS, *LAYER), 1.39),
        ("H100, float8, 1024 x 2048 x 1024", speedup(float8(), slower, 1024, *small), 0.80),
        ("H100, float8, 4096 x 8192 x 16384", speedup(float8(), slower, 4096, *large), 1.39),
        *(
            (
                f"H100, float8, {tokens} x 4096 x 1024 (left alone)",
                speedup(float8(), slower, tokens, (4096, 1024)),
                None,
            )
            for tokens in (2048, 4096, 16384)
        ),
    ]


def main() -> None:
    print(f"{'':46}  estimated  published")
    for name, found, published in rows():
        said = f"{published:.2f}" if published else "-"
        print(f"{name:46}  {found:9.2f}  {said:>9}")
    print(f"\nA recipe is said to pay from {1 / WORTH['gpu']:.2f} on.")


if __name__ == "__main__":
    main()
