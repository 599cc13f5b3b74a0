"""What has happened so far, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the start; whoever publishes them takes differences."""

    tokens: int = 0
    stopped: int = 0
    """Requests ended by a stop string."""
    unknown: int = 0
    """Streams and tokens that came for an attempt which is not open here."""
    stale: int = 0
    """Batches of an engine's former epoch."""
    gaps: int = 0
    failed: int = 0
    """Requests given up before their end."""
