"""One request's way through the services, from what each process remembers of it: without a collector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from shared import topics
from shared.bus import Bus, BusError, ReplyError, ReplyTimeout
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


class GatewaysSilent(Exception):
    """No gateway that answers remembers a request, and some did not answer: it may be one of theirs."""

    def __init__(self, gateways: Sequence[InstanceId]) -> None:
        super().__init__(f"{', '.join(gateways)} did not answer, and may know of it; ask again")


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
    """A request's way through the services."""

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
    """Asks the gateways which trace this is, twice where one is silent and the others do not know, then everybody what
    they have done for it. Returns None where nobody knows of it: it was never there, or is forgotten, or its gateway is
    gone. Raises GatewaysSilent."""
    known = await _ask_all(bus, name, gateways)
    if (trace_id := _trace_of(known)) is None and (silent := _silent(known)):
        known |= await _ask_all(bus, name, silent)
        if (trace_id := _trace_of(known)) is None and (silent := _silent(known)):
            raise GatewaysSilent(silent)
    if trace_id is None:
        return None
    asked = known | await _ask_all(bus, trace_id, others)
    answers = {instance: found for instance, found in asked.items() if isinstance(found, SpansFound)}
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


def _trace_of(known: dict[InstanceId, SpansFound | BusError]) -> str | None:
    found = (each.trace_id for each in known.values() if isinstance(each, SpansFound))
    return next((trace_id for trace_id in found if trace_id is not None), None)


def _silent(known: dict[InstanceId, SpansFound | BusError]) -> list[InstanceId]:
    """Those that live, as far as is known."""
    return [instance for instance, found in known.items() if isinstance(found, ReplyTimeout | ReplyError)]


async def _ask_all(bus: Bus, name: str, instances: Iterable[InstanceId]) -> dict[InstanceId, SpansFound | BusError]:
    asked = sorted(set(instances))[:MAX_ASKED]
    return dict(zip(asked, await asyncio.gather(*(_ask(bus, name, instance) for instance in asked)), strict=True))


async def _ask(bus: Bus, name: str, instance: InstanceId) -> SpansFound | BusError:
    try:
        found: SpansFound = await bus.request(
            topics.span_requests(instance), ReadSpans(name), SpansFound, ANSWER_TIMEOUT
        )
    except BusError as error:
        return error
    return found
