"""How long an accelerator takes for a step: the roofline of its memory bandwidth and its arithmetic.

S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009. Peaks are those of NVIDIA's data sheets (dense
bf16); the shares of them that inference reaches are rounded from published measurements, and can be set by flags.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

ProfileName = Literal["h200", "h100", "a100", "l40s", "l4"]

BANDWIDTH_SHARE = 0.8
FLOPS_SHARE = 0.5
MEMORY_SHARE = 0.9
"""Share of the memory for weights and KV together; the rest is for activations."""


class StepCost(Struct, frozen=True):
    """What a step has to move and to compute."""

    bytes: float
    flops: float

    def shared_by(self, ranks: int) -> StepCost:
        """One rank's part; what the ranks say to each other is not modelled."""
        return StepCost(self.bytes / ranks, self.flops / ranks)


class Accelerator(Struct, frozen=True, kw_only=True):
    """What a device reaches of its peaks, and its memory in bytes."""

    bandwidth: float
    """Bytes per second that are reached."""
    flops: float
    """Floating-point operations per second that are reached."""
    memory: int
    fixed_seconds: float = 0.0005
    """Launches, sampling, copies: what an empty step takes."""

    def seconds(self, load: StepCost) -> float:
        """Fixed time, and whichever of moving and computing binds."""
        return self.fixed_seconds + max(load.bytes / self.bandwidth, load.flops / self.flops)

    def changed(self, *, fixed_seconds: float | None, bandwidth: float | None, flops: float | None) -> Accelerator:
        """This one, with what is not None set."""
        return replace(
            self,
            fixed_seconds=self.fixed_seconds if fixed_seconds is None else fixed_seconds,
            bandwidth=bandwidth or self.bandwidth,
            flops=flops or self.flops,
        )


def _of_data_sheet(*, bandwidth: float, flops: float, memory: float) -> Accelerator:
    return Accelerator(bandwidth=bandwidth * BANDWIDTH_SHARE, flops=flops * FLOPS_SHARE, memory=int(memory))


PROFILES: dict[ProfileName, Accelerator] = {
    "h200": _of_data_sheet(bandwidth=4.8e12, flops=989e12, memory=141e9),
    "h100": _of_data_sheet(bandwidth=3.35e12, flops=989e12, memory=80e9),
    "a100": _of_data_sheet(bandwidth=2.04e12, flops=312e12, memory=80e9),
    "l40s": _of_data_sheet(bandwidth=864e9, flops=362e12, memory=48e9),
    "l4": _of_data_sheet(bandwidth=300e9, flops=121e12, memory=24e9),
}
