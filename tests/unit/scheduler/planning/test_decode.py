"""The scheduler over a pipeline: plans fill the stages, and none waits for a token that another stage is to draw."""

from __future__ import annotations

from collections import deque

import pytest

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import Event, SendPlan, SendTokens, WorkersReady
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from shared.ids import EngineId, Incarnation, SequenceId
from shared.messages.scheduler import StepFinished
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import HonestWorker, card, generate, right_output


class Pipe:
    """An engine whose ranks form `stages`; results come one by one, the oldest first."""

    def __init__(self, stages: int, run_ahead: int, blocks: int = 64) -> None:
        self.stages = stages
        self.engine = EngineCore(EngineId("e"), Incarnation(1), EngineLimits(run_ahead=run_ahead, plan_late=False))
        self.worker = HonestWorker(blocks)
        self.plans: list[StepPlan] = []
        self.finished = 0
        self.output: dict[str, list[int]] = {}
        self.results: deque[StepFinished] = deque()
        self.tell(WorkersReady(card(), blocks, stages=stages))

    @property
    def in_flight(self) -> int:
        return len(self.plans) - self.finished

    def tell(self, event: Event) -> None:
        outputs = self.engine.handle(event, 0.0)
        check(self.engine)
        for output in outputs:
            if isinstance(output, SendPlan):
                self.plans.append(output.plan)
                self.results.append(self.worker.step(output.plan))
            elif isinstance(output, SendTokens):
                for entry in output.batch.entries:
                    self.output.setdefault(entry.request, []).extend(entry.tokens)

    def step(self) -> None:
        self.finished += 1
        self.tell(self.results.popleft())

    def drawn(self, plan: StepPlan) -> set[SequenceId]:
        return {work.sequence for work in plan.work if work.sample}


def run(pipe: Pipe, requests: int, tokens: int) -> None:
    """Each plan, as it was sent, against those whose results were not known then."""
    asked = [generate(f"r{i}", [4 + i] * 5, max_tokens=tokens, ignore_eos=True) for i in range(requests)]
    for request in asked:
        pipe.tell(request)
    while pipe.in_flight:
        known, sent = pipe.finished + 1, len(pipe.plans)
        pipe.step()
        for number in range(sent, len(pipe.plans)):
            unknown = pipe.plans[max(known, number - pipe.stages + 1) : number]
            held = {work.sequence for work in pipe.plans[number].work}
            assert not held & set().union(*map(pipe.drawn, unknown)), "its token is drawn by a plan beside it"
    assert [pipe.output[r.generation.request] for r in asked] == [right_output(r, 256)[0] for r in asked]


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("requests", [1, 2, 5])
def test_no_sequence_is_in_two_plans_that_are_computed_at_a_time(stages: int, run_ahead: int, requests: int) -> None:
    run(Pipe(stages, run_ahead), requests, 20)


def test_preempted_sequences_come_back_with_the_token_that_was_on_its_way() -> None:
    pipe = Pipe(2, 1, blocks=7)
    run(pipe, 4, 40)
    assert pipe.engine.epoch_state is not None
    assert pipe.engine.epoch_state.planner.preemption.count > 0


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_as_many_plans_are_in_flight_as_there_are_stages_and_those_that_lie_ready(run_ahead: int) -> None:
    pipe = Pipe(3, run_ahead)
    for i in range(9):
        pipe.tell(generate(f"r{i}", [4] * 5, max_tokens=40, ignore_eos=True))
    most = 0
    for _ in range(20):
        most = max(most, pipe.in_flight)
        pipe.step()
    assert most == 3 + run_ahead
    assert pipe.in_flight == 3 + run_ahead


@pytest.mark.parametrize(("requests", "parts"), [(7, [2, 2, 3]), (4, [1, 1, 2]), (3, [1, 1, 1]), (9, [3, 3, 3])])
def test_each_plan_holds_its_part_of_those_that_decode(requests: int, parts: list[int]) -> None:
    pipe = Pipe(3, 0)
    for i in range(requests):
        pipe.tell(generate(f"r{i}", [4] * 5, max_tokens=40, ignore_eos=True))
    for _ in range(12):
        pipe.step()
    sizes = [len(plan.work) for plan in pipe.plans[-6:]]
    assert sizes[:3] == sizes[3:]
    assert sorted(sizes[:3]) == parts
