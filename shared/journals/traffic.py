"""Messages recorded from the bus: the journal that `baton record` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.journals.journal import Journal, JournalError, JournalWriter
from shared.packing import NOT_DECODED

KIND = "traffic"


class TrafficStart(Struct, frozen=True):
    """The contents of a traffic journal's header."""

    namespace: str
    patterns: tuple[str, ...]
    """Subjects that were listened to, below the namespace."""


class RecordedMessage(Struct, frozen=True, array_like=True):
    """One message as it was on the bus."""

    time: float
    """When the message was received, in Unix seconds."""
    subject: str
    """The message's subject below the namespace."""
    payload: bytes


class TrafficJournal:
    """Owns the journal that is being written, and with `ring` the one before: together they hold the newest messages,
    in `path` and `path`.older."""

    def __init__(self, path: Path, start: TrafficStart, *, written_by: str, limit: int | None, ring: bool) -> None:
        """`limit`: bytes in all. Raises OSError."""
        self._path, self._start, self._written_by = path, start, written_by
        self._ring = ring and limit is not None
        self._each = limit // 2 if limit is not None and ring else limit
        self._writer = self._begun()
        self._before = 0
        """Bytes of journals that were put aside or dropped."""
        self.messages = 0

    @property
    def size(self) -> int:
        """Bytes since the start, those dropped included."""
        return self._before + self._writer.size

    @property
    def full(self) -> bool:
        """Whether a message was left out because of the limit."""
        return self._writer.full

    def add(self, message: RecordedMessage) -> None:
        """Adds one message; left out where the journal is full. Raises OSError."""
        body = msgspec.msgpack.encode(message)
        self._writer.add(body)
        if self._writer.full and self._ring:
            self._turn()
            self._writer.add(body)
        self.messages += not self._writer.full

    def flush(self) -> None:
        """Writes what is held back. Raises OSError."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what is held back and closes the file. Safe to call again."""
        self._writer.close()

    def _turn(self) -> None:
        self._writer.close()
        self._before += self._writer.size
        self._path.replace(older(self._path))
        self._writer = self._begun()

    def _begun(self) -> JournalWriter:
        return JournalWriter(self._path, KIND, self._start, written_by=self._written_by, limit=self._each)


def older(path: Path) -> Path:
    """Where a ring at `path` has the journal before."""
    return path.with_name(f"{path.name}.older")


def recorded_messages(journal: Journal) -> Iterator[RecordedMessage]:
    """Every whole record. Raises JournalError for one that is none of ours."""
    for number, record in enumerate(journal):
        try:
            yield msgspec.msgpack.decode(record, type=RecordedMessage)
        except NOT_DECODED as error:
            raise JournalError(f"{journal.path}: record {number} is no message ({error})") from None
