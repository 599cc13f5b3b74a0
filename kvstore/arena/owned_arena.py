"""An arena as its store holds it: makes the file, writes slot headers, gives memory back. Decides nothing.

The process may be killed within any step: the state is written last when a slot gains contents, and first when it loses
them. A generation never goes back."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import msgspec

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.arena.mapped_arena import ArenaError, ArenaUnreadable, MappedArena
from kvstore.core.layout import (
    ARENA_MAGIC,
    COMMITTED,
    FILE_HEADER,
    FREE,
    GENERATION_AT,
    HASH_AT,
    PAGE,
    RESERVED,
    TOKENS_AT,
    USED_AT,
    WORD,
    geometry,
)
from shared.blocks import BlockHash
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout


class OwnedArena(MappedArena):
    """An arena whose headers this process writes. One process at a time; see `kvstore/arena/directory.py`."""

    @classmethod
    def open(cls, path: Path, arena: ArenaId | None = None) -> OwnedArena:
        """Opens an arena for the one process that writes headers; see `MappedArena.open`."""
        opened = cls._opened(path, arena)
        assert isinstance(opened, OwnedArena)
        return opened

    @classmethod
    def create(cls, path: Path, arena: ArenaId, layout: KvLayout, slots: int) -> OwnedArena:
        """A new file with every slot free and without memory, in place of whatever was at `path`. Raises
        ArenaUnreadable, UnknownDtype, and OSError where there is no room for its headers."""
        head = msgspec.msgpack.encode(layout)
        if len(head) > PAGE - FILE_HEADER.size:
            raise ArenaUnreadable(f"{path}: the layout's description takes {len(head)} bytes")
        shape = geometry(layout, slots)
        # Made aside and renamed: nobody ever opens half an arena.
        making = path.with_suffix(".making")
        with open(making, "wb", opener=_for_its_owner_alone) as file:
            file.write(FILE_HEADER.pack(ARENA_MAGIC, arena, slots, len(head), 0) + head)
            file.flush()
            file.truncate(shape.file_bytes)
            # Reading a hole that a full tmpfs cannot fill would kill us later.
            os.posix_fallocate(file.fileno(), 0, shape.payloads_at)
        making.replace(path)
        return cls.open(path, arena)

    def reserve(self, slot: int, generation: int, name: BlockHash, parent: bytes, tokens: int) -> None:
        """Names the block that is written to the slot from now on; no cell counts as written."""
        self._words[self._header_word(slot)] = RESERVED
        self.set_generation(slot, generation)
        self._clear_checksums(slot)
        self._write_names(slot, name, parent, tokens)

    def commit(self, slot: int, used: int) -> None:
        """The slot's block can be found from now on, by a store started later too; `used` as in `touch`."""
        self.touch(slot, used)
        self._words[self._header_word(slot)] = COMMITTED

    def touch(self, slot: int, used: int) -> None:
        """Writes the order of use, for a store that is started after this one."""
        self._words[self._header_word(slot) + USED_AT // WORD] = used

    def free(self, slot: int) -> None:
        """The slot holds no block any more; its memory stays."""
        self._words[self._header_word(slot)] = FREE

    def fill(self, slot: int, block: InFlightBlock) -> None:
        """Copies a block that came from elsewhere, and was checked there, to a reserved slot. Raises ValueError where
        it is of another size."""
        self.payload(slot)[:] = block.payload
        self.write_checksums(slot, block.checksums)

    def write_checksums(self, slot: int, packed: bytes) -> None:
        """Marks every cell of a reserved slot as written, its bytes being there. Raises ValueError where these are not
        8 bytes for each cell."""
        self._bytes[self._checksums_at(slot)] = packed

    def take_memory(self, *slots: int) -> int:
        """Allocates the payloads' memory from the system, one after the other; returns how many have it: fewer where
        none is left.

        A write to a page that a full tmpfs cannot provide kills the writer (SIGBUS); this asks beforehand. May be
        called on another thread.
        """
        shape, taken = self.geometry, 0
        try:
            with self.path.open("r+b") as file:
                for slot in slots:
                    os.posix_fallocate(file.fileno(), shape.payload_at(slot), shape.payload_stride)
                    taken += 1
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT, errno.ENOENT):
                raise ArenaError(f"{self.path}: {error.strerror}") from None
        return taken

    def give_memory_back(self, slot: int, generation: int) -> None:
        """Frees the slot and returns its payload to the system; it reads as zeros afterwards, and says so by another
        generation. Raises ArenaError where the file system cannot do that: arenas want tmpfs, ext4, xfs or btrfs."""
        self.free(slot)
        self.set_generation(slot, generation)
        try:
            self._map.madvise(mmap.MADV_REMOVE, self.geometry.payload_at(slot), self.geometry.payload_stride)
        except OSError as error:
            raise ArenaError(f"{self.path}: cannot give memory back: {error.strerror}") from None

    def set_generation(self, slot: int, generation: int) -> None:
        """Late readers of the slot see by another generation that its contents are not theirs."""
        self._words[self._header_word(slot) + GENERATION_AT // WORD] = generation

    def _clear_checksums(self, slot: int) -> None:
        sums = self._checksums_at(slot)
        self._bytes[sums] = bytes(sums.stop - sums.start)

    def _write_names(self, slot: int, name: BlockHash, parent: bytes, tokens: int) -> None:
        start = self.geometry.header_at(slot)
        self._bytes[start + HASH_AT : start + TOKENS_AT] = name + parent
        self._words[(start + TOKENS_AT) // WORD] = tokens


def _for_its_owner_alone(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
