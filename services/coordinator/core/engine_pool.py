"""One engine as its reports and the placements since show it, and pools of engines that take one more request."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.engine_slowdowns import NO_SLOWDOWN, Slowdown
from services.coordinator.core.reservations import ReservedWork
from shared.ids import EngineId, InstanceId, NodeId
from shared.messages.lifecycle import EngineReport, Lifecycle, Phase, Role

DECODING: frozenset[Role] = frozenset(("mixed", "decode"))
PREFILLING: frozenset[Role] = frozenset(("prefill",))

MIN_BACKLOG = 8
"""Requests that may wait in an engine although its batch is small: a few have only just arrived there."""
WAITING_WEIGHT = 4
"""A waiting request is work that has yet to begin; a running one shares each step with the others."""


def room(report: EngineReport, fill: float | None) -> int:
    """Requests that the engine can take beyond those it reported; never negative. `fill`: see `engine_fill` of
    `CoordinatorConfig`.

    Where something waits already, a free place in the running batch is no room: blocks may be what is short.
    """
    free = 0 if report.waiting else report.max_running - report.running
    by_bounds = report.max_waiting - report.waiting + free
    if fill is None:
        return max(0, by_bounds)
    by_fill = int(fill * report.max_running) - report.waiting - report.running
    return max(0, min(by_bounds, by_fill))


def fair_room(report: EngineReport, fill: float) -> int:
    """Requests of API keys that the engine can take beyond those it reported; never negative. `fill`: see `fair_fill`
    of `CoordinatorConfig`.

    In an engine they wait in the order of their arrival, and in the coordinator's queue in a fair one. So an engine
    gets no more than it needs until its next report.
    """
    backlog = max(MIN_BACKLOG, int((fill - 1) * report.running))
    return 0 if report.waiting >= backlog else room(report, fill)


def share(whole: int, parts: int, turn: int) -> int:
    """One of `parts` shares of `whole`, which add up to it over `turn` = t, t + 1, …, t + parts - 1."""
    return whole // parts + (1 if turn % parts < whole % parts else 0)


def cost(report: EngineReport, placed: int) -> int:
    """Requests on the engine once `placed` more have reached it: they fill the running batch first."""
    free = 0 if report.waiting else max(0, report.max_running - report.running)
    running = min(placed, free)
    return WAITING_WEIGHT * (report.waiting + placed - running) + report.running + running


class EngineLoad(NamedTuple):
    """One engine as its last report shows it, with values that each placement needs computed once."""

    id: EngineId
    instance: InstanceId
    phase: Phase
    progress: int
    """Its count of heartbeats, which all coordinators see alike."""
    report: EngineReport
    room: int
    """Requests that it takes beyond those reported."""
    fair_room: int
    """The same for requests of API keys."""
    prefill: float
    """Blocks that it has yet to compute before it gets to one more request."""
    used: int
    """Blocks of KV memory in use."""
    slowdown: Slowdown
    """What its work costs beside that of others."""

    @classmethod
    def of(
        cls, life: Lifecycle, report: EngineReport, config: CoordinatorConfig, slowdown: Slowdown = NO_SLOWDOWN
    ) -> EngineLoad:
        """The engine that sent `life` with this `report` in it."""
        return cls(
            id=EngineId(life.instance),
            instance=life.instance,
            phase=life.phase,
            progress=life.progress,
            report=report,
            room=room(report, config.engine_fill),
            fair_room=min(room(report, config.engine_fill), fair_room(report, config.fair_fill)),
            prefill=report.prefill_tokens / report.model.block_size,
            used=report.blocks_total - report.blocks_free,
            slowdown=slowdown,
        )

    def is_like(self, other: EngineLoad) -> bool:
        """Whether both are the same to all but the arithmetic of load: which requests an engine may take, and which
        engines are ejected, follows from nothing else."""
        ours, theirs = self.report, other.report
        return (
            self.phase == other.phase
            and ours.role == theirs.role
            and ours.node == theirs.node
            and ours.health == theirs.health
            and ours.model == theirs.model
        )


class Candidate(NamedTuple):
    """An engine that takes one more request, and its work with that counted which its report does not show yet."""

    engine: EngineLoad
    node: NodeId | None
    reserved: ReservedWork
    requests: int
    """Waiting and running, in all."""
    prefill: float
    """Blocks that it computes before it gets to one more request."""
    used: int
    """Blocks of KV memory in use, which every decode step reads."""

    @classmethod
    def of(cls, engine: EngineLoad, reserved: ReservedWork) -> Candidate:
        """The engine with what was placed on it."""
        report = engine.report
        return cls(
            engine,
            report.node,
            reserved,
            report.waiting + report.running + reserved.requests,
            engine.prefill + reserved.prefill,
            engine.used + reserved.blocks,
        )


def blocks_of(candidate: Candidate) -> float:
    """The work of an engine in blocks: those that it has yet to compute, and those that each step reads, as many as the
    median engine would do in the time that they take it."""
    slowdown = candidate.engine.slowdown
    return slowdown.prefill * candidate.prefill + slowdown.decode * candidate.used


def requests_of(candidate: Candidate) -> float:
    """The work of an engine in requests, waiting ones more than running ones."""
    return cost(candidate.engine.report, candidate.reserved.requests)


def nothing_of(_: Candidate) -> float:
    """Where work does not count all engines are equal."""
    return 0.0


class _Group(NamedTuple):
    """Engines that differ in their work alone."""

    node: NodeId | None
    slowdown: Slowdown


class EnginePool:
    """Owns engines that take one more request, in the order of their work, and equals in that of their names.

    Kept up to date engine by engine, so that a placement looks at those alone that differ from the rest by what they
    have cached, and by what a request costs them: of all others with one slowdown the cheapest is at the front.
    """

    def __init__(self, work_of: Callable[[Candidate], float], candidates: Iterable[Candidate] = ()) -> None:
        self.requests = 0
        """Of all of them, waiting and running."""
        self.eligible: frozenset[EngineId] = frozenset()
        """Those that come in once they have room; of a pool that is kept up to date."""
        self._work_of = work_of
        self._members: dict[EngineId, tuple[float, Candidate]] = {}
        for each in candidates:
            self._members[each.engine.id] = work_of(each), each
            self.requests += each.requests
        self._orders: dict[Slowdown, list[tuple[float, EngineId]]] = {}
        """Their work and their names, those with the least work first."""
        self._groups: dict[_Group, list[tuple[float, EngineId]]] = {}
        """The same by node."""
        for work, name in sorted((work, name) for name, (work, _) in self._members.items()):
            group = _group_of(self._members[name][1])
            self._orders.setdefault(group.slowdown, []).append((work, name))
            self._groups.setdefault(group, []).append((work, name))

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Candidate]:
        """By name."""
        return (self._members[name][1] for name in sorted(self._members))

    def by_work(self) -> Iterator[Candidate]:
        """Of each slowdown the one with the least first."""
        return (self._members[name][1] for order in self._orders.values() for _, name in order)

    def get(self, engine: EngineId) -> Candidate | None:
        """That engine; None where it is not among them."""
        member = self._members.get(engine)
        return None if member is None else member[1]

    def put(self, candidate: Candidate) -> None:
        """Adds an engine, or takes its new values."""
        name = candidate.engine.id
        work = self._work_of(candidate)
        before = self._members.get(name)
        group = _group_of(candidate)
        if before is not None and before[0] == work and _group_of(before[1]) == group:
            self.requests -= before[1].requests
        else:
            self.drop(name)
            insort(self._orders.setdefault(group.slowdown, []), (work, name))
            insort(self._groups.setdefault(group, []), (work, name))
        self._members[name] = work, candidate
        self.requests += candidate.requests

    def drop(self, engine: EngineId) -> None:
        """It takes no more requests; nothing where it is not among them."""
        before = self._members.pop(engine, None)
        if before is not None:
            work, candidate = before
            group = _group_of(candidate)
            for order in (self._orders[group.slowdown], self._groups[group]):
                del order[bisect_left(order, (work, engine))]
            self.requests -= candidate.requests

    def least(self, without: Container[EngineId] = ()) -> list[Candidate]:
        """Of each slowdown those with the least work, by name, `without` some; none where there are no others."""
        found: list[Candidate] = []
        for order in self._orders.values():
            least: float | None = None
            for work, name in order:
                if least is not None and work > least:
                    break
                if name not in without:
                    least = work
                    found.append(self._members[name][1])
        return found

    def least_by_node(self, without: Container[EngineId], is_full: Callable[[Candidate], bool]) -> list[Candidate]:
        """Of each node and slowdown those with the least work, up to the first that is not full, `without` some: where
        all on a node are worth the same unless they are full, and these less, the best of each node is among them."""
        found: list[Candidate] = []
        for order in self._groups.values():
            least: float | None = None
            for work, name in order:
                if least is not None and work > least:
                    break
                if name not in without:
                    candidate = self._members[name][1]
                    found.append(candidate)
                    if least is None and not is_full(candidate):
                        least = work
        return found


def _group_of(candidate: Candidate) -> _Group:
    return _Group(candidate.node, candidate.engine.slowdown)
