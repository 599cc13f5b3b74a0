"""Records which events one scheduler's core handled, when, and what it decided, so that they can be replayed.

The order in which the core took its events is known nowhere else: on the bus several senders' messages have none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
from msgspec import Struct

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import EndProcess, Event, Output
from services.scheduler.core.limits import EngineLimits, EngineRole
from shared.ids import EngineId, Incarnation
from shared.journals.journal import JournalWriter

KIND = "decisions"
DIGEST_BYTES = 16
MAX_JOURNALS = 16
"""Of one engine in a folder; the oldest is removed for another."""
DISK_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})

log = logging.getLogger(__name__)

EVENTS: dict[str, Any] = {event.__name__: event for event in get_args(Event)}
"""Every type of event by name: a union of dataclasses and of messages, which no single decoder could tell apart."""

_encode = msgspec.msgpack.Encoder().encode


class EngineStart(Struct, frozen=True):
    """All that an engine's core is made of, so that another one can be made that is the same."""

    engine: EngineId
    epoch: Incarnation
    limits: EngineLimits
    role: EngineRole

    def core(self) -> EngineCore:
        """A core in its first state."""
        return EngineCore(self.engine, self.epoch, self.limits, self.role)


class RecordedOutput(Struct, frozen=True, array_like=True):
    """One output of the core."""

    kind: str
    digest: bytes
    """BLAKE2b-128 of its MessagePack bytes."""
    size: int
    content: bytes = b""
    """The output's MessagePack bytes, if the journal keeps them; else empty."""


class Decision(Struct, frozen=True, array_like=True):
    """One event, and the outputs that it led to."""

    now: float
    event: str
    """A name in EVENTS."""
    content: bytes
    outputs: tuple[RecordedOutput, ...] = ()
    plan_due: float | None = None
    raised: str | None = None
    """The exception that ended the process, which is a bug; None without one."""


class JournalSettings(NamedTuple):
    """Where decisions are recorded, and how much of them."""

    path: Path
    """A file; or a folder, in which each start of the engine writes a file of its own."""
    contents: bool = False
    """Record whole outputs instead of their digests: twice the size, but a difference is shown side by side."""
    limit: int | None = None
    """Most bytes in the journal; None: no limit."""

    def file(self, start: EngineStart) -> Path:
        """The file for this start of the engine."""
        return self.path / f"{start.engine}-{start.epoch:016x}.journal" if self.path.is_dir() else self.path


def record_outputs(
    outputs: Sequence[Output],
    contents: bool,
    spelled: Callable[[str, bytes], tuple[str, bytes]] = lambda kind, content: (kind, content),
) -> tuple[RecordedOutput, ...]:
    """The core's outputs as the journal compares them; `spelled` converts an output to the names and bytes of an older
    journal."""
    encoded = [spelled(type(output).__name__, _encode(output)) for output in outputs]
    return tuple(
        RecordedOutput(
            kind, blake2b(content, digest_size=DIGEST_BYTES).digest(), len(content), content if contents else b""
        )
        for kind, content in encoded
    )


class DecisionJournal:
    """Owns the journal of one core and wraps the core: events are handled through it."""

    def __init__(self, settings: JournalSettings, start: EngineStart, core: EngineCore) -> None:
        """Creates the journal, and renames an earlier one of the same path to `.before`.
        Raises OSError, but not for a full disk: then nothing is recorded."""
        self._core = core
        self._contents = settings.contents
        self._writer = _begun(settings, start)

    def handle(self, event: Event, now: float) -> list[Output]:
        """Handles an event by the core. If the core raises, the event is on disk before the process ends."""
        try:
            outputs = self._core.handle(event, now)
        except BaseException as error:
            self._record(Decision(now, type(event).__name__, _encode(event), raised=repr(error)))
            self.close()
            raise
        answer = record_outputs(outputs, self._contents)
        self._record(Decision(now, type(event).__name__, _encode(event), answer, self._core.plan_due))
        if any(isinstance(output, EndProcess) for output in outputs):
            self.close()
        return outputs

    def _record(self, decision: Decision) -> None:
        """A journal that cannot be written any more is given up: serving goes on."""
        if self._writer is None:
            return
        try:
            self._writer.add(_encode(decision))
        except OSError as error:
            log.error("the journal cannot be written and ends here", extra={"error": str(error)})
            self._writer = None
            return
        if self._writer.full:
            log.warning("the journal is full and ends here", extra={"bytes": self._writer.size})
            self.close()

    def close(self) -> None:
        """Writes what is held back. Safe to call again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


def _begun(settings: JournalSettings, start: EngineStart) -> JournalWriter | None:
    """None if the disk cannot take a journal: serving goes on without one. Raises OSError for a path that is none."""
    path = settings.file(start)
    try:
        if path.is_file():  # of an earlier start, which may hold the failure that is to be looked into
            path.replace(path.with_name(f"{path.name}.before"))
        if settings.path.is_dir():
            _drop_oldest(settings.path, start.engine)
        writer = JournalWriter(path, KIND, start, written_by=version("baton-serve"), limit=settings.limit)
    except OSError as error:
        if error.errno not in DISK_TROUBLE:
            raise
        log.error("the journal cannot be written", extra={"journal": str(path), "error": str(error)})
        return None
    log.info("decisions are recorded", extra={"journal": str(path)})
    return writer


def _drop_oldest(folder: Path, engine: EngineId) -> None:
    """An engine that keeps dying begins a journal each time: room for one more is made."""
    found = sorted(folder.glob(f"{engine}-{'[0-9a-f]' * 16}.journal"), key=lambda path: path.stat().st_mtime)
    for path in found[: max(0, len(found) + 1 - MAX_JOURNALS)]:
        path.unlink(missing_ok=True)
