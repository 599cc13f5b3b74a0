"""Which blocks hold each sequence's keys and values, in an array by slot."""

from __future__ import annotations

import numpy as np

from services.worker.batch import BrokenPlan
from services.worker.rows import Int32s, Slots
from shared.blocks import BLOCK_SIZE
from shared.ids import SequenceId

_WIRE = np.dtype("<u4")


class BlockTables:
    """Owned by the sequence table: a row for each slot. Untouched pages take no memory."""

    def __init__(self, slots: int, width: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.ids: Int32s = np.zeros((slots, width), dtype=np.int32)
        """[slots, width]"""
        self._held = np.zeros(slots, dtype=np.int32)

    def begin(self, slot: int) -> None:
        """An empty table for whoever has the slot now."""
        self._held[slot] = 0

    def append(self, slot: int, sequence: SequenceId, packed: bytes) -> None:
        """Raises BrokenPlan where they are too many, or not of this worker's memory."""
        blocks = np.frombuffer(packed, dtype=_WIRE)
        held = int(self._held[slot])
        if held + len(blocks) > self.ids.shape[1]:
            raise BrokenPlan(f"sequence {sequence}: {held + len(blocks)} blocks are more than its context fills")
        if len(blocks) and int(blocks.max()) >= self._num_blocks:
            raise BrokenPlan(f"sequence {sequence}: block {blocks.max()} of {self._num_blocks}")
        self.ids[slot, held : held + len(blocks)] = blocks
        self._held[slot] = held + len(blocks)

    def held(self, slots: Slots | int) -> Int32s:
        """Blocks in each table."""
        held: Int32s = self._held[slots]
        return held

    def room(self, slots: Slots | int) -> Int32s:
        """Tokens that each one's blocks hold."""
        return self.held(slots) * np.int32(BLOCK_SIZE)
