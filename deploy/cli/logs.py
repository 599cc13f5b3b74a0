"""`baton logs`: the lines of all services in time order, of one service or one request, for people or for scripts."""

from __future__ import annotations

import contextlib
import heapq
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, run_dir_of
from deploy.errors import CommandError
from deploy.supervisor.log_files import log_files
from shared.packing import NOT_DECODED


class LogQuery(NamedTuple):
    """Which log lines to show; None: no restriction."""

    service: str | None
    """A service or an instance."""
    request: str | None
    """A request's id, the beginning that its choices have in common, or the client's own `X-Request-Id`."""
    lines: int | None


class LogLine(NamedTuple):
    """One line of a process's log."""

    time: str
    """ISO 8601, UTC; what is no JSON (a traceback) has the time of the line before it."""
    instance: str
    text: str
    fields: dict[str, Any] | None


def parsed(instance: str, text: str, before: str) -> LogLine:
    """The line, with its fields where it is JSON with a time; otherwise with the time `before`, of the line
    before it."""
    try:
        fields = msgspec.json.decode(text)
    except NOT_DECODED:
        return LogLine(before, instance, text, None)
    if not isinstance(fields, dict) or not isinstance(fields.get("time"), str):
        return LogLine(before, instance, text, None)
    return LogLine(fields["time"], instance, text, fields)


def lines_of(path: Path) -> Iterator[LogLine]:
    """All lines of a log file, in order."""
    instance, before = instance_of(path), ""
    with path.open(errors="replace") as file:
        for text in file:
            line = parsed(instance, text.rstrip("\n"), before)
            before = line.time
            yield line


def instance_of(path: Path) -> str:
    """The instance whose log file this is, a rotated one included."""
    return path.name.removesuffix(".1").removesuffix(".log")


def matches(line: LogLine, query: LogQuery) -> bool:
    """Whether the line matches the query. `query.lines` is ignored."""
    if query.service is not None and query.service != line.instance:
        service = line.fields.get("service") if line.fields else line.instance.rpartition("-")[0]
        if service != query.service:
            return False
    return query.request is None or _is_about(line.fields, query.request)


def _is_about(fields: dict[str, Any] | None, request: str) -> bool:
    if fields is None:
        return False
    if fields.get("client_request") == request:
        return True
    named = (fields.get("request"), *(fields.get("requests") or ()))
    return any(isinstance(each, str) and (each == request or each.startswith(f"{request}-")) for each in named)


def ring_names(paths: Iterable[Path], request: str) -> frozenset[str]:
    """`request`, and what the ring calls it where it is the client's own `X-Request-Id`: the gateway logs both, but of
    what it refused before the ring had heard of it."""
    called = (line.fields for path in paths for line in lines_of(path) if line.fields)
    of_client = (fields.get("request") for fields in called if fields.get("client_request") == request)
    return frozenset({request, *filter(None, of_client)})


def merged(paths: Iterable[Path], query: LogQuery) -> Iterable[LogLine]:
    """In time order; each file is in order already, a rotated one continues in its successor."""
    paths = list(paths)
    names = [None] if query.request is None else sorted(ring_names(paths, query.request))
    queries = [query._replace(request=name) for name in names]
    by_time = heapq.merge(*(lines_of(path) for path in paths), key=lambda line: line.time)
    wanted = (line for line in by_time if any(matches(line, each) for each in queries))
    return wanted if query.lines is None else deque(wanted, maxlen=query.lines)


# `baton logs`: the services' log lines, coloured for people or as they are for scripts.


POLL_INTERVAL = 0.2
COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "31"}
HIDDEN = frozenset({"time", "level", "service", "instance", "event"})


def logs(
    service: Annotated[str | None, typer.Argument(help="A service or an instance. Default: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep running and show new lines.")] = False,
    request: Annotated[str | None, typer.Option(help="Only lines about this request.")] = None,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last N lines.")] = None,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Show the services' log lines, merged in time order. Works on a stack that has ended, too."""
    query = LogQuery(service=service, request=request, lines=lines)
    folder = run_dir_of(name, run_dir) / "logs"
    if not folder.is_dir():
        raise CommandError(f"no logs in {folder}")
    tails = LogFollower(folder)
    if follow:
        tails.go_to_end()
    coloured = sys.stdout.isatty()
    found = False
    for line in merged(log_files(folder), query):
        found = True
        _print(line, as_json, coloured)
    if not found and not follow and query.lines != 0:
        raise CommandError(f"no line in {folder}{_asked(query)}; it has {', '.join(_instances(folder)) or 'no file'}")
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            sys.stdout.flush()
            time.sleep(POLL_INTERVAL)
            for line in sorted(tails.new_lines(), key=lambda line: line.time):
                if matches(line, query):
                    _print(line, as_json, coloured)


def _asked(query: LogQuery) -> str:
    filters = (("of", query.service), ("about request", query.request))
    return "".join(f" {how} {what!r}" for how, what in filters if what is not None)


def _instances(folder: Path) -> list[str]:
    return sorted({instance_of(path) for path in log_files(folder)})


class LogFollower:
    """Owns how far each log file was read. New files are read from their beginning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._times: dict[Path, str] = {}

    def go_to_end(self) -> None:
        """Skips everything that the files hold now."""
        self._read = {path: path.stat().st_size for path in self._folder.glob("*.log")}

    def new_lines(self) -> Iterator[LogLine]:
        """Lines that were written since the last call, of one file after the other."""
        for path in sorted(self._folder.glob("*.log")):
            yield from self._new_lines_of(path)

    def _new_lines_of(self, path: Path) -> Iterator[LogLine]:
        at = self._read.get(path, 0)
        if path.stat().st_size < at:  # it was rotated
            at = 0
        with path.open("rb") as file:
            file.seek(at)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read[path] = at + len(whole)
        for text in whole.decode(errors="replace").splitlines():
            line = parsed(instance_of(path), text, self._times.get(path, ""))
            self._times[path] = line.time
            yield line


def _print(line: LogLine, as_json: bool, coloured: bool) -> None:
    if as_json:
        if line.fields is not None:
            print(line.text)
        return
    print(for_people(line, coloured))


def shown_lines(instance: str, lines: Iterable[str]) -> list[str]:
    """Lines of an instance's log as `baton logs` shows them, indented, for use below a heading."""
    found = (parsed(instance, line, "") for line in lines)
    return [f"  {line.text if line.fields is None else for_people(line, False)}" for line in found]


def for_people(line: LogLine, coloured: bool) -> str:
    """`10:21:05.040 engine-1         stop requested  seconds=3`; a line that is not JSON is kept as it is."""
    fields = line.fields
    if fields is None:
        return f"{line.time[11:23]:<12} {line.instance:<16} {line.text}"
    rest = "  ".join(f"{key}={value}" for key, value in fields.items() if key not in HIDDEN and key != "error")
    text = f"{line.time[11:23]} {line.instance:<16} {fields.get('event', '')}{'  ' if rest else ''}{rest}"
    if "error" in fields:
        text += f"\n{fields['error']}" if "\n" in str(fields["error"]) else f"  error={fields['error']}"
    colour = COLOURS.get(str(fields.get("level")))
    return f"\x1b[{colour}m{text}\x1b[0m" if coloured and colour else text
