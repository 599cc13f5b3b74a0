"""Applies the limits of API keys, and exchanges with the other gateways what each key has used."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.gateway.core.api_keys import ApiKey
from services.gateway.core.rate_limits import LimitExceeded, LimitState, RateLimits
from shared import topics
from shared.bus import Bus, BusError
from shared.ids import GatewayId, Incarnation
from shared.messages.gateway import UsageReport

log = logging.getLogger(__name__)

COLLECT_SECONDS = 0.02
"""Changes within this time are reported together: it bounds how many reports a gateway sends."""
REPORT_SECONDS = 1.0
"""After which everything in use is reported again, for gateways that are new and for what was lost."""


class KeyLimiter:
    """Owns the table of limits. What it admits, the other gateways know within some 20 ms."""

    def __init__(
        self, bus: Bus, gateway: GatewayId, incarnation: Incarnation, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus, self._clock = bus, clock
        self._limits = RateLimits(gateway, incarnation)
        self._woken = asyncio.Event()

    def start(self, key: ApiKey) -> LimitExceeded | None:
        """See `RateLimits.start`."""
        exceeded = self._limits.start(key, self._clock())
        self._woken.set()
        return exceeded

    def reserve(self, key: ApiKey, tokens: int) -> int | LimitExceeded:
        """See `RateLimits.reserve`."""
        reserved = self._limits.reserve(key, tokens, self._clock())
        self._woken.set()
        return reserved

    def finish(self, key: ApiKey, reserved: int, used: int) -> None:
        """See `RateLimits.finish`."""
        self._limits.finish(key, reserved, used, self._clock())
        self._woken.set()

    def state(self, key: ApiKey) -> LimitState:
        """See `RateLimits.state`."""
        return self._limits.state(key, self._clock())

    def record_report(self, report: UsageReport) -> None:
        """Takes a report of any gateway."""
        self._limits.record_report(report, self._clock())

    async def run(self) -> None:
        """Reports to the other gateways until it is cancelled. While the bus is away each gateway limits alone."""
        due = self._clock()
        while True:
            now = self._clock()
            self._limits.expire(now)
            everything = now >= due
            if everything:
                due = now + REPORT_SECONDS
            if everything or self._limits.changed:
                await self._publish(self._limits.report(now, everything=everything))
            await asyncio.sleep(COLLECT_SECONDS)
            if not self._limits.changed:
                self._woken.clear()
                await self._wait(due - self._clock())

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _publish(self, report: UsageReport) -> None:
        try:
            await self._bus.publish(topics.key_usage(), report)
        except BusError as error:
            log.warning("use of keys not reported", extra={"error": str(error)})
