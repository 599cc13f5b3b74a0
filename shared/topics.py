"""Every subject on the bus, typed: publishing the wrong message on a topic is a type error.

The bus puts its namespace (`baton.` unless configured) in front of each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar, cast

from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, ModelName, NodeId, subject_token
from shared.messages import (
    coordinator,
    detokenizer,
    encoder,
    gateway,
    kvstore,
    lifecycle,
    scheduler,
    supervisor,
    tokenizer,
    worker,
)
from shared.messages import kv_events as kv_events_messages

M = TypeVar("M")
_SUBJECT_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Topic(Generic[M]):
    """A subject, the type of its messages, and whether its subscribers share the messages (`queue`)."""

    subject: str
    type: Any
    """The type that msgspec decodes to: a struct or a union of tagged structs, the `M` of this topic."""
    queue: str | None = None
    """Queue group: each message goes to one subscriber of the group; None: to all."""


F = TypeVar("F", bound=Callable[..., Any])


def _cached(make: F) -> F:
    """A topic is made once for each instance, as the hot ones are needed at every step."""
    return cast(F, lru_cache(maxsize=1024)(make))


@_cached
def tokenize(model: ModelName) -> Topic[tokenizer.Tokenize]:
    """gateway → one tokenizer of that model: the request as the client sent it, validated."""
    return Topic(f"tokenize.{subject_token(model)}", tokenizer.Tokenize, queue="tokenizers")


def tokenizer_requests(model: ModelName) -> Topic[tokenizer.TokenizerRequest]:
    """gateway → one tokenizer of that model, answered with a `TokenizerReply`."""
    return Topic(f"tokenizer.{subject_token(model)}.ask", tokenizer.TokenizerRequest, queue="tokenizers")


def image_requests(model: ModelName) -> Topic[encoder.EncodeInput]:
    """gateway → one encoder of that model, answered with an `EncoderReply`."""
    return Topic(f"encoder.{subject_token(model)}.ask", encoder.EncodeInput, queue="encoders")


def rows_leases(model: ModelName) -> Topic[encoder.RowsNotice]:
    """gateway → every encoder of that model: which rows open requests need, or that others are to be forgotten."""
    return Topic(f"encoder.{subject_token(model)}.leases", encoder.RowsNotice)


def kept_rows(owner: InstanceId) -> Topic[encoder.ReadRows]:
    """scheduler, gateway → the encoder that keeps rows; rank → its scheduler: a piece of them, answered by a
    `RowsPiece`."""
    return Topic(f"rows.{owner}", encoder.ReadRows)


@_cached
def route() -> Topic[coordinator.Route]:
    """tokenizer → one coordinator: token ids, block hashes, parameters."""
    return Topic("route", coordinator.Route, queue="coordinators")


def withdrawals() -> Topic[coordinator.PlacementNotice]:
    """gateway → every coordinator and tokenizer: a request was given up that may wait there, or that one of them has
    placed; or it has ended, after so many tokens."""
    return Topic("withdraw", coordinator.PlacementNotice)


def placements() -> Topic[coordinator.PlacementMade]:
    """coordinator → every coordinator, itself included: which request it placed on which engine."""
    return Topic("placements", coordinator.PlacementMade)


@_cached
def engine_requests(engine: EngineId) -> Topic[scheduler.GenerateRequest]:
    """coordinator → that engine's scheduler: a request placed on it, with the detokenizer for its output."""
    return Topic(f"engine.{engine}.requests", scheduler.GenerateRequest)


@_cached
def engine_steps(engine: EngineId) -> Topic[worker.StepPlan]:
    """scheduler → every rank of the engine: what to compute next."""
    return Topic(f"engine.{engine}.steps", worker.StepPlan)


def rank_orders(engine: EngineId) -> Topic[worker.RankOrder]:
    """scheduler → every rank of the engine: sleep, wake up, say that you live."""
    return Topic(f"engine.{engine}.ranks", worker.RankOrder)


def prefill_pulls() -> Topic[coordinator.PullPrefills]:
    """prefill engine's scheduler → every coordinator: prompts are wanted."""
    return Topic("prefill.pulls", coordinator.PullPrefills)


@_cached
def engine_results(engine: EngineId) -> Topic[scheduler.WorkerResult]:
    """worker ranks → scheduler: results of steps, compiled grammars, finished transfers."""
    return Topic(f"engine.{engine}.results", scheduler.WorkerResult)


def engine_control(engine: EngineId) -> Topic[scheduler.SchedulerControl]:
    """gateway, detokenizer, coordinator → scheduler: cancel, stop-string hit; requests fail with you."""
    return Topic(f"engine.{engine}.control", scheduler.SchedulerControl)


def engine_probes(engine: EngineId) -> Topic[scheduler.SchedulerQuestion]:
    """gateway, detokenizer → scheduler, answered with a `ProbeReply`; gateway: `ReadPicture`; coordinator:
    `ResetPrefixCache`, `PauseGeneration`, `ResumeGeneration`, `ReadPauseState`, `SleepEngine`, `WakeEngine`,
    `ReadSleepState`."""
    return Topic(f"engine.{engine}.probe", scheduler.SchedulerQuestion)


def kvstore_requests(node: NodeId) -> Topic[kvstore.KvStoreQuestion]:
    """scheduler → the KV store of its node, answered with a `KvStoreReply`; coordinator: `ResetPrefixCache`."""
    return Topic(f"kvstore.{node}.ask", kvstore.KvStoreQuestion)


def kvstore_releases(node: NodeId) -> Topic[kvstore.Release]:
    """scheduler → the KV store of its node: ends leases."""
    return Topic(f"kvstore.{node}.release", kvstore.Release)


def kvstore_prefetches(node: NodeId) -> Topic[kvstore.Prefetch]:
    """prefill engine → the KV store of the node that decodes its request: copies blocks while they are computed."""
    return Topic(f"kvstore.{node}.prefetch", kvstore.Prefetch)


def kv_events(source: InstanceId) -> Topic[kv_events_messages.KvEvents]:
    """scheduler, KV store → every coordinator: blocks stored and removed, numbered."""
    return Topic(f"events.kv.{source}", kv_events_messages.KvEvents)


def all_kv_events() -> Topic[kv_events_messages.KvEvents]:
    """For subscribing: the KV events of every source."""
    return Topic("events.kv.*", kv_events_messages.KvEvents)


def kv_dump_requests(source: InstanceId) -> Topic[kv_events_messages.KvDumpRequest]:
    """coordinator → scheduler, KV store: send everything that you hold."""
    return Topic(f"kv.{source}.dump", kv_events_messages.KvDumpRequest)


def kv_dumps(coordinator_: InstanceId) -> Topic[kv_events_messages.KvDump]:
    """scheduler, KV store → the coordinator that requested it."""
    return Topic(f"coordinator.{coordinator_}.kv", kv_events_messages.KvDump)


@_cached
def detokenizer_tokens(instance: DetokenizerId) -> Topic[detokenizer.TokenBatch]:
    """scheduler → one detokenizer: all new tokens of the step for the requests it holds, one message."""
    return Topic(f"detokenizer.{instance}.tokens", detokenizer.TokenBatch)


@_cached
def gateway_inbox(instance: GatewayId) -> Topic[gateway.GatewayMessage]:
    """detokenizer, coordinator, tokenizer, scheduler → the gateway that holds the client's connection; a gateway → the
    one that keeps copies of its streams."""
    return Topic(f"gateway.{instance}.deltas", gateway.GatewayMessage)


def key_usage() -> Topic[gateway.UsageReport]:
    """gateway → every gateway, itself included: what API keys with limits have used there."""
    return Topic("keys.usage", gateway.UsageReport)


@_cached
def gateway_requests(instance: GatewayId) -> Topic[gateway.GatewayRequest]:
    """gateway → another gateway, answered."""
    return Topic(f"gateway.{instance}.ask", gateway.GatewayRequest)


def lifecycles(service: lifecycle.Service | None = None) -> Topic[lifecycle.Lifecycle]:
    """For subscribing: the lifecycle messages of every process, or of one service for receivers that need no others."""
    return Topic(f"lifecycle.{service or '*'}.*", lifecycle.Lifecycle)


def lifecycle_of(service: lifecycle.Service, instance: InstanceId) -> Topic[lifecycle.Lifecycle]:
    """everyone → everyone: phase, load, progress; on changes, and every second or so."""
    return Topic(f"lifecycle.{service}.{instance}", lifecycle.Lifecycle)


def lifecycle_requests() -> Topic[lifecycle.LifecycleRequest]:
    """whoever has just begun to listen → everyone: publish your lifecycle soon, though nothing has changed."""
    return Topic("lifecycles.wanted", lifecycle.LifecycleRequest)


def heartbeat_interval() -> Topic[lifecycle.HeartbeatInterval]:
    """coordinator → everyone: how often to publish a lifecycle, as there are so many processes."""
    return Topic("lifecycles.interval", lifecycle.HeartbeatInterval)


def rank_lifecycles(engine: EngineId) -> Topic[lifecycle.Lifecycle]:
    """worker rank → everyone, as `lifecycle_of`: named after its engine, so that a scheduler hears its own ranks and no
    others, however many engines there are."""
    return Topic(f"lifecycle.worker.{engine}", lifecycle.Lifecycle)


def instance_control(instance: InstanceId) -> Topic[lifecycle.InstanceControl]:
    """coordinator → any instance: drain, undrain."""
    return Topic(f"instance.{instance}.control", lifecycle.InstanceControl)


def name_claims(instance: InstanceId) -> Topic[lifecycle.NameClaim]:
    """a process that starts → the one that has its name, which answers with a NameHolder."""
    return Topic(f"instance.{instance}.claim", lifecycle.NameClaim)


def span_requests(instance: InstanceId) -> Topic[gateway.ReadSpans]:
    """gateway, operator → an instance, answered with what it has done for a request: `SpansFound`."""
    return Topic(f"instance.{instance}.spans", gateway.ReadSpans)


def rank_assignments() -> Topic[supervisor.RankAssignment]:
    """first host's supervisor → the other hosts' supervisors: which ranks shall run. Once a second, and on changes."""
    return Topic("supervisor.ranks.wanted", supervisor.RankAssignment)


def rank_status() -> Topic[supervisor.RankStatus]:
    """another host's supervisor → the first host's: which ranks it runs. Once a second, and when a rank ends."""
    return Topic("supervisor.ranks.held", supervisor.RankStatus)


def host_reports() -> Topic[supervisor.HostReport]:
    """each host's supervisor → those of the other hosts: that the host is there. Once a second, and at its end."""
    return Topic("supervisor.hosts", supervisor.HostReport)


def scaling() -> Topic[supervisor.SupervisorOrder]:
    """coordinator → the first host's supervisor, answered with a `ScaleReply`, or a `StrikeReply`."""
    return Topic("supervisor.scale", supervisor.SupervisorOrder, queue="supervisors")


def host_scaling(node: NodeId) -> Topic[supervisor.SupervisorOrder]:
    """coordinator → the supervisor of that host, answered with a `ScaleReply`, or a `StrikeReply`."""
    return Topic(f"supervisor.{node}.scale", supervisor.SupervisorOrder)


def planner_decisions() -> Topic[supervisor.PlannerDecision]:
    """`baton plan` → operators: each decision, whether it is acted upon or not."""
    return Topic("planner.decisions", supervisor.PlannerDecision)


ADMIN = "admin"
"""Subject of the NATS micro service: `admin.list`, `admin.drain`, `admin.undrain`, `admin.scale`, `admin.strike`,
`admin.prefixes`, `admin.reset_prefix_cache`, `admin.pause`, `admin.resume`, `admin.paused`,
`admin.sleep`, `admin.wake_up`, `admin.sleeping`, JSON in and out."""

ADMIN_OF_GATEWAYS = (
    *("drain", "undrain", "scale", "strike", "prefixes", "reset_prefix_cache"),
    *("pause", "resume", "paused", "sleep", "wake_up", "sleeping"),
)
"""Those of `ADMIN` that gateways use, for API keys with the scope `admin`."""

CLUSTERS_ADMIN = f"{ADMIN}.clusters"
"""Subject of the gateways' micro service: `list`, `drain`, `undrain` of the clusters of a federation."""


def inbox_prefix(user: str | None) -> str:
    """What the subjects begin with where replies to this user's requests arrive; the user's own, so that a server can
    keep it from all others. Below NATS's own prefix, so that one who allows `_INBOX.>` allows it, too."""
    return f"_INBOX.{user}" if user is not None and _SUBJECT_TOKEN.fullmatch(user) else "_INBOX"
