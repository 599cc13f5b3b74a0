"""The norm behind a mixer whose heads several ranks share."""

from __future__ import annotations

from torch import Tensor

from services.worker.distributed.communicator import Communicator


def normed_over_ranks(mixed: Tensor, weight: Tensor, eps: float, communicator: Communicator) -> Tensor:
    """mixed [n, H * P], RMS-normed over the heads of all ranks."""
    wide, elements = mixed.float(), mixed.shape[1] * communicator.world_size
    squares = communicator.sum(wide.square().sum(1, keepdim=True))
    return (wide * (squares / elements + eps).rsqrt() * weight).to(mixed.dtype)
