"""`baton logs`: the services' log lines, coloured for people or as they are for scripts."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deploy.cli.errors import CommandError
from deploy.cli.log_lines import LogLine, LogQuery, instance_of, matches, merged, parsed
from deploy.supervisor.log_files import log_files

LOOK_EVERY = 0.2
COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "31"}
HIDDEN = frozenset({"time", "level", "service", "instance", "event"})


def show_logs(folder: Path, query: LogQuery, *, follow: bool, as_json: bool) -> None:
    if not folder.is_dir():
        raise CommandError(f"no logs in {folder}")
    tails = Tails(folder)
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
            time.sleep(LOOK_EVERY)
            for line in sorted(tails.new_lines(), key=lambda line: line.time):
                if matches(line, query):
                    _print(line, as_json, coloured)


def _asked(query: LogQuery) -> str:
    asked = (("of", query.service), ("about request", query.request))
    return "".join(f" {how} {what!r}" for how, what in asked if what is not None)


def _instances(folder: Path) -> list[str]:
    return sorted({instance_of(path) for path in log_files(folder)})


class Tails:
    """Owns how far each log file was read. New files are read from their beginning."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._times: dict[Path, str] = {}

    def go_to_end(self) -> None:
        self._read = {path: path.stat().st_size for path in self._folder.glob("*.log")}

    def new_lines(self) -> Iterator[LogLine]:
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


def for_people(line: LogLine, coloured: bool) -> str:
    """`10:21:05.040 engine-1         stop asked  seconds=3`; what is no JSON as it is."""
    fields = line.fields
    if fields is None:
        return f"{line.time[11:23]:<12} {line.instance:<16} {line.text}"
    rest = "  ".join(f"{key}={value}" for key, value in fields.items() if key not in HIDDEN and key != "error")
    text = f"{line.time[11:23]} {line.instance:<16} {fields.get('event', '')}{'  ' if rest else ''}{rest}"
    if "error" in fields:
        text += f"\n{fields['error']}" if "\n" in str(fields["error"]) else f"  error={fields['error']}"
    colour = COLOURS.get(str(fields.get("level")))
    return f"\x1b[{colour}m{text}\x1b[0m" if coloured and colour else text
