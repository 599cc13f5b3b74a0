"""One request's way through the services, from what each process remembers of it: without a collector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from shared import topics
from shared.bus import Bus, BusError
from shared.ids import InstanceId
from shared.messages.gateway import MAX_SPANS_FOUND, ReadSpans, SpanFound, SpansFound
from shared.messages.lifecycle import Service
from shared.telemetry.tracing import OpenSpan, Tracing

RECORDERS: tuple[Service, ...] = ("gateway", "tokenizer", "coordinator", "scheduler", "detokenizer")
"""Those that do something for single requests, and remember it."""
ANSWER_TIMEOUT = 1.0
"""Seconds that each process may take."""
MAX_ASKED = 512
"""Processes that are asked for one request."""


class Hop(NamedTuple):
    """What one process has done for the request, or is doing."""

    name: str
    instance: InstanceId
    begun: float
    """In Unix seconds, by the clock of the process's host."""
    ended: float | None
    """None: it is under way."""
    attributes: dict[str, Any]


class RequestTrace(NamedTuple):
    """A request's way."""

    trace_id: str
    hops: tuple[Hop, ...]
    """In the order in which they began; a gateway's, which is the whole request, first."""
    unanswered: tuple[InstanceId, ...] = ()
    """Processes that did not answer in time: what they have done is missing, and may be had when asked again."""


def spans_found(tracing: Tracing, name: str, open_spans: Callable[[str], Sequence[OpenSpan]]) -> SpansFound:
    """Returns what a process knows of a request. `open_spans`: what it is doing for a trace."""
    trace_id = tracing.trace_of(name)
    if trace_id is None and (name.isalnum() and len(name) == 32):
        trace_id = name  # nothing has ended here yet
    if trace_id is None:
        return SpansFound(None)
    ended = [
        SpanFound(name=span.name, begun=span.begun, ended=span.ended, attributes=span.attributes)
        for span in tracing.recent(trace_id)
    ]
    under_way = [
        *((request.name, request.begun) for request in tracing.open_requests(trace_id)),
        *open_spans(trace_id),
    ]
    found = [*ended, *(SpanFound(name=name, begun=begun, ended=None, attributes={}) for name, begun in under_way)]
    return SpansFound(trace_id if found else None, tuple(found[-MAX_SPANS_FOUND:]))


async def request_trace(
    bus: Bus, name: str, gateways: Iterable[InstanceId], others: Iterable[InstanceId]
) -> RequestTrace | None:
    """Asks the gateways which trace this is, then everybody what they have done for it. Returns None where nobody who
    answers knows of it: it was never there, or is forgotten, or its gateway is gone."""
    known = await _ask_all(bus, name, gateways)
    trace_id = next((found.trace_id for found in known.values() if found and found.trace_id is not None), None)
    if trace_id is None:
        return None
    asked = known | await _ask_all(bus, trace_id, others)
    answers = {instance: found for instance, found in asked.items() if found is not None}
    hops = {  # actors of one process all say what that remembers
        (span.name, span.begun, span.ended): Hop(span.name, instance, span.begun, span.ended, span.attributes)
        for instance, found in reversed(answers.items())
        if found.trace_id == trace_id
        for span in found.spans
    }
    whole = {instance for instance in known if instance in answers and answers[instance].trace_id == trace_id}
    return RequestTrace(
        trace_id,
        tuple(sorted(hops.values(), key=lambda hop: (hop.instance not in whole, hop.begun))),
        tuple(instance for instance in asked if instance not in answers),
    )


async def _ask_all(bus: Bus, name: str, instances: Iterable[InstanceId]) -> dict[InstanceId, SpansFound | None]:
    asked = sorted(set(instances))[:MAX_ASKED]
    return dict(zip(asked, await asyncio.gather(*(_ask(bus, name, instance) for instance in asked)), strict=True))


async def _ask(bus: Bus, name: str, instance: InstanceId) -> SpansFound | None:
    try:
        found: SpansFound = await bus.request(
            topics.span_requests(instance), ReadSpans(name), SpansFound, ANSWER_TIMEOUT
        )
    except BusError:
        return None
    return found
