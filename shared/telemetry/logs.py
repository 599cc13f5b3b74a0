"""Log lines as JSON objects: time, level, service, instance, what happened, and the request it happened to.

log = logging.getLogger(__name__)
log.info("placed", extra={"request": request, "engine": engine})
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

import msgspec

_OURS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encode = msgspec.json.Encoder(enc_hook=str).encode


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
