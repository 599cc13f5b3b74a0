"""Batches of messages in Anthropic's shapes: the body that makes one, how it is shown, and its results."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.gateway.api.batches.batch import BatchFields, BatchState
from services.gateway.api.batches.lines import BatchEndpoint
from services.gateway.api.errors import FIELDS, abbreviated, decode_body, invalid, not_allowed

MESSAGES: BatchEndpoint = "/v1/messages"
WINDOW = "24h"


class MessageBatchRequestFields(Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a batch."""

    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: Annotated[msgspec.Raw, Meta(description="The body of `POST /v1/messages`.", extra_json_schema={})]


class MessageBatchFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of `POST /v1/messages/batches`."""

    requests: list[MessageBatchRequestFields]


_decoder = msgspec.json.Decoder(MessageBatchFields)
_line = msgspec.json.Decoder(dict[str, Any])


def read_message_batch(body: bytes, max_requests: int) -> list[MessageBatchRequestFields]:
    """Returns the requests of a batch. Raises RequestError."""
    requests = decode_body(body, _decoder).requests
    if not 1 <= len(requests) <= max_requests:
        raise invalid("requests", f"{len(requests)} requests are not allowed; 1 to {max_requests} are")
    seen = set[str]()
    for i, request in enumerate(requests):
        if request.custom_id in seen:
            raise invalid(f"requests[{i}].custom_id", f"{abbreviated(request.custom_id)} is not allowed twice")
        seen.add(request.custom_id)
        try:
            stream = bytes(FIELDS.decode(request.params).get("stream", b"null"))
        except msgspec.ValidationError:
            raise invalid(f"requests[{i}].params", "an object is expected") from None
        if stream not in (b"null", b"false"):
            raise not_allowed(f"requests[{i}].params.stream", "true", "false is, as nothing is streamed in a batch")
    return requests


def input_lines(requests: list[MessageBatchRequestFields]) -> Iterator[bytes]:
    """Yields the requests as lines of a batch's input."""
    for request in requests:
        params = request.params
        if b"\n" in bytes(params) or b"\r" in bytes(params):  # a body that was printed over several lines
            params = msgspec.Raw(msgspec.json.format(bytes(params), indent=-1))
        line = {"custom_id": request.custom_id, "method": "POST", "url": MESSAGES, "body": params}
        yield msgspec.json.encode(line) + b"\n"


def batch_fields(input_file_id: str) -> BatchFields:
    """Returns the same batch as OpenAI's API has it."""
    return BatchFields(input_file_id=input_file_id, endpoint=MESSAGES, completion_window=WINDOW)


def message_batch(id: str, created: float, state: BatchState) -> dict[str, Any]:
    """Returns Anthropic's message batch. Until the end its requests are being processed, as Anthropic counts."""
    status: Literal["in_progress", "canceling", "ended"] = "ended" if state.ended else "in_progress"
    if state.status == "cancelling":
        status = "canceling"
    rest = state.total - state.completed - state.failed
    ended, cancelled = state.ended, state.status == "cancelled"
    counts = {
        "processing": 0 if ended else state.total,
        "succeeded": state.completed if ended else 0,
        "errored": state.failed - state.expired + (0 if cancelled else rest) if ended else 0,
        "canceled": rest if ended and cancelled else 0,
        "expired": state.expired if ended else 0,
    }
    return {
        "id": id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _moment(created),
        "expires_at": _moment(state.expires_at),
        "ended_at": _moment(state.times.get(state.status)) if state.ended else None,
        "cancel_initiated_at": _moment(state.times.get("cancelling")),
        "archived_at": None,
        "results_url": f"/v1/messages/batches/{id}/results" if state.ended else None,
    }


def result_line(line: bytes) -> bytes:
    """Returns the result that a line of a batch's output says."""
    entry = _line.decode(line)
    response, error = entry["response"], entry["error"]
    match entry:
        case {"response": {"status_code": 200, "body": message}}:
            result: dict[str, Any] = {"type": "succeeded", "message": message}
        case {"response": {"body": {"type": "error"} as body}}:
            result = {"type": "errored", "error": {**body, "request_id": response["request_id"] or None}}
        case {"error": {"code": "batch_expired"}}:
            result = {"type": "expired"}
        case _:
            text = "no answer" if error is None else error["message"]
            result = _failed(text)
    return _result(entry["custom_id"], result)


def unanswered_line(line: bytes, *, cancelled: bool) -> bytes:
    """Returns the result of a line of a batch's input that has no answer."""
    result = {"type": "canceled"} if cancelled else _failed("the batch has failed")
    return _result(_line.decode(line)["custom_id"], result)


def _failed(message: str) -> dict[str, Any]:
    return {"type": "errored", "error": {"type": "error", "error": {"type": "api_error", "message": message}}}


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(int(seconds), UTC).isoformat()
