"""A batch: what clients say of a new one, its states, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from services.gateway.api.batches.files import ExpiresAfter
from services.gateway.api.batches.lines import BatchEndpoint
from services.gateway.api.errors import not_allowed
from shared.reliability.transitions import IllegalTransition

MAX_METADATA = 16
MAX_ERRORS = 50
"""Lines of an input that are named where it cannot be used."""
MAX_WINDOW_HOURS = 168

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
TRANSITIONS: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling", "expired"}),
    "in_progress": frozenset({"finalizing", "failed", "cancelling", "expired"}),
    "finalizing": frozenset({"completed"}),
    "cancelling": frozenset({"cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "expired": frozenset(),
}

_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")

MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class BatchFields(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: BatchEndpoint
    completion_window: Annotated[str, Meta(max_length=8)]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None

    def window_seconds(self) -> int:
        """How long the batch may take. Raises RequestError 400."""
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None or int(found[1]) > MAX_WINDOW_HOURS:
            rule = f"hours are expected, as in 24h, and at most {MAX_WINDOW_HOURS}h"
            raise not_allowed("completion_window", self.completion_window, rule)
        return int(found[1]) * 3600


class BatchLineError(Struct, frozen=True):
    """Why an input cannot be used."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchState(Struct, frozen=True, kw_only=True):
    """What a batch's record says. All times are seconds since the epoch."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None
    """Seconds."""
    expires_at: int
    status: BatchStatus = "validating"
    times: dict[str, int] = {}
    """When it came into each status but the first."""
    errors: tuple[BatchLineError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    """Of those that failed."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    def moved(self, status: BatchStatus, now: float, **fields: Any) -> BatchState:
        """The batch in its next status. Raises IllegalTransition."""
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"batch: {self.status} → {status}")
        return replace(self, status=status, times={**self.times, status: int(now)}, **fields)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return not TRANSITIONS[self.status]

    def body(self, id: str, created: float) -> dict[str, object]:
        """OpenAI's batch object."""
        errors = [{"code": e.code, "line": e.line, "message": e.message, "param": e.param} for e in self.errors]
        moments = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(created),
            "expires_at": self.expires_at,
            **{f"{moment}_at": self.times.get(moment) for moment in moments},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
