"""`baton top`: what the stack is doing, drawn anew every interval; or once, for scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Annotated

import typer

from deploy.cli.ps import WIDE
from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, running_stack
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from shared import topics
from shared.bus import Bus
from shared.messages.lifecycle import LifecycleRequest
from shared.telemetry.lifecycle_listener import LifecycleListener
from shared.telemetry.stack_figures import Figures
from shared.telemetry.stack_figures import as_json as to_json

HEARTBEAT = 0.6
"""Seconds within which every instance sends a lifecycle message."""


def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the figures of one interval and exit.")] = False,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Show live figures of a stack: engines, time per step phase, queues, KV memory, tokens/s, hit rates."""
    state = running_stack(name, run_dir)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_once(state, interval, as_json) if once else _live(state, interval, as_json))


async def _once(state: StackState, interval: float, in_json: bool) -> None:
    async with operator_bus(state) as bus:
        listener = await _listening(bus)
        await asyncio.sleep(HEARTBEAT)
        listener.look()
        await asyncio.sleep(max(interval, HEARTBEAT))
        found = listener.look()
    if in_json:
        print(_json(state, found))
        return
    from rich.console import Console

    from deploy.cli.top.view import view

    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(view(_title(state), found))


async def _live(state: StackState, interval: float, in_json: bool) -> None:
    async with operator_bus(state) as bus:
        listener = await _listening(bus)
        await asyncio.sleep(HEARTBEAT)
        if in_json:
            while True:
                print(_json(state, listener.look()), flush=True)
                await asyncio.sleep(interval)
        await _draw(state, listener, interval)


async def _draw(state: StackState, listener: LifecycleListener, interval: float) -> None:
    from rich.live import Live

    from deploy.cli.top.view import view

    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            live.update(view(_title(state), listener.look()), refresh=True)
            await asyncio.sleep(interval)


async def _listening(bus: Bus) -> LifecycleListener:
    listener = LifecycleListener()
    await bus.subscribe(topics.lifecycles(), listener.record)
    await bus.publish(topics.lifecycle_requests(), LifecycleRequest())
    await bus.flush()
    return listener


def _title(state: StackState) -> str:
    return f"{state.name}  {state.url}  {state.model}"


def _json(state: StackState, found: Figures) -> str:
    return json.dumps(to_json(found, name=state.name, model=state.model, time=round(time.time(), 3)))
