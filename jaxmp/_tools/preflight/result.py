"""What `preflight` finds of a program under one policy: its sizes, its work, what it warned of."""

from __future__ import annotations

import dataclasses

from jaxmp._core.speed import Work
from jaxmp._tools.preflight.hlo import HloProgram
from jaxmp._tools.preflight.hlo_collectives import sent_bytes
from jaxmp._tools.preflight.size_search import Largest
from jaxmp._tools.speed.target import Target

AS_WRITTEN = "as written"


@dataclasses.dataclass(frozen=True, slots=True)
class Preflight:
    """One program compiled for a target. Sizes are of one device.

    Attributes:
      policy: the policy, or "as written".
      error: the compiler's message, if it failed for another reason than memory; all else is empty
        then.
      argument_bytes: of arguments: parameters, optimizer state, batch.
      output_bytes: of results.
      temporary_bytes: of temporaries.
      code_bytes: of the compiled program itself, which is in the device's memory too.
      aliased_bytes: of results that reuse the buffers of donated arguments.
      host_argument_bytes, host_output_bytes, host_temporary_bytes, host_aliased_bytes: the same in
        the memory of the host. The peak has none of it.
      required_bytes: the peak, where the compiler refuses a program that does not fit (TPU). It
        reports nothing else of such a program, so that all other figures are zero.
      available_bytes: the memory that the compiler then leaves to programs, which is a little less
        than the chip's.
      bytes_accessed: memory traffic, where the compiler reports it (TPU). A loop's body counts
        once.
      program: the optimized program.
      requested: FLOPs of matmuls and convolutions by dtype, in the program before it was compiled.
      callbacks: the number of callbacks to Python that are not compiled, by primitive.
      device_count: the number of devices that the program is split over.
      largest: the result of `max_batch`, by "batch", and of `max_length`, by "length".
      warned: the warning about the policy's recipe on the target: that its 8-bit products are
        emulated, or no faster.
    """

    policy: str = AS_WRITTEN
    error: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    aliased_bytes: int = 0
    host_argument_bytes: int = 0
    host_output_bytes: int = 0
    host_temporary_bytes: int = 0
    host_aliased_bytes: int = 0
    required_bytes: int = 0
    available_bytes: int = 0
    bytes_accessed: float | None = None
    program: HloProgram | None = None
    requested: dict[str, float] = dataclasses.field(default_factory=dict)
    callbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    device_count: int = 1
    largest: dict[str, Largest] = dataclasses.field(default_factory=dict)
    warned: str = ""

    @property
    def peak_bytes(self) -> int:
        """The memory needed: arguments, results, temporaries and code, less what is aliased."""
        data = self.argument_bytes + self.output_bytes + self.temporary_bytes - self.aliased_bytes
        return self.required_bytes or data + self.code_bytes

    @property
    def host_bytes(self) -> int:
        """The memory needed on the host."""
        results = self.host_output_bytes - self.host_aliased_bytes
        return self.host_argument_bytes + self.host_temporary_bytes + results

    @property
    def host_moved_bytes(self) -> tuple[int, int]:
        """The bytes moved from the host and to it, if each array is moved once."""
        temporaries = self.host_temporary_bytes
        return self.host_argument_bytes + temporaries, self.host_output_bytes + temporaries

    @property
    def work(self) -> Work | None:
        """The work of one device in a call; None if the program was not compiled."""
        if self.program is None:
            return None
        products, others, kernels = self.program.traffic
        flops = {dtype: count / self.device_count for dtype, count in self.requested.items()}
        for dtype, count in self.program.attention_flops:
            flops[dtype] = flops.get(dtype, 0) + count
        return Work(
            flops,
            products,
            others,
            kernels,
            sent_bytes(self.program.moved, self.device_count),
            self.program.cycles_run,
        )

    def excess_bytes(self, target: Target) -> int:
        """Returns the bytes needed beyond the memory of a target's device; at most 0 if it fits."""
        return self.peak_bytes - (self.available_bytes or target.hbm_bytes)
