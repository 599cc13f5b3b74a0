"""`baton trace`: one request's way through the services, hop by hop, from what each process remembers of it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Annotated

import typer

from deploy.cli.ps import WIDE, latest_lifecycles
from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, running_stack
from deploy.errors import CommandError
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from shared.ids import InstanceId
from shared.traces.request_trace import RECORDERS, GatewaysSilent, Hop, RequestTrace, request_trace

BAR = 40
"""Characters of the whole request."""


def trace(
    request: Annotated[
        str, typer.Argument(help="The id of its response, the client's own X-Request-Id, or that of its trace.")
    ],
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Follow one request through the services, hop by hop with times: an open one, or one that ended a while ago."""
    try:
        found = asyncio.run(_find(running_stack(name, run_dir), request))
    except GatewaysSilent as silent:
        raise CommandError(f"request {request!r}: {silent}") from None
    if found is None:
        raise CommandError(
            f"no process remembers a request {request!r}: there was none, it is too long ago, or its gateway is gone "
            "(--trace-history says how much is remembered)"
        )
    if as_json:
        hops = [hop._asdict() for hop in found.hops]
        print(json.dumps({"trace": found.trace_id, "hops": hops, "unanswered": found.unanswered}))
        return
    _print(found, time.time())


async def _find(state: StackState, request: str) -> RequestTrace | None:
    lives = await latest_lifecycles(state)
    ask = {InstanceId(instance): life.service for instance, life in lives.items() if life.service in RECORDERS}
    gateways = [instance for instance, service in ask.items() if service == "gateway"]
    others = [instance for instance, service in ask.items() if service != "gateway"]
    async with operator_bus(state) as bus:
        return await request_trace(bus, request, gateways, others)


def _print(found: RequestTrace, now: float) -> None:
    from rich.console import Console
    from rich.table import Table

    began = min(hop.begun for hop in found.hops)
    whole = max(1e-6, max(hop.ended or now for hop in found.hops) - began)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("HOP", "INSTANCE", "AFTER", "TIME", ""):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("AFTER", "TIME") else "left")
    table.add_column("", overflow="fold")
    for hop in found.hops:
        start, time_taken = hop.begun - began, (hop.ended or now) - hop.begun
        taken = milliseconds(time_taken) if hop.ended is not None else f"{milliseconds(time_taken)} …"
        told = "  ".join(f"{name}={value}" for name, value in hop.attributes.items())
        table.add_row(hop.name, hop.instance, milliseconds(start), taken, _bar(start / whole, time_taken / whole), told)
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(f"trace {found.trace_id}  {'open' if is_open(found.hops) else 'ended'}", highlight=False)
    console.print(table)
    if found.unanswered:
        console.print(f"did not answer: {', '.join(found.unanswered)}; ask again for what they did", highlight=False)


def is_open(hops: tuple[Hop, ...]) -> bool:
    """Whether something of the request is under way."""
    return any(hop.ended is None for hop in hops)


def milliseconds(seconds: float) -> str:
    """`0.42 ms`, `17.3 ms`, `1840 ms`."""
    value = 1000 * max(0.0, seconds)
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def _bar(start: float, share: float) -> str:
    """Where in the whole request the hop lies."""
    first = min(BAR - 1, int(start * BAR))
    return " " * first + "█" * max(1, min(BAR - first, round(share * BAR)))
