"""`baton record` writes messages on the bus to a journal; `baton replay` repeats a scheduler's recorded decisions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, running_stack
from deploy.errors import CommandError
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from services.scheduler.journal import KIND as DECISIONS
from services.scheduler.journal import Decision
from services.scheduler.replay import ReplayResult
from services.scheduler.replay import replay as decide_again
from shared import topics
from shared.ids import EngineId, InstanceId
from shared.journals.journal import Journal, JournalError
from shared.journals.traffic import KIND as TRAFFIC
from shared.journals.traffic import RecordedMessage, TrafficJournal, TrafficStart, older, recorded_messages
from shared.packing import NOT_DECODED
from shared.settings import parse_bytes

SHOW_EVERY = 0.25
_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def record(
    journal: Annotated[Path, typer.Argument(help="File to write.", dir_okay=False)],
    subjects: Annotated[
        list[str] | None, typer.Argument(help="Subjects below the namespace, e.g. 'engine.*.steps'; > for all.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="All messages to this engine's scheduler; may be repeated.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--for", help="How long to record, e.g. 10s or 5m. Default: until Ctrl-C.")
    ] = None,
    limit: Annotated[str | None, typer.Option(help="Stop at this size, e.g. 512MiB.")] = None,
    ring: Annotated[
        str | None, typer.Option(help="Keep only the newest messages of this total size, in FILE and FILE.older.")
    ] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Record the messages on the bus in a journal; Ctrl-C ends it."""
    patterns = [*(subjects or ()), *(subject for each in engine or () for subject in scheduler_subjects(each))]
    if not patterns:
        raise CommandError("name subjects, or an engine with --engine", status=2)
    if limit is not None and ring is not None:
        raise CommandError("--limit and --ring: one of them", status=2)
    check_patterns(patterns)
    try:
        size = None if limit is None and ring is None else parse_bytes(str(limit or ring))
    except ValueError as error:
        raise CommandError(f"{limit or ring}: {error}", status=2) from None
    recording = Recording(
        path=journal,
        patterns=tuple(dict.fromkeys(patterns)),
        seconds=None if duration is None else seconds(duration),
        limit=size,
        ring=ring is not None,
    )
    check_new(recording)
    write_journal(running_stack(name, run_dir), recording)


def replay(
    journal: Annotated[
        Path, typer.Argument(help="A scheduler's journal, from `baton up --set scheduler.journal=FILE`.")
    ],
    listed: Annotated[bool, typer.Option("--list", help="Only list the records; works for every journal.")] = False,
    as_json: AsJson = False,
) -> None:
    """Repeat the decisions of a scheduler from its journal; a difference is shown and ends with status 1."""
    (list_journal if listed else replay_journal)(journal, as_json=as_json)


class Recording(NamedTuple):
    """What to record, where to, and when to end."""

    path: Path
    patterns: tuple[str, ...]
    seconds: float | None
    limit: int | None
    ring: bool


def seconds(text: str) -> float:
    """`10s`, `1.5m`, `250ms`, `2h`, `10`. Raises CommandError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text.strip())
    if not match:
        raise CommandError(f"--for {text}: a number with s, m or h is expected, for example 10s", status=2)
    return float(match[1]) * _UNITS[match[2]]


def scheduler_subjects(engine: str) -> tuple[str, ...]:
    """All subjects that an engine's scheduler listens to."""
    id_, instance = EngineId(engine), InstanceId(engine)
    return (
        topics.engine_requests(id_).subject,
        topics.engine_results(id_).subject,
        topics.engine_control(id_).subject,
        topics.engine_probes(id_).subject,
        topics.kv_dump_requests(instance).subject,
        topics.instance_control(instance).subject,
        topics.lifecycles().subject,
    )


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises CommandError for what the bus would not take as a subject."""
    for pattern in patterns:
        tokens = pattern.split(".")
        if not all(re.fullmatch(r"[A-Za-z0-9_$-]+|\*|>", token) for token in tokens) or ">" in tokens[:-1]:
            raise CommandError(f"{pattern}: no subject; tokens with dots between, * for one, > for the rest", status=2)


def check_new(recording: Recording) -> None:
    """Raises CommandError where a file with something in it would be written over."""
    paths = [recording.path, older(recording.path)] if recording.ring else [recording.path]
    for path in paths:
        if path.is_file() and path.stat().st_size:
            raise CommandError(f"{path} is there already; name another file, or remove it", status=2)


def write_journal(state: StackState, recording: Recording) -> None:
    """Ends after the time, at Ctrl-C, or when the journal is full. Raises CommandError."""
    start = TrafficStart(namespace=state.namespace, patterns=recording.patterns)
    try:
        journal = TrafficJournal(
            recording.path, start, written_by=version("baton-serve"), limit=recording.limit, ring=recording.ring
        )
    except OSError as error:
        raise CommandError(f"{recording.path}: {error.strerror}") from None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_record(state, recording, journal))
    except OSError as error:
        raise CommandError(f"{recording.path}: {error.strerror}") from None
    finally:
        journal.close()
        _show("\r\x1b[K")
    full = "; the journal is full" if journal.full else ""
    print(f"{journal.messages} messages in {recording.path}{full}", file=sys.stderr)


async def _record(state: StackState, recording: Recording, journal: TrafficJournal) -> None:
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(subject: str, payload: bytes) -> None:
        try:
            journal.add(RecordedMessage(time.time(), subject, payload))
        except OSError as error:
            if not broken.done():
                broken.set_exception(error)

    async with operator_bus(state) as bus:
        for pattern in recording.patterns:
            await bus.tap(pattern, take)
        await bus.flush()
        _show("recording…")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(recording.seconds):
                while not journal.full and not broken.done():
                    await asyncio.sleep(SHOW_EVERY)
                    journal.flush()
                    _show(f"\r\x1b[K{journal.messages} messages, {journal.size / 2**20:.1f} MiB")
        if broken.done():
            broken.result()


def _show(text: str) -> None:
    """On a terminal only."""
    if sys.stderr.isatty():
        print(text, end="", file=sys.stderr, flush=True)


# `baton replay`


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
        result = decide_again(path)
    except JournalError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    print(json.dumps(_as_json(result)) if as_json else _told(path, result))
    if result.difference is not None:
        raise SystemExit(1)


def _as_json(result: ReplayResult) -> dict[str, Any]:
    difference = result.difference
    return {**result._asdict(), "difference": None if difference is None else difference._asdict()}


def _told(path: Path, result: ReplayResult) -> str:
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
            for number, message in enumerate(recorded_messages(journal)):
                yield _row(number, message.time, message.subject, message.payload)
        case kind if kind == DECISIONS:
            for number, record in enumerate(journal):
                decision = msgspec.msgpack.decode(record, type=Decision)
                row = _row(number, decision.now, decision.event, decision.content)
                yield {**row, "answers": [each.kind for each in decision.outputs]}
        case kind:
            raise JournalError(f"{journal.path}: holds {kind}, which this release does not know")


def _row(number: int, when: float, what: str, content: bytes) -> dict[str, Any]:
    try:
        message = msgspec.to_builtins(msgspec.msgpack.decode(content))
    except NOT_DECODED:
        message = content.hex()
    return {"number": number, "time": when, "what": what, "bytes": len(content), "message": message}


def _line(row: dict[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.gmtime(row["time"])) + f"{row['time'] % 1:.3f}"[1:]
    message = json.dumps(row["message"], ensure_ascii=False)
    if len(message) > SHOWN:
        message = f"{message[:SHOWN]}…"
    answers = f"  → {', '.join(row['answers'])}" if row.get("answers") else ""
    return f"{row['number']:>6}  {when}  {row['what']}  {row['bytes']} B  {message}{answers}"
