"""What the engine's core hears beside bus messages, and what it answers: closed unions."""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import DetokenizerId, EngineId, GatewayId, Incarnation
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import Failed, Placed, Rejected
from shared.messages.kvstore import KvLayout, KvStoreAnswer, KvStoreQuestion, Release
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import Cancel, Generate, SchedulerControl, StopMatched, Transferred, WorkerResult
from shared.messages.worker import StepPlan


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Every rank is ready with the same card; the numbers are the least that any of them has."""

    card: ModelCard
    num_blocks: int
    max_running: int | None = None
    max_batch_tokens: int | None = None
    world_size: int = 1
    layout: KvLayout | None = None
    """None: their blocks cannot be shared through a KV store."""
    stages: int = 1
    """Of the pipeline that the ranks form."""
    max_speculate: int = 0
    """Drafts that a step may hold of one sequence."""
    max_jump_ahead: int = 0
    """Forced tokens that a step may hold of a sequence with a grammar."""


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
    transfers: Transferred | None = None


@dataclass(frozen=True, slots=True)
class DetokenizerGone:
    """A detokenizer has no subscriber any more, or its process ended."""

    detokenizer: DetokenizerId


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway's process ended, and with it the connections of its clients."""

    gateway: GatewayId


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """Another engine begins or ceases to take requests over: it is ready, or drains, died, fell silent."""

    engine: EngineId
    takes: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time to look for a step that takes too long, and for a plan that is due (`Engine.plan_due`)."""


@dataclass(frozen=True, slots=True)
class StoreHere:
    """The node's KV store is there, in this life of it."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class StoreGone:
    """The node's KV store stopped, or is silent."""


@dataclass(frozen=True, slots=True)
class StoreAnswered:
    """To `AskStore`, in any order. None: not in time, or nobody was there."""

    question: KvStoreQuestion
    answer: KvStoreAnswer | None


@dataclass(frozen=True, slots=True)
class NotTaken:
    """`PassOn` found nobody there."""

    generate: Generate
    engine: EngineId


Event = (
    Generate
    | SchedulerControl
    | WorkerResult
    | WorkersReady
    | WorkersLost
    | RankProgress
    | DetokenizerGone
    | GatewayGone
    | PeerChanged
    | TimePassed
    | StoreHere
    | StoreGone
    | StoreAnswered
    | NotTaken
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
    message: Rejected | Failed | Placed


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The engine is wedged: every request has been failed, the process must end and be started anew."""

    reason: str


@dataclass(frozen=True, slots=True)
class AskStore:
    """To be answered by `StoreAnswered`, after `timeout` seconds at the latest."""

    question: KvStoreQuestion
    timeout: float


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    release: Release


@dataclass(frozen=True, slots=True)
class PassOn:
    """The request's first token is drawn and its blocks are in the store: `engine` goes on with it."""

    engine: EngineId
    generate: Generate


@dataclass(frozen=True, slots=True)
class Relay:
    """A request was called off here that `engine` has by now."""

    engine: EngineId
    message: Cancel | StopMatched


Output = SendPlan | SendTokens | TellGateway | GiveUp | AskStore | ReleaseLease | PassOn | Relay
