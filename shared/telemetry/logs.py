"""Log lines as JSON objects: time, level, service, instance, what happened, and the request it happened to.

log = logging.getLogger(__name__)
log.info("placed", extra={"request": request, "engine": engine})

A line about a request that is traced names the trace, too (`record_trace`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

from shared.reliability.recent import RecentEntries
from shared.telemetry.tracing import trace_id_of

MAX_TRACED_REQUESTS = 8192
"""Requests whose traces are known for their log lines; the oldest are forgotten."""
_TRACES: RecentEntries[str, str] = RecentEntries(MAX_TRACED_REQUESTS)
_UNKNOWN = {**vars(logging.makeLogRecord({})), "process": 0, "thread": 0}
"""What a library's own formatter may ask for, and is not found out for our lines."""
_OURS = frozenset(_UNKNOWN) | {"message", "asctime", "taskName"}
_NOISY = ("nats", "asyncio", "urllib3", "filelock")
_encode = msgspec.json.Encoder(enc_hook=str).encode


def record_trace(request: str, traceparent: str | None) -> None:
    """From now on this process's log lines about the request name its trace; None: it is not traced."""
    if traceparent is not None:
        _TRACES[request] = trace_id_of(traceparent)


class LineRecord(logging.LogRecord):
    """Holds what a line says. Where in the code it was written, by which thread and process, is what no line says, and
    costs half of a record."""

    def __init__(
        self,
        name: str,
        level: int,
        pathname: str,
        lineno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        sinfo: str | None = None,
    ) -> None:
        self.__dict__.update(_UNKNOWN)  # in place of the parent's initialisation, which finds all that out
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.msg = msg
        self.args = args[0] if args and len(args) == 1 and isinstance(args[0], Mapping) and args[0] else args
        self.exc_info, self.exc_text, self.stack_info = exc_info, None, sinfo
        self.created = now = time.time()
        self.msecs = now % 1 * 1000


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes each line as it comes: what is killed has said what it did."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line. What cannot be written is left to `logging.raiseExceptions`."""
        try:
            self.stream.write(self.format(record) + self.terminator)
            self.stream.flush()
        except Exception:
            self.handleError(record)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON line; whatever `extra` holds becomes a field."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._service, self._instance = service, instance
        self._second, self._date = 0, ""
        """The latest second that a line was written in, and how it is written."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON: time in UTC, level, service, instance, event, then the fields of `extra`."""
        second = int(record.created)
        if second != self._second:
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        line: dict[str, Any] = {
            "time": f"{self._date}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self._instance,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _OURS}
        if "trace" not in line and (trace := _TRACES.get(str(line.get("request")))) is not None:
            line["trace"] = trace
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def set_up_logs(service: str, instance: str, level: str, stream: TextIO | None = None) -> None:
    """Every logger of the process writes JSON lines to `stream` (standard error) from `level` on."""
    logging.setLogRecordFactory(LineRecord)
    logging._srcfile = None  # as Python's manual has it: nobody looks for the caller
    handler = LineHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(service, instance))
    logging.getLogger().handlers[:] = [handler]
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Lines are written from `level` on, of some libraries warnings at least. A level that stands already is left
    alone: setting one writes to every logger of the process, half a MiB that a forked one shares until then."""
    least = logging.getLevelNamesMapping()[level.upper()]
    levels = {"": least, **dict.fromkeys(_NOISY, max(logging.WARNING, least))}
    for logger, wanted in ((logging.getLogger(name), wanted) for name, wanted in levels.items()):
        if logger.level != wanted:
            logger.setLevel(wanted)
