"""NVIDIA's GPUs, and whatever else PyTorch calls `cuda`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from services.worker.platforms.interface import MemoryReading, Platform


class CudaPlatform(Platform):
    """See `Platform`. Nothing here touches a GPU before its methods are called."""

    name = "cuda"
    operations = ("triton", "torch")
    process_group = "cpu:gloo,cuda:nccl"
    compiles = True
    launches_ahead = True
    captures_graphs = True

    @classmethod
    def why_unavailable(cls) -> str | None:
        """Where there is no GPU, or no driver, or a PyTorch without CUDA."""
        return (
            None
            if torch.cuda.is_available()
            else "PyTorch sees no CUDA device here (baton doctor says why); --device cpu computes without"
        )

    @classmethod
    def device_count(cls) -> int:
        """Those that CUDA_VISIBLE_DEVICES leaves."""
        return torch.cuda.device_count()

    def torch_device(self, index: int) -> torch.device:
        """By number."""
        return torch.device("cuda", index)

    @property
    def device_name(self) -> str:
        """As "NVIDIA H200"."""
        return torch.cuda.get_device_name(self.device)

    def pci_addresses(self) -> list[str]:
        """As the driver says."""
        # torch's stubs do not know these.
        found: Iterable[Any] = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in found]

    def activate(self) -> None:
        """Libraries launch on whatever is current; a thread begins with GPU 0."""
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """All streams."""
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """What is garbage, too."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def memory(self) -> MemoryReading:
        """`own` is what PyTorch holds, whatever others take and give back meanwhile."""
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryReading(int(free), int(torch.cuda.memory_reserved(self.device)), int(total))

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """What PyTorch reserved during `work`, more than the tensors hold, because of fragmentation."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = int(torch.cuda.memory_reserved(self.device))
        work()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device)) - before
