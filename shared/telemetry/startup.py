"""How long each stage of a process's start takes, as a metric and as one line of its log."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Gauge

log = logging.getLogger(__name__)

STAGE_BEGUN = "startup stage"
"""Event of the log line by which `baton up` shows what a process is at."""
STAGE_SECONDS = Gauge(
    "baton_startup_seconds",
    "Seconds of each stage of this process's start; total: from the process's start until it was ready; processor: "
    "processor time until then.",
    ["stage"],
)


class StartupStages:
    """Owns the seconds of each stage, in the order in which they ended. One process has one start: see `STARTUP`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def record(self, stage: str, seconds: float) -> None:
        """Records a stage that took so long; one that is repeated counts as it went last."""
        self.seconds[stage] = round(seconds, 4)
        STAGE_SECONDS.labels(stage).set(seconds)

    @contextlib.contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Records how long the context is open, unless it raises; says in the log that it has begun."""
        log.info(STAGE_BEGUN, extra={"stage": stage})
        began = time.perf_counter()
        yield
        self.record(stage, time.perf_counter() - began)

    def finish(self) -> None:
        """The process is ready: records the total, and writes all stages to the log."""
        age = process_age()
        if age is not None:
            self.record("total", age)
        self.record("processor", time.process_time())
        log.info("startup", extra={"seconds": self.seconds})


STARTUP = StartupStages()
"""Of this process."""


def process_age() -> float | None:
    """Seconds since the kernel started this process, exact to about 10 ms; None where it does not say (not Linux)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - float(fields[19]) / os.sysconf("SC_CLK_TCK"))
