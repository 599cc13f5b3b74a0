"""`baton replay`: decides again what a journal says was decided, and shows the first difference; or lists a journal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from deploy.cli.errors import CommandError
from services.scheduler.journal import KIND as DECISIONS
from services.scheduler.journal import Decision
from services.scheduler.replay import Replayed, replay
from shared.journal import Journal, JournalError
from shared.traffic import KIND as TRAFFIC
from shared.traffic import traffic

SHOWN = 160


def replay_journal(path: Path, *, as_json: bool) -> None:
    """Ends with status 1 at a difference. Raises CommandError."""
    try:
        with Journal(path) as journal:
            kind = journal.header.kind
        if kind == TRAFFIC:
            raise CommandError(
                f"{path}: holds traffic, which tells not in which order a scheduler took it; its own journal does "
                "(baton up --set scheduler.journal=FILE). To read this one: --list"
            )
        result = replay(path)
    except JournalError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    print(json.dumps(_as_json(result)) if as_json else _told(path, result))
    if result.difference is not None:
        raise SystemExit(1)


def _as_json(result: Replayed) -> dict[str, Any]:
    difference = result.difference
    return {**result._asdict(), "difference": None if difference is None else difference._asdict()}


def _told(path: Path, result: Replayed) -> str:
    difference = result.difference
    torn = "\nThe file ends within a record, which was left out." if result.torn else ""
    if difference is None:
        return f"{path}: {result.events} events decided again, all {result.outputs} answers are the same.{torn}"
    lines = [
        f"{path}: event {difference.number} is decided differently (the {result.events - 1} before it are not)",
        f"event     at {difference.now!r}: {difference.event}",
        *_column("expected", difference.expected),
        *_column("got", difference.got),
    ]
    return "\n".join(lines)


def _column(title: str, lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield f"{title:<9} {line}"
        title = ""


def list_journal(path: Path, *, as_json: bool) -> None:
    """One line for each record. Raises CommandError."""
    try:
        with Journal(path) as journal:
            for row in _rows(journal):
                print(json.dumps(row) if as_json else _line(row))
            if journal.torn:
                print("the file ends within a record, which was left out", file=sys.stderr)
    except JournalError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


def _rows(journal: Journal) -> Iterator[dict[str, Any]]:
    match journal.header.kind:
        case kind if kind == TRAFFIC:
            for number, heard in enumerate(traffic(journal)):
                yield _row(number, heard.time, heard.subject, heard.payload)
        case kind if kind == DECISIONS:
            for number, record in enumerate(journal):
                decision = msgspec.msgpack.decode(record, type=Decision)
                row = _row(number, decision.now, decision.event, decision.content)
                yield {**row, "answers": [each.kind for each in decision.said]}
        case kind:
            raise JournalError(f"{journal.path}: holds {kind}, which this release does not know")


def _row(number: int, when: float, what: str, content: bytes) -> dict[str, Any]:
    try:
        message = msgspec.to_builtins(msgspec.msgpack.decode(content))
    except msgspec.DecodeError:
        message = content.hex()
    return {"number": number, "time": when, "what": what, "bytes": len(content), "message": message}


def _line(row: dict[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.gmtime(row["time"])) + f"{row['time'] % 1:.3f}"[1:]
    message = json.dumps(row["message"], ensure_ascii=False)
    if len(message) > SHOWN:
        message = f"{message[:SHOWN]}…"
    answers = f"  → {', '.join(row['answers'])}" if row.get("answers") else ""
    return f"{row['number']:>6}  {when}  {row['what']}  {row['bytes']} B  {message}{answers}"
