"""When a process says again how it is: at changes, when it is asked, and before its silence could mean its death."""

from __future__ import annotations

from msgspec.structs import replace

from shared.messages.lifecycle import HEARTBEAT_SECONDS, Lifecycle, StepSums

EARLY = HEARTBEAT_SECONDS / 2
"""Seconds by which a message may come before it is due: the next look would come later than promised."""


class Heartbeat:
    """Owns what was last published of a process's life, and when. Pure: time is an argument, that of the event loop."""

    def __init__(self, keep_alive: float) -> None:
        """`keep_alive`: seconds between two messages that say the same, unless the fleet's interval is longer."""
        self._configured = keep_alive
        self._interval = 0.0
        """Of the fleet; 0.0 while nobody has said one."""
        self._published: Lifecycle | None = None
        self._at = 0.0
        self._requested = False

    @property
    def keep_alive(self) -> float:
        """Seconds within which the next message is promised."""
        return max(self._configured, self._interval)

    def set_interval(self, keep_alive: float) -> None:
        """A coordinator has said how often a process of this fleet says how it is. If that is new the next message is
        due, as it holds another promise."""
        before, self._interval = self.keep_alive, keep_alive
        self._requested = self._requested or self.keep_alive != before

    def request(self) -> None:
        """Somebody has begun to listen: the next message is due whatever it says."""
        self._requested = True

    def is_due(self, life: Lifecycle, now: float) -> bool:
        """Whether `life` is to be published, at one of the looks that come every HEARTBEAT_SECONDS."""
        if self._requested or self._published is None:
            return True
        silent = now - self._at + EARLY
        return silent >= self.keep_alive or (silent >= self._interval / 2 and _state(life) != _state(self._published))

    def record_published(self, life: Lifecycle, now: float) -> None:
        """`life` was published."""
        self._published, self._at, self._requested = life, now, False


def _state(life: Lifecycle) -> Lifecycle:
    """What others act on: without the counts of messages and of idle seconds, which grow while nothing happens."""
    rank = None if life.worker is None else replace(life.worker, sums=StepSums())
    return replace(life, progress=0, worker=rank)
