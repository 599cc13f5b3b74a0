"""Feeds a recorded core's events to a new core and compares what it decides, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.scheduler.core.engine import Engine
from services.scheduler.core.events import Event
from services.scheduler.journal import EVENTS, KIND, Decision, EngineStart, Said, said
from shared.journal import Journal, JournalError

SHOWN = 4000
"""Characters of an output in a report."""


class Difference(NamedTuple):
    """The first event whose outcome is another than the recorded one."""

    number: int
    """Events are counted from 0."""
    now: float
    event: str
    """What it was, readable."""
    expected: list[str]
    got: list[str]


class Replayed(NamedTuple):
    events: int
    """Decided again, the one with the difference included."""
    outputs: int
    torn: bool
    """The file ends within a record, which was left out."""
    difference: Difference | None


def replay(path: Path, on_event: Callable[[int], None] = lambda number: None) -> Replayed:
    """Stops at the first difference. Raises JournalError, OSError."""
    with Journal(path) as journal:
        core = journal.about(KIND, EngineStart).core()
        events = outputs = 0
        for number, record in enumerate(journal):
            decision, event = _read(journal, number, record)
            events += 1
            outputs += len(decision.said)
            difference = _differs(core, number, decision, event)
            if difference is not None:
                return Replayed(events, outputs, False, difference)
            on_event(number)
            if decision.raised is not None:
                break
        return Replayed(events, outputs, journal.torn, None)


def _read(journal: Journal, number: int, record: bytes) -> tuple[Decision, Event]:
    try:
        decision = msgspec.msgpack.decode(record, type=Decision)
        event: Event = msgspec.msgpack.decode(decision.content, type=EVENTS[decision.event])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as error:
        raise JournalError(f"{journal.path}: event {number} is none of this release's ({error!r})") from None
    return decision, event


def _differs(core: Engine, number: int, decision: Decision, event: Event) -> Difference | None:
    """A bug that was recorded must show again: the exception is an outcome like any other."""
    raised: str | None = None
    answer: tuple[Said, ...] = ()
    try:
        answer = said(core.handle(event, decision.now), contents=True)
    except Exception as error:
        raised = repr(error)
    same_due = raised is not None or core.plan_due == decision.plan_due
    if raised == decision.raised and _digests(answer) == _digests(decision.said) and same_due:
        return None
    expected = _shown(decision.said, decision.plan_due, decision.raised)
    got = _shown(answer, core.plan_due, raised)
    return Difference(number, decision.now, f"{decision.event} {_readable(decision.content)}", expected, got)


def _digests(answer: tuple[Said, ...]) -> list[tuple[str, bytes]]:
    return [(each.kind, each.digest) for each in answer]


def _shown(answer: tuple[Said, ...], plan_due: float | None, raised: str | None) -> list[str]:
    if raised is not None:
        return [f"raised {raised}"]
    lines = []
    for each in answer:
        content = f": {_readable(each.content)}" if each.content else ""
        lines.append(f"{each.kind} ({each.size} bytes, digest {each.digest.hex()[:12]}){content}")
    return [*lines, f"next plan due at {plan_due!r}"]


def _readable(content: bytes) -> str:
    text = repr(msgspec.msgpack.decode(content))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
