"""Builders of what a coordinator hears, for its tests."""

from __future__ import annotations

from typing import Any

from services.coordinator.core.actions import Action, Moment, Place, Tell
from shared.ids import Attempt, EngineId, GatewayId, Incarnation, InstanceId, ModelName, RequestId
from shared.messages.coordinator import Route
from shared.messages.generation import Generation, SamplingParams, StopParams
from shared.messages.lifecycle import EngineReport, Lifecycle, ModelCard, Phase, Service
from shared.tokens import pack

MODEL = ModelName("demo/model")
GATEWAY = GatewayId("gateway-1")


def at(seconds: float) -> Moment:
    return Moment(now=1000.0 + seconds, alive=seconds)


def card(model: ModelName = MODEL, max_model_len: int = 64) -> ModelCard:
    return ModelCard(
        name=model, max_model_len=max_model_len, vocab_size=256, eos_token_ids=(0,), dtype="float32", created=0
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
) -> Lifecycle:
    report = EngineReport(
        model=card(model, max_model_len),
        waiting=waiting,
        running=running,
        max_waiting=max_waiting,
        max_running=max_running,
        blocks_total=100,
        blocks_free=50,
        steps=0,
        tokens=0,
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
) -> Route:
    return Route(
        Generation(
            request=RequestId(request),
            attempt=Attempt(attempt),
            gateway=GATEWAY,
            model=model,
            tokens=pack(range(prompt)),
            prompt_length=prompt,
            block_hashes=b"",
            sampling=SamplingParams(seed=1),
            stopping=StopParams(max_tokens=max_tokens),
            priority=priority,
            arrival=arrival,
            avoid=tuple(EngineId(e) for e in avoid),
        )
    )


def summary(actions: list[Action]) -> list[tuple[str, ...]]:
    """Actions as (what, request, where or why)."""
    lines: list[tuple[str, ...]] = []
    for action in actions:
        match action:
            case Place():
                lines.append(("place", action.generate.generation.request, action.engine))
            case Tell(_, message):
                kind = type(message).__name__.lower()
                lines.append((kind, message.request, *([message.kind] if kind == "rejected" else [])))
            case _:
                lines.append(("cancel", action.cancel.request, action.engine))
    return lines
