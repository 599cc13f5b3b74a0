"""Whether Triton's kernels can be launched on a GPU: it is asked before anything depends on it."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

_LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies, and the least that our kernels are compiled for in tests."""


@cache
def why_no_triton(device: torch.device) -> str | None:
    """Why they cannot be on `device`, a GPU; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        needed, have = (".".join(map(str, version)) for version in (_LEAST_CAPABILITY, found))
        return f"Triton's kernels need a GPU of compute capability {needed}, {device} has {have}"
    try:
        _start()
    except Exception as error:  # no compiler, one that fails, no headers, no libcuda, a folder that nobody may write to
        return (
            f"Triton cannot launch kernels here ({error}): it builds what launches them by gcc or clang with Python's "
            "headers, and keeps it in TRITON_CACHE_DIR"
        )
    return None


def _start() -> None:
    """Builds what Triton's driver consists of, where that was not done before."""
    from triton.runtime import driver

    _ = driver.active.utils
