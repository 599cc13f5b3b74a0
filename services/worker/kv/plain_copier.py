"""Copies blocks of caches that lie as [blocks, heads, tokens, elements] in main memory, layer by layer.

By numpy, not PyTorch: its copies use all cores, which belong to the computing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.kv.copier import Copied, HostLayerCache, TransferChunk
from services.worker.kv.rank_heads import RankHeads

_WORDS: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 2: np.dtype("<u2"), 1: np.dtype("u1")}
"""Data that is only copied is treated as integers that numpy knows, by element size."""
_TORCH_WORDS: dict[int, torch.dtype] = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PlainKvCopier:
    """The `KvCopier` of a CPU."""

    def __init__(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        self._caches = [tuple(_as_words(cache) for cache in halves) for halves in caches]
        self._dtype = _WORDS[caches[0][0].dtype.itemsize]

    @property
    def runs(self) -> tuple[HostLayerCache, ...]:
        """Each cache, as pages of this process."""
        caches = [cache for halves in self._caches for cache in halves]
        return tuple(HostLayerCache(cache.ctypes.data, cache[0].nbytes) for cache in caches)

    def bind(self, heads: RankHeads) -> BoundPlainKvCopier:
        """See `KvCopier.bind`."""
        keys = heads.arena.geometry.key_bytes // self._dtype.itemsize
        return BoundPlainKvCopier(self._caches, heads, self._dtype, (slice(0, keys), slice(keys, None)))


class BoundPlainKvCopier:
    """The `BoundCopier` of a CPU."""

    def __init__(
        self,
        caches: Sequence[tuple[NDArray[np.generic], ...]],
        heads: RankHeads,
        dtype: np.dtype[Any],
        parts: tuple[slice, ...],
    ) -> None:
        """`caches`: of each layer, [blocks, heads, elements] for each of the `parts` of a cell."""
        self._caches = caches
        self._heads = heads
        self._slots = slots_as_array(heads, dtype)
        self._parts = parts

    def save(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.save`."""
        blocks, slots, generations = (each.tolist() for each in chunk)

        def put(number: int) -> None:
            to = self._slots[slots[number]]
            for layer, halves in enumerate(self._caches):
                for part, cache in zip(self._parts, halves, strict=True):
                    to[:, layer, part] = cache[blocks[number]]

        self._heads.touch(slots)
        return self._heads.save(slots, generations, put)

    def load(self, chunk: TransferChunk) -> Copied:
        """See `BoundCopier.load`."""
        blocks, slots, generations = (each.tolist() for each in chunk)

        def take(number: int) -> None:
            source = self._slots[slots[number]]
            for layer, halves in enumerate(self._caches):
                for part, cache in zip(self._parts, halves, strict=True):
                    cache[blocks[number]] = source[:, layer, part]

        copied = self._heads.load(slots, generations, take)
        if copied != "all":
            self._clear(blocks)
        return copied

    def close(self) -> None:
        """Lets go of the arena."""
        self.forget()
        self._heads.close()

    def forget(self) -> None:
        """Lets go of the slots; somebody else lets go of the arena."""
        del self._slots

    def _clear(self, blocks: list[int]) -> None:
        """Zeroes blocks with undefined contents, which must be finite because attention multiplies them by 0."""
        for halves in self._caches:
            for cache in halves:
                cache[blocks] = 0


def slots_as_array(heads: RankHeads, dtype: np.dtype[Any]) -> NDArray[np.generic]:
    """[slots, heads, layers, elements of a cell] where the arena lies; the caller keeps it mapped. A cell's keys come
    first, then its values."""
    shape = heads.arena.geometry
    room = (shape.slots - 1) * shape.payload_stride + heads.span
    return np.ndarray(
        (shape.slots, heads.count, heads.layers, shape.cell_bytes // dtype.itemsize),
        dtype=dtype,
        buffer=memoryview((ctypes.c_char * room).from_address(heads.payloads)).cast("B"),
        strides=(shape.payload_stride, heads.head_stride, shape.cell_bytes, dtype.itemsize),
    )


def _as_words(cache: Tensor) -> NDArray[np.generic]:
    """[blocks, heads, elements of 16 tokens] in the same memory."""
    words: NDArray[np.generic] = cache.flatten(2).view(_TORCH_WORDS[cache.dtype.itemsize]).numpy()
    return words
