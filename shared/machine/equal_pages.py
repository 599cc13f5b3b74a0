"""Pages of several processes with the same content, which the kernel can keep once (KSM)."""

from __future__ import annotations

import ctypes
import os

_PR_SET_MEMORY_MERGE = 67


def offer_equal_pages() -> None:
    """Lets the kernel keep equal pages of this process once, and of all that it forks from now on, whatever they hold
    (PR_SET_MEMORY_MERGE(2const)). It does so where the host's administrator has switched that on. Raises OSError where
    the kernel does not know how (before Linux 6.4, or built without CONFIG_KSM)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "prctl"):
        raise OSError("this system is not Linux")
    if libc.prctl(_PR_SET_MEMORY_MERGE, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
