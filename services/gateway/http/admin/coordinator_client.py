"""What operators' endpoints ask of coordinators."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.api.errors import RequestError
from shared import topics
from shared.bus import Bus, BusError, EndpointError

ADMIN_TIMEOUT = 15.0
"""Seconds in which a coordinator must answer."""


async def ask_coordinator(bus: Bus, endpoint: str, request: dict[str, Any], timeout: float = ADMIN_TIMEOUT) -> Any:
    """The answer of `admin.ENDPOINT`. Raises RequestError: its refusal, or 503 where none answers."""
    try:
        answer = await bus.request_raw(f"{topics.ADMIN}.{endpoint}", msgspec.json.encode(request), timeout)
    except EndpointError as error:
        raise RequestError(error.code, error.text) from None
    except BusError as error:
        raise RequestError(503, f"no coordinator answers: {error}", retry_after=1.0) from None
    return msgspec.json.decode(answer)
