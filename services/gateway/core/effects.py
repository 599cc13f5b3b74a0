"""What the supervisor of requests wants done; the request table does it."""

from __future__ import annotations

from typing import NamedTuple

from shared.ids import Attempt, EngineId, RequestId
from shared.messages.coordinator import RequestEnded, Withdraw
from shared.messages.gateway import Delta, PromptLogprobsDelta, RequestRejected, StreamOpened
from shared.messages.scheduler import Cancel, Probe
from shared.messages.tokenizer import Tokenize


class DispatchAttempt(NamedTuple):
    """Send the attempt to a tokenizer, and report if there is none."""

    tokenize: Tokenize


class CancelAttempt(NamedTuple):
    """Send the engine the cancel of an attempt that is over."""

    engine: EngineId
    cancel: Cancel


class ProbeEngine(NamedTuple):
    """Ask the engine whether it holds the request; the reply goes to `RequestSupervisor.record_probe_reply`."""

    engine: EngineId
    probe: Probe


class AttemptRetry(NamedTuple):
    """Log and count that the request starts another attempt."""

    request: RequestId
    attempt: Attempt
    reason: str
    tokens: int
    """Output tokens that the new attempt resumes from."""


Effect = (
    Delta
    | StreamOpened
    | PromptLogprobsDelta
    | RequestRejected
    | DispatchAttempt
    | CancelAttempt
    | Withdraw
    | RequestEnded
    | ProbeEngine
    | AttemptRetry
)
"""`StreamOpened`, `PromptLogprobsDelta`, `Delta` and `RequestRejected` go to the client. The last one of each request
is a `Delta` with `finish` or a `RequestRejected`."""
