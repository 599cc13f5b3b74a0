"""How long an accelerator takes for a step: the roofline of its memory bandwidth and its arithmetic, and what the ranks
of an engine exchange.

S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009. Peaks are those of NVIDIA's data sheets (dense
bf16); the shares of them that inference reaches are rounded from published measurements, and can be set by flags.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

ProfileName = Literal["h200", "h100", "a100", "l40s", "l4"]

BANDWIDTH_SHARE = 0.8
FLOPS_SHARE = 0.5
LINK_SHARE = 0.7
NETWORK_SHARE = 0.8
"""What DeepEP's low-latency kernels reach of a card's 400 Gbit/s among 64 to 256 ranks (its docs/legacy.md)."""
MEMORY_SHARE = 0.9
"""Share of the memory for weights and KV together; the rest is for activations."""


class StepCost(Struct, frozen=True, gc=False):
    """What a step has to move and to compute."""

    bytes: float
    flops: float
    reduced: float = 0.0
    """Bytes that all ranks sum up with each other; nothing where there is one rank."""
    reductions: int = 0
    """Into how many sums they are divided, one after the other."""
    networked: float = 0.0
    """Bytes that each rank sends to other nodes."""
    linked: float = 0.0
    """Bytes that each rank sends to others of its node, beside those of sums."""
    messages: int = 0
    """In how many exchanges of all ranks, one after the other."""

    def shared_by(self, ranks: int) -> StepCost:
        """One rank's part. It sends the bytes of each sum twice, but for its own share (ring all-reduce: Patarasuk,
        Yuan, JPDC 2009)."""
        if ranks == 1:
            return replace(self, reduced=0.0, reductions=0)
        sent = self.reduced * 2 * (ranks - 1) / ranks
        return replace(self, bytes=self.bytes / ranks, flops=self.flops / ranks, reduced=sent)


class Accelerator(Struct, frozen=True, kw_only=True):
    """What a device reaches of its peaks, and its memory in bytes."""

    bandwidth: float
    """Bytes per second that are reached."""
    flops: float
    """Floating-point operations per second that are reached."""
    memory: int
    fixed_seconds: float = 0.0005
    """Launches, sampling, copies: what an empty step takes."""
    link: float = math.inf
    """Bytes per second that are reached from one rank to the next."""
    network: float = math.inf
    """Bytes per second that are reached from a rank to other nodes."""
    host_link: float = math.inf
    """Bytes per second that are reached from a device to main memory, and back: on their way are KV blocks."""
    link_seconds: float = 0.0
    """What one sum of all ranks takes however small it is."""

    def seconds(self, load: StepCost) -> float:
        """Fixed time, whichever of moving and computing binds, and what ranks send each other: nothing overlaps."""
        return self.fixed_seconds + self._computing(load) + self._sending(load)

    def overlapped(self, half: StepCost) -> float:
        """The same for a step of two halves, of which one's rows are on their way while the other is computed."""
        return self.fixed_seconds + 2 * max(self._computing(half), self._sending(half))

    def _computing(self, load: StepCost) -> float:
        computing = max(load.bytes / self.bandwidth, load.flops / self.flops)
        return computing + load.reduced / self.link + load.reductions * self.link_seconds

    def _sending(self, load: StepCost) -> float:
        """To experts and back: what takes the network goes on in its node meanwhile."""
        return max(load.networked / self.network, load.linked / self.link) + load.messages * self.link_seconds

    def changed(
        self,
        *,
        fixed_seconds: float | None = None,
        bandwidth: float | None = None,
        flops: float | None = None,
        link: float | None = None,
        link_seconds: float | None = None,
        host_link: float | None = None,
        network: float | None = None,
    ) -> Accelerator:
        """This one, with what is not None set."""
        return replace(
            self,
            fixed_seconds=self.fixed_seconds if fixed_seconds is None else fixed_seconds,
            bandwidth=bandwidth or self.bandwidth,
            flops=flops or self.flops,
            link=link or self.link,
            link_seconds=self.link_seconds if link_seconds is None else link_seconds,
            host_link=host_link or self.host_link,
            network=network or self.network,
        )


NVLINK_SECONDS, PCIE_SECONDS = 10e-6, 25e-6
"""Of one small sum of all ranks: an assumption, rounded from what is published of NCCL; set by flag where measured."""


def _of_data_sheet(
    *,
    bandwidth: float,
    flops: float,
    memory: float,
    link: float,
    host_link: float,
    network: float,
    link_seconds: float = NVLINK_SECONDS,
) -> Accelerator:
    """`link`, `host_link`, `network`: of one direction."""
    return Accelerator(
        bandwidth=bandwidth * BANDWIDTH_SHARE,
        flops=flops * FLOPS_SHARE,
        memory=int(memory),
        link=link * LINK_SHARE,
        link_seconds=link_seconds,
        host_link=host_link * LINK_SHARE,
        network=network * NETWORK_SHARE,
    )


PCIE_5, PCIE_4 = 64e9, 32e9
"""Bytes per second of 16 lanes, one direction."""

GBIT_400, GBIT_200, GBIT_100 = 50e9, 25e9, 12.5e9
"""Bytes per second of the network card of each device, as hosts of that kind are commonly built."""

PROFILES: dict[ProfileName, Accelerator] = {
    "h200": _of_data_sheet(
        bandwidth=4.8e12, flops=989e12, memory=141e9, link=450e9, network=GBIT_400, host_link=PCIE_5
    ),
    "h100": _of_data_sheet(
        bandwidth=3.35e12, flops=989e12, memory=80e9, link=450e9, network=GBIT_400, host_link=PCIE_5
    ),
    "a100": _of_data_sheet(
        bandwidth=2.04e12, flops=312e12, memory=80e9, link=300e9, network=GBIT_200, host_link=PCIE_4
    ),
    "l40s": _of_data_sheet(
        bandwidth=864e9,
        flops=362e12,
        memory=48e9,
        link=PCIE_4,
        network=GBIT_100,
        host_link=PCIE_4,
        link_seconds=PCIE_SECONDS,
    ),
    "l4": _of_data_sheet(
        bandwidth=300e9,
        flops=121e12,
        memory=24e9,
        link=PCIE_4,
        network=GBIT_100,
        host_link=PCIE_4,
        link_seconds=PCIE_SECONDS,
    ),
}
