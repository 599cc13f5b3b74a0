"""Copies blocks of the native caches: one call of the library converts, sums up and writes them, without Python's lock.

It takes one core at the most: the pool's threads belong to the computing.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable

from torch import Tensor

from services.worker.kv.copier import CacheRun, Copied, Piece
from services.worker.kv.rank_heads import RankHeads
from services.worker.ops.native import library

_MIN_CHECKSUM_BYTES = 240
"""The value of `Checksum::kShortest` in checksum.h."""
_COPIED: tuple[Copied, ...] = ("all", "other generation", "other checksum")
"""The values of `KvCopied` in kv_copy.h."""


class NativeKvCopier:
    """See :class:`services.worker.kv.copier.KvCopier`."""

    def __init__(self, loaded: ctypes.CDLL, caches: list[tuple[Tensor, Tensor]], head_dim: int) -> None:
        self._library = loaded
        self._caches = caches
        array = ctypes.c_void_p * len(caches)
        keys = caches[0][0]
        self._memory = library.NativeKvCaches(
            item_bytes=keys.dtype.itemsize,
            layers=len(caches),
            kv_heads=keys.shape[1],
            head_dim=head_dim,
            pages=keys.shape[2] // library.PAGE_TOKENS,
            keys=array(*(cache[0].data_ptr() for cache in caches)),
            values=array(*(cache[1].data_ptr() for cache in caches)),
        )

    @property
    def runs(self) -> tuple[CacheRun, ...]:
        """Each layer's keys and values, as they lie in this process's memory."""
        caches = [cache for halves in self._caches for cache in halves]
        return tuple(CacheRun(cache.data_ptr(), cache[0].nbytes) for cache in caches)

    def bind(self, heads: RankHeads) -> BoundNativeKvCopier:
        """For these heads and layers of an arena. Raises OSError for heads too small for the library's checksums."""
        if heads.arena.geometry.cell_bytes <= _MIN_CHECKSUM_BYTES:
            raise OSError(errno.EINVAL, f"heads of {heads.arena.geometry.cell_bytes} bytes are not supported")
        return BoundNativeKvCopier(self._library, self._memory, heads)


class BoundNativeKvCopier:
    """See :class:`services.worker.kv.copier.BoundCopier`."""

    def __init__(self, loaded: ctypes.CDLL, memory: library.NativeKvCaches, heads: RankHeads) -> None:
        self._library = loaded
        self._memory = memory
        self._heads = heads
        shape = heads.arena.geometry
        self._arena = library.KvArena(
            generations=heads.generations,
            checksums=heads.checksums,
            payloads=heads.payloads,
            header_stride=shape.header_stride,
            payload_stride=shape.payload_stride,
            head_stride=heads.head_stride,
            checksum_stride=heads.checksum_stride,
        )

    def save(self, piece: Piece) -> Copied:
        """See `BoundCopier.save`. Python's lock is not held meanwhile."""
        self._heads.touch(piece.slots.tolist())
        return self._copy(self._library.baton_kv_save, piece)

    def load(self, piece: Piece) -> Copied:
        """See `BoundCopier.load`. Python's lock is not held meanwhile."""
        return self._copy(self._library.baton_kv_load, piece)

    def close(self) -> None:
        """Lets go of the arena's memory."""
        self._heads.close()

    def _copy(self, function: Callable[..., int], piece: Piece) -> Copied:
        what = library.KvBlocks(
            len(piece.blocks), piece.blocks.ctypes.data, piece.slots.ctypes.data, piece.generations.ctypes.data
        )
        return _COPIED[function(ctypes.byref(self._memory), ctypes.byref(self._arena), ctypes.byref(what))]
