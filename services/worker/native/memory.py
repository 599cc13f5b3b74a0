"""Memory that the kernels read: aligned, and on huge pages where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64
_MADV_HUGEPAGE = 14


def zeroed(num_bytes: int) -> Tensor:
    """`num_bytes` zero bytes that start on a huge page's bound, as a uint8 tensor; pages come when first touched."""
    room = num_bytes + _HUGE_PAGE
    whole = torch.frombuffer(_mapping(room), dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    aligned = whole[start : start + num_bytes]
    if sys.platform == "linux":
        # Streaming weights from 4 kB pages is a tenth slower. A refusal costs only that.
        length = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(aligned.data_ptr()), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return aligned


def _mapping(num_bytes: int) -> mmap.mmap:
    """Anonymous memory of its own, not malloc's: zero without being written, and taken only as it is touched."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Arena:
    """Places many pieces in a few large allocations, which stay until the arena and all pieces are gone."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """A zeroed piece, aligned for the kernels."""
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._left) < rounded:
            self._left = zeroed(max(_CHUNK_BYTES, rounded))
        piece, self._left = self._left[:rounded], self._left[rounded:]
        return piece[:num_bytes]
