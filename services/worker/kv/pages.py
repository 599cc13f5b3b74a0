"""Has the system provide pages of memory before they are touched: one by one, when touched, costs far more."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys

from kvstore.core.layout import PAGE
from services.worker.kv.copier import RankKvCache

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


# Provides the pages of KV memory shortly before blocks are used. Knows no threads and no arena.
#
# Memory that was never touched must be zeroed by the system before it can be written to, which takes several times as
# long as loading a block into it. Little is provided beyond what is used, as it cannot be given back.


AHEAD_BYTES = 256 << 20
"""Most bytes of blocks that are provided beyond the last used one; the scheduler uses blocks in order."""
FIRST_BYTES = 32 << 20
FIRST_TOKENS = 512
"""Before any is used, blocks of so many tokens are provided, a few requests', and of no more than `FIRST_BYTES`: an
engine that idles should not look as if it worked. From then on as many are provided as are in use, up to
`AHEAD_BYTES`."""
CHUNK_BYTES = 2 << 20
"""Bytes that are provided at a time: less than a millisecond's work, so that nothing waits for it."""

_log = logging.getLogger(__name__)


class PagePrefault:
    """Owns how far a rank's blocks have their pages. Used from one thread."""

    def __init__(self, share: RankKvCache) -> None:
        self._runs = tuple(share.copier.runs)
        self._blocks = share.num_blocks - share.pages
        block_bytes = max(1, sum(run.block_bytes for run in self._runs))
        self._first = min(FIRST_BYTES // block_bytes, FIRST_TOKENS // share.layout.block_size)
        self._most = AHEAD_BYTES // block_bytes
        self._at_a_time = max(1, CHUNK_BYTES // max((run.block_bytes for run in self._runs), default=1))
        self._provided = 0
        """Blocks before this one have their pages, and it and those behind it in the first `_run` runs."""
        self._run = self._piece = 0
        """The run that comes next, and the blocks that are provided in each: no more than have their pages already."""
        self._wanted = min(self._first, self._blocks) if self._runs else 0

    @property
    def left(self) -> bool:
        """Whether there are pages to provide."""
        return self._provided < self._wanted

    def used(self, block: int) -> None:
        """It and what lies before it is in use."""
        if self._runs and block < self._blocks:
            ahead = min(max(block + 1, self._first), self._most)
            self._wanted = max(self._wanted, min(block + 1 + ahead, self._blocks))

    def provide_some(self) -> None:
        """One piece, where some is left."""
        run = self._runs[self._run]
        if self._run == 0:
            self._piece = min(self._at_a_time, max(1, self._first, self._provided), self._blocks - self._provided)
        try:
            provide(run.address + self._provided * run.block_bytes, self._piece * run.block_bytes, write=True)
        except OSError as error:
            _log.warning("KV memory is not mapped in advance: %s", error)
            self._runs, self._wanted = (), 0
            return
        self._run = (self._run + 1) % len(self._runs)
        if self._run == 0:
            self._provided += self._piece
