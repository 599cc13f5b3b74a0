"""What one gateway adds to the console: its open responses, nothing of their texts, and how long its clients waited."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator

from services.gateway.api.response import GenerationResponse, prompt_tokens
from services.gateway.core.open_request import OpenRequest
from services.gateway.request_table import RequestTable
from shared.ids import RequestId
from shared.messages.gateway import EndedResponse, GatewayOverview, ResponseOverview
from shared.telemetry.tracing import RESPONSE, TRACING

MAX_ENDED_RESPONSES = 20
"""Of those that have ended the newest are shown."""


def overview_of(table: RequestTable, max_responses: int) -> GatewayOverview:
    """Returns what is open in this process, and its latencies."""
    responses = list(table.open_responses())
    oldest = oldest_responses(responses, table.open_requests(), max_responses)
    return GatewayOverview(tuple(oldest), len(responses), tuple(table.meters.latencies()), tuple(_ended()))


def _ended() -> Iterator[EndedResponse]:
    for span in TRACING.ended_requests(MAX_ENDED_RESPONSES):
        told = span.attributes
        yield EndedResponse(
            id=str(told[RESPONSE]),
            model=str(told.get("gen_ai.request.model", "")),
            started=span.begun,
            ended=span.ended,
            outcome=str(told.get("baton.outcome", "refused")),
            prompt_tokens=int(told.get("gen_ai.usage.input_tokens", 0)),
            tokens=int(told.get("gen_ai.usage.output_tokens", 0)),
        )


def oldest_responses(
    responses: Iterable[GenerationResponse], requests: Iterable[OpenRequest], limit: int
) -> list[ResponseOverview]:
    """Returns those of the responses that are open for longest; `requests`: all that are open."""
    supervised = {request.request: request for request in requests}
    clock = time.time() - time.monotonic()
    oldest = heapq.nsmallest(limit, responses, key=lambda response: response.started_at)
    return [_overview(response, supervised, clock) for response in oldest]


def _overview(response: GenerationResponse, supervised: dict[RequestId, OpenRequest], clock: float) -> ResponseOverview:
    requests = [supervised[each] for each in response.requests if each in supervised]
    return ResponseOverview(
        id=response.header.id,
        model=response.header.model,
        kind=response.header.kind,
        started=clock + response.started_at,
        state="queued" if any(each.state != "placed" for each in requests) else "running",
        engines=tuple(sorted({each.engine for each in requests if each.engine is not None})),
        sequences=len(response.choices),
        prompt_tokens=prompt_tokens(response.choices),
        tokens=sum(choice.tokens for choice in response.choices),
        attempts=response.attempts,
    )
