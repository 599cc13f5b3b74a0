"""The bounds that a coordinator keeps, and what it promises when one is reached."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    queue: int = 1024
    """Requests that wait here; the next one is rejected as `overloaded`."""
    queue_seconds: float = 60.0
    """How long a request may wait here before it is rejected."""
    expect_seconds: float = 15.0
    """How long after the last sign of a model's engines one is still expected back."""
    engine_fill: float | None = None
    """An engine takes no more once it has this many times `max_running` in hand; None: until `max_waiting` is
    reached. Low values bind requests later, so that they go where work ends first; but that work has ended is only
    heard with the next report, half a second late."""
    settle_seconds: float = 0.1
    """A placement younger than this, when an engine's report comes in, may not be counted in it yet."""
    hand_over_seconds: float = 1.0
    """How long a request is taken to stay on the engine that prefills it, before the one that decodes it reports it."""
    renew_seconds: float = 1.0
    """How often a gateway is told again that its request waits here, so that silence means something."""
    remembered: int = 65_536
    """Requests whose newest attempt is remembered; the oldest are forgotten first."""
