"""Copies blocks of the native caches: one call of the library converts, sums up and writes them, without Python's lock.

It takes one core at the most: the pool's threads belong to the computing.
"""

from __future__ import annotations

import ctypes
import errno
import logging
from collections.abc import Callable

from torch import Tensor

from services.worker.kv.arena_cells import ArenaCells, Generations, Int32s, PlainArenaCells, Slots
from services.worker.kv.copier import Copied, HostLayerCache, TransferChunk
from services.worker.kv.rank_heads import RankHeads
from services.worker.ops.native import library
from services.worker.ops.native.build import BuildError, best_level, library_path
from services.worker.ops.native.kv_structures import KvArena, KvBlocks, KvCells, NativeKvCaches

_log = logging.getLogger(__name__)

_MIN_CHECKSUM_BYTES = 240
"""The value of `Checksum::kShortest` in checksum.h."""
_LINE_BYTES = 64
"""The value of `kLine` in kv_copy.cpp."""
_COPIED: tuple[Copied, ...] = ("all", "other generation", "other checksum")
"""The values of `KvCopied` in kv_copy.h."""


class NativeKvCopier:
    """See :class:`services.worker.kv.copier.KvCopier`."""

    def __init__(self, loaded: ctypes.CDLL, caches: list[tuple[Tensor, Tensor]], head_dim: int) -> None:
        self._library = loaded
        self._caches = caches
        array = ctypes.c_void_p * len(caches)
        keys = caches[0][0]
        self._memory = NativeKvCaches(
            item_bytes=keys.dtype.itemsize,
            layers=len(caches),
            kv_heads=keys.shape[1],
            head_dim=head_dim,
            pages=keys.shape[2] // library.PAGE_TOKENS,
            keys=array(*(cache[0].data_ptr() for cache in caches)),
            values=array(*(cache[1].data_ptr() for cache in caches)),
        )

    @property
    def runs(self) -> tuple[HostLayerCache, ...]:
        """Each layer's keys and values, as they lie in this process's memory."""
        caches = [cache for halves in self._caches for cache in halves]
        return tuple(HostLayerCache(cache.data_ptr(), cache[0].nbytes) for cache in caches)

    def bind(self, heads: RankHeads) -> BoundNativeKvCopier:
        """For these heads and layers of an arena. Raises OSError for heads too small for the library's checksums."""
        if heads.arena.geometry.cell_bytes <= _MIN_CHECKSUM_BYTES:
            raise OSError(errno.EINVAL, f"heads of {heads.arena.geometry.cell_bytes} bytes are not supported")
        return BoundNativeKvCopier(self._library, self._memory, heads)


def native_cells(heads: RankHeads) -> ArenaCells:
    """The library's copies of cells; `PlainArenaCells` where there is no library, or none for cells of that size. Waits
    for a compiler where nobody has compiled it."""
    size = heads.arena.geometry.cell_bytes
    if size <= _MIN_CHECKSUM_BYTES or size % _LINE_BYTES:
        return PlainArenaCells(heads)
    try:
        return NativeArenaCells(library.load(library_path(best_level())), heads)
    except (BuildError, OSError, AttributeError) as error:
        _log.info("blocks are copied by Python: %s", error)
        return PlainArenaCells(heads)


class NativeArenaCells:
    """See :class:`services.worker.kv.arena_cells.ArenaCells`. Python's lock is not held while anything is copied."""

    def __init__(self, loaded: ctypes.CDLL, heads: RankHeads) -> None:
        self._library = loaded
        self._heads = heads
        self._arena = _arena_of(heads)

    def write(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """See `ArenaCells.write`."""
        return self._copy(self._library.baton_kv_save_cells, host, slots, generations)

    def read(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """See `ArenaCells.read`."""
        return self._copy(self._library.baton_kv_load_cells, host, slots, generations)

    def _copy(self, function: Callable[..., int], host: Int32s, slots: Slots, generations: Generations) -> Copied:
        heads = self._heads
        if host.ctypes.data % _LINE_BYTES:
            raise ValueError(f"cells at {host.ctypes.data:#x}: a multiple of {_LINE_BYTES} is expected")
        cells = KvCells(heads.layers, heads.count, heads.arena.geometry.cell_bytes, host.ctypes.data)
        what = KvBlocks(len(slots), None, slots.ctypes.data, generations.ctypes.data)
        return _COPIED[function(ctypes.byref(cells), ctypes.byref(self._arena), ctypes.byref(what))]


class BoundNativeKvCopier:
    """See :class:`services.worker.kv.copier.BoundCopier`."""

    def __init__(self, loaded: ctypes.CDLL, memory: NativeKvCaches, heads: RankHeads) -> None:
        self._library = loaded
        self._memory = memory
        self._heads = heads
        self._arena = _arena_of(heads)

    def save(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.save`. Python's lock is not held meanwhile."""
        self._heads.touch(chunk.slots.tolist())
        return self._copy(self._library.baton_kv_save, chunk)

    def load(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.load`. Python's lock is not held meanwhile."""
        return self._copy(self._library.baton_kv_load, chunk)

    def close(self) -> None:
        """Lets go of the arena's memory."""
        self._heads.close()

    def _copy(self, function: Callable[..., int], chunk: TransferChunk) -> Copied:
        what = KvBlocks(
            len(chunk.blocks), chunk.blocks.ctypes.data, chunk.slots.ctypes.data, chunk.generations.ctypes.data
        )
        return _COPIED[function(ctypes.byref(self._memory), ctypes.byref(self._arena), ctypes.byref(what))]


def _arena_of(heads: RankHeads) -> KvArena:
    shape = heads.arena.geometry
    return KvArena(
        generations=heads.generations,
        checksums=heads.checksums,
        payloads=heads.payloads,
        header_stride=shape.header_stride,
        payload_stride=shape.payload_stride,
        head_stride=heads.head_stride,
        checksum_stride=heads.checksum_stride,
    )
