"""`baton ps`: what the supervisor started, joined with what each process says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil

from deploy.cli.errors import CommandError
from deploy.cli.operator_bus import operator_bus
from deploy.cli.ps_detail import detail, sentence
from deploy.supervisor.state_file import MemberRecord, StackState
from shared import topics
from shared.messages.lifecycle import Lifecycle

WIDE = 200
"""Columns where no terminal says how many it has: nothing is cut or wrapped for `grep`."""
LISTEN = 1.2
"""Seconds; everybody speaks twice a second."""

Said = Mapping[str, Lifecycle]


def show_processes(state: StackState, *, as_json: bool) -> None:
    rows = [_row(member, said) for said in [asyncio.run(heard(state))] for member in state.members]
    rows.sort(key=lambda row: (row["service"], row["instance"]))
    if as_json:
        print(json.dumps(_described(state, rows)))
        return
    _print_table(state, rows)


def _described(state: StackState, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": state.name,
        "url": state.url,
        "phase": state.phase,
        "model": state.model,
        "supervisor_pid": state.pid,
        "nats_pid": state.nats_pid,
        "redis_pid": state.redis_pid,
        "processes": rows,
    }


async def heard(state: StackState) -> Said:
    """What each member of the stack last said; listens until all were heard, LISTEN at most."""
    said: dict[str, Lifecycle] = {}
    missing = {member.instance for member in state.members if member.pid is not None}
    complete = asyncio.Event()

    async def take(message: Lifecycle) -> None:
        said[message.instance] = message
        missing.discard(message.instance)
        if not missing:
            complete.set()

    with contextlib.suppress(TimeoutError, CommandError):
        async with operator_bus(state) as bus, asyncio.timeout(LISTEN):
            await bus.subscribe(topics.lifecycles(), take)
            await complete.wait()
    return said


def _row(member: MemberRecord, said: Said) -> dict[str, Any]:
    life = said.get(member.instance)
    if life is not None and life.pid != member.pid:
        life = None
    return {
        "service": member.service,
        "instance": member.instance,
        "pid": member.pid,
        "phase": _phase(member, life),
        "load": life.load if life else None,
        "uptime": round(max(0.0, time.time() - life.started), 1) if life else None,
        "restarts": member.restarts,
        "memory": _resident(member.pid),
        "metrics_port": life.metrics_port if life else None,
        "detail": detail(life),
    }


def _phase(member: MemberRecord, life: Lifecycle | None) -> str:
    if member.state != "running":
        return {"waiting": "restarting", "ending": "ending"}[member.state]
    return life.phase if life else "silent"


def _resident(pid: int | None) -> int | None:
    """Bytes."""
    with contextlib.suppress(psutil.Error):
        return None if pid is None else int(psutil.Process(pid).memory_info().rss)
    return None


def _print_table(state: StackState, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("SERVICE", "INSTANCE", "PID", "PHASE", "LOAD", "UPTIME", "RESTARTS", "MEMORY", ""):
        table.add_column(
            heading,
            no_wrap=True,
            justify="right" if heading in ("PID", "LOAD", "UPTIME", "RESTARTS", "MEMORY") else "left",
        )
    styles = {"ready": "green", "draining": "cyan", "silent": "red", "failed": "red"}
    for row in rows:
        style = styles.get(row["phase"], "yellow")
        table.add_row(
            row["service"],
            row["instance"],
            _shown(row["pid"]),
            f"[{style}]{row['phase']}[/{style}]",
            _shown(row["load"]),
            duration(row["uptime"]),
            str(row["restarts"]),
            "-" if row["memory"] is None else f"{row['memory'] / 2**20:.0f} MiB",
            sentence(row["detail"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(
        f"[bold]{state.name}[/bold] {state.phase}  {state.url}  model {state.model}", highlight=False, soft_wrap=True
    )
    console.print(table)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def duration(seconds: float | None) -> str:
    """`42s`, `3m07s`, `5h12m`, `2d04h`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
