"""What the core is told of time, and what it answers with."""

from __future__ import annotations

from typing import NamedTuple

from services.coordinator.core.reuse import Reuse
from shared.ids import EngineId, GatewayId
from shared.messages.coordinator import PlacementMade
from shared.messages.gateway import Placed, Queued, Rejected
from shared.messages.scheduler import Cancel, Generate


class Moment(NamedTuple):
    now: float
    """Monotonic seconds: what queueing is measured by."""
    alive: float
    """The bus's liveness clock: what somebody's silence is measured by."""


class Place(NamedTuple):
    """Send `generate` to that engine, and then `Placed` to the gateway: in this order, so that a gateway that has
    no use for the `Placed` and cancels finds the request at the engine.

    If the engine has no subscriber, tell the core with `engine_unreachable`.
    """

    engine: EngineId
    generate: Generate
    waited: float
    """Seconds that the request waited here."""
    reuse: Reuse
    """What the engine is expected not to have to compute, of `blocks`."""
    blocks: int
    told: PlacementMade | None = None
    """What the other coordinators are to be told, right behind `generate`; None where there is none."""

    @property
    def placed(self) -> Placed:
        generation = self.generate.generation
        return Placed(generation.request, generation.attempt, self.engine, self.generate.detokenizer)


class Tell(NamedTuple):
    """Send this to that gateway. If that (or a `Placed`) has no subscriber, tell the core: `gateway_unreachable`."""

    gateway: GatewayId
    message: Queued | Rejected


class CancelAt(NamedTuple):
    """Nobody waits for this any more: free what the engine holds of it."""

    engine: EngineId
    cancel: Cancel


Action = Place | Tell | CancelAt
