"""The document that the console's page draws. Objects are by name, so that a patch names only what changed. Nothing in
it is of any prompt or answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from services.gateway.console.merge_patch import JsonObject, without_none
from services.gateway.console.overview import MAX_ENDED_RESPONSES
from services.gateway.console.stack_view import EndedInstance, ReceivedDecision, StackView
from shared.ids import GatewayId, InstanceId
from shared.messages.gateway import GatewayOverview
from shared.messages.lifecycle import LATENCY_BOUNDS, LatencySums, Lifecycle
from shared.messages.model_card import ModelCard
from shared.packing import to_plain
from shared.telemetry.stack_figures import EngineFigures, Figures

MAX_REQUESTS = 100
"""Of the open responses the oldest are shown."""


def stack_document(
    view: StackView,
    figures: Figures,
    models: Sequence[ModelCard],
    overviews: Mapping[GatewayId, GatewayOverview],
    decisions: Iterable[ReceivedDecision] = (),
    **more: Any,
) -> JsonObject:
    """Returns the whole document; `more`: further fields of it."""
    document = {
        **more,
        "totals": {
            "tokens_per_second": figures.tokens_per_second,
            "streams": figures.streams,
            "running": figures.running,
            "waiting": figures.waiting,
        },
        "models": {card.name: _model(card) for card in models},
        "instances": _instances(view, figures),
        "engines": {engine.instance: _engine(engine, view) for engine in figures.engines},
        "stores": {store.instance: _named(store) for store in figures.stores},
        "open_responses": sum(each.open_responses for each in overviews.values()),
        "requests": _requests(overviews),
        "ended": _ended_responses(overviews),
        "latency": _latency(overviews.values(), "model"),
        "latency_by_key": _latency(overviews.values(), "key"),
        "pools": pools_of(view.alive.values()),
        "decisions": [{"heard": each.at, **to_plain(each.decision)} for each in decisions],
        "events": [event._asdict() for event in view.events],
    }
    return without_none(document)  # type: ignore[no-any-return]


def _requests(overviews: Mapping[GatewayId, GatewayOverview]) -> JsonObject:
    shown = [(each, gateway) for gateway, overview in overviews.items() for each in overview.responses]
    shown.sort(key=lambda pair: pair[0].started)
    return {each.id: {**to_plain(each), "id": None, "gateway": gateway} for each, gateway in shown[:MAX_REQUESTS]}


def _ended_responses(overviews: Mapping[GatewayId, GatewayOverview]) -> JsonObject:
    shown = [(each, gateway) for gateway, overview in overviews.items() for each in overview.ended]
    shown.sort(key=lambda pair: pair[0].ended, reverse=True)
    newest = shown[:MAX_ENDED_RESPONSES]
    return {each.id: {**to_plain(each), "id": None, "gateway": gateway} for each, gateway in newest}


def pools_of(lives: Iterable[Lifecycle]) -> JsonObject:
    """What engines have counted of their tokens since their start, by model and role: how long a request waited for its
    first one there, and how long for each later one; as histograms where all of them count by bounds."""
    pools: JsonObject = {}
    for engine in (life.engine for life in lives if life.engine is not None):
        names = {"model": engine.model.name, "role": engine.role, "engines": 0}
        pool = pools.setdefault(f"{engine.model.name} {engine.role}", names)
        pool["engines"] += 1
        sums = engine.latency or LatencySums()
        for name in ("first_tokens", "first_token_seconds", "later_tokens", "later_token_seconds"):
            pool[name] = pool.get(name, 0) + getattr(sums, name)
        for name, counts in (("first", sums.first_counts), ("later", sums.later_counts)):
            pool.setdefault(name, []).append(counts)
    for pool in pools.values():
        for name in ("first", "later"):
            pool[name] = _histogram(pool[name], pool[f"{name}_token_seconds"])
    return pools


def _histogram(counts: Sequence[tuple[int, ...]], total: float) -> JsonObject | None:
    """None where an engine, of another release, counts by no bounds, or by others."""
    if any(len(each) != len(LATENCY_BOUNDS) + 1 for each in counts):
        return None
    return {"bounds": LATENCY_BOUNDS, "counts": [sum(bucket) for bucket in zip(*counts, strict=True)], "total": total}


def _latency(overviews: Iterable[GatewayOverview], by: Literal["model", "key"]) -> JsonObject:
    """The histograms of all gateways together, by model or API key; a gateway with other buckets, of another release,
    is left out."""
    models: JsonObject = {}
    for histogram in (each for overview in overviews for each in overview.latencies if each.by == by):
        sums = models.setdefault(histogram.model, {})
        known = sums.get(histogram.name)
        if known is None:
            sums[histogram.name] = {"bounds": histogram.bounds, "counts": histogram.counts, "total": histogram.total}
        elif known["bounds"] == histogram.bounds:
            known["counts"] = [one + other for one, other in zip(known["counts"], histogram.counts, strict=True)]
            known["total"] += histogram.total
    return models


def _model(card: ModelCard) -> JsonObject:
    return {
        "max_model_len": card.max_model_len,
        "dtype": card.dtype,
        "generates": card.generates,
        "images": card.images is not None,
        "videos": card.shown_videos is not None,
        "hears": card.audio is not None,
        "loras": [lora.name for lora in card.loras],
    }


def _instances(view: StackView, figures: Figures) -> JsonObject:
    rates = {each.instance: each.messages_per_second for each in figures.others}
    rates |= {each.instance: each.messages_per_second for each in figures.engines}
    shown = {name: _living(life, view.deaths[name], rates.get(name)) for name, life in view.alive.items()}
    gone = {name: _ended(ended, view.deaths[name]) for name, ended in view.ended.items()}
    return dict(sorted((gone | shown).items()))


def _living(life: Lifecycle, deaths: int, rate: float | None) -> JsonObject:
    return {
        **_identity(life),
        "phase": life.shown_phase,
        "load": life.load,
        "messages_per_second": rate,
        "deaths": deaths,
        "suspect": None if life.engine is None else life.engine.suspect,
    }


def _ended(ended: EndedInstance, deaths: int) -> JsonObject:
    return {**_identity(ended.last), "phase": "gone", "why": ended.why, "ended": ended.at, "deaths": deaths}


def _identity(life: Lifecycle) -> JsonObject:
    worker, report = life.worker, life.engine or life.store
    return {
        "service": life.service,
        "host": life.host,
        "pid": life.pid,
        "started": life.started,
        "engine": None if worker is None else worker.engine,
        "rank": None if worker is None else worker.rank,
        "device": None if worker is None else worker.device,
        "node": None if report is None else report.node,
        "role": None if life.engine is None else life.engine.role,
        "model": life.model,
    }


def _engine(engine: EngineFigures, view: StackView) -> JsonObject:
    ranks = {rank.instance: _named(rank) for rank in engine.ranks}
    experts = experts_of(view.alive.get(InstanceId(rank)) for rank in ranks)
    return {**_named(engine), "ranks": ranks, "experts": experts}


def experts_of(ranks: Iterable[Lifecycle | None]) -> JsonObject | None:
    """How evenly picks of a mixture's experts fall on an engine's ranks, by layer: of all its stages, each of which
    tells of its own. None: none has told yet, or there are no experts."""
    workers = (life.worker for life in ranks if life is not None)
    reports = [worker.experts for worker in workers if worker is not None and worker.experts is not None]
    if not reports:
        return None
    rearranged = [each.rearrangements for each in reports if each.rearrangements is not None]
    return {
        "layers": {str(load.layer): load.ranks for report in reports for load in report.layers},
        "rearrangements": max(rearranged, default=None),
        "moved": sum(each.experts_moved for each in reports),
    }


def _named(figures: Any) -> JsonObject:
    fields: JsonObject = msgspec.to_builtins(figures)
    del fields["instance"]
    return fields
