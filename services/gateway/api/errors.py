"""Errors as OpenAI's API words them, with the status codes that its clients know."""

from __future__ import annotations

import msgspec

from shared.messages.gateway import ErrorKind

STATUS: dict[ErrorKind, int] = {"invalid_request": 400, "too_large": 413, "overloaded": 429, "unavailable": 503}

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """Ends a request with an error body. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error")


def invalid(param: str, message: str) -> ApiError:
    """400: the field `param` is at fault."""
    return ApiError(400, f"{param}: {message}", param=param)


def unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, f"{param}: {what} is not supported", param=param, code="unsupported_parameter")


def shown(value: object, limit: int = 80) -> str:
    """A client's value in an error message, cut to a bounded length."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
