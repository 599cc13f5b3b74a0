"""Feeds a recorded core's events to a new core and compares what it decides, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import Event
from services.scheduler.journal import EVENTS, KIND, Decision, EngineStart, RecordedOutput, record_outputs
from services.scheduler.old_journals import JournalNames, names_of
from shared.journals.journal import Journal, JournalError
from shared.packing import NOT_DECODED

MAX_SHOWN = 4000
"""Characters of an output in a report."""


class ReplayDifference(NamedTuple):
    """The first event whose outcome is another than the recorded one."""

    number: int
    """Events are counted from 0."""
    now: float
    event: str
    """The event, as readable text."""
    expected: list[str]
    got: list[str]


class ReplayResult(NamedTuple):
    """How far a journal was decided again, and whether everything was the same."""

    events: int
    """Decided again, the one with the difference included."""
    outputs: int
    torn: bool
    """The file ends within a record, which was left out."""
    difference: ReplayDifference | None


def replay(path: Path, on_event: Callable[[int], None] = lambda number: None) -> ReplayResult:
    """Decides a journal's events again, up to the first difference. `on_event` is called with the number of each one
    that was the same. Raises JournalError, OSError."""
    with Journal(path) as journal:
        names = names_of(journal.header.version)
        core = journal.about(KIND, EngineStart, names.start).core()
        events = outputs = 0
        for number, record in enumerate(journal):
            decision, event = _read(journal, names, number, record)
            events += 1
            outputs += len(decision.outputs)
            difference = _differs(core, names, number, decision, event)
            if difference is not None:
                return ReplayResult(events, outputs, False, difference)
            on_event(number)
            if decision.raised is not None:
                break
        return ReplayResult(events, outputs, journal.torn, None)


def _read(journal: Journal, names: JournalNames, number: int, record: bytes) -> tuple[Decision, Event]:
    try:
        decision = msgspec.msgpack.decode(record, type=Decision)
        name, content = names.event(decision.event, decision.content)
        event: Event = msgspec.msgpack.decode(content, type=EVENTS[name])
    except (*NOT_DECODED, KeyError, IndexError) as error:
        raise JournalError(f"{journal.path}: event {number} is none of this release's ({error!r})") from None
    return decision, event


def _differs(
    core: EngineCore, names: JournalNames, number: int, decision: Decision, event: Event
) -> ReplayDifference | None:
    """A bug that was recorded must show again: the exception is an outcome like any other."""
    raised: str | None = None
    answer: tuple[RecordedOutput, ...] = ()
    try:
        answer = record_outputs(core.handle(event, decision.now), contents=True, spelled=names.output)
    except Exception as error:
        raised = repr(error)
    same_due = raised is not None or core.plan_due == decision.plan_due
    if raised == decision.raised and _digests(answer) == _digests(decision.outputs) and same_due:
        return None
    expected = _shown(decision.outputs, decision.plan_due, decision.raised)
    got = _shown(answer, core.plan_due, raised)
    return ReplayDifference(number, decision.now, f"{decision.event} {_readable(decision.content)}", expected, got)


def _digests(answer: tuple[RecordedOutput, ...]) -> list[tuple[str, bytes]]:
    return [(each.kind, each.digest) for each in answer]


def _shown(answer: tuple[RecordedOutput, ...], plan_due: float | None, raised: str | None) -> list[str]:
    if raised is not None:
        return [f"raised {raised}"]
    lines = []
    for each in answer:
        content = f": {_readable(each.content)}" if each.content else ""
        lines.append(f"{each.kind} ({each.size} bytes, digest {each.digest.hex()[:12]}){content}")
    return [*lines, f"next plan due at {plan_due!r}"]


def _readable(content: bytes) -> str:
    text = repr(msgspec.msgpack.decode(content))
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
