"""Answers, their usage, and errors, in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Any

import msgspec

from services.gateway.api.anthropic.blocks import MessageBlocks
from services.gateway.api.errors import RequestError
from services.gateway.api.response import ChoiceState, ResponseHeader

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message(header: ResponseHeader, choice: ChoiceState, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a message; a stream begins with one that has no content."""
    return {
        "id": header.id,
        "type": "message",
        "role": "assistant",
        "model": header.model,
        "content": content,
        **ending(choice),
        "usage": usage(choice),
    }


def message_body(header: ResponseHeader, choices: list[ChoiceState]) -> bytes:
    """Returns the JSON of an answer that is not streamed."""
    blocks = choices[0].message
    assert isinstance(blocks, MessageBlocks)
    return msgspec.json.encode(message(header, choices[0], blocks.body()))


def ending(choice: ChoiceState) -> dict[str, str | None]:
    """Returns why the answer ended; nulls as long as it has not."""
    if choice.finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    if reason == "end_turn" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": reason, "stop_sequence": None}


def usage(choice: ChoiceState) -> dict[str, int]:
    """Returns the tokens as Anthropic counts them: `input_tokens` are those that were not in the cache."""
    return {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.tokens,
    }


def error_body(error: RequestError) -> bytes:
    """Returns the JSON of an error."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})
