"""A processor with two threads: prepared ahead, computed in order, at rest before a new epoch."""

from __future__ import annotations

import asyncio
import queue
import threading

import pytest

from services.worker.backend import ExecutionMode, StepOutput
from services.worker.executor.plan_queue import MAX_QUEUED_PLANS, ComputedPlan, PlanGap, PlanQueue, ResultQueue
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan
from tests.unit.worker.executor.test_compute_thread import SECONDS, Scripted, plan, started


class Processor(Scripted):
    """Computes a step once it is let go."""

    mode: ExecutionMode = "prepared"

    def __init__(self) -> None:
        super().__init__()
        self.unpreparable: str | None = None

    def prepare(self, plan: StepPlan) -> Step:
        name = f"{plan.epoch}.{plan.step}"
        self.note(f"prepare {name}")
        if name == self.unpreparable:
            raise LookupError("no such sequence")
        return Step(self, name)


class Step:
    def __init__(self, processor: Processor, name: str) -> None:
        self._processor, self._name = processor, name

    def launch(self) -> None:
        self._processor.note(f"compute {self._name}")
        assert self._processor.gate(self._name).wait(SECONDS)
        if self._name == self._processor.burns:
            raise ArithmeticError("the processor burns")
        self._processor.note(f"done {self._name}")

    def result(self) -> StepOutput:
        return StepOutput((), StepTiming(wait=0, prepare=0, forward=1, sample=0))


async def test_steps_are_prepared_while_one_is_computed_and_computed_in_order() -> None:
    processor = Processor()
    thread = await started(processor)
    for number in range(4):
        thread.submit(plan(number))
    await processor.says("prepare 1.3")  # so the two before it are prepared
    assert "compute 1.1" not in processor.said
    for number in range(4):
        processor.gate(f"1.{number}").set()
    results = [await thread.result() for _ in range(4)]
    assert [result.plan.step for result in results] == [0, 1, 2, 3]
    outputs = [result.output for result in results if result.output is not None]
    assert [(output.timing.wait, output.timing.prepare) for output in outputs[1:3]] == [(0, 0)] * 2, "nothing held up"
    await thread.stop()


async def test_what_is_prepared_late_has_held_the_processor_up() -> None:
    processor = Processor()
    thread = await started(processor)
    processor.gate("1.0").set()
    thread.submit(plan(0))
    await thread.result()
    await asyncio.sleep(0.01)
    processor.gate("1.1").set()
    thread.submit(plan(1))
    second = await thread.result()
    assert second.output is not None
    assert second.output.timing.wait >= 0.01
    assert second.output.timing.prepare > 0
    await thread.stop()


async def test_a_new_epoch_begins_when_all_that_was_prepared_is_computed() -> None:
    processor = Processor()
    thread = await started(processor)
    thread.submit(plan(0))
    await processor.says("compute 1.0")
    thread.submit(plan(0, epoch=2))
    await asyncio.sleep(0.05)
    assert processor.said.count("reset") == 1, "that of the first"
    processor.gate("1.0").set()
    await processor.says("done 1.0")
    processor.gate("2.0").set()
    await processor.says("done 2.0")
    said = processor.said
    assert said.index("done 1.0") < said.index("reset", 2) < said.index("prepare 2.0")
    await thread.stop()


async def test_a_step_of_an_epoch_that_is_over_is_left_out_in_its_place() -> None:
    processor = Processor()
    thread = await started(processor)
    thread.submit(plan(0))
    await processor.says("compute 1.0")
    thread.submit(plan(0, epoch=2))
    await asyncio.sleep(0.05)
    thread.submit(plan(1, epoch=2))
    thread.submit(plan(0, epoch=3))
    for name in ("1.0", "2.0", "2.1", "3.0"):
        processor.gate(name).set()
    results = [await thread.result() for _ in range(4)]
    assert [(r.plan.epoch, r.plan.step) for r in results] == [(1, 0), (2, 0), (2, 1), (3, 0)]
    assert results[2].output is None
    assert "prepare 2.1" not in processor.said
    await thread.stop()


@pytest.mark.parametrize(("where", "error"), [("burns", ArithmeticError), ("unpreparable", LookupError)])
async def test_what_either_thread_raises_is_raised_where_results_are_awaited(
    where: str, error: type[Exception]
) -> None:
    processor = Processor()
    setattr(processor, where, "1.1")
    thread = await started(processor)
    for number in range(2):
        processor.gate(f"1.{number}").set()
        thread.submit(plan(number))
    assert (await thread.result()).plan.step == 0
    with pytest.raises(error):
        await thread.result()


async def test_plans_must_be_consecutive_from_step_zero() -> None:
    plans = PlanQueue(skip_void=True)

    def take(epoch: int, step: int) -> object:
        return plans.submit(plan(step, epoch))

    assert take(1, 1) == PlanGap(0)
    assert [take(1, 0), take(1, 1), take(1, 1), take(1, 3)] == ["first", "next", "repeated", PlanGap(2)]
    assert take(1, 2) == "next"
    assert [take(2, 1), take(2, 0), take(2, 1)] == [PlanGap(0), "first", "next"]
    assert (plans.epoch, plans.expected) == (2, 2)
    plans.end()
    waiting = [(each.plan.epoch, each.plan.step, each.first, each.void) for each in iter(plans.next_plan, None)]
    assert waiting == [
        (1, 0, True, True),
        (1, 1, False, True),
        (1, 2, False, True),
        (2, 0, True, False),
        (2, 1, False, False),
    ]
    plans.results.close()


async def test_more_plans_than_may_lie_ready_are_a_bug() -> None:
    flow = PlanQueue(skip_void=True)
    for number in range(MAX_QUEUED_PLANS):
        flow.submit(plan(number))
    with pytest.raises(queue.Full):
        flow.submit(plan(MAX_QUEUED_PLANS))
    flow.results.close()


async def test_results_of_another_thread_come_to_the_loop_in_their_order() -> None:
    results = ResultQueue()

    def put(first: int, last: int) -> None:
        for number in range(first, last):
            results.put(ComputedPlan(plan(number), None))

    putting = threading.Thread(target=put, args=(0, 100_000))
    putting.start()
    putting.join()  # while nobody reads: a full pipe holds notices enough
    async with asyncio.timeout(SECONDS):
        assert [(await results.get()).plan.step for _ in range(100_000)] == list(range(100_000))
        waiting = asyncio.create_task(results.get())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        putting = threading.Thread(target=put, args=(7, 8))
        putting.start()
        assert (await waiting).plan.step == 7
        putting.join()
    results.close()
