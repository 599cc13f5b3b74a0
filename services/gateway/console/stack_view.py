"""Which processes there are and were, from their lifecycle messages: those that live, those that ended a moment ago,
and what happened to them. No bus."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle
from shared.messages.supervisor import PlannerDecision
from shared.telemetry.lifecycle_listener import ENDED_PHASES, LifecycleListener
from shared.telemetry.stack_figures import Figures

ENDED_SHOWN = 60.0
"""Seconds that an instance is shown after its end."""
MAX_ENDED = 64
MAX_EVENTS = 60
"""The newest events are kept."""
MAX_DECISIONS = 20
LISTENING = 2.5
"""Seconds in which the first message of an instance says nothing of its start: it was there before."""


class EndedInstance(NamedTuple):
    """An instance whose process is gone."""

    last: Lifecycle
    why: str
    at: float
    """In Unix seconds."""


class ReceivedDecision(NamedTuple):
    """What a planner has decided."""

    at: float
    """When it was heard, in Unix seconds: planners say it by clocks of their own."""
    decision: PlannerDecision


class StackEvent(NamedTuple):
    """Something that happened to an instance."""

    at: float
    """In Unix seconds."""
    instance: InstanceId
    service: str
    what: str


class StackView:
    """Owns what was heard of every process since somebody looks."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        """`clock`: monotonic seconds; `wall`: Unix seconds."""
        self._wall = wall
        self._began = wall()
        self._listener = LifecycleListener(clock)
        self.alive: dict[InstanceId, Lifecycle] = {}
        self.ended: dict[InstanceId, EndedInstance] = {}
        self.deaths: Counter[InstanceId] = Counter()
        """How often each was seen to end without having been stopped."""
        self.decisions: deque[ReceivedDecision] = deque(maxlen=MAX_DECISIONS)
        self.events: deque[StackEvent] = deque(maxlen=MAX_EVENTS)

    async def record(self, life: Lifecycle) -> None:
        """Takes a lifecycle message."""
        before = self.alive.get(life.instance)
        same = before is not None and before.incarnation == life.incarnation
        if life.phase in ENDED_PHASES and not same:
            return  # of an earlier run, or already known
        await self._listener.record(life)
        if life.phase in ENDED_PHASES:
            self._end(life, life.phase)
            return
        self.alive[life.instance] = life
        ended = self.ended.pop(life.instance, None)
        if before is None:
            if ended is not None or self._wall() - self._began > LISTENING:
                self._note(life, f"started, {life.shown_phase}")
        elif not same:
            self.deaths[life.instance] += 1
            self._note(life, f"restarted, {life.shown_phase}")
        elif before.shown_phase != life.shown_phase:
            self._note(life, f"is {life.shown_phase}")

    async def record_decision(self, decision: PlannerDecision) -> None:
        """Takes what a planner says that it has decided."""
        self.decisions.append(ReceivedDecision(self._wall(), decision))

    def look(self) -> Figures:
        """Returns the figures since the former look; notes who has fallen silent."""
        lives = self._listener.lives()
        for instance in self.alive.keys() - lives.keys():
            self._end(self.alive[instance], "silent")
        oldest = self._wall() - ENDED_SHOWN
        self.ended = {instance: ended for instance, ended in self.ended.items() if ended.at > oldest}
        for instance in self.deaths.keys() - self.alive.keys() - self.ended.keys():
            del self.deaths[instance]
        return self._listener.look()

    def _end(self, life: Lifecycle, why: str) -> None:
        self.alive.pop(life.instance, None)
        if len(self.ended) < MAX_ENDED:
            self.ended[life.instance] = EndedInstance(life, why, self._wall())
        if why != "stopped":
            self.deaths[life.instance] += 1
        self._note(life, why)

    def _note(self, life: Lifecycle, what: str) -> None:
        self.events.append(StackEvent(self._wall(), life.instance, life.service, what))
