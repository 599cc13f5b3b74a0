"""The cells of one rank in a mapped arena, some layers of some heads: where they lie in this process's memory, and when
what is written there or read from there counts.

The slots' generations are compared before and after each copy: a writer that was stopped for long never leaves contents
with checksums that fit them in a slot that is another's. `ops/native/kv_copy.cpp` does the same. Knows no device.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.arena.mapped_arena import MappedArena
from kvstore.core.layout import CHECKSUM, COMMITTED, GENERATION_AT
from services.worker.kv.copier import Copied
from services.worker.kv.pages import provide

_CELLS_AT_ONCE = 4
"""Summed up before other threads may run."""


class RankHeads:
    """`count` KV heads from head `first` on, `layers` layers from `first_layer` on, in every slot of `arena`. Keeps the
    arena mapped."""

    def __init__(self, arena: MappedArena, first: int, count: int, first_layer: int, layers: int) -> None:
        self.arena = arena
        self.count = count
        self.layers = layers
        all_layers = arena.layout.layers
        if not 0 <= first_layer < first_layer + layers <= all_layers:
            raise IndexError(f"layers {first_layer}..{first_layer + layers} of {all_layers}")
        self._first_cells = [head * all_layers + first_layer for head in range(first, first + count)]
        """The first cell of each head."""
        start = arena.cells(0, self._first_cells[0], self._first_cells[-1] + layers - self._first_cells[0])
        self.payloads = ctypes.addressof(ctypes.c_char.from_buffer(start))
        """Address of the first of these cells in slot 0."""
        self.span = len(start)
        """Bytes of a slot from there to the end of the last of these cells."""
        self._base = self.payloads - arena.geometry.payload_at(0, self._first_cells[0])
        self._keeps = start
        self._touched: set[int] = set()

    @property
    def bytes_of_slot(self) -> int:
        """Bytes of this rank's cells in a slot; cells of other ranks may lie between them."""
        return self.count * self.layers * self.arena.geometry.cell_bytes

    @property
    def head_stride(self) -> int:
        """Bytes from a head to the next."""
        return self.arena.layout.layers * self.arena.geometry.cell_bytes

    @property
    def checksum_stride(self) -> int:
        """Bytes from a head's checksums to the next one's."""
        return self.arena.layout.layers * CHECKSUM.size

    @property
    def contiguous(self) -> bool:
        """Whether no others' cells lie between them."""
        return self.span == self.bytes_of_slot

    @property
    def generations(self) -> int:
        """Address of slot 0's generation; those of other slots follow `geometry.header_stride` apart."""
        return self._base + self.arena.geometry.header_at(0) + GENERATION_AT

    @property
    def checksums(self) -> int:
        """Address of the first cell's checksum in slot 0."""
        return self._base + self.arena.geometry.checksum_at(0, self._first_cells[0])

    def save(self, slots: Sequence[int], generations: Sequence[int], put: Callable[[int], None]) -> Copied:
        """Has `put` write the cells of slots[i], by its number i, then writes their checksums. Ends at the first slot
        that is another's by now: it has no checksums then, so that nobody takes it for whole."""
        for number, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
            if self.arena.generation(slot) != generation:
                return "other generation"
            put(number)
            sums = [self.arena.compute_checksum(slot, cell) for cell in self._cells_one_by_one()]
            # Where the slot is another's they would fit what was written over its block, and be believed.
            if self.arena.generation(slot) == generation:
                for cell, value in zip(self._cells(), sums, strict=True):
                    self.arena.write_checksum(slot, cell, value)
            if self.arena.generation(slot) != generation:
                self.forget_checksums(slot)
                return "other generation"
        return "all"

    def load(self, slots: Sequence[int], generations: Sequence[int], take: Callable[[int], None]) -> Copied:
        """Has `take` read the cells of slots[i], by its number i, where they equal their checksums. Ends at the first
        slot that does not, or is another's."""
        for number, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
            if self.arena.generation(slot) != generation:
                return "other generation"
            if not all(self.arena.verify(slot, cell) for cell in self._cells_one_by_one()):
                return "other checksum"
            take(number)
            if self.arena.generation(slot) != generation:
                return "other generation"
        return "all"

    def touch(self, slots: Iterable[int]) -> None:
        """Maps the pages of slots that are to be written to, many at once: one by one, when first written to, takes
        longer than the copying. Raises OSError (ENOSPC) where the system has no memory for them; writing there would
        be the signal SIGBUS, and the process's end. Elsewhere than on Linux it does nothing."""
        fresh = [slot for slot in slots if slot not in self._touched]
        for first, count in _runs(fresh):
            self._provide(first, count, write=True)
        self._touched.update(fresh)

    def map_committed(self, slots: int) -> Iterator[None]:
        """Maps the pages of what can be loaded, some `slots` at a time. Raises OSError."""
        held = (slot for slot, header in self.arena.headers() if header.state == COMMITTED)
        for first, count in _runs(held, slots):
            self._provide(first, count, write=False)
            yield

    def _provide(self, first: int, count: int, *, write: bool) -> None:
        shape = self.arena.geometry
        start = self._base + shape.payload_at(first, self._first_cells[0])
        end = self._base + shape.payload_at(first + count - 1, self._first_cells[0]) + self.span
        provide(start, end - start, write=write)

    def forget_checksums(self, slot: int) -> None:
        """Nobody will take the slot for whole."""
        first = self.checksums + slot * self.arena.geometry.header_stride
        for head in range(self.count):
            ctypes.memset(first + head * self.checksum_stride, 0, CHECKSUM.size * self.layers)

    def _cells(self) -> Iterator[int]:
        return (first + layer for first in self._first_cells for layer in range(self.layers))

    def _cells_one_by_one(self) -> Iterator[int]:
        """For what takes microseconds for each. Whoever waits for Python's lock gets it in between: it would wait for 5
        ms each time otherwise, and who launches a step gives the lock away with every launch."""
        for number, cell in enumerate(self._cells()):
            if number % _CELLS_AT_ONCE == 0:
                time.sleep(0)
            yield cell

    def close(self) -> None:
        """Lets go of the arena's memory."""
        self._keeps.release()
        self.arena.close()


def _runs(slots: Iterable[int], most: int | None = None) -> Iterator[tuple[int, int]]:
    """Slots that follow each other, as (first, count); never more than `most`."""
    first, count = 0, 0
    for slot in slots:
        if count and slot == first + count and count != most:
            count += 1
            continue
        if count:
            yield first, count
        first, count = slot, 1
    if count:
        yield first, count
