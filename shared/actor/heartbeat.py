"""When a process says again how it is: at changes, when it is asked, and before its silence could mean its death."""

from __future__ import annotations

from msgspec.structs import replace

from shared.messages.lifecycle import HEARTBEAT_SECONDS, Lifecycle, StepSums

EARLY = HEARTBEAT_SECONDS / 2
"""Seconds by which a message may come before it is due: the next look would come later than promised."""


class Heartbeat:
    """Owns what was last published of a process's life, and when. Pure: time is an argument, that of the event loop."""

    def __init__(self, keep_alive: float) -> None:
        """`keep_alive`: seconds between two messages that say the same."""
        self.keep_alive = keep_alive
        self._published: Lifecycle | None = None
        self._at = 0.0
        self._requested = False

    def request(self) -> None:
        """Somebody has begun to listen: the next message is due whatever it says."""
        self._requested = True

    def is_due(self, life: Lifecycle, now: float) -> bool:
        """Whether `life` is to be published, at one of the looks that come every HEARTBEAT_SECONDS."""
        overdue = now - self._at >= self.keep_alive - EARLY
        return self._requested or overdue or self._published is None or _state(life) != _state(self._published)

    def record_published(self, life: Lifecycle, now: float) -> None:
        """`life` was published."""
        self._published, self._at, self._requested = life, now, False


def _state(life: Lifecycle) -> Lifecycle:
    """What others act on: without the counts of messages and of idle seconds, which grow while nothing happens."""
    rank = None if life.worker is None else replace(life.worker, sums=StepSums())
    return replace(life, progress=0, worker=rank)
