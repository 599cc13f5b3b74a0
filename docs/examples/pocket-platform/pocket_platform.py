"""A device as small as can be: two of it per host, with 1 GiB each, which compute by PyTorch's operations in float32.

It has no kernels: its tensors are main memory. What is its own are its memory, its norms, and what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import Tensor

try:
    from baton.services.worker.platforms import main_memory
    from baton.services.worker.platforms.interface import (
        MemoryReading,
        Ops,
        OpsChoice,
        Platform,
        PlatformSettings,
        TorchOps,
    )
except ModuleNotFoundError:  # a checkout
    from services.worker.platforms import main_memory
    from services.worker.platforms.interface import (
        MemoryReading,
        Ops,
        OpsChoice,
        Platform,
        PlatformSettings,
        TorchOps,
    )

DEVICES = 2
MEMORY = 1 << 30


class PocketOps(TorchOps):
    """PyTorch's operations, but for one that the device has itself."""

    @property
    def name(self) -> str:
        """For logs, and for stores: whose layout blocks of keys and values have."""
        return "pocket"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [n, H] over the root of its mean square."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)


class Pocket(Platform):
    """What this process takes from here on counts as the device's."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._before = main_memory.resident_bytes()

    @classmethod
    def why_unavailable(cls) -> str | None:
        """It can tell what a process takes by Linux's /proc only."""
        return None if main_memory.STATUS.exists() else "it needs Linux"

    @classmethod
    def device_count(cls) -> int:
        """Ranks of one engine need one each."""
        return DEVICES

    def torch_device(self, index: int) -> torch.device:
        """Both are PyTorch's CPU."""
        return torch.device("cpu")

    def check_settings(self, settings: PlatformSettings) -> PlatformSettings:
        """All weights are float32."""
        if settings.dtype not in ("auto", "float32"):
            raise ValueError(f"dtype = {settings.dtype}: it computes in float32; auto and float32 are possible")
        return replace(settings, dtype="float32")

    def create_ops(self, choice: OpsChoice) -> Ops:
        """Its own, unless PyTorch's are asked for."""
        if choice.name == "auto" and choice.cache == "auto":
            return PocketOps(choice.device, choice.dtype, block_size=choice.block_size)
        return super().create_ops(choice)

    def synchronize(self) -> None:
        """It has computed; but a step may have taken more than there is."""
        if self.memory().free == 0:
            raise torch.OutOfMemoryError(f"{self}: a step took more than the device has")

    def memory(self) -> MemoryReading:
        """Of its own size."""
        own = max(0, main_memory.resident_bytes() - self._before)
        return MemoryReading(max(0, MEMORY - own), own, MEMORY)

    def peak_bytes(self, work: Callable[[], None]) -> int:
        """That of the process."""
        return main_memory.peak_bytes(work)
