"""A coordinator against any sequence of routes, reports, deaths and withdrawals: nothing lost, nothing overfilled."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.actions import Action, NotifyGateway, PlaceRequest
from services.coordinator.core.coordinator import Coordinator
from shared.ids import Attempt, InstanceId, RequestId
from shared.messages.coordinator import Withdraw
from shared.messages.gateway import RequestQueued, RequestRejected
from shared.messages.lifecycle import Phase
from tests.support.engines.coordinator_events import at, detokenizer, engine, route

ENGINES = ("a", "b", "c")
MAX_RUNNING, MAX_WAITING = 3, 2


class SimulatedEngine:
    """What an engine holds, and whether it can be reached."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.phase: Phase = "ready"
        self.reported_phase: Phase = "ready"

    def load(self) -> tuple[int, int]:
        running = min(len(self.held), MAX_RUNNING)
        return len(self.held) - running, running


class Placement(RuleBasedStateMachine):
    """Every request is in exactly one state; a Place reaches an engine that could take it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig(queue_limit=4, queue_timeout=5))
        self.engines = {name: SimulatedEngine() for name in ENGINES}
        self.ends: Counter[str] = Counter()
        self.open: set[str] = set()
        self.attempts: dict[str, int] = {}

    @initialize()
    def everybody_is_heard(self) -> None:
        self.core.lifecycle(detokenizer(), at(self.now))
        for name in ENGINES:
            self.report(name)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case PlaceRequest():
                    self.place(action)
                case NotifyGateway(_, RequestRejected() as rejected):
                    self.end(rejected.request)
                case NotifyGateway(_, RequestQueued() as queued):
                    assert queued.request in self.open
                case _:
                    raise AssertionError(action)

    def place(self, action: PlaceRequest) -> None:
        where, request = self.engines[action.engine], action.generate.generation.request
        assert where.reported_phase == "ready"
        if where.phase == "failed":
            self.take(self.core.engine_unreachable(action.generate, at(self.now)))
            return
        assert len(where.held) < MAX_RUNNING + MAX_WAITING
        where.held.append(request)
        self.end(request)

    def end(self, request: str) -> None:
        self.ends[request] += 1
        self.open.discard(request)

    def report(self, name: str) -> None:
        """A report that every placement before it has reached: time to settle has passed."""
        self.now += 0.2
        of = self.engines[name]
        if of.phase == "failed":
            return
        of.reported_phase = of.phase
        waiting, running = of.load()
        heard = engine(
            name, of.phase, waiting=waiting, running=running, max_waiting=MAX_WAITING, max_running=MAX_RUNNING
        )
        self.take(self.core.lifecycle(heard, at(self.now)))

    @rule(priority=st.integers(0, 2), avoid=st.sets(st.sampled_from(ENGINES)))
    def a_request_comes(self, priority: int, avoid: set[str]) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.open.add(name)
        self.take(self.core.route(route(name, priority=priority, avoid=tuple(avoid)), at(self.now)))

    @rule(name=st.sampled_from(ENGINES))
    def an_engine_reports(self, name: str) -> None:
        self.report(name)

    @rule(name=st.sampled_from(ENGINES), done=st.integers(1, 4))
    def an_engine_finishes_some(self, name: str, done: int) -> None:
        del self.engines[name].held[:done]

    @rule(name=st.sampled_from(ENGINES), phase=st.sampled_from(["ready", "draining"]))
    def an_engine_is_drained_or_undrained(self, name: str, phase: Phase) -> None:
        self.engines[name].phase = phase
        self.report(name)

    @rule(name=st.sampled_from(ENGINES))
    def an_engine_dies_unnoticed(self, name: str) -> None:
        self.engines[name].phase = "failed"
        self.engines[name].held.clear()

    @rule(name=st.sampled_from(ENGINES))
    def a_dead_engine_is_started_again(self, name: str) -> None:
        if self.engines[name].phase == "failed":
            self.engines[name].phase = "ready"
            self.report(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def a_client_goes_away(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.take(self.core.withdraw(Withdraw(RequestId(name), Attempt(1))))
        self.end(name)

    @rule(seconds=st.floats(0.01, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.core.fleet.record_lifecycle(detokenizer(), at(self.now))
        self.take(self.core.time_passed(at(self.now)))

    @invariant()
    def each_request_has_one_end_or_waits(self) -> None:
        assert all(count == 1 for count in self.ends.values())
        assert {w.generation.request for w in self.core.queue} == self.open
        assert len(self.core.queue) <= 4

    @invariant()
    def the_queue_is_one(self) -> None:
        ordered = [w for model in self.core.queue.models() for w in self.core.queue.in_order(model)]
        assert len(ordered) == len(self.core.queue)
        assert ordered == sorted(ordered)


Placement.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPlacement = Placement.TestCase


class Fairness(RuleBasedStateMachine):
    """Equal engines that finish nothing get equal shares, whatever the reports' timing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held = dict.fromkeys(ENGINES, 0)
        self.core = Coordinator(InstanceId("coordinator-1"), CoordinatorConfig(router_policy="least-loaded"))
        self.core.lifecycle(detokenizer(), at(0))
        for name in ENGINES:
            self.core.lifecycle(engine(name, max_running=1000), at(0))

    @rule()
    def a_request_comes(self) -> None:
        (action,) = self.core.route(route(f"r{sum(self.held.values())}"), at(self.now))
        assert isinstance(action, PlaceRequest)
        self.held[action.engine] += 1

    @rule(name=st.sampled_from(ENGINES))
    def an_engine_reports(self, name: str) -> None:
        self.now += 0.2
        self.core.fleet.record_lifecycle(detokenizer(), at(self.now))
        self.core.lifecycle(engine(name, running=self.held[name], max_running=1000), at(self.now))

    @invariant()
    def no_engine_has_two_more_than_another(self) -> None:
        assert max(self.held.values()) - min(self.held.values()) <= 1


Fairness.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestFairness = Fairness.TestCase
