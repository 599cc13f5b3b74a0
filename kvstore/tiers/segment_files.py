"""The files of the SSD tier: makes, writes, reads and removes them, on the caller's thread. Decides nothing.

    FOLDER/MARKER               says that the folder is such a tier, and of which format
    FOLDER/lock                 held by the store that works there
    FOLDER/LAYOUT/NUMBER.seg    a page that names layout and shape, the records, and the footer

A record is one block: `ENVELOPE`, its checksums and a checksum over both, padded to a page; then the payload, padded
to a page. A footer lists the hashes of a segment that is full; without one (the process died before), the records'
heads are read. What a crash tore is found by the checksums, of a head when it is looked for, of a payload whenever it
is read. Everything is read and written in pages and from page-aligned memory, as O_DIRECT wants it: blocks that have
left the arena would only push others out of the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.arena.in_flight_block import BLOCK_MAGIC, ENVELOPE, BlockShape, InFlightBlock, checksum, is_sound
from kvstore.core.layout import CHECKSUM, PAGE
from kvstore.core.segments import FOOTER_BYTES, Segment
from shared.blocks import HASH_BYTES, BlockHash, split_hashes
from shared.packing import NOT_DECODED

log = logging.getLogger(__name__)

MARKER, LOCK, SUFFIX = "baton-kv-ssd.json", "lock", ".seg"
NOT_OURS = ("lost+found",)
"""What may lie in an empty folder: the root of an ext4 file system has one."""

SEGMENT_HEAD = struct.Struct("<8s32sIIII")
"""Magic, layout, cells of a block, bytes of a cell, records, bytes of a record; then the checksum."""
SEGMENT_MAGIC = b"BATONSG1"
FOOTER_HEAD = struct.Struct("<8sI")
"""Magic, number of hashes; then the hashes (zeros: unreadable), then the checksum."""
FOOTER_MAGIC = b"BATONSE1"
UNREADABLE = bytes(HASH_BYTES)

TOUCH_SECONDS = 60.0
"""A file's time, which is its place in the order of use after a restart, is at most this old after a read."""


class FolderRefused(Exception):
    """The folder is not, or cannot become, this store's tier; the text names it and says why."""


class _Marker(msgspec.Struct, frozen=True):
    format: int = 1


class RecordShape(NamedTuple):
    """Sizes of a record, in bytes: whole pages."""

    head_bytes: int
    record_bytes: int


def record_shape(shape: BlockShape) -> RecordShape:
    """How blocks of this shape are laid out in a segment."""
    head = _pages(ENVELOPE.size + shape.cells * CHECKSUM.size + CHECKSUM.size)
    return RecordShape(head, head + _pages(shape.payload_bytes))


class SegmentFiles:
    """Owns the folder's lock. Methods that name no other error raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_direct = False
        """Whether the file system takes O_DIRECT, as of the last `open`."""
        self._lock: int | None = None

    # ---- the folder

    def open(self) -> None:
        """Makes the folder, whose parent must be there, and locks it. Raises FolderRefused where another store works
        there or where it holds something else."""
        self.close()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._check_marker()
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise FolderRefused(f"{self.folder}: another store works here") from None
        self._lock = lock
        if not (marker := self.folder / MARKER).exists():
            marker.write_bytes(msgspec.json.encode(_Marker()))
        self.is_direct = self._takes_direct()

    def close(self) -> None:
        """Gives the lock up. Safe to call again."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _check_marker(self) -> None:
        marker = self.folder / MARKER
        if not marker.exists():
            others = sorted(name for name in os.listdir(self.folder) if name not in (LOCK, *NOT_OURS))
            if others:
                raise FolderRefused(f"{self.folder}: holds {others[0]!r} and is no KV tier; name an empty folder")
            return
        try:
            found = msgspec.json.decode(marker.read_bytes() or b"{}", type=_Marker)
        except NOT_DECODED as error:
            raise FolderRefused(f"{marker}: {error}; remove the folder or name another") from None
        if found != _Marker():
            raise FolderRefused(f"{marker}: {found} is not {_Marker()}; remove the folder or name another")

    def _takes_direct(self) -> bool:
        """Asked by reading, as that works on a full disk, too."""
        try:
            file = os.open(self.folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        try:
            os.preadv(file, [mmap.mmap(-1, PAGE)], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return False
        finally:
            os.close(file)
        return True

    def free_bytes(self) -> int:
        """What the file system has left for us."""
        there = os.statvfs(self.folder)
        return there.f_bavail * there.f_frsize

    # ---- segments

    def path(self, segment: Segment) -> Path:
        """The segment's file."""
        return self.folder / segment.layout / f"{segment.number:08d}{SUFFIX}"

    def create(self, segment: Segment, shape: BlockShape) -> None:
        """Makes the file and takes all its room, so that no later write finds the disk full."""
        path = self.path(segment)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            # Never another store's file, which may work here if the folder was removed and made again.
            with open(path, "xb", opener=_for_its_owner_alone) as file:
                os.posix_fallocate(file.fileno(), 0, segment.file_bytes)
            head = SEGMENT_HEAD.pack(
                SEGMENT_MAGIC, segment.layout.encode(), *shape, segment.capacity, segment.record_bytes
            )
            self._write(path, 0, [_padded(head + CHECKSUM.pack(checksum(head)))])
        except FileExistsError:
            raise
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def write(self, segment: Segment, record: int, records: Sequence[mmap.mmap]) -> None:
        """Writes `records`, each made by `pack_record`, from record number `record` on, in one go."""
        self._write(self.path(segment), segment.offset_of(record), records)

    def seal(self, segment: Segment) -> None:
        """Writes the footer, so that the next start need not read every record's head; flushes the file to the
        disk."""
        names = b"".join(UNREADABLE if name is None else name for name in segment.names)
        footer = FOOTER_HEAD.pack(FOOTER_MAGIC, len(segment.names)) + names
        self._write(self.path(segment), segment.footer_at, [_padded(footer + CHECKSUM.pack(checksum(footer)))], True)

    def read(
        self, segment: Segment, records: Sequence[tuple[int, BlockHash]], shape: BlockShape
    ) -> list[InFlightBlock | None]:
        """The blocks in these records; None for each that is not the expected block or whose checksums do not match."""
        found: list[InFlightBlock | None] = []
        with self._opened(self.path(segment), os.O_RDONLY) as file:
            for record, name in records:
                buffer = mmap.mmap(-1, segment.record_bytes)
                whole = os.preadv(file, [buffer], segment.offset_of(record)) == segment.record_bytes
                block = unpack_record(buffer, shape) if whole else None
                found.append(block if block is not None and block.hash == name else None)
            now = time.time()
            if now - os.fstat(file).st_mtime > TOUCH_SECONDS:
                with contextlib.suppress(OSError):  # another user's file: it keeps its place in the order
                    os.utime(file, (now, now))
        return found

    def remove(self, segment: Segment) -> None:
        """Removes the file, if it is there."""
        self.path(segment).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        file = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0))
        try:
            yield file
        finally:
            os.close(file)

    def _write(self, path: Path, offset: int, buffers: Sequence[mmap.mmap], flush: bool = False) -> None:
        with self._opened(path, os.O_WRONLY) as file:
            if os.pwritev(file, buffers, offset) != sum(map(len, buffers)):
                raise OSError(errno.ENOSPC, "written in part", str(path))
            if flush:
                os.fdatasync(file)

    # ---- at the start

    def scan(self) -> list[Segment]:
        """The segments in the folder, least recently used first. Files that are torn, or that say that they are of
        another layout than their folder, are removed."""
        found: list[tuple[float, int, Segment]] = []
        for path in self.folder.glob(f"*/*{SUFFIX}"):
            try:
                segment = self._read_segment(path)
            except _Unusable as error:
                log.warning("segment of the SSD tier refused and removed", extra={"path": str(path), "why": str(error)})
                path.unlink(missing_ok=True)
                continue
            found.append((path.stat().st_mtime, segment.number, segment))
        return [segment for *_, segment in sorted(found, key=lambda each: each[:2])]

    def _read_segment(self, path: Path) -> Segment:
        with self._opened(path, os.O_RDONLY) as file:
            page = _read_pages(file, 0, PAGE)
            magic, layout, cells, cell_bytes, capacity, record_bytes = SEGMENT_HEAD.unpack_from(page)
            if magic != SEGMENT_MAGIC or not _is_checked(page, SEGMENT_HEAD.size) or not path.stem.isdecimal():
                raise _Unusable("no segment, or a torn one")
            name = layout.rstrip(b"\0").decode(errors="replace")
            if name != path.parent.name:
                raise _Unusable(f"it is of layout {name}, in the folder of {path.parent.name}")
            shape = record_shape(BlockShape(cells, cell_bytes))
            segment = Segment(name, int(path.stem), record_bytes, capacity)
            if record_bytes != shape.record_bytes or os.fstat(file).st_size != segment.file_bytes:
                raise _Unusable(f"{os.fstat(file).st_size} bytes, {segment.file_bytes} expected")
            footer = _read_footer(file, segment)
            segment.names = footer if footer is not None else list(_heads(file, segment, shape.head_bytes))
        while segment.names and segment.names[-1] is None:
            segment.names.pop()
        return segment


class _Unusable(Exception):
    """A file that is no segment of this folder; the text says why."""


def pack_record(block: InFlightBlock, shape: RecordShape, buffer: mmap.mmap) -> None:
    """Copies the block to a buffer of `record_bytes`."""
    head = ENVELOPE.pack(BLOCK_MAGIC, block.hash, block.parent, block.tokens, len(block.checksums)) + block.checksums
    head += CHECKSUM.pack(checksum(head))
    buffer[: len(head)] = head
    buffer[shape.head_bytes : shape.head_bytes + len(block.payload)] = block.payload


def unpack_record(buffer: mmap.mmap, shape: BlockShape) -> InFlightBlock | None:
    """The block in a record; None where a checksum does not match. The payload is a view of `buffer`."""
    head = _record_head(buffer[: record_shape(shape).head_bytes])
    if head is None:
        return None
    name, parent, tokens, checksums = head
    start = record_shape(shape).head_bytes
    block = InFlightBlock(name, parent, tokens, checksums, memoryview(buffer)[start : start + shape.payload_bytes])
    return block if is_sound(block, shape) else None


def _record_head(page: bytes) -> tuple[BlockHash, bytes, int, bytes] | None:
    magic, name, parent, tokens, length = ENVELOPE.unpack_from(page)
    end = ENVELOPE.size + length
    if magic != BLOCK_MAGIC or end + CHECKSUM.size > len(page) or not _is_checked(page, end):
        return None
    return BlockHash(name), parent, tokens, page[ENVELOPE.size : end]


def _heads(file: int, segment: Segment, head_bytes: int) -> Iterator[BlockHash | None]:
    for record in range(segment.capacity):
        head = _record_head(_read_pages(file, segment.offset_of(record), head_bytes))
        yield None if head is None else head[0]


def _read_footer(file: int, segment: Segment) -> list[BlockHash | None] | None:
    footer = _read_pages(file, segment.footer_at, segment.file_bytes - segment.footer_at)
    magic, count = FOOTER_HEAD.unpack_from(footer)
    end = FOOTER_HEAD.size + count * HASH_BYTES
    if magic != FOOTER_MAGIC or count != segment.capacity or not _is_checked(footer, end):
        return None
    return [None if name == UNREADABLE else name for name in split_hashes(footer[FOOTER_HEAD.size : end])]


def _is_checked(page: bytes, size: int) -> bool:
    """Whether the checksum behind the first `size` bytes is theirs."""
    return size + CHECKSUM.size <= len(page) and page[size : size + CHECKSUM.size] == CHECKSUM.pack(
        checksum(page[:size])
    )


def _read_pages(file: int, offset: int, size: int) -> bytes:
    buffer = mmap.mmap(-1, size)
    os.preadv(file, [buffer], offset)
    return buffer[:]


def _padded(content: bytes) -> mmap.mmap:
    buffer = mmap.mmap(-1, _pages(len(content)))
    buffer[: len(content)] = content
    return buffer


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _for_its_owner_alone(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


assert FOOTER_HEAD.size + CHECKSUM.size <= FOOTER_BYTES
