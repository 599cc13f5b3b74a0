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

_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Numbers of set_mempolicy and get_mempolicy, by machine."""
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
    mask = _mask(nodes)
    if _call(0, int(policy), mask if nodes else None, _MASK_BITS + 1 if nodes else 0):
        raise OSError(ctypes.get_errno(), f"set_mempolicy: {os.strerror(ctypes.get_errno())}")


def memory_policy() -> tuple[MemoryPolicy, frozenset[int]]:
    """This thread's policy, and its nodes. Raises OSError."""
    mode, mask = ctypes.c_int(), _mask(())
    if _call(1, ctypes.byref(mode), mask, _MASK_BITS + 1, None, 0):
        raise OSError(ctypes.get_errno(), f"get_mempolicy: {os.strerror(ctypes.get_errno())}")
    words = enumerate(mask)
    nodes = frozenset(64 * word + bit for word, bits in words for bit in range(64) if bits >> bit & 1)
    return MemoryPolicy(mode.value), nodes


def _mask(nodes: Collection[int]) -> ctypes.Array[ctypes.c_uint64]:
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    return mask


def _call(which: int, *arguments: object) -> int:
    numbers = _CALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        ctypes.set_errno(errno.ENOSYS)
        return -1
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(ctypes.c_long(numbers[which]), *(_argument(each) for each in arguments)))


def _argument(value: object) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value
