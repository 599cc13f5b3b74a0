"""What the first host knows of the ranks on others: whether a start of an engine that they took part in still lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shared.ids import EngineId
from shared.messages.supervisor import EngineRanks, RankStatus

HOST_SILENCE_SECONDS = 10.0
"""Seconds without a word from a host whose ranks were running, after which they count as lost."""


class _RunningRank(NamedTuple):
    rendezvous: str
    seen_at: float


class OtherHostRanks:
    """Owns what the other hosts last said. Time is that of the bus's liveness clock."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, EngineId], _RunningRank] = {}

    def record_status(self, report: RankStatus, current: Mapping[EngineId, str], now: float) -> list[EngineId]:
        """Engines of which a rank has ended there, of the `current` starts. A host that ran some and now says nothing
        of them has been started anew itself."""
        running = {each.engine: each.rendezvous for each in report.running}
        lost = [each.engine for each in report.lost if current.get(each.engine) == each.rendezvous]
        for engine, rendezvous in current.items():
            before = self._running.pop((report.host, engine), None)
            if running.get(engine) == rendezvous:
                self._running[report.host, engine] = _RunningRank(rendezvous, now)
            elif before is not None and before.rendezvous == rendezvous and engine not in lost:
                lost.append(engine)
        return lost

    def silent(self, current: Mapping[EngineId, str], now: float) -> list[EngineId]:
        """Engines with ranks on a host that says nothing any more. Each is named once."""
        gone = [key for key, held in self._running.items() if now - held.seen_at > HOST_SILENCE_SECONDS]
        held_there = [(engine, self._running.pop((host, engine)).rendezvous) for host, engine in gone]
        return [engine for engine, rendezvous in held_there if current.get(engine) == rendezvous]


def started_engines(current: Mapping[EngineId, str]) -> tuple[EngineRanks, ...]:
    """The present start of each engine, as the first host announces it."""
    return tuple(EngineRanks(engine, rendezvous) for engine, rendezvous in current.items())
