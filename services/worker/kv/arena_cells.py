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
        """To the slots, then the checksums. A slot that became another's meanwhile has none."""

    def read(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """From the slots: what equals its checksums. Ends at the first that does not."""


MakeCells = Callable[[RankHeads], ArenaCells]


class PlainArenaCells:
    """By numpy and xxhash."""

    def __init__(self, heads: RankHeads) -> None:
        self._heads = heads
        self._slots = slots_as_array(heads, WORD)

    def write(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """See `ArenaCells.write`."""
        copied: Copied = "all"
        for row, (slot, generation) in enumerate(zip(slots.tolist(), generations.tolist(), strict=True)):
            self._slots[slot] = host[row]
            if not self._heads.write_checksums(slot, generation):
                copied = "other generation"
        return copied

    def read(self, host: Int32s, slots: Slots, generations: Generations) -> Copied:
        """See `ArenaCells.read`."""
        for row, (slot, generation) in enumerate(zip(slots.tolist(), generations.tolist(), strict=True)):
            if not self._heads.unchanged([slot], [generation]):
                return "other generation"
            if not self._heads.verified(slot):
                return "other checksum"
            host[row] = self._slots[slot]
        return "all"
