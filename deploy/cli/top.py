"""`baton top`: what the stack is doing, drawn anew every interval; or once, for scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable

from deploy.cli.operator_bus import operator_bus
from deploy.cli.ps import WIDE
from deploy.cli.top_figures import Figures, Heard, as_json, figures
from deploy.supervisor.state_file import StackState
from shared import topics
from shared.bus import Bus
from shared.messages.lifecycle import Lifecycle

HEARTBEAT = 0.6
"""Seconds within which everybody has spoken."""
FORGOTTEN_AFTER = 5.0
"""Seconds of silence."""
SETTLED = ("stopped", "failed")


def show_top(state: StackState, interval: float, *, once: bool, in_json: bool) -> None:
    """Until Ctrl-C, or once: then two looks, an interval apart. Raises CommandError."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_once(state, interval, in_json) if once else _live(state, interval, in_json))


class Listener:
    """Owns what everybody said last, and how that was an interval ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, Heard] = {}
        self._shown: dict[str, Heard] = {}
        """As of the newest look that found something new."""
        self._before: dict[str, Heard] = {}
        """As of the look before that."""

    async def take(self, life: Lifecycle) -> None:
        if life.phase in SETTLED:
            self._heard.pop(life.instance, None)
        else:
            self._heard[life.instance] = Heard(self._clock(), life)

    def look(self) -> Figures:
        """The figures since the look before; of who has said nothing new, as they were."""
        silent = self._clock() - FORGOTTEN_AFTER
        now = {instance: heard for instance, heard in self._heard.items() if heard.at > silent}
        for instance, heard in now.items():
            shown = self._shown.get(instance)
            if shown is not heard:
                self._shown[instance] = heard
                if shown is not None:
                    self._before[instance] = shown
        return figures(self._before, now)


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

    from deploy.cli.top_view import view

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


async def _draw(state: StackState, listener: Listener, interval: float) -> None:
    from rich.live import Live

    from deploy.cli.top_view import view

    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            live.update(view(_title(state), listener.look()), refresh=True)
            await asyncio.sleep(interval)


async def _listening(bus: Bus) -> Listener:
    listener = Listener()
    await bus.subscribe(topics.lifecycles(), listener.take)
    await bus.flush()
    return listener


def _title(state: StackState) -> str:
    return f"{state.name}  {state.url}  {state.model}"


def _json(state: StackState, found: Figures) -> str:
    return json.dumps(as_json(found, name=state.name, model=state.model, time=round(time.time(), 3)))
