"""Finds processes that live and do nothing: engines by their steps, everybody by silence. Pure: time is an argument."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from shared.ids import Incarnation, InstanceId
from shared.messages.lifecycle import EngineReport, Lifecycle


class WatchLimits(Struct, frozen=True, kw_only=True):
    step: float = 90.0
    """Seconds that an engine with work in hand may take for a step. The scheduler's own limit is tighter."""
    silence: float = 15.0
    """Seconds without a word from a process that was ready."""


class Stall(NamedTuple):
    instance: InstanceId
    reason: str


class _Watched(NamedTuple):
    incarnation: Incarnation
    heard_at: float
    steps: int
    moved_at: float
    """When `steps` last changed, or was last without work."""
    was_ready: bool


class Watchdog:
    """Owns what was last heard of each process. `now` is the bus's liveness clock, which stands still with the bus."""

    def __init__(self, limits: WatchLimits | None = None) -> None:
        self._limits = limits or WatchLimits()
        self._watched: dict[InstanceId, _Watched] = {}

    def heard(self, message: Lifecycle, now: float) -> None:
        if message.phase in ("stopped", "failed"):
            self.forget(message.instance)
            return
        before = self._watched.get(message.instance)
        if before is not None and before.incarnation != message.incarnation:
            before = None
        steps = message.engine.steps if message.engine else 0
        stands = (
            before is not None and steps == before.steps and _has_work(message.engine) and message.phase != "starting"
        )
        self._watched[message.instance] = _Watched(
            incarnation=message.incarnation,
            heard_at=now,
            steps=steps,
            moved_at=before.moved_at if before is not None and stands else now,
            was_ready=message.phase == "ready" or (before is not None and before.was_ready),
        )

    def forget(self, instance: InstanceId) -> None:
        self._watched.pop(instance, None)

    def stalled(self, now: float) -> list[Stall]:
        """Names each stalled process once, and forgets it."""
        found = [stall for instance in self._watched if (stall := self._judge(instance, now)) is not None]
        for stall in found:
            self.forget(stall.instance)
        return found

    def _judge(self, instance: InstanceId, now: float) -> Stall | None:
        watched = self._watched[instance]
        if watched.was_ready and now - watched.heard_at > self._limits.silence:
            return Stall(instance, f"silent for {self._limits.silence:g} s")
        if now - watched.moved_at > self._limits.step and watched.heard_at > watched.moved_at:
            return Stall(instance, f"work in hand and no step for {self._limits.step:g} s")
        return None


def _has_work(report: EngineReport | None) -> bool:
    return report is not None and report.running + report.waiting > 0
