"""How much main memory there is, and how much of it a piece of work took at its peak."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")
"""Where Linux says what this process takes."""
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def gib(size: int) -> str:
    """Bytes as people read them; less than a tenth of a GiB in smaller units, so that little is not nothing."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= (1 << shift) / 10:
            return f"{size / (1 << shift):.2f} {unit}"
    return f"{size} bytes"


def free_bytes() -> int:
    """Main memory that could be had now."""
    if _MEMINFO.exists():
        return min(_kilobytes(_MEMINFO, "MemAvailable"), _left_in_cgroup())
    return total_bytes() // 2


def total_bytes() -> int:
    """Main memory, whoever holds it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes() -> int:
    """What this process holds of it."""
    return _kilobytes(STATUS, "VmRSS") if STATUS.exists() else _peak_resident()


def peak_bytes(work: Callable[[], None]) -> int:
    """Runs `work`; how much more main memory it took at its peak than was taken before."""
    before = _resident_after_resetting_peak()
    work()
    return max(0, _peak_resident() - before)


def _left_in_cgroup() -> int:
    """What a container's limit leaves (cgroup v2); beyond every machine where there is no limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    return max(0, int(limit) - used) if limit.isdigit() else sys.maxsize


def _resident_after_resetting_peak() -> int:
    """Linux: resets the high-water mark (proc_pid_clear_refs(5)), which would else hide behind the loading's."""
    if not _CLEAR_REFS.exists():
        return _peak_resident()
    _CLEAR_REFS.write_text("5")
    return resident_bytes()


def _peak_resident() -> int:
    if STATUS.exists():
        return _kilobytes(STATUS, "VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _kilobytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no {key}")
