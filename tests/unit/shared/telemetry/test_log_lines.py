"""Lines of a log are JSON; one about a traced request names its trace."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from shared.telemetry.logs import MAX_TRACED_REQUESTS, JsonLines, LineHandler, LineRecord, record_trace, set_log_level

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CONTEXT = f"00-{TRACE}-00f067aa0ba902b7-01"


class Lines:
    """What a logger of its own has written."""

    def __init__(self, log: logging.Logger, stream: io.StringIO) -> None:
        self.log, self._stream = log, stream

    def last(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self._stream.getvalue().splitlines()[-1])
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    stream, log = io.StringIO(), logging.getLogger("lines of a test")
    handler = LineHandler(stream)
    handler.setFormatter(JsonLines("gateway", "gateway-1"))
    log.addHandler(handler)
    log.setLevel("INFO")
    log.propagate = False
    factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(LineRecord)
    yield Lines(log, stream)
    logging.setLogRecordFactory(factory)
    log.removeHandler(handler)


def test_a_line_says_who_and_what_and_has_the_fields_of_extra(lines: Lines) -> None:
    lines.log.info("placed", extra={"request": "r-1", "blocks": 3})
    line = lines.last()
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "service": "gateway",
        "instance": "gateway-1",
        "event": "placed",
        "request": "r-1",
        "blocks": 3,
    }


def test_a_line_about_a_traced_request_names_its_trace(lines: Lines) -> None:
    record_trace("r-2", CONTEXT)
    record_trace("r-3", None)
    for request, trace in (("r-2", TRACE), ("r-3", None), (None, None)):
        lines.log.info("placed", extra={"request": request})
        assert lines.last().get("trace") == trace
    lines.log.info("audit", extra={"request": "r-2", "trace": "its own"})
    assert lines.last()["trace"] == "its own"


def test_traces_of_the_newest_requests_are_known(lines: Lines) -> None:
    record_trace("oldest", CONTEXT)
    for number in range(MAX_TRACED_REQUESTS):
        record_trace(f"r-{number}", CONTEXT)
    lines.log.info("late", extra={"request": "oldest"})
    assert "trace" not in lines.last()


def test_a_line_holds_what_any_record_may_say(lines: Lines) -> None:
    lines.log.warning("%(free)d of %(all)d blocks", {"free": 3, "all": 8})
    assert (lines.last()["level"], lines.last()["event"]) == ("warning", "3 of 8 blocks")
    try:
        raise ValueError("no such block")
    except ValueError:
        lines.log.exception("failed %s", "twice")
    line = lines.last()
    assert line["event"] == "failed twice"
    assert line["error"].endswith("ValueError: no such block")


def test_a_level_that_stands_is_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root, nats = logging.getLogger(), logging.getLogger("nats")
    before = root.level, nats.level
    set_log_level("error")
    assert (root.level, nats.level) == (logging.ERROR, logging.ERROR)
    set_log_level("debug")
    assert (root.level, nats.level) == (logging.DEBUG, logging.WARNING)
    written: list[str] = []
    monkeypatch.setattr(logging.Logger, "setLevel", lambda logger, level: written.append(logger.name))
    set_log_level("debug")
    assert written == []
    monkeypatch.undo()
    for logger, level in zip((root, nats), before, strict=True):
        logger.setLevel(level)
