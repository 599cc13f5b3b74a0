"""Log lines as JSON objects: time, level, service, instance, what happened, and the request it happened to.

log = logging.getLogger(__name__)
log.info("placed", extra={"request": request, "engine": engine})

A line about a request that is traced names the trace, too (`record_trace`).
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

import msgspec

from shared.reliability.recent import RecentEntries
from shared.telemetry.tracing import trace_id_of

MAX_TRACED_REQUESTS = 8192
"""Requests whose traces are known for their log lines; the oldest are forgotten."""
_TRACES: RecentEntries[str, str] = RecentEntries(MAX_TRACED_REQUESTS)
_OURS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def record_trace(request: str, traceparent: str | None) -> None:
    """From now on this process's log lines about the request name its trace; None: it is not traced."""
    if traceparent is not None:
        _TRACES[request] = trace_id_of(traceparent)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON line; whatever `extra` holds becomes a field."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._who = {"service": service, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON: time in UTC, level, service, instance, event, then the fields of `extra`."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._who,
            "event": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _OURS)
        if "trace" not in line and (trace := _TRACES.get(str(line.get("request")))) is not None:
            line["trace"] = trace
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def set_up_logs(service: str, instance: str, level: str, stream: TextIO | None = None) -> None:
    """Every logger of the process writes JSON lines to `stream` (standard error) from `level` on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(service, instance))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("nats", "asyncio", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
