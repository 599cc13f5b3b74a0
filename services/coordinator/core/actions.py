"""The time that the coordinator's core is given, and the actions that it answers with."""

from __future__ import annotations

from typing import NamedTuple

from services.coordinator.core.kv_sources import Reuse
from services.coordinator.core.reservations import PromptPrefix
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, NodeId
from shared.messages.coordinator import PlacementMade
from shared.messages.gateway import RequestFailed, RequestQueued, RequestRejected
from shared.messages.scheduler import Cancel, GenerateRequest, OutlierReport


class Moment(NamedTuple):
    """One instant, on the two clocks that the core uses."""

    now: float
    """Monotonic seconds; waiting is measured by them."""
    alive: float
    """Seconds of the bus's liveness clock, which is paused while the bus is unreachable; liveness is measured by
    them."""


class Placement(NamedTuple):
    """Where one request goes, as the router decided it."""

    engine: EngineId
    """Gets the request, and computes its prompt."""
    detokenizer: DetokenizerId
    prefix: PromptPrefix
    reuse: Reuse
    """What `engine` is expected not to have to compute, of `blocks`."""
    blocks: int
    decode_on: EngineId | None = None
    """The engine that `engine` hands the request over to; None: it keeps the request."""
    decode_node: NodeId | None = None
    """The node of `decode_on`, where it is another one than that of `engine`."""

    prefill_on: EngineId | None = None
    """Decode-first: the engine that may compute the prompt for `engine`; None: `engine` computes it, or `decode_on` is
    set."""
    remote_from: int = 0
    """Decode-first: if so many tokens or more are left to compute."""

    def announcement(self, coordinator: InstanceId) -> PlacementMade:
        """The message with which `coordinator`, which made this placement, announces it to the others."""
        return PlacementMade(
            coordinator=coordinator,
            engine=self.prefill_on or self.engine,
            detokenizer=self.detokenizer,
            model=self.prefix.model,
            prompt=self.prefix.last_block,
            prompt_blocks=self.prefix.blocks,
            blocks=self.blocks,
            reused=self.reuse.blocks,
            on_device=self.reuse.device,
            decode_on=self.decode_on if self.prefill_on is None else self.engine,
        )


class PlaceRequest(NamedTuple):
    """Send `generate` to that engine, and then `RequestPlaced` to the gateway: in this order, so that a gateway that
    has no use for the `RequestPlaced` and cancels finds the request at the engine.

    If the engine has no subscriber, call `Coordinator.engine_unreachable`.
    """

    engine: EngineId
    generate: GenerateRequest
    waited: float
    """Seconds that the request waited here."""
    reuse: Reuse
    """What the engine is expected not to have to compute, of `blocks`."""
    blocks: int
    announcement: PlacementMade | None = None
    """To be published to the other coordinators right behind `generate`; None where there are no others."""


class NotifyGateway(NamedTuple):
    """Send this to that gateway. If this (or a `RequestPlaced`) has no subscriber, call
    `Coordinator.gateway_unreachable`."""

    gateway: GatewayId
    message: RequestQueued | RequestRejected | RequestFailed


class CancelOnEngine(NamedTuple):
    """The gateway of this request is gone or has given it up: have the engine free what it holds of it."""

    engine: EngineId
    cancel: Cancel


class AccuseEngine(NamedTuple):
    """Requests keep failing on this engine: tell it so, that all learn of it from its lifecycle."""

    engine: EngineId
    report: OutlierReport


Action = PlaceRequest | NotifyGateway | CancelOnEngine | AccuseEngine
