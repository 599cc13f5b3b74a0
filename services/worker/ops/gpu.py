"""What a GPU is to Triton's kernels: whether they can be launched on it, its generation, and its multiprocessors."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

AMPERE = 8
"""Major compute capability of the GPUs whose programs have 99 KiB of shared memory, or 163, and products by warps."""
HOPPER = 9
"""Major compute capability from which products run on whole warp groups (wgmma) and shared memory has 227 KiB."""

_MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies, and the least that our kernels are compiled for in tests."""


@cache
def why_no_triton(device: torch.device) -> str | None:
    """Why they cannot be on `device`, a GPU; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    found = torch.cuda.get_device_capability(device)
    if found < _MIN_CAPABILITY:
        needed, have = (".".join(map(str, version)) for version in (_MIN_CAPABILITY, found))
        return f"Triton's kernels need a GPU of compute capability {needed}, {device} has {have}"
    try:
        _start()
    except Exception as error:  # no compiler, one that fails, no headers, no libcuda, a folder that nobody may write to
        return (
            f"Triton cannot launch kernels here ({error}): it builds what launches them by gcc or clang with Python's "
            "headers, and keeps it in TRITON_CACHE_DIR"
        )
    return None


def runs_triton(device: torch.device) -> bool:
    """Whether what lies on `device` is computed by Triton's kernels: it is a GPU, and they can be launched there."""
    return device.type == "cuda" and why_no_triton(device) is None


def _start() -> None:
    """Builds what Triton's driver consists of, where that was not done before."""
    from triton.runtime import driver

    _ = driver.active.utils


@cache
def generation(device: torch.device) -> int:
    """The generation whose tiles the GPU can run; off a GPU, as if it were Hopper."""
    return generation_of(torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else HOPPER)


def generation_of(major: int) -> int:
    """By major compute capability. Those of 12 (GeForce RTX 50 and their kin) have an Ada's shared memory, and no
    products of warp groups."""
    return AMPERE if major == 12 else major


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of the GPU; off a GPU, as many as an H200 has, so that tests cut as it would."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
