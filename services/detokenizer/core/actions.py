"""The detokenizer core's events beside token batches, the messages that it sends, its counters, and how many streams it
holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shared.ids import Attempt, EngineId, GatewayId, RequestId
from shared.messages.gateway import Death, GatewayMessage
from shared.messages.scheduler import Cancel, StopMatched, TokenBatchLost

MAX_STREAMS = 16_384
"""Requests that a detokenizer holds by default; further ones fail and are dispatched elsewhere."""


class EngineLost(NamedTuple):
    """An engine that died, fell silent or restarted: its requests get no more tokens."""

    engine: EngineId
    reason: str
    death_of: Callable[[RequestId], Death | None] = lambda _: None
    """How each request was there, if its process died."""


class GatewayLost(NamedTuple):
    """A gateway that died, fell silent, restarted or receives nothing: its requests have no client any more."""

    gateway: GatewayId
    reason: str


class StreamOrphaned(NamedTuple):
    """A stream's engine does not have its request: that never came, or its end was lost on the way here."""

    request: RequestId
    attempt: Attempt
    position: int
    """Output tokens that had arrived; with more, the stream is no orphan."""


class ToGateway(NamedTuple):
    """Send `message` to a gateway. If `Deltas` find no subscriber, the actor reports GatewayLost to the core."""

    gateway: GatewayId
    message: GatewayMessage


class ToEngine(NamedTuple):
    """Send this to that engine's scheduler."""

    engine: EngineId
    message: Cancel | StopMatched | TokenBatchLost


Action = ToGateway | ToEngine


@dataclass(slots=True)
class DetokenizerCounters:
    """Counts since the start. They only grow; metrics publish their differences."""

    tokens: int = 0
    """Tokens that were turned into text."""
    stopped: int = 0
    """Requests ended by a stop string."""
    unknown: int = 0
    """Streams and tokens that came for an attempt which is not open here."""
    stale: int = 0
    """Batches of an engine's former epoch."""
    gaps: int = 0
    """Times that batches of an engine were missed."""
    failed: int = 0
    """Requests that failed here."""
