"""What the core is told beside token batches, and what it wants sent."""

from __future__ import annotations

from typing import NamedTuple

from shared.ids import Attempt, EngineId, GatewayId, RequestId
from shared.messages.gateway import GatewayMessage
from shared.messages.scheduler import SchedulerControl


class EngineGone(NamedTuple):
    """An engine that died, fell silent or started anew: nothing more comes for what it ran."""

    engine: EngineId
    reason: str


class GatewayGone(NamedTuple):
    """A gateway that died, fell silent, started anew or takes nothing: nobody waits for its requests."""

    gateway: GatewayId
    reason: str


class StreamUnclaimed(NamedTuple):
    """A stream has moved to an engine that knows nothing of its request, and never will."""

    request: RequestId
    attempt: Attempt


class ToGateway(NamedTuple):
    gateway: GatewayId
    message: GatewayMessage


class ToEngine(NamedTuple):
    engine: EngineId
    message: SchedulerControl


Action = ToGateway | ToEngine
