"""The heads of one rank in a mapped arena: where they lie in this process's memory. Knows no device."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Iterable, Iterator

from kvstore.arena import MappedArena
from kvstore.core.layout import GENERATION_AT, PAGE

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; see madvise(2)."""


class RankHeads:
    """`count` KV heads from head `first` on, in every slot of `arena`. Keeps the arena mapped."""

    def __init__(self, arena: MappedArena, first: int, count: int) -> None:
        self.arena = arena
        self.first = first
        self.count = count
        start = arena.heads(0, first, count)
        self.payloads = ctypes.addressof(ctypes.c_char.from_buffer(start))
        """Address of the first of these heads in slot 0."""
        self._base = self.payloads - arena.geometry.payload_at(0, first)
        self._keeps = start
        self._touched: set[int] = set()

    @property
    def bytes_of_slot(self) -> int:
        return self.count * self.arena.geometry.head_bytes

    @property
    def generations(self) -> int:
        """Address of slot 0's generation; those of other slots follow `geometry.header_stride` apart."""
        return self._base + self.arena.geometry.header_at(0) + GENERATION_AT

    @property
    def checksums(self) -> int:
        """Address of the first head's checksum in slot 0."""
        return self._base + self.arena.geometry.checksum_at(0, self.first)

    def unchanged(self, slots: Iterable[int], generations: Iterable[int]) -> bool:
        return all(self.arena.generation(slot) == wanted for slot, wanted in zip(slots, generations, strict=True))

    def touch(self, slots: Iterable[int]) -> None:
        """Maps the pages of slots that are to be written to, many at once: one by one, when first written to, takes
        longer than the copying. Raises OSError (ENOSPC) where the system has no memory for them; writing there would
        be the signal SIGBUS, and the process's end. Elsewhere than on Linux it does nothing."""
        fresh = [slot for slot in slots if slot not in self._touched]
        if sys.platform != "linux" or not fresh:
            return
        for first, count in _runs(fresh):
            shape = self.arena.geometry
            start = (self._base + shape.payload_at(first, self.first)) // PAGE * PAGE
            end = self._base + shape.payload_at(first + count - 1, self.first) + self.bytes_of_slot
            _populate(start, end - start)
        self._touched.update(fresh)

    def write_checksums(self, slot: int) -> None:
        """After the heads' bytes are written."""
        for head in range(self.first, self.first + self.count):
            self.arena.write_checksum(slot, head)

    def verified(self, slot: int) -> bool:
        """Whether the heads' bytes are what their checksums were made of."""
        return all(self.arena.verify(slot, head) for head in range(self.first, self.first + self.count))

    def forget_checksums(self, slots: Iterable[int]) -> None:
        """Nobody will take the slots for whole."""
        stride = self.arena.geometry.header_stride
        for slot in slots:
            ctypes.memset(self.checksums + slot * stride, 0, 8 * self.count)

    def close(self) -> None:
        self._keeps.release()
        self.arena.close()


_libc = ctypes.CDLL(None, use_errno=True)


def _populate(start: int, length: int) -> None:
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) == 0:
        return
    # Whatever else is refused (an older kernel knows no such advice) costs only time: pages come when written to.
    if ctypes.get_errno() in (errno.EFAULT, errno.ENOMEM):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _runs(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Slots that follow each other, as (first, count)."""
    first, count = 0, 0
    for slot in slots:
        if count and slot == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = slot, 1
    if count:
        yield first, count
