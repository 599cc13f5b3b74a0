"""Through whom the planner has engines started and drained: coordinators on the bus, or whoever deploys the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from services.planner.core.host_spread import Host
from shared import topics
from shared.bus import Bus, BusError, EndpointError

SCALE_TIMEOUT = 35.0
"""Seconds for the supervisor's answer."""


class ScalingRefused(Exception):
    """The pool was not scaled, and would not be done another time; the text says why."""


class ScalingFailed(Exception):
    """It is not known whether the pool was scaled: nobody answered in time."""


class FleetScaler(Protocol):
    """Engines that are too many drain before they end."""

    places_engines: bool
    """Whether it chooses hosts itself. Then it is asked for a pool as a whole, on the host None."""

    async def scale(self, pool: str, count: int, host: Host) -> None:
        """Makes a pool have `count` engines on a host. Raises ScalingRefused, ScalingFailed."""


class AdminScaler:
    """What `baton scale` does: a coordinator passes it on to the supervisor of a host."""

    places_engines = False

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def scale(self, pool: str, count: int, host: Host) -> None:
        """As `FleetScaler.scale`."""
        request: Mapping[str, object] = {"service": pool, "count": count} | ({} if host is None else {"host": host})
        try:
            await self._bus.request_raw(f"{topics.ADMIN}.scale", msgspec.json.encode(request), SCALE_TIMEOUT)
        except EndpointError as error:
            raise ScalingRefused(error.text) from None
        except BusError as error:
            raise ScalingFailed(str(error)) from None
