"""A processor with two threads: prepared ahead, computed in order, at rest before a new epoch."""

from __future__ import annotations

import asyncio
import queue
import threading

import pytest

from services.worker.backend import ExecutionMode, StepOutput
from services.worker.executor.plan_queue import MAX_QUEUED_PLANS, Notifier, PlanQueue
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
        thread.submit(plan(number), first=number == 0)
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
    thread.submit(plan(0), first=True)
    await thread.result()
    await asyncio.sleep(0.01)
    processor.gate("1.1").set()
    thread.submit(plan(1), first=False)
    second = await thread.result()
    assert second.output is not None
    assert second.output.timing.wait >= 0.01
    assert second.output.timing.prepare > 0
    await thread.stop()


async def test_a_new_epoch_begins_when_all_that_was_prepared_is_computed() -> None:
    processor = Processor()
    thread = await started(processor)
    thread.submit(plan(0), first=True)
    await processor.says("compute 1.0")
    thread.submit(plan(0, epoch=2), first=True)
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
    thread.submit(plan(0), first=True)
    await processor.says("compute 1.0")
    thread.submit(plan(0, epoch=2), first=True)
    await asyncio.sleep(0.05)
    thread.submit(plan(1, epoch=2), first=False)
    thread.submit(plan(0, epoch=3), first=True)
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
        thread.submit(plan(number), first=number == 0)
    assert (await thread.result()).plan.step == 0
    with pytest.raises(error):
        await thread.result()


async def test_more_plans_than_may_lie_ready_are_a_bug() -> None:
    flow = PlanQueue(skip_void=True)
    for number in range(MAX_QUEUED_PLANS):
        flow.submit(plan(number), first=False)
    with pytest.raises(queue.Full):
        flow.submit(plan(MAX_QUEUED_PLANS), first=False)
    flow.close()


async def test_a_bell_that_is_rung_from_another_thread_is_answered_on_the_loop() -> None:
    answered = asyncio.Event()
    answers: list[str] = []

    def answer() -> None:
        answers.append(threading.current_thread().name)
        answered.set()

    bell = Notifier(answer)

    def ring() -> None:
        for _ in range(100_000):
            bell.notify()

    ringing = threading.Thread(target=ring)
    ringing.start()
    ringing.join()  # while nobody answers: a full pipe has rung often enough
    assert answers == []
    async with asyncio.timeout(SECONDS):
        await answered.wait()
        answered.clear()
        while True:
            before = len(answers)
            await asyncio.sleep(0.01)
            if len(answers) == before:
                break
        bell.notify()
        await answered.wait()
    assert set(answers) == {threading.current_thread().name}
    bell.close()
