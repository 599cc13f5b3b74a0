"""Log lines of all services in time order, of one service or one request. Pure but for reading files."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class LogQuery(NamedTuple):
    service: str | None
    """A service or an instance."""
    request: str | None
    """A request's id, the beginning that its choices have in common, or the client's own `X-Request-Id`."""
    lines: int | None


class LogLine(NamedTuple):
    time: str
    """ISO 8601, UTC; what is no JSON (a traceback) has the time of the line before it."""
    instance: str
    text: str
    fields: dict[str, Any] | None


def parsed(instance: str, text: str, before: str) -> LogLine:
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return LogLine(before, instance, text, None)
    if not isinstance(fields, dict) or not isinstance(fields.get("time"), str):
        return LogLine(before, instance, text, None)
    return LogLine(fields["time"], instance, text, fields)


def lines_of(path: Path) -> Iterator[LogLine]:
    instance, before = instance_of(path), ""
    with path.open(errors="replace") as file:
        for text in file:
            line = parsed(instance, text.rstrip("\n"), before)
            before = line.time
            yield line


def instance_of(path: Path) -> str:
    return path.name.removesuffix(".1").removesuffix(".log")


def matches(line: LogLine, query: LogQuery) -> bool:
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
    """`request`, and what the ring calls it where it is the client's own `X-Request-Id`: the gateway logs both."""
    called = (line.fields for path in paths for line in lines_of(path) if line.fields)
    return frozenset({request, *(f["request"] for f in called if f.get("client_request") == request)})


def merged(paths: Iterable[Path], query: LogQuery) -> Iterable[LogLine]:
    """In time order; each file is in order already, a rotated one continues in its successor."""
    paths = list(paths)
    names = [None] if query.request is None else sorted(ring_names(paths, query.request))
    queries = [query._replace(request=name) for name in names]
    by_time = heapq.merge(*(lines_of(path) for path in paths), key=lambda line: line.time)
    wanted = (line for line in by_time if any(matches(line, each) for each in queries))
    return wanted if query.lines is None else deque(wanted, maxlen=query.lines)
