"""Chooses the operations that a model runs on."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from services.worker.ops import Ops, OpsUnavailable
from services.worker.torch_ops import TorchOps

OpsName = Literal["auto", "torch", "native"]

_log = logging.getLogger(__name__)


def create_ops(name: OpsName, device: torch.device, dtype: torch.dtype) -> Ops:
    """The operations called `name`; `auto` is the native ones where this machine can run them, else PyTorch's.

    Raises OpsUnavailable where `native` is asked for by name and cannot be had.
    """
    if name == "torch" or (name == "auto" and device.type != "cpu"):
        return TorchOps(device, dtype)
    try:
        return _native(device, dtype)
    except OpsUnavailable as reason:
        if name == "native":
            raise
        _log.info("native operations are not available: %s", reason)
        return TorchOps(device, dtype)


def _native(device: torch.device, dtype: torch.dtype) -> Ops:
    try:
        from services.worker.native.native_ops import NativeOps
    except ImportError as error:
        raise OpsUnavailable(f"the native operations are not part of this installation ({error})") from None
    return NativeOps(device, dtype)
