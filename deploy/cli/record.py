"""`baton record`: writes what is said on chosen subjects to a journal, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from deploy.cli.errors import CommandError
from deploy.cli.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from shared import topics
from shared.ids import EngineId, InstanceId
from shared.traffic import Heard, TrafficJournal, TrafficStart

SHOW_EVERY = 0.25
_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Recording(NamedTuple):
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


def heard_by_scheduler(engine: str) -> tuple[str, ...]:
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


def record(state: StackState, recording: Recording) -> None:
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
            journal.add(Heard(time.time(), subject, payload))
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
