"""On which NUMA nodes the kernel puts the memory that this thread, and those that it starts, touch first.

The policies of set_mempolicy(2), called as libnuma calls them; the packages on PyPI that wrap libnuma are unmaintained,
and need it installed. https://man7.org/linux/man-pages/man2/set_mempolicy.2.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Collection
from enum import IntEnum

_CALLS = {"x86_64": 238, "aarch64": 237}
"""The number of set_mempolicy, by machine."""
_MASK_BITS = 1024
"""As many nodes as Linux can have."""


class MemoryPolicy(IntEnum):
    """Where memory is put; numbers of the kernel's."""

    DEFAULT = 0
    """On the node of the processor that touches it."""
    PREFERRED = 1
    """On one node as long as it has room."""
    BIND = 2
    """On these nodes, and nowhere else."""
    INTERLEAVE = 3
    """On these nodes in turn, page by page."""


def set_memory_policy(policy: MemoryPolicy, nodes: Collection[int]) -> None:
    """For this thread and the threads and processes that it starts. Raises OSError: ENOSYS where the system has no such
    call, EPERM in a sandbox that forbids it, EINVAL for nodes that this process may not use."""
    number = _CALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise OSError(errno.ENOSYS, f"set_mempolicy: {os.strerror(errno.ENOSYS)}")
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    libc, bits = ctypes.CDLL(None, use_errno=True), ctypes.c_long(_MASK_BITS + 1 if nodes else 0)
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(policy), mask if nodes else None, bits):
        raise OSError(ctypes.get_errno(), f"set_mempolicy: {os.strerror(ctypes.get_errno())}")
