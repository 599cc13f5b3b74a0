"""Maps an arena for the processes that read and write blocks in it: ranks and the store. No bus, no numpy.

Where everything lies is said in `kvstore/core/layout.py`. Ranks write payloads and their checksums, nothing else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.arena.in_flight_block import BlockShape, InFlightBlock, checksum
from kvstore.core.layout import (
    ARENA_MAGIC,
    CHECKSUM,
    FILE_HEADER,
    GENERATION_AT,
    PAGE,
    SLOT_HEADER,
    WORD,
    Geometry,
    geometry,
)
from shared.blocks import BlockHash
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout
from shared.packing import NOT_DECODED


class ArenaError(Exception):
    """An arena file that cannot be used; the text names it."""


class ArenaMissing(ArenaError):
    """There is no such file (any more)."""


class ArenaReplaced(ArenaError):
    """The file is another arena than the expected one."""


class ArenaUnreadable(ArenaError):
    """The file is no arena, or not a whole one."""


class SlotHeader(NamedTuple):
    """The contents of a slot's header, without the checksums. `used` is an order, not a time: larger is more recent."""

    state: int
    generation: int
    hash: BlockHash
    parent: BlockHash
    tokens: int
    used: int


class MappedArena:
    """Owns the mapping of one arena file. Views of it may outlive it; the memory stays mapped as long as they do."""

    def __init__(self, path: Path, arena: ArenaId, layout: KvLayout, geometry: Geometry, mapping: mmap.mmap) -> None:
        self.path = path
        self.arena = arena
        self.layout = layout
        self.geometry = geometry
        self._map = mapping
        self._bytes = memoryview(mapping)
        # Words are stored whole by a memoryview of words; `struct` would write them byte by byte.
        self._words = self._bytes.cast("Q")

    @classmethod
    def open(cls, path: Path, arena: ArenaId | None = None) -> MappedArena:
        """Maps the file, which must be `arena` unless None. Raises ArenaMissing, ArenaReplaced, ArenaUnreadable."""
        return cls._opened(path, arena)

    @classmethod
    def _opened(cls, path: Path, arena: ArenaId | None) -> MappedArena:
        _require_little_endian()
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ArenaMissing(f"{path}: no such arena") from None
        except OSError as error:
            raise ArenaUnreadable(f"{path}: {error.strerror}") from None
        try:
            found, layout, shape = _read_file_header(path, file)
            if arena is not None and found != arena:
                raise ArenaReplaced(f"{path}: holds arena {found:x}, not {arena:x}")
            mapping = mmap.mmap(file, shape.file_bytes)
        finally:
            os.close(file)
        return cls(path, found, layout, shape, mapping)

    @property
    def shape(self) -> BlockShape:
        """Cells of a block and bytes of a cell."""
        return BlockShape(self.geometry.cells, self.geometry.cell_bytes)

    @property
    def slots(self) -> int:
        """How many blocks the arena can hold."""
        return self.geometry.slots

    def cells(self, slot: int, first: int, count: int) -> memoryview:
        """The bytes of `count` cells from cell `first` on, writable, `count * geometry.cell_bytes` long."""
        shape = self.geometry
        if not (0 <= slot < shape.slots and 0 <= first < first + count <= shape.cells):
            raise IndexError(f"slot {slot}, cells {first}..{first + count}: {shape.slots} slots of {shape.cells}")
        start = shape.payload_at(slot, first)
        return self._bytes[start : start + count * shape.cell_bytes]

    def payload(self, slot: int) -> memoryview:
        """The bytes of all cells of a slot, writable."""
        return self.cells(slot, 0, self.geometry.cells)

    def state(self, slot: int) -> int:
        """The state in the slot's header: FREE, RESERVED or COMMITTED."""
        return self._words[self._header_word(slot)]

    def generation(self, slot: int) -> int:
        """The slot's generation. It changes with each reservation: as long as it is the same, so are the contents."""
        return self._words[self._header_word(slot) + GENERATION_AT // WORD]

    def checksum(self, slot: int, cell: int) -> int:
        """The checksum in the header; 0 while the cell has not been written since the slot was reserved."""
        return self._words[self.geometry.checksum_at(slot, cell) // WORD]

    def compute_checksum(self, slot: int, cell: int) -> int:
        """The checksum of the cell's bytes as they are."""
        return checksum(self.cells(slot, cell, 1))

    def write_checksum(self, slot: int, cell: int, value: int | None = None) -> None:
        """Marks a cell as written; call it after its bytes are. `value`: what `compute_checksum` returned then."""
        self._words[self.geometry.checksum_at(slot, cell) // WORD] = (
            self.compute_checksum(slot, cell) if value is None else value
        )

    def verify(self, slot: int, cell: int) -> bool:
        """Whether the cell's bytes match the checksum in the header."""
        return self.checksum(slot, cell) == self.compute_checksum(slot, cell)

    def is_written(self, slot: int) -> bool:
        """Whether every cell has been written since the slot was reserved."""
        first = self.geometry.checksum_at(slot, 0) // WORD
        return all(self._words[first : first + self.geometry.cells].tolist())

    def is_sound(self, slot: int) -> bool:
        """Whether every cell's bytes match its checksum. Reads the whole payload."""
        return all(self.verify(slot, cell) for cell in range(self.geometry.cells))

    def header(self, slot: int) -> SlotHeader:
        """What the slot's header says at this moment. Raises nothing for a slot that was never used: its state is
        FREE."""
        start = self.geometry.header_at(slot)
        state, generation, name, parent, tokens, _, used = SLOT_HEADER.unpack_from(self._bytes, start)
        return SlotHeader(state, generation, BlockHash(name), BlockHash(parent), tokens, used)

    def headers(self) -> Iterator[tuple[int, SlotHeader]]:
        """The headers of all slots that were ever reserved, with their numbers, in order."""
        first, stride = PAGE // WORD, self.geometry.header_stride // WORD
        generations = self._words[first + GENERATION_AT // WORD :: stride][: self.slots].tolist()
        return ((slot, self.header(slot)) for slot, generation in enumerate(generations) if generation)

    def in_flight(self, slot: int) -> InFlightBlock:
        """The whole block, to be taken elsewhere. Its payload is a view: copy it, or keep the slot pinned."""
        header = self.header(slot)
        sums = self._checksums_at(slot)
        return InFlightBlock(header.hash, header.parent, header.tokens, bytes(self._bytes[sums]), self.payload(slot))

    def close(self) -> None:
        """Gives the mapping back once the last view of it is gone. Safe to call again."""
        self._words.release()
        self._bytes.release()
        with contextlib.suppress(BufferError):  # somebody still has a view: the mapping goes with it
            self._map.close()

    def _header_word(self, slot: int) -> int:
        if not 0 <= slot < self.geometry.slots:
            raise IndexError(f"slot {slot} of {self.geometry.slots}")
        return self.geometry.header_at(slot) // WORD

    def _checksums_at(self, slot: int) -> slice:
        start = self.geometry.checksum_at(slot, 0)
        return slice(start, start + self.geometry.cells * CHECKSUM.size)


def _read_file_header(path: Path, file: int) -> tuple[ArenaId, KvLayout, Geometry]:
    start = os.pread(file, PAGE, 0)
    if len(start) < PAGE or not start.startswith(ARENA_MAGIC):
        raise ArenaUnreadable(f"{path}: no arena file")
    _, arena, slots, layout_bytes, _ = FILE_HEADER.unpack_from(start)
    try:
        layout = msgspec.msgpack.decode(start[FILE_HEADER.size :][:layout_bytes], type=KvLayout)
        shape = geometry(layout, slots)
    except (*NOT_DECODED, ValueError) as error:
        raise ArenaUnreadable(f"{path}: {error}") from None
    if (size := os.fstat(file).st_size) != shape.file_bytes:
        raise ArenaUnreadable(f"{path}: {size} bytes, {shape.file_bytes} expected")
    return ArenaId(arena), layout, shape


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise ArenaError("arenas are little endian, this machine is not")
