"""Arrays to a device and tensors back, in the order of its current stream, and without waiting for it.

On CUDA both go through page-locked memory, which PyTorch keeps and gives out again when the copy is over. What comes
from `to_host` may be read once an event is over that was recorded behind it. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED_BYTES = 16
"""Bytes that each array's place among others is a multiple of."""


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`; it may be written to at once, unless that is the CPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def on_this_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """What the host has sent to `device`, or what lies there already."""
    return values if isinstance(values, Tensor) else to_device(values, device)


def to_device_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Each of `arrays` (of one dimension) on `device`, in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    together, starts = pack_bytes(arrays)
    return unpack_tensors(to_device(together, device), arrays, starts)


def pack_bytes(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[np.uint8], list[int]]:
    """(the bytes of all, one behind the other, where each begins)"""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    together = np.zeros(end, dtype=np.uint8)
    for array, start in zip(arrays, starts, strict=True):
        together[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    return together, starts


def unpack_tensors(together: Tensor, arrays: Sequence[NDArray[Any]], starts: list[int]) -> list[Tensor]:
    """Splits packed bytes into tensors with the shapes and dtypes of `arrays`."""
    return [
        together[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, starts, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` on its way to main memory."""
    return tensor.contiguous().to("cpu", non_blocking=True)  # which is page-locked then, where it comes from a GPU
