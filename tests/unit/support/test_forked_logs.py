"""Processes that tests fork log to their own errors."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from tests.support.lanes.forked_logs import log_to_own_errors


def test_loggers_that_had_another_stream_write_to_the_process_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger(__name__)
    logger.addHandler(handler)
    log_to_own_errors()
    logger.removeHandler(handler)
    assert handler.stream is sys.stderr
    assert (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
