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


def message(
    header: ResponseHeader, choice: ChoiceState, content: list[dict[str, Any]], max_tokens: int | None
) -> dict[str, Any]:
    """Returns the fields of a message; a stream begins with one that has no content. `max_tokens`: see `ending`."""
    return {
        "id": header.id,
        "type": "message",
        "role": "assistant",
        "model": header.model,
        "content": content,
        **ending(choice, max_tokens),
        "usage": {**usage(choice), "service_tier": "standard"},
    }


def message_body(
    header: ResponseHeader,
    choice: ChoiceState,
    max_tokens: int | None,
    transfer: dict[str, Any] | None,
    applied: list[dict[str, Any]] | None = None,
) -> bytes:
    """Returns the JSON of an answer that is not streamed. `transfer`: vLLM's `kv_transfer_params`. `applied`: see
    `applied_edits`."""
    blocks = choice.message
    assert isinstance(blocks, MessageBlocks)
    body = message(header, choice, blocks.body(), max_tokens) | applied_edits(applied)
    return msgspec.json.encode(body if transfer is None else {**body, "kv_transfer_params": transfer})


def applied_edits(applied: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Returns what an answer says of the edits that clear results of tools; None: none was asked for."""
    return {} if applied is None else {"context_management": {"applied_edits": applied}}


def ending(choice: ChoiceState, max_tokens: int | None) -> dict[str, Any]:
    """Returns why the answer ended; nulls as long as it has not. One that is as long as it may be, and has fewer tokens
    than the client's `max_tokens`, has filled the context."""
    ended: dict[str, Any] = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
    if choice.finish is None:
        return ended
    reason = _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    if reason == "end_turn" and isinstance(choice.stop_reason, str):
        return ended | {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    if reason == "max_tokens" and max_tokens is not None and choice.tokens < max_tokens:
        reason = "model_context_window_exceeded"
    return ended | {"stop_reason": reason}


def usage(choice: ChoiceState) -> dict[str, Any]:
    """Returns the tokens as Anthropic counts them: `input_tokens` are those that were not in the cache."""
    parser = None if choice.message is None else choice.message.parser
    thinking = None
    if parser is not None and parser.separates_reasoning:
        thinking = {"thinking_tokens": min(parser.reasoning_tokens, choice.tokens)}
    return {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.tokens,
        "output_tokens_details": thinking,
    }


def error_body(error: RequestError, request_id: str | None = None) -> bytes:
    """Returns the JSON of an error; `request_id`: of the call, by which it is found in the logs."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    shown = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    return msgspec.json.encode(shown)
