"""One line of a batch: OpenAI's request format in, its answer format out. No files, no network."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from services.gateway.api.errors import FIELDS
from shared.packing import NOT_DECODED

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"]
URLS: tuple[BatchEndpoint, ...] = get_args(BatchEndpoint)


class _Line(Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchRequest(NamedTuple):
    """A line of the input that is a valid request."""

    id: str
    """Id of the output line; the same line with the same number always has the same id."""
    custom_id: str
    url: str
    body: bytes
    """The request's body as in the line, JSON."""


class BadLine(NamedTuple):
    """A line that is no request."""

    id: str
    custom_id: str | None
    code: Literal["invalid_line", "invalid_request", "duplicate_custom_id", "batch_expired"]
    message: str


class BatchAnswer(NamedTuple):
    """A server's response to one request."""

    status: int
    request_id: str
    body: bytes


_line = msgspec.json.Decoder(_Line)
_any = msgspec.json.Decoder(Any)


def line_id(number: int, line: bytes) -> str:
    """The id of the line with this number in the file, counted from 1."""
    return f"batch_req_{blake2b(b'%d %b' % (number, line.strip()), digest_size=12).hexdigest()}"


def read_line(number: int, line: bytes) -> BatchRequest | BadLine:
    """Parses one line, which must not be blank. An invalid one is returned as BadLine, never raised."""
    id_ = line_id(number, line)
    try:
        request = _line.decode(line)
    except NOT_DECODED as error:
        return BadLine(id_, _custom_id(line), "invalid_line", f"line {number}: {error}")
    problem = _problem(request)
    if problem is not None:
        return BadLine(id_, request.custom_id, "invalid_request", f"line {number}: {problem}")
    return BatchRequest(id_, request.custom_id, request.url, bytes(request.body))


def _custom_id(line: bytes) -> str | None:
    """The `custom_id` of an otherwise invalid line, so that its owner can find it; None if it has none."""
    try:
        found = msgspec.json.decode(line)
    except NOT_DECODED:
        return None
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def _problem(request: _Line) -> str | None:
    if not request.custom_id:
        return "custom_id: it must not be empty"
    if request.method != "POST":
        return f"method: {request.method!r} is not allowed; 'POST' is"
    if request.url not in URLS:
        return f"url: {request.url!r} is not allowed; one of {', '.join(URLS)}"
    try:
        fields = FIELDS.decode(request.body)
        unfit = [name for name in ("stream", "background") if _any.decode(fields.get(name, b"null"))]
    except NOT_DECODED as error:
        return f"body: {error}"
    return f"body.{unfit[0]}: true is not allowed in a batch" if unfit else None


def answered_line(request: BatchRequest, answer: BatchAnswer) -> bytes:
    """The output line for an answered request, with its line end. A body that is not JSON, such as a proxy's error
    page, becomes an error entry."""
    try:
        msgspec.json.decode(answer.body)
    except NOT_DECODED:
        message = f"the server's answer, with status {answer.status}, is not JSON"
        return _entry(request.id, request.custom_id, None, {"code": "invalid_answer", "message": message})
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": msgspec.Raw(answer.body),
    }
    return _entry(request.id, request.custom_id, response, None)


def refused_line(bad: BadLine) -> bytes:
    """The output line for an invalid input line, with its line end: an error and no response."""
    return _entry(bad.id, bad.custom_id, None, {"code": bad.code, "message": bad.message})


def _entry(id_: str, custom_id: str | None, response: object, error: object) -> bytes:
    entry = {"id": id_, "custom_id": custom_id, "response": response, "error": error}
    encoded = msgspec.json.encode(entry)
    if b"\n" in encoded:  # a body that was printed over several lines
        encoded = msgspec.json.format(encoded, indent=-1)
    return encoded + b"\n"
