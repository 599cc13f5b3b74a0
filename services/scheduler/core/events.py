"""The events that the engine's core handles in addition to bus messages, and the outputs that it returns: closed
unions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.ids import DetokenizerId, EngineId, GatewayId, Incarnation, LeaseId, NodeId
from shared.kv_groups import KvCacheGroup, StateRecords
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import PromptKept, RequestFailed, RequestPlaced, RequestRejected
from shared.messages.kv_events import ResetPrefixCache
from shared.messages.kvstore import KvLayout, KvStoreReply, KvStoreRequest, Prefetch, Release
from shared.messages.model_card import LoraCard, LoraRefusal, ModelCard
from shared.messages.scheduler import (
    Cancel,
    GenerateRequest,
    PauseGeneration,
    ReleaseKept,
    ResumeGeneration,
    SchedulerControl,
    StopMatched,
    TransferProgress,
    WorkerResult,
)
from shared.messages.worker import StepPlan


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Every rank is ready with the same model card; each number is the smallest that any rank reports."""

    card: ModelCard
    num_blocks: int
    max_running: int | None = None
    max_batch_tokens: int | None = None
    world_size: int = 1
    layout: KvLayout | None = None
    """The layout of KV blocks; None if they cannot be shared through a KV store."""
    stages: int = 1
    """Stages of the workers' pipeline."""
    max_speculate: int = 0
    """Draft tokens that a step may verify for one sequence."""
    max_jump_ahead: int = 0
    """Forced tokens that a step may yield for a sequence with a grammar."""
    cache_format: str = ""
    """See `WorkerReport.cache_format`."""
    layerwise_loads: bool = False
    """See `WorkerReport.layerwise_loads`; whether all ranks do."""
    max_loras: int = 0
    """See `WorkerReport.max_loras`."""
    kv_groups: tuple[KvCacheGroup, ...] = ()
    """See `WorkerReport.kv_groups`; equal on all ranks."""
    state_checkpoints: int | None = None
    """See `WorkerReport.state_checkpoints`; the least of all ranks."""
    state_records: StateRecords | None = None
    """See `WorkerReport.state_records`; equal on all ranks."""
    rows_per_draft: int = 1
    """See `WorkerReport.rows_per_draft`; the most of all ranks."""


@dataclass(frozen=True, slots=True)
class LorasChanged:
    """Adapters came or went while the ranks work."""

    loras: tuple[LoraCard, ...]
    """Those that every rank serves."""
    refusals: tuple[LoraRefusal, ...] = ()
    """Those that some rank does not, and was to."""


@dataclass(frozen=True, slots=True)
class WorkersLost:
    """A rank died, restarted or fell silent: nothing that was computed can be relied on."""

    reason: str
    died: bool = False
    """Whether its process died, perhaps of what it was computing."""
    unheard: int | None = None
    """The first step whose plan found no worker: it was dead before, of whatever. None: all plans found one."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank's report, every half second: how many plans of `epoch` it has received and published results of."""

    rank: int
    epoch: Incarnation | None
    received: int
    published: int
    transfers: TransferProgress | None = None


@dataclass(frozen=True, slots=True)
class DetokenizerGone:
    """A detokenizer's process has ended, or its subject has no subscriber."""

    detokenizer: DetokenizerId


@dataclass(frozen=True, slots=True)
class GatewayGone:
    """A gateway's process ended, and with it the connections of its clients."""

    gateway: GatewayId


@dataclass(frozen=True, slots=True)
class PeerChanged:
    """Another engine starts or stops taking requests over: it became ready, or it drains, died or fell silent."""

    engine: EngineId
    takes: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed: a step may have taken too long, or a plan may be due (`EngineCore.plan_due`)."""


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The node's KV store is running, with this incarnation."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class StoreGone:
    """The node's KV store stopped or fell silent."""


@dataclass(frozen=True, slots=True)
class StoreReplied:
    """The reply to a `SendStoreRequest`; replies may come in any order. `reply` is None if none came in time, or if
    there is no store."""

    request: KvStoreRequest
    reply: KvStoreReply | None


@dataclass(frozen=True, slots=True)
class ConnectorMatched:
    """The reply to a `ConnectorLookUp`: the tokens that can be loaded. 0: none, or no sound answer in time."""

    lease: LeaseId
    tokens: int
    awaited: bool = False
    """Whether the load is over only when the connector names the request as received."""


@dataclass(frozen=True, slots=True)
class ConnectorKeeps:
    """The reply to a `ConnectorRequestFinished`: whether the connector keeps the request's blocks."""

    lease: LeaseId
    keeps: bool


@dataclass(frozen=True, slots=True)
class HandOverRefused:
    """`SendHandOver` was not delivered: the engine is gone."""

    generate: GenerateRequest
    engine: EngineId


Event = (
    GenerateRequest
    | SchedulerControl
    | WorkerResult
    | WorkersReady
    | LorasChanged
    | WorkersLost
    | RankProgress
    | DetokenizerGone
    | GatewayGone
    | PeerChanged
    | TimePassed
    | StoreReady
    | StoreGone
    | StoreReplied
    | ConnectorMatched
    | ConnectorKeeps
    | HandOverRefused
    | ResetPrefixCache
    | PauseGeneration
    | ResumeGeneration
)


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send the plan to every rank."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class SendTokens:
    """Send a batch to one detokenizer. Batches are numbered, and must be sent in order."""

    detokenizer: DetokenizerId
    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class SendToGateway:
    """Tell a gateway why a request ends without tokens, which engine continues it, or what is kept of it."""

    gateway: GatewayId
    message: RequestRejected | RequestFailed | RequestPlaced | PromptKept


@dataclass(frozen=True, slots=True)
class EndProcess:
    """The engine is wedged: every request has failed, and the process must end and be started again."""

    reason: str


@dataclass(frozen=True, slots=True)
class SendStoreRequest:
    """Send a request to the node's KV store; `StoreReplied` follows after `timeout` seconds at the latest."""

    request: KvStoreRequest
    timeout: float


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Release a lease in the node's KV store, which does not reply."""

    release: Release


@dataclass(frozen=True, slots=True)
class SendHandOver:
    """The request's first token is drawn and its blocks are in the store: `engine` continues it."""

    engine: EngineId
    generate: GenerateRequest


@dataclass(frozen=True, slots=True)
class SendPrefetch:
    """The request's prompt is computed from now on: the store of `node`, where it will be decoded, copies its blocks
    meanwhile."""

    node: NodeId
    prefetch: Prefetch


@dataclass(frozen=True, slots=True)
class ConnectorLookUp:
    """Ask the KV connector for the blocks of a request; `ConnectorMatched` follows after `timeout` seconds at the
    latest."""

    lease: LeaseId
    request: str
    tokens: bytes
    """Packed uint32: all that are known."""
    hashes: bytes
    """16 bytes for each full block."""
    num_computed_tokens: int
    timeout: float


@dataclass(frozen=True, slots=True)
class ConnectorRequestFinished:
    """Ask the KV connector whether it keeps these blocks of a request that has ended; `ConnectorKeeps` follows."""

    lease: LeaseId
    request: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConnectorReport:
    """Report to the KV connector what every rank has reported."""

    request: str
    kind: Literal["received", "sent", "failed"]


@dataclass(frozen=True, slots=True)
class ForwardControl:
    """Forward the cancel of a request that was handed over to `engine`, or tell it that its blocks were used."""

    engine: EngineId
    message: Cancel | StopMatched | ReleaseKept


Output = (
    SendPlan
    | SendTokens
    | SendToGateway
    | EndProcess
    | SendStoreRequest
    | ReleaseLease
    | ConnectorLookUp
    | ConnectorRequestFinished
    | ConnectorReport
    | SendHandOver
    | SendPrefetch
    | ForwardControl
)
