"""Builders of what a coordinator hears, for its tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from services.coordinator.core.actions import AccuseEngine, Action, CancelOnEngine, Moment, NotifyGateway, PlaceRequest
from shared.blocks import hash_chain
from shared.ids import Attempt, EngineId, GatewayId, Incarnation, InstanceId, LoraId, ModelName, NodeId, RequestId
from shared.messages.coordinator import Route
from shared.messages.generation import Generation, SamplingOptions, StopConditions
from shared.messages.kv_events import KvEvents, KvSource
from shared.messages.kvstore import LinkReport
from shared.messages.lifecycle import (
    EngineReport,
    Lifecycle,
    Phase,
    RecomputeReport,
    Role,
    Service,
    StepTimesReport,
    StoreReport,
)
from shared.messages.model_card import LoraCard, ModelCard
from shared.packing import pack

MODEL = ModelName("demo/model")
GATEWAY = GatewayId("gateway-1")
NO_LINKS: Mapping[str, float] = MappingProxyType({})


def at(seconds: float) -> Moment:
    return Moment(now=1000.0 + seconds, alive=seconds)


def card(model: ModelName = MODEL, max_model_len: int = 64, loras: Sequence[LoraId] = ()) -> ModelCard:
    return ModelCard(
        name=model,
        max_model_len=max_model_len,
        vocab_size=256,
        eos_token_ids=(0,),
        dtype="float32",
        created=0,
        loras=tuple(LoraCard(name=ModelName(each.hex()), id=each, rank=8) for each in loras),
    )


def life(service: Service, instance: str, phase: Phase = "ready", **fields: Any) -> Lifecycle:
    known = {"incarnation": Incarnation(1), "pid": 7, "host": "here", "started": 0.0, **fields}
    return Lifecycle(service=service, instance=InstanceId(instance), phase=phase, **known)


def engine(
    instance: str,
    phase: Phase = "ready",
    *,
    waiting: int = 0,
    running: int = 0,
    max_waiting: int = 8,
    max_running: int = 4,
    model: ModelName = MODEL,
    max_model_len: int = 64,
    incarnation: int = 1,
    progress: int = 0,
    blocks_total: int = 100,
    blocks_used: int = 50,
    role: Role = "mixed",
    node: str | None = None,
    prefill_tokens: int = 0,
    recompute: RecomputeReport | None = None,
    steps: int = 0,
    step_times: StepTimesReport | None = None,
    loras: Sequence[LoraId] = (),
    loaded: tuple[LoraId, ...] = (),
) -> Lifecycle:
    """`loras`: adapters that it serves; `loaded`: those in its slots."""
    report = EngineReport(
        model=card(model, max_model_len, loras),
        loras=loaded,
        waiting=waiting,
        running=running,
        max_waiting=max_waiting,
        max_running=max_running,
        blocks_total=blocks_total,
        blocks_free=blocks_total - blocks_used,
        steps=steps,
        tokens=0,
        role=role,
        node=NodeId(node) if node is not None else None,
        prefill_tokens=prefill_tokens,
        recompute=recompute,
        step_times=step_times,
    )
    return life(
        "scheduler",
        instance,
        phase,
        incarnation=Incarnation(incarnation),
        engine=report,
        load=waiting + running,
        progress=progress,
    )


def detokenizer(instance: str = "detokenizer-1", phase: Phase = "ready", load: int = 0) -> Lifecycle:
    return life("detokenizer", instance, phase, load=load)


def store(node: str, phase: Phase = "ready", *, committed: int = 1, links: Mapping[str, float] = NO_LINKS) -> Lifecycle:
    """The KV store of that node, `kvstore-NODE`; `links`: bytes per second from other nodes."""
    report = StoreReport(
        node=NodeId(node),
        slots=100,
        committed=committed,
        reserved=0,
        pinned=0,
        bytes_used=committed * 64,
        bytes_total=6400,
        hits=3,
        misses=1,
        links=tuple(
            LinkReport(source=NodeId(name), bytes_per_second=rate, latency=0.0) for name, rate in links.items()
        ),
    )
    return life("kvstore", f"kvstore-{node}", phase, store=report)


def holds(
    instance: str,
    hashes: bytes = b"",
    *,
    number: int = 0,
    epoch: int = 1,
    removed: bytes = b"",
    node: str | None = None,
) -> KvEvents:
    """What an engine, or (by its name) a node's store says of its blocks; number 0 begins with nothing held."""
    return KvEvents(
        source=source(instance, node),
        epoch=Incarnation(epoch),
        number=number,
        stored=hashes,
        removed=removed,
        cleared=number == 0,
    )


def source(instance: str, node: str | None = None, model: ModelName = MODEL) -> KvSource:
    is_store = instance.startswith("kvstore-")
    at_node = instance.removeprefix("kvstore-") if is_store else node
    return KvSource(
        instance=InstanceId(instance),
        model=model,
        node=NodeId(at_node) if at_node is not None else None,
        store=is_store,
    )


def route(
    request: str,
    attempt: int = 1,
    *,
    prompt: int = 4,
    max_tokens: int | None = 8,
    avoid: tuple[str, ...] = (),
    priority: int = 0,
    arrival: float = 0.0,
    model: ModelName = MODEL,
    seed: int = 0,
    key: str = "",
    weight: float = 1.0,
    lora: LoraId | None = None,
) -> Route:
    """Prompts of equal seeds begin alike."""
    tokens = pack([(seed + position) % 2**32 for position in range(prompt)])
    return Route(
        Generation(
            request=RequestId(request),
            attempt=Attempt(attempt),
            gateway=GATEWAY,
            model=model,
            tokens=tokens,
            prompt_length=prompt,
            block_hashes=b"".join(hash_chain(tokens, None, 16, lora)),
            sampling=SamplingOptions(seed=1),
            stopping=StopConditions(max_tokens=max_tokens),
            priority=priority,
            arrival=arrival,
            avoid=tuple(EngineId(e) for e in avoid),
            key=key,
            weight=weight,
            lora=lora,
        )
    )


def summary(actions: list[Action]) -> list[tuple[str, ...]]:
    """Actions as (what, request, where or why)."""
    lines: list[tuple[str, ...]] = []
    for action in actions:
        match action:
            case PlaceRequest():
                lines.append(("place", action.generate.generation.request, action.engine))
            case NotifyGateway(_, message):
                kind = type(message).__name__.removeprefix("Request").lower()
                lines.append((kind, message.request, *([message.kind] if kind == "rejected" else [])))
            case AccuseEngine():
                lines.append(("accuse", action.engine, action.report.reason))
            case CancelOnEngine():
                lines.append(("cancel", action.cancel.request, action.engine))
    return lines
