"""Decode steps between two events of other kinds, taken in at once.

What the core does at each step is done for each step, in the same order, by its own parts: numbers, times, counts.
What it does for each sequence, and the messages to and from the device, are the same whether they are made at each step
or behind the last of them, so they are made once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.simulation.hops import HopDelays
from deploy.simulation.steps.device import VirtualDevice
from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.planning.step_timing import ExpectedResult, FinishedStep
from services.scheduler.core.sequence import Sequence
from shared.messages.scheduler import SampledTokens, StepFinished, StepTiming
from shared.messages.worker import StepPlan

TIMER_SECONDS = 0.001
"""No timer is finer."""


class ResultDue(NamedTuple):
    """When the result of a step in flight comes."""

    at: float
    number: int
    """Of the event on its engine's timeline, which orders what happens at the same time."""
    wait: float
    forward: float
    """As in its `StepTiming`."""
    result: StepFinished | None
    """None: nobody has made it yet."""

    @property
    def made(self) -> StepFinished:
        """The result, once a leap is over."""
        assert self.result is not None, "a leap makes what is in flight behind it"
        return self.result

    @property
    def timing(self) -> StepTiming:
        """Of the step."""
        return StepTiming(wait=self.wait, prepare=0.0, forward=self.forward, sample=0.0)


_new_due = tuple.__new__
"""A step costs microseconds here, and a named tuple's own constructor is half of one."""


@dataclass(slots=True)
class StepTimeline:
    """Owns the results that an engine waits for, in their order, and when it plans next."""

    results: deque[ResultDue]
    plan_at: float | None
    plan_number: int
    """Of the event, if `plan_at` is not None."""
    events: int
    """How many the engine's timeline has had so far."""
    overtaken: list[tuple[float, int]] = field(default_factory=list)
    """When, and by which events, it was to plan where another time was found since: nothing happens then."""

    def await_plan(self, due: float, now: float) -> bool:
        """The next plan is due then. Returns whether another time was set."""
        before, number = self.plan_at, self.plan_number
        if before == due:
            return False
        self.events += 1
        self.plan_at, self.plan_number = max(due, now + TIMER_SECONDS), self.events
        if before is None:
            return False
        self.overtaken.append((before, number))
        return True


class LeapRoom(NamedTuple):
    """So much may come of a leap at the most."""

    results: int
    plans: int


class DecodeLeap:
    """Owns how far the leap has come: see `DecodeRun.leap`."""

    def __init__(
        self,
        state: EpochState,
        counters: EngineCounters,
        members: list[Sequence],
        device: VirtualDevice,
        hops: HopDelays,
    ) -> None:
        self.times: list[float] = []
        """At which results came."""
        self.planned = 0
        """Steps."""
        self._state = state
        self._counters = counters
        self._members = members
        self._device = device
        self._hops = hops
        self._taken: list[ResultDue] = []
        self._seconds: list[float] = []
        """What the core measured of the steps whose results were taken."""
        count = len(members)
        self._expected = ExpectedResult(count, count, {}, prefills=False, decodes=count)
        self._read = sum([device.backend.computed(member.id) for member in members])

    def take(self, timeline: StepTimeline, until: float, room: LeapRoom, *, late: bool) -> None:
        """Takes in what happens before `until`, and what comes of it. `late`: plans are made as late as the core finds
        right."""
        state, results, times = self._state, timeline.results, self.times
        steps, timeout, ahead, count = (
            state.steps,
            state.limits.step_timeout,
            state.limits.plans_ahead,
            len(self._members),
        )
        while True:
            planning = timeline.plan_at
            plans = planning is not None and not (results and results[0] < (planning, timeline.plan_number))
            if self.planned + ahead + 1 - steps.issued + steps.finished + (not plans) > room.plans:
                break
            if plans and planning is not None:
                now = planning
                if now >= until or steps.overdue(now, timeout) is not None:
                    break
                timeline.plan_at = None
            elif results and len(times) < room.results and (now := results[0][0]) < until:
                self._taken.append(results.popleft())
                steps.finish(count, now)
                self._seconds.append(steps.last_seconds)
                times.append(now)
                if late and steps.issued - steps.finished <= ahead and now < (due := steps.next_due(1)):
                    if timeline.await_plan(due, now):
                        until = min(until, timeline.overtaken[-1][0])
                    continue
            else:
                break
            if self._plan(timeline, now, late=late):
                until = min(until, timeline.overtaken[-1][0])
        if times or self.planned:
            self._apply(timeline)

    def _plan(self, timeline: StepTimeline, now: float, *, late: bool) -> bool:
        """Plans as many steps as are to be in flight now, of which the first is due, or sees when the next is. Whether
        another time was set before."""
        device, hops, steps, count = self._device, self._hops, self._state.steps, len(self._members)
        ahead = self._state.limits.plans_ahead
        while steps.issued - steps.finished <= ahead:
            steps.issue(self._expected, now)
            seconds = device.backend.decode_seconds(count, self._read)
            wait, forward = device.occupy(seconds, now + hops.plan)
            self._read += count
            self.planned += 1
            timeline.events += 1
            due = device.busy_until + hops.result, timeline.events, wait, forward, None
            timeline.results.append(_new_due(ResultDue, due))
            if late and steps.issued - steps.finished <= ahead and now < (at := steps.next_due(1)):
                return timeline.await_plan(at, now)
        return False

    def _apply(self, timeline: StepTimeline) -> None:
        """Makes what was left out at each step."""
        state, backend, results = self._state, self._device.backend, timeline.results
        known = len(self.times)
        if known:
            self._count()
        for member in self._members:
            tokens = member.tokens
            produced = tokens.produced
            for position in range(produced, produced + known):
                tokens.append(backend.token(member.id, position))
            tokens.plan_decode(self.planned)
            backend.decode(member.id, self.planned)
            if known:
                member.last_token_at = self.times[-1]
        first, count, before = state.steps.finished, len(self._members), state.plans_in_flight
        work = tuple([member.decode_work for member in self._members])
        finished = [
            FinishedStep(
                step=first - known + place,
                work=before[place].work if place < len(before) else work,
                decodes=count,
                seconds=self._seconds[place],
                timing=due.timing,
                drafted=0,
                accepted=(),
            )
            for place, due in enumerate(self._taken)
        ]
        plans: list[StepPlan] = []
        for place, due in enumerate(results):
            if due.result is None:
                step = first + place
                results[place] = due._replace(result=self._result(step, place, due.timing))
                plans.append(StepPlan(epoch=state.steps.epoch, step=step, work=work))
        state.record_run(finished, plans)

    def _count(self) -> None:
        """Each member has a token by each result."""
        count, before = len(self._members), self._members[0].last_token_at
        for now in self.times:
            self._counters.record_later_tokens(count, now - before)
            before = now

    def _result(self, step: int, place: int, timing: StepTiming) -> StepFinished:
        """Of a step that is the one at that place of those in flight."""
        token = self._device.backend.token
        sampled = tuple(
            [
                SampledTokens(member.id, (token(member.id, member.tokens.produced + place),), None, 0)
                for member in self._members
            ]
        )
        return StepFinished(epoch=self._state.steps.epoch, step=step, sampled=sampled, timing=timing)
