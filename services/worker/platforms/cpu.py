"""This machine's processors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.worker.distributed.host_memory import SharedExchange
from services.worker.platforms import main_memory
from services.worker.platforms.interface import MemoryReading, Platform


class CpuPlatform(Platform):
    """See `Platform`. All ranks have the one device, each some of its processors."""

    name = "cpu"
    operations = ("native", "torch", "triton")  # the last are interpreted, where TRITON_INTERPRET says so
    owns_memory = False
    profiled_rows = 128
    """The largest batch of a large model takes a minute. Activations grow with the rows, so fewer will do. With 512 a
    model of 110 M parameters took 22 s of processor time and was taken to need 0.99 GiB, with 128 9 s and 1.05."""
    keeps_profile = True

    @classmethod
    def why_unavailable(cls) -> None:
        """There is one everywhere."""

    def torch_device(self, index: int) -> torch.device:
        """The same for all ranks."""
        return torch.device("cpu")

    def shared_exchange(self, ranks: int) -> SharedExchange | None:
        """By the C++ library, through shared memory."""
        from services.worker.ops.native.native_exchange import shared_exchange

        return shared_exchange(ranks)

    def memory(self) -> MemoryReading:
        """Main memory. What this process holds of it is not told from what others do."""
        return MemoryReading(main_memory.free_bytes(), total=main_memory.total_bytes())

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """By the high-water mark of this process."""
        return main_memory.peak_bytes(work)
