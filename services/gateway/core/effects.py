"""What the supervision of requests wants done. The actor does it."""

from __future__ import annotations

from typing import NamedTuple

from shared.ids import Attempt, EngineId, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import Delta, PromptPart, Rejected, StreamOpened
from shared.messages.scheduler import Cancel, Probe
from shared.messages.tokenizer import Tokenize


class Dispatch(NamedTuple):
    """Send it to a tokenizer, and say so should there be none."""

    tokenize: Tokenize


class Stop(NamedTuple):
    """Tell the engine that this attempt is over."""

    engine: EngineId
    cancel: Cancel


class Ask(NamedTuple):
    """Ask the engine after the request; the answer goes to `Supervision.probed`."""

    engine: EngineId
    probe: Probe


class Retried(NamedTuple):
    """For log and metrics: the request begins another attempt."""

    request: RequestId
    attempt: Attempt
    reason: str
    tokens: int
    """Output tokens that the new attempt resumes from."""


Effect = Delta | StreamOpened | PromptPart | Rejected | Dispatch | Stop | Withdraw | Ask | Retried
"""`StreamOpened`, `PromptPart`, `Delta` and `Rejected` go to the client: each request's last is a `Delta` with `finish`
or a `Rejected`, and nothing of it follows."""
