"""An asyncio loop on a virtual clock: where all tasks wait for timers, the clock goes on to the next one at once."""

from __future__ import annotations

import asyncio
import selectors


class _NeverWaiting(selectors.DefaultSelector):
    """Lets time pass instead of waiting. What is waited for on a socket never comes: there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits, and no timer runs")
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` is virtual, and with it `sleep`, `call_at`, `timeout` and whatever is given it as its clock."""

    def __init__(self) -> None:
        self.clock = _NeverWaiting()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now
