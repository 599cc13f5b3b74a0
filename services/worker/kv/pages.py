"""Has the system provide pages of memory before they are touched: one by one, when touched, costs far more."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

from kvstore.core.layout import PAGE

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""Linux 5.14 and later; see madvise(2)."""


def provide(start: int, length: int, *, write: bool) -> None:
    """Pages for `length` bytes from address `start` on, whose contents stay what they are; `write`: to be written to.

    Raises OSError (ENOSPC) where the system has no memory for them: touching them would end the process. Elsewhere than
    on Linux it does nothing.
    """
    if sys.platform != "linux" or length <= 0:
        return
    first = start // PAGE * PAGE
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    if _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(start + length - first), advice) == 0:
        return
    # Whatever else is refused (an older kernel knows no such advice) costs only time: pages come when touched.
    if ctypes.get_errno() in (errno.EFAULT, errno.ENOMEM):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_libc = ctypes.CDLL(None, use_errno=True)
