"""What the supervisor of requests wants done; the request table does it."""

from __future__ import annotations

from typing import NamedTuple

from shared.ids import Attempt, ClusterName, DetokenizerId, EngineId, RequestId
from shared.messages.coordinator import RequestEnded, Withdraw
from shared.messages.gateway import Delta, PooledDelta, PromptLogprobsDelta, RequestRejected, StreamOpened
from shared.messages.scheduler import Cancel, Probe
from shared.messages.tokenizer import Tokenize


class DispatchAttempt(NamedTuple):
    """Send the attempt to a tokenizer, or to another cluster, and report if there is nobody."""

    tokenize: Tokenize
    cluster: ClusterName | None = None
    """The other cluster; None: it is served here."""


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
    | PooledDelta
    | RequestRejected
    | DispatchAttempt
    | CancelAttempt
    | Withdraw
    | RequestEnded
    | ProbeEngine
    | AttemptRetry
)
"""`StreamOpened`, `PromptLogprobsDelta`, `PooledDelta`, `Delta` and `RequestRejected` go to the client. The last one of
each request is a `Delta` with `finish` or a `RequestRejected`."""


def cancel_of(
    request: RequestId, attempt: Attempt, handed_by: EngineId | None, detokenizer: DetokenizerId | None
) -> Cancel:
    """A cancel that also names the detokenizer where the request was handed over: the engine that takes it over may
    have died, or never received it, after its stream had moved there."""
    return Cancel(request, attempt, None if handed_by is None else detokenizer)
