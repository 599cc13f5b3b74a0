"""What this coordinator has placed where, until the receiver's own reports must have counted it."""

from __future__ import annotations

from collections import deque

from shared.ids import InstanceId


class Reservations:
    """Owns the times of the placements that no report covers yet, by instance.

    A report says nothing of what it counted. It was written a moment before it is heard, so a placement made
    within the last `settle` seconds may have crossed it on the way: that one is kept until the next report.
    Older ones are in the report, or finished already.
    """

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._placed: dict[InstanceId, deque[float]] = {}

    def add(self, instance: InstanceId, now: float) -> None:
        self._placed.setdefault(instance, deque()).append(now)

    def reported(self, instance: InstanceId, now: float) -> None:
        placed = self._placed.get(instance)
        while placed and now - placed[0] >= self._settle:
            placed.popleft()

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone, and what it was given with it."""
        self._placed.pop(instance, None)

    def count(self, instance: InstanceId) -> int:
        return len(self._placed.get(instance, ()))
