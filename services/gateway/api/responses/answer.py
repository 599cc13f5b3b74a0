"""Response objects: what they say at each moment, and their usage."""

from __future__ import annotations

import time
from typing import Any, Literal

from services.gateway.api.errors import RequestError
from services.gateway.api.response import ChoiceState, ResponseHeader
from services.gateway.api.responses.output_items import OutputItems

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_INCOMPLETE = {"length": "max_output_tokens"}
"""One that an operator has aborted is incomplete without a reason: OpenAI's API has no word for that."""
_ERROR_CODES = {400: "invalid_prompt", 413: "invalid_prompt", 429: "rate_limit_exceeded"}


def response_object(
    header: ResponseHeader,
    echoed: dict[str, Any],
    status: ResponseStatus = "in_progress",
    choice: ChoiceState | None = None,
    error: RequestError | None = None,
) -> dict[str, Any]:
    """Returns a response. `choice`: what there is of it; None: nothing. `error`: why it failed."""
    return {
        "id": header.shown_id or header.id,
        "object": "response",
        "created_at": header.created,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "error": None
        if error is None
        else {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message},
        "incomplete_details": None if status != "incomplete" else {"reason": _INCOMPLETE.get(_finish(choice))},
        "model": header.model,
        "output": [] if choice is None else output_of(choice).body(),
        "usage": None if choice is None else usage(choice),
        **echoed,
    }


def finished(header: ResponseHeader, echoed: dict[str, Any], choice: ChoiceState) -> dict[str, Any]:
    """Returns the response whose output has ended."""
    return response_object(header, echoed, "completed" if choice.finish == "stop" else "incomplete", choice)


def _finish(choice: ChoiceState | None) -> str:
    return "" if choice is None else choice.finish or ""


def output_of(choice: ChoiceState) -> OutputItems:
    """Returns the items of a response's only choice."""
    assert isinstance(choice.message, OutputItems)
    return choice.message


def usage(choice: ChoiceState) -> dict[str, Any]:
    """Returns what the response took."""
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": choice.tokens,
        "output_tokens_details": {"reasoning_tokens": output_of(choice).parser.reasoning_tokens},
        "total_tokens": choice.prompt_tokens + choice.tokens,
    }
