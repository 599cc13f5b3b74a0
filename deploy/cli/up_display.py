"""What `baton up` shows while the stack starts: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.supervisor.core.members import Member
from deploy.supervisor.stack import Stack

REFRESH = 0.1
_STYLES = {"ready": "green", "starting": "yellow", "failed": "red", "draining": "cyan", "stopped": "dim"}


class Display(Protocol):
    def show(self, members: Iterable[Member], seconds: float) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """One line whenever an instance becomes something else."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, str] = {}

    def show(self, members: Iterable[Member], seconds: float) -> None:
        for member in members:
            now = described(member)
            if self._shown.get(member.seat.instance) != now:
                self._shown[member.seat.instance] = now
                self._console.print(f"{seconds:6.1f} s  {member.seat.instance:<20} {now}", highlight=False)

    def close(self) -> None:
        pass


class LiveDisplay:
    """A table that is drawn again in place. Refreshed by hand: the supervisor has no threads."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._spinner = Spinner("dots")
        self._ready_at: dict[str, float] = {}

    def show(self, members: Iterable[Member], seconds: float) -> None:
        table = Table(box=None, padding=(0, 2), show_header=False)
        for member in members:
            name, now = member.seat.instance, described(member)
            if now != "ready":
                self._ready_at.pop(name, None)
            since = self._ready_at.setdefault(name, seconds) if now == "ready" else seconds
            mark = Text("●", "green") if now == "ready" else self._spinner.render(time.monotonic())
            table.add_row(mark, name, Text(now, _STYLES.get(now, "yellow")), Text(f"{since:.1f} s", "dim"))
        self._live.update(table, refresh=True)

    def close(self) -> None:
        self._live.stop()


def described(member: Member) -> str:
    """One word or two: the phase it tells, or how far its process is."""
    match member.state:
        case "waiting":
            return "restarting" if member.restarts else "waiting"
        case "ending":
            return "ending"
        case "running":
            return member.phase or "loading"


async def follow(stack: Stack, console: Console) -> None:
    """Shows the start until all are ready or the stack stops."""
    display: Display = LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
    begun = time.monotonic()
    try:
        while stack.phase == "starting":
            display.show(list(stack.fleet.members()), time.monotonic() - begun)
            await asyncio.sleep(REFRESH)
        if stack.phase == "ready":
            display.show(list(stack.fleet.members()), time.monotonic() - begun)
    finally:
        display.close()
