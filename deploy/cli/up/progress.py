"""What `baton up` shows while the stack starts: a live table on a terminal, plain lines elsewhere.

A supervisor in the background does without rich, 3 MiB: whatever needs that imports it where it is used.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

import msgspec

from deploy.supervisor.core.members import SupervisedProcess
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.spec import StackSpec
from deploy.supervisor.stack import Stack
from shared.packing import NOT_DECODED
from shared.telemetry.startup import STAGE_BEGUN

if TYPE_CHECKING:
    from rich.console import Console

REFRESH = 0.1
_STYLES = {"ready": "green", "starting": "yellow", "failed": "red", "draining": "cyan", "stopped": "dim"}


_WORDS: Mapping[str, str] = {
    "libraries": "importing PyTorch",
    "device": "opening the device",
    "ranks": "meeting the other ranks",
    "digest": "naming the model",
    "kernels": "loading kernels",
    "weights": "reading weights",
    "profile": "sizing the KV cache",
    "warm_up": "warming up",
}
"""For the stages of a start (docs/startup.md) that may take long."""
_MAX_READ = 256 * 1024
"""Bytes of a log at a time."""


class Output(Protocol):
    """Where `baton up` writes."""

    def print(self, text: str, *, style: str | None = None, markup: bool = True) -> None:
        """Writes a line. `style`: rich's name of one for all of it; `markup`: there are tags of rich's in it."""


class RichOutput:
    """Writes with rich's colours where the file is a terminal."""

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self.console = Console(file=file)

    def print(self, text: str, *, style: str | None = None, markup: bool = True) -> None:
        """See `Output`."""
        self.console.print(text, style=style, markup=markup, highlight=False, soft_wrap=True)


class PlainOutput:
    """Writes to a file that is no terminal."""

    _TAGS = re.compile(r"\[/?(?:bold|green)\]")

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def print(self, text: str, *, style: str | None = None, markup: bool = True) -> None:
        """See `Output`."""
        self._file.write((self._TAGS.sub("", text) if markup else text) + "\n")
        self._file.flush()


class StartStages:
    """Owns how far each process's log has been read, and which stage of its start it says that it is at."""

    def __init__(self, log_of: Callable[[str], Path], weights: int) -> None:
        """`log_of` is where an instance's log lies; `weights` are bytes of the model's weights, 0 if they are not
        known."""
        self._log_of = log_of
        self._reading = f"reading weights ({weights / 10**6:,.0f} MB)" if weights else _WORDS["weights"]
        self._read: dict[str, int] = {}
        self._stage: dict[str, str] = {}

    def of(self, instance: str) -> str | None:
        """What the process is at, in words; None where it does not say."""
        for line in self._new_lines(instance):
            if STAGE_BEGUN.encode() in line:
                try:
                    said = msgspec.json.decode(line)
                except NOT_DECODED:
                    continue
                if isinstance(said, dict) and said.get("event") == STAGE_BEGUN:
                    self._stage[instance] = str(said.get("stage"))
        stage = self._stage.get(instance, "")
        return self._reading if stage == "weights" else _WORDS.get(stage)

    def _new_lines(self, instance: str) -> Iterable[bytes]:
        """Whole lines that have come since the last call; none where the log cannot be read."""
        try:
            with self._log_of(instance).open("rb") as file:
                file.seek(self._read.get(instance, 0))
                text = file.read(_MAX_READ)
        except OSError:
            return ()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[instance] = self._read.get(instance, 0) + len(whole)
        return whole.splitlines()


def weight_bytes(spec: StackSpec) -> int:
    """Of the one model that is served; 0 for several, and for dummy weights."""
    if spec.models or spec.settings.get("worker", {}).get("load_format") == "dummy":
        return 0
    return sum(path.stat().st_size for path in spec.model.glob("*.safetensors"))


class ProcessRow(NamedTuple):
    """A process, and what it is at."""

    name: str
    now: str


class Display(Protocol):
    """How the start of a stack is shown."""

    def show(self, rows: Iterable[ProcessRow], seconds: float) -> None:
        """Shows the state of all processes, `seconds` after the start."""

    def close(self) -> None:
        """Ends the display; nothing is shown after it."""


class PlainDisplay:
    """One line whenever an instance becomes something else."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._shown: dict[str, str] = {}

    def show(self, rows: Iterable[ProcessRow], seconds: float) -> None:
        """Prints a line for each process whose state differs from the one printed last."""
        for name, now in rows:
            if self._shown.get(name) != now:
                self._shown[name] = now
                self._output.print(f"{seconds:6.1f} s  {name:<20} {now}", markup=False)

    def close(self) -> None:
        """Does nothing: every line is final."""


class LiveDisplay:
    """A table that is drawn again in place. Refreshed by hand: the supervisor has no threads."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._spinner = Spinner("dots")
        self._shown: dict[str, tuple[str, float]] = {}
        """What each is at, and since when."""

    def show(self, rows: Iterable[ProcessRow], seconds: float) -> None:
        """Draws the whole table again. Whoever is ready has the time when it became so, others that of what they are
        at."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2), show_header=False)
        for name, now in rows:
            before, since = self._shown.get(name, ("", seconds))
            self._shown[name] = (now, since if now == before else seconds)
            since = self._shown[name][1] if now == "ready" else seconds - self._shown[name][1]
            mark = Text("●", "green") if now == "ready" else self._spinner.render(time.monotonic())
            table.add_row(mark, name, Text(now, _STYLES.get(now, "yellow")), Text(f"{since:.1f} s", "dim"))
        self._live.update(table, refresh=True)

    def close(self) -> None:
        """Removes the table from the terminal."""
        self._live.stop()


def described(member: SupervisedProcess, stage: str | None) -> str:
    """The phase that the process reports, or, before it reports any, the state of the program; while it starts, the
    stage of that."""
    match member.state:
        case "waiting":
            return "restarting" if member.restarts else "waiting"
        case "ending":
            return "ending"
        case "running":
            phase = member.phase or "loading"
            return stage if stage is not None and phase in ("starting", "loading") else phase


async def follow(stack: Stack, output: Output) -> None:
    """Shows the start until all are ready or the stack stops."""
    display: Display = PlainDisplay(output)
    if isinstance(output, RichOutput) and output.console.is_terminal:
        display = LiveDisplay(output.console)
    begun = time.monotonic()
    stages = StartStages(LogFolder(stack.spec.run_dir).of, weight_bytes(stack.spec))

    def rows() -> list[ProcessRow]:
        members = list(stack.supervisor.members())
        starting = {each.process.instance for each in members if each.state == "running" and not each.is_ready}
        return [
            ProcessRow(name, described(each, stages.of(name) if name in starting else None))
            for each in members
            for name in (each.process.instance,)
        ]

    try:
        while stack.phase == "starting":
            display.show(rows(), time.monotonic() - begun)
            await asyncio.sleep(REFRESH)
        if stack.phase == "ready":
            display.show(rows(), time.monotonic() - begun)
    finally:
        display.close()
