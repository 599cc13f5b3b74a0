"""An engine that fails what it gets is soon empty and the cheapest: what failed there weighs more than its load."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import pytest
from msgspec.structs import replace

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import AccuseEngine, Moment, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from services.coordinator.core.outliers import MIN_FAILURES, MIN_ROUNDS, WINDOW, OutlierDetector
from services.scheduler.core.health.suspicion import Suspicion
from shared.ids import EngineId, InstanceId, RequestId
from shared.messages.lifecycle import EngineHealth, Lifecycle
from tests.support.engines.coordinator_events import MODEL, at, detokenizer, engine, life, route, summary

A = EngineId("a")


def failed(detector: OutlierDetector, count: int, *, first: float = 0.0, apart: float = 0.1, name: str = "r") -> None:
    """Requests that fail one after the other, each placed after the one before had failed."""
    for number in range(count):
        placed = first + number * apart
        detector.record_placement(A, placed)
        detector.record_failure(A, RequestId(f"{name}{number}"), placed, placed + apart / 2)


def test_failures_one_after_the_other_are_evidence_for_a_while() -> None:
    detector = OutlierDetector()
    failed(detector, MIN_FAILURES - 1)
    assert detector.evidence(A, 1.0) is None
    failed(detector, 1, first=0.9, name="last")
    assert detector.evidence(A, 1.0) == "5 requests failed in 10 s, of 5"
    assert detector.evidence(A, 1.0 + WINDOW) is None


def test_what_failed_at_one_moment_is_one_event() -> None:
    detector = OutlierDetector()
    for number in range(200):
        detector.record_placement(A, number / 100)
        detector.record_failure(A, RequestId(f"r{number}"), number / 100, 2.0 + number / 1000)
    assert detector.evidence(A, 2.2) is None, "an epoch was lost"


def test_few_failures_among_many_placements_are_none() -> None:
    detector = OutlierDetector()
    for number in range(50):
        detector.record_placement(A, number / 10)
    failed(detector, 20, first=5.0)
    assert detector.evidence(A, 7.0) is None


def test_a_request_that_fails_everywhere_speaks_against_no_engine() -> None:
    core = fleet_of("a", "b", "c", "d")
    for number in range(200):
        name, now = f"r{number}", number / 20
        tried: tuple[str, ...] = ()
        for attempt in range(1, 4):
            actions = core.route(route(name, attempt=attempt, avoid=tried), at(now + attempt / 1000))
            assert not any(isinstance(action, AccuseEngine) for action in actions)
            tried = (*tried, *(action.engine for action in actions if isinstance(action, PlaceRequest)))


def test_an_engine_of_a_release_that_knows_of_no_health_is_told_nothing() -> None:
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
    for each in (large("a"), large("b", running=30), detokenizer()):
        core.lifecycle(each, at(0))
    for number in range(20):
        core.route(route(f"r{number}"), at(number / 10))
        again = core.route(route(f"r{number}", attempt=2, avoid=("a",)), at(number / 10 + 0.05))
        assert [line[0] for line in summary(again)] == ["place"]


def engines_of(core: Coordinator, first: int, now: float) -> set[str]:
    """Where ten requests go."""
    actions = [each for i in range(10) for each in core.route(route(f"n{first + i}"), at(now))]
    return {action.engine for action in actions if isinstance(action, PlaceRequest)}


def test_an_engine_that_says_nothing_while_a_request_waits_for_it_is_passed_by_until_it_does() -> None:
    core = fleet_of("a", "b", "c")
    placed = core.route(route("r"), at(1))
    (silent,) = [action.engine for action in placed if isinstance(action, PlaceRequest)]
    for name in {"a", "b", "c"} - {silent}:
        core.lifecycle(watched(large(name)), at(5))
    core.route(route("r", attempt=2, avoid=(silent,)), at(7.25))
    assert engines_of(core, 0, 7.3) == {"a", "b", "c"} - {silent}
    assert "nothing was heard of it" in (core.fleet.suspicion_of(InstanceId(silent)) or "")
    core.lifecycle(watched(large(silent)), at(8))
    assert silent in engines_of(core, 10, 8.1)
    assert core.fleet.suspicion_of(InstanceId(silent)) is None


@pytest.mark.parametrize(("reports_at", "again_at"), [(2.0, 7.25), (0.0, 3.0)], ids=["it reports", "failed at once"])
def test_a_request_that_comes_again_from_an_engine_that_lives_is_no_silence(reports_at: float, again_at: float) -> None:
    core = fleet_of("a", "b", "c")
    placed = core.route(route("r"), at(1))
    (tried,) = [action.engine for action in placed if isinstance(action, PlaceRequest)]
    core.lifecycle(watched(large(tried)), at(reports_at))
    core.route(route("r", attempt=2, avoid=(tried,)), at(again_at))
    assert tried in engines_of(core, 0, again_at + 0.05)


def test_the_last_engines_are_used_however_silent_they_are() -> None:
    core = fleet_of("a", "b")
    for number in range(6):
        actions = core.route(route(f"r{number}"), at(1))
        (tried,) = [action.engine for action in actions if isinstance(action, PlaceRequest)]
        core.route(route(f"r{number}", attempt=2, avoid=(tried,)), at(7.25))
    assert len(engines_of(core, 0, 7.3)) == 1


def fleet_of(*names: str) -> Coordinator:
    core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig())
    for each in (*(watched(large(name)) for name in names), detokenizer()):
        core.lifecycle(each, at(0))
    return core


def large(name: str, running: int = 0) -> Lifecycle:
    """An engine that many requests fit into."""
    return engine(name, running=running, max_running=256, max_waiting=1024, blocks_total=4096, blocks_used=2 * running)


def watched(life: Lifecycle, health: EngineHealth | None = None) -> Lifecycle:
    assert life.engine is not None
    return replace(life, engine=replace(life.engine, health=health or EngineHealth()))


# The trap: how much of the traffic goes to an engine that fails everything at once, and so is always idle.


class TrapSimulation:
    """Coordinators and engines of which one fails what it gets within a millisecond. Its canaries are right, so nothing
    but the requests that come again tells of it. The others take half a second for a request."""

    REPORT_EVERY, BUS, FAILS_IN, TAKES = 0.5, 0.002, 0.001, 0.5

    def __init__(self, *, coordinators: int, watching: bool, engines: int = 4) -> None:
        names = [f"coordinator-{number}" for number in range(coordinators)]
        self.cores = [Coordinator(InstanceId(name), CoordinatorConfig(), turn=i) for i, name in enumerate(names)]
        self.peers = [life("coordinator", name) for name in names]
        self.engines = [f"engine-{number}" for number in range(engines)]
        self.failing = self.engines[0]
        self.watching = watching
        self.suspicion = Suspicion(10.0, probed=True)
        self.running: Counter[str] = Counter()
        self.placed: Counter[str] = Counter()
        self.ejections: list[float] = []
        self._events: list[tuple[float, int, str, str, int]] = []
        self._order = 0

    def run(self, rate: float, seconds: float) -> float:
        """The share of all placements that the failing engine got."""
        self._at(0.0, "report")
        for number in range(int(rate * seconds)):
            self._at(0.6 + number / rate, "route", f"r{number}", 1)
        while self._events:
            now, _, what, who, attempt = heapq.heappop(self._events)
            if what == "route":
                self._route(who, attempt, now)
            elif what == "end":
                self.running[who] -= 1
            elif what == "report":
                self.suspicion.record_canary(None, now)
                self._report(now)
                if now < seconds:
                    self._at(now + self.REPORT_EVERY, "report")
            else:
                self.suspicion.accuse(who, now)
                self.ejections.append(now)
                self._report(now)
        return self.placed[self.failing] / sum(self.placed.values())

    def _route(self, request: str, attempt: int, now: float) -> None:
        avoid = (self.failing,) if attempt > 1 else ()
        core = self.cores[hash((int(request[1:]), attempt)) % len(self.cores)]
        for action in core.route(route(request, attempt=attempt, avoid=avoid), Moment(now, now)):
            if isinstance(action, AccuseEngine):
                self._at(now + self.BUS, "accuse", action.report.reason)
            elif isinstance(action, PlaceRequest):
                self.placed[action.engine] += 1
                if action.engine == self.failing:
                    self._at(now + self.FAILS_IN + 3 * self.BUS, "route", request, attempt + 1)
                else:
                    self.running[action.engine] += 1
                    self._at(now + self.TAKES, "end", action.engine)

    def _report(self, now: float) -> None:
        lives = [large(name, running=self.running[name]) for name in self.engines]
        if self.watching:
            lives = [watched(each, self._health(each)) for each in lives]
        for core in self.cores:
            for each in (*self.peers, detokenizer(), *lives):
                core.lifecycle(each, Moment(now, now))

    def _health(self, each: Lifecycle) -> EngineHealth:
        return self.suspicion.report if each.instance == self.failing else EngineHealth()

    def _at(self, when: float, what: str, who: str = "", attempt: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what, who, attempt))


def test_without_a_look_at_failures_the_failing_engine_draws_the_traffic() -> None:
    share = TrapSimulation(coordinators=1, watching=False).run(rate=60, seconds=20)
    assert share > 0.35, "a fair one is a quarter"


@pytest.mark.parametrize("coordinators", [1, 3])
def test_failures_outweigh_load(coordinators: int) -> None:
    trap = TrapSimulation(coordinators=coordinators, watching=True)
    share = trap.run(rate=60, seconds=80)
    assert share < 0.02
    assert trap.placed[trap.failing] >= MIN_ROUNDS
    firsts = [moment for i, moment in enumerate(trap.ejections) if i == 0 or moment - trap.ejections[i - 1] > 1]
    pauses = [later - earlier for earlier, later in itertools.pairwise(firsts)]
    assert len(pauses) >= 2
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(pauses)), "ever longer"


def test_the_share_of_engines_that_are_out_is_bounded_even_if_all_fail() -> None:
    core = fleet_of("a", "b", "c", "d")
    accused = set()
    for number in range(400):
        now = 0.01 * number
        for action in core.route(route(f"r{number}"), at(now)):
            assert isinstance(action, PlaceRequest)
            again = core.route(route(f"r{number}", attempt=2, avoid=(action.engine,)), at(now + 0.001))
            accused |= {each.engine for each in again if isinstance(each, AccuseEngine)}
        assert len(core.fleet.ejected(MODEL)) <= 2
    assert len(accused) > 2
