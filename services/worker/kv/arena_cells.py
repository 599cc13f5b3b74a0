"""Copies blocks between memory that lies as an arena's cells do and the arena's slots, with their checksums.

For devices that bring their blocks into that order themselves. The library's copies (`ops/native/native_kv.py`) need no
lock of Python's; these take it for each cell, and give it away in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.kv.copier import Copied
from services.worker.kv.plain_copier import slots_as_array
from services.worker.kv.rank_heads import RankHeads

WORD = np.dtype("<i4")
"""Data that is only copied is treated as 4-byte integers; 16 tokens of any head are a multiple of that."""

Int32s = NDArray[np.int32]
Slots = NDArray[np.uint32]
Generations = NDArray[np.uint64]


class ArenaCells(Protocol):
    """This rank's cells in an arena. `host`: [blocks, heads, layers, words of a cell], contiguous, from a multiple
    of 64 bytes on; a slot and the generation that it must have for each block."""

    def write(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """To the slots, then the checksums. Ends at the first slot that is another's, which has none then."""

    def read(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """From the slots: what equals its checksums. Ends at the first slot that does not, or is another's."""


MakeCells = Callable[[RankHeads], ArenaCells]


class PlainArenaCells:
    """`ArenaCells` by numpy and xxhash."""

    def __init__(self, heads: RankHeads) -> None:
        self._heads = heads
        self._slots = slots_as_array(heads, WORD)

    def write(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """See `ArenaCells.write`."""

        def put(number: int) -> None:
            self._slots[slots[number]] = host[number]

        return self._heads.save(slots.tolist(), generations.tolist(), put)

    def read(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """See `ArenaCells.read`."""

        def take(number: int) -> None:
            host[number] = self._slots[slots[number]]

        return self._heads.load(slots.tolist(), generations.tolist(), take)
