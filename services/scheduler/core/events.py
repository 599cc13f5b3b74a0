"""What the engine's core hears beside bus messages, and what it answers: closed unions."""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import DetokenizerId, GatewayId, Incarnation
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import Failed, Rejected
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import Generate, SchedulerControl, WorkerResult
from shared.messages.worker import StepPlan


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Every rank is ready with the same card; the numbers are the least that any of them has."""

    card: ModelCard
    num_blocks: int
    max_running: int | None = None
    max_batch_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """A rank died, restarted or fell silent: nothing that was computed can be relied on."""

    reason: str


@dataclass(frozen=True, slots=True)
class RankProgress:
    """What one rank reports every half second: how many plans of `epoch` it has and has published."""

    rank: int
    epoch: Incarnation | None
    received: int
    published: int


@dataclass(frozen=True, slots=True)
class DetokenizerGone:
    """A detokenizer has no subscriber any more, or its process ended."""

    detokenizer: DetokenizerId


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway's process ended, and with it the connections of its clients."""

    gateway: GatewayId


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time to look for a step that takes too long, and for a plan that is due (`Engine.plan_due`)."""


Event = (
    Generate
    | SchedulerControl
    | WorkerResult
    | WorkersReady
    | WorkersLost
    | RankProgress
    | DetokenizerGone
    | GatewayGone
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class SendPlan:
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class SendTokens:
    detokenizer: DetokenizerId
    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class TellGateway:
    gateway: GatewayId
    message: Rejected | Failed


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The engine is wedged: every request has been failed, the process must end and be started anew."""

    reason: str


Output = SendPlan | SendTokens | TellGateway | GiveUp
