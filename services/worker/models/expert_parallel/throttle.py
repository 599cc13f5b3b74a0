"""How a thread works beside steps without being in their way. Knows nothing of what it does."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SHARE = 0.1
"""Of a processor, at most, for as long as there is something to do."""
_NICENESS = 10
_MIN_REST = 0.0005
"""Seconds of work that are not worth a rest yet."""


class ThreadThrottle:
    """Owns how much of a processor one thread takes: it rests between pieces of its work, in proportion to these.

    All ranks are in a step together, so what one of them loses to such a thread all lose. Niceness alone bounds that by
    the time of a step, but not by the slice of a core that the scheduler gives at once, nor where cores are free."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`clock`: seconds that the thread has worked."""
        self._rest_per_second = 1.0 / share - 1.0
        self._clock, self._sleep = clock, sleep
        self._rested_at = 0.0

    def start(self) -> None:
        """Called on the thread before its first piece of work."""
        if sys.platform == "linux":
            thread = threading.get_native_id()
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
                # Takes no core from others as it wakes up.
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        self._rested_at = self._clock()

    def rest(self) -> None:
        """Called behind each piece of work."""
        worked = self._clock() - self._rested_at
        if worked >= _MIN_REST:
            self._sleep(worked * self._rest_per_second)
            self._rested_at = self._clock()
