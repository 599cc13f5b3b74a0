"""Which engines get no requests although they are ready: those that are suspects, within a bound."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from shared.ids import InstanceId
from shared.messages.lifecycle import EngineHealth

ACCUSED = EngineHealth(suspect="requests failed there, and it has not said yet that it knows")
"""The health of an engine that this coordinator has just told so: its own report follows in a moment."""


class RatedEngine(NamedTuple):
    """An engine that is ready, and its health as far as is known."""

    instance: InstanceId
    health: EngineHealth | None


def choose_ejected(engines: Collection[RatedEngine], max_share: float) -> frozenset[InstanceId]:
    """The suspects among the engines of one model, `max_share` of all at most and never the last one.

    Where there are more suspects the worst go: those with the most faulty canaries, then those that were suspects most
    often, then by name. All coordinators see the same reports, so they agree without talking of it.
    """
    suspects = [each for each in engines if each.health is not None and each.health.suspect is not None]
    most = min(int(max_share * len(engines)), len(engines) - 1)
    return frozenset(each.instance for each in sorted(suspects, key=_badness)[: max(0, most)])


def _badness(engine: RatedEngine) -> tuple[int, int, str]:
    health = engine.health or EngineHealth()
    return -health.faults, -health.ejections, engine.instance
