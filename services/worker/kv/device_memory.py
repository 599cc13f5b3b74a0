"""How much memory there is, and how much a piece of work took at its peak."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def gib(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / (1 << 30):.2f} GiB"


def free_bytes(device: torch.device) -> int:
    """Memory of `device` that could be had now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if _MEMINFO.exists():
        return min(_kilobytes(_MEMINFO, "MemAvailable"), _left_in_cgroup())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def own_bytes(device: torch.device) -> int:
    """What this process's PyTorch holds of a GPU, whatever others take and give back meanwhile; 0 elsewhere."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def total_bytes(device: torch.device) -> int:
    """Memory of `device`, whoever holds it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_cgroup() -> int:
    """What a container's limit leaves (cgroup v2); beyond every machine where there is no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    return max(0, int(limit) - used) if limit.isdigit() else sys.maxsize


def peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Runs `work`; how much more memory it took at its peak than was taken before."""
    if device.type == "cuda":
        return _peak_on_cuda(device, work)
    before = _resident_after_resetting_peak()
    work()
    return max(0, _peak_resident() - before)


def _peak_on_cuda(device: torch.device, work: Callable[[], None]) -> int:
    """Peak bytes that PyTorch reserved on the device during `work`. It is more than the tensors hold, because of
    fragmentation."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = own_bytes(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_reserved(device)) - before


def _resident_after_resetting_peak() -> int:
    """Linux: resets the high-water mark (proc_pid_clear_refs(5)), which would else hide behind the loading's."""
    if not _CLEAR_REFS.exists():
        return _peak_resident()
    _CLEAR_REFS.write_text("5")
    return _kilobytes(_STATUS, "VmRSS")


def _peak_resident() -> int:
    if _STATUS.exists():
        return _kilobytes(_STATUS, "VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _kilobytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no {key}")
