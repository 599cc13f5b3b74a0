"""A file of MessagePack records that can be read to its last whole record, however its writer ended.

Each record is one MessagePack `bin 32`, which states its length, around one of our messages: any MessagePack reader can
walk through the file, and a cut is seen without decoding. The first record is the header.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from shared.packing import NOT_DECODED
from shared.private_files import private_opener

FORMAT = "baton-journal"
JOURNAL_VERSION = 11
"""1: before message classes were renamed (docs/adr/0015)."""
BUFFER_BYTES = 64 * 1024
"""The most bytes that are buffered before they are written."""
FLUSH_EVERY = 0.25
"""Seconds after the last write; a record that is added later writes all buffered records, too."""

_FRAME = struct.Struct(">BI")
_BIN32 = 0xC6

T = TypeVar("T")


class JournalError(Exception):
    """The file is not a journal, or not a journal of the expected kind."""


class Header(Struct, frozen=True, kw_only=True):
    """The first record of a journal."""

    format: str = FORMAT
    version: int = JOURNAL_VERSION
    kind: str
    """What its records are: `traffic`, `decisions`."""
    written_by: str
    """The release that wrote it."""
    started: float
    """When the recording began, in Unix seconds."""
    about: msgspec.Raw
    """What the records are of; its type depends on the kind of journal."""


def framed(body: bytes) -> bytes:
    """The bytes of one record in the file."""
    return _FRAME.pack(_BIN32, len(body)) + body


class JournalWriter:
    """Owns a journal file from its first byte on. Bounded by `limit`: further records are left out, and `full` is true.

    A record is in the file FLUSH_EVERY seconds after it was added, given that others follow, or when `flush` returns.
    """

    def __init__(self, path: Path, kind: str, about: Any, *, written_by: str, limit: int | None = None) -> None:
        """Creates the file, for its owner alone, and writes its header. Raises OSError."""
        raw = msgspec.Raw(msgspec.msgpack.encode(about))
        header = Header(kind=kind, written_by=written_by, started=time.time(), about=raw)
        self._file: BinaryIO = open(path, "wb", buffering=0, opener=private_opener)  # noqa: SIM115  # it is closed by `close`
        self._held: list[bytes] = [framed(msgspec.msgpack.encode(header))]
        self._held_bytes = len(self._held[0])
        self._limit = limit
        self._flushed_at = time.monotonic()
        self.size = self._held_bytes
        """Bytes, held back or written."""
        self.full = False
        try:
            self.flush()
        except OSError:
            self._file.close()
            raise

    def add(self, body: bytes) -> None:
        """Adds one record; left out, and `full` from then on, where the limit would be passed. Raises OSError."""
        record = framed(body)
        if self.full or (self._limit is not None and self.size + len(record) > self._limit):
            self.full = True
            return
        self._held.append(record)
        self._held_bytes += len(record)
        self.size += len(record)
        if self._held_bytes >= BUFFER_BYTES or time.monotonic() - self._flushed_at >= FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Writes what is held back. Raises OSError."""
        held, self._held, self._held_bytes = b"".join(self._held), [], 0
        view = memoryview(held)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._end_at_last_record(self.size - len(held))
            raise
        self._flushed_at = time.monotonic()

    def _end_at_last_record(self, size: int) -> None:
        """What was written in part would hide everything behind it."""
        self.full, self.size = True, size
        with contextlib.suppress(OSError):
            self._file.truncate(size)

    def close(self) -> None:
        """Writes what is held back and closes the file. Safe to call again."""
        if not self._file.closed:
            self.flush()
            self._file.close()


class Journal:
    """Owns an open journal file for reading."""

    def __init__(self, path: Path) -> None:
        """Opens the file and reads its header. Raises JournalError, OSError."""
        self._file = path.open("rb")
        self.torn = False
        """Whether the file ends within a record; known once all records were read."""
        try:
            body = _body(self._file)
            header = None if body is None else msgspec.msgpack.decode(body, type=Header)
        except NOT_DECODED:
            header = None
        if header is None or header.format != FORMAT:
            self._file.close()
            raise JournalError(f"{path}: this is no journal of ours, or it was cut off within its first record")
        if header.version > JOURNAL_VERSION:
            self._file.close()
            raise JournalError(f"{path}: version {header.version}; this release reads up to {JOURNAL_VERSION}")
        self.header = header
        self.path = path

    def about(self, kind: str, type_: type[T], translate: Callable[[bytes], bytes] = bytes) -> T:
        """What the header says of a journal of this kind, its bytes put through `translate` before they are decoded.
        Raises JournalError where the journal is of another kind."""
        if self.header.kind != kind:
            raise JournalError(f"{self.path}: holds {self.header.kind}, not {kind}")
        try:
            return msgspec.msgpack.decode(translate(bytes(self.header.about)), type=type_)
        except NOT_DECODED as error:
            raise JournalError(f"{self.path}: its header is of another release ({error})") from None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        """Every whole record behind the header."""
        while (body := _body(self._file)) is not None:
            yield body
        at = self._file.tell()
        self.torn = at != self._file.seek(0, 2)


def _body(file: BinaryIO) -> bytes | None:
    """The next record; None if there is no complete one, and then the file's position is where it would begin."""
    start = file.tell()
    frame = file.read(_FRAME.size)
    if len(frame) == _FRAME.size:
        mark, length = _FRAME.unpack(frame)
        if mark == _BIN32 and length <= os.fstat(file.fileno()).st_size - file.tell():
            return file.read(length)
    file.seek(start)
    return None
