"""What coordinators have placed where, until the receiver's own reports must have counted it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shared.ids import InstanceId


class Reserved(NamedTuple):
    """The sum of what was placed on one instance."""

    requests: int = 0
    prefill: int = 0
    """Blocks to compute."""
    blocks: int = 0
    """Blocks of KV memory that it will take."""

    def plus(self, other: Reserved) -> Reserved:
        if not other.requests:
            return self
        return Reserved(self.requests + other.requests, self.prefill + other.prefill, self.blocks + other.blocks)


NOTHING = Reserved()


class _Placed(NamedTuple):
    counted: float
    """From when on a report holds it."""
    what: Reserved


@dataclass(slots=True)
class _Instance:
    placed: list[_Placed] = field(default_factory=list)
    total: Reserved = NOTHING

    def add(self, placed: _Placed) -> None:
        self.placed.append(placed)
        self.total = placed.what.plus(self.total)

    def reported(self, now: float) -> None:
        self.placed = [placed for placed in self.placed if now < placed.counted]
        self.total = NOTHING
        for placed in self.placed:
            self.total = placed.what.plus(self.total)


class Reservations:
    """Owns the placements that no report covers yet, by instance.

    A report says nothing of what it counted. It was written a moment before it is heard, so a placement made
    within the last `settle` seconds may have crossed it on the way: that one is kept until the next report.
    Older ones are in the report, or finished already.
    """

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self._instances: dict[InstanceId, _Instance] = {}

    def add(self, instance: InstanceId, now: float, *, prefill: int = 0, blocks: int = 0, later: float = 0.0) -> None:
        """`later`: seconds that the request needs to get there, at a guess."""
        placed = _Placed(now + self._settle + later, Reserved(1, prefill, blocks))
        self._instances.setdefault(instance, _Instance()).add(placed)

    def reported(self, instance: InstanceId, now: float) -> None:
        if (there := self._instances.get(instance)) is not None and there.placed:
            there.reported(now)

    def forget(self, instance: InstanceId) -> None:
        """The instance is gone, and what it was given with it."""
        self._instances.pop(instance, None)

    def on(self, instance: InstanceId) -> Reserved:
        there = self._instances.get(instance)
        return there.total if there is not None else NOTHING
