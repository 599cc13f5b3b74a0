"""A device that works by itself: launched ahead, awaited in order, at rest before a new epoch."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AbstractContextManager, nullcontext

import pytest

from services.worker.backend import MAX_LAUNCHED_STEPS, ExecutionMode, StepOutput
from services.worker.executor.compute_thread import ComputeThread
from services.worker.executor.plan_queue import ComputedPlan, PlanQueue
from services.worker.kv.copy_thread import CopyThread
from services.worker.sim.backend import SimBackend
from shared.ids import Incarnation
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan
from tests.support.engines.checking_worker import card

SECONDS = 60.0


class Step:
    def __init__(self, device: Device, name: str, ended: float | None, began: float | None) -> None:
        self._device, self._name, self._ended, self._began = device, name, ended, began

    def launch(self) -> None:
        self._device.note(f"begin {self._name}")

    def result(self) -> StepOutput:
        self._device.note(f"await {self._name}")
        assert self._device.gate(self._name).wait(SECONDS)
        if self._name == self._device.burns:
            raise ArithmeticError("the device burns")
        self._device.note(f"done {self._name}")
        timing = StepTiming(wait=0, prepare=0, forward=1, sample=0)
        return StepOutput((), timing, ended=self._ended, began=self._began)


class Scripted:
    """What every backend has; notes what it is asked to do."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.burns: str | None = None
        self.kv = self.card = self.grammars = None
        self.num_blocks = self.max_speculate = self.max_jump_ahead = self.max_loras = 0
        self.rows_per_draft = 1
        self.adapters = self.expert_load = self.group = None
        self.device = "scripted"
        self._gates: dict[str, threading.Event] = {}
        self._changed = threading.Condition()
        self.ends: dict[str, float] = {}
        self.begins: dict[str, float] = {}

    def note(self, what: str) -> None:
        with self._changed:
            self.said.append(what)
            self._changed.notify_all()

    def gate(self, name: str) -> threading.Event:
        with self._changed:
            return self._gates.setdefault(name, threading.Event())

    async def says(self, what: str) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: what in self.said, SECONDS)

        assert await asyncio.to_thread(wait), f"never: {what}; {self.said}"

    def compute_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reset(self) -> None:
        self.note("reset")


class Device(Scripted):
    """Computes a step once it is let go."""

    mode: ExecutionMode = "launched"

    def prepare(self, plan: StepPlan) -> Step:
        name = f"{plan.epoch}.{plan.step}"
        return Step(self, name, self.ends.get(name), self.begins.get(name))


def plan(step: int, epoch: int = 1) -> StepPlan:
    return StepPlan(epoch=Incarnation(epoch), step=step)


class Running:
    """A compute thread and its plans."""

    def __init__(self, device: Scripted) -> None:
        self._plans = PlanQueue(skip_void=True)
        self.thread = ComputeThread(lambda: device, self._plans, CopyThread(None))  # type: ignore[arg-type,return-value]

    def submit(self, plan: StepPlan) -> None:
        assert self._plans.submit(plan) in ("first", "next")

    async def result(self) -> ComputedPlan:
        return await self._plans.results.get()

    async def stop(self) -> None:
        await self.thread.stop()


async def started(device: Scripted) -> Running:
    running = Running(device)
    await running.thread.start()
    return running


def test_the_simulated_device_works_by_itself() -> None:
    assert SimBackend(card(), 8, None, [2], "sim").mode == Device().mode == "launched"


async def test_the_next_step_is_begun_while_the_device_computes_and_no_third() -> None:
    device = Device()
    thread = await started(device)
    for number in range(4):
        thread.submit(plan(number))
    await device.says("begin 1.1")
    await device.says("await 1.0")
    assert "begin 1.3" not in device.said, f"{MAX_LAUNCHED_STEPS} are begun, and one waits to be told"
    for number in range(4):
        device.gate(f"1.{number}").set()
    assert [(await thread.result()).plan.step for _ in range(4)] == [0, 1, 2, 3]
    await thread.stop()


async def test_results_come_in_the_order_of_the_plans() -> None:
    device = Device()
    thread = await started(device)
    for number in range(2):
        thread.submit(plan(number))
    device.gate("1.1").set()
    await device.says("begin 1.1")
    assert "await 1.1" not in device.said
    device.gate("1.0").set()
    assert [(await thread.result()).plan.step for _ in range(2)] == [0, 1]
    await thread.stop()


async def test_a_new_epoch_begins_when_the_device_is_at_rest() -> None:
    device = Device()
    thread = await started(device)
    thread.submit(plan(0))
    await device.says("await 1.0")
    thread.submit(plan(0, epoch=2))
    device.gate("2.0").set()
    await asyncio.sleep(0.05)
    assert "reset" not in device.said[2:]
    device.gate("1.0").set()
    await device.says("done 2.0")
    assert device.said.index("done 1.0") < device.said.index("reset", 2) < device.said.index("begin 2.0")
    await thread.stop()


async def test_steps_of_an_epoch_that_is_over_are_left_out_in_their_place() -> None:
    device = Device()
    thread = await started(device)
    thread.submit(plan(0))
    await device.says("await 1.0")
    thread.submit(plan(1))
    await device.says("begin 1.1")
    thread.submit(plan(2))
    thread.submit(plan(3))
    thread.submit(plan(0, epoch=2))
    for name in ("1.0", "1.1", "1.2", "2.0"):
        device.gate(name).set()
    results = [await thread.result() for _ in range(5)]
    assert [(r.plan.epoch, r.plan.step) for r in results] == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert results[3].output is None
    assert "begin 1.3" not in device.said
    await thread.stop()


async def test_what_the_device_raises_is_raised_where_results_are_awaited() -> None:
    device = Device()
    device.burns = "1.1"
    thread = await started(device)
    for number in range(2):
        thread.submit(plan(number))
    for number in range(2):
        device.gate(f"1.{number}").set()
    assert (await thread.result()).plan.step == 0
    with pytest.raises(ArithmeticError, match="burns"):
        await thread.result()


async def test_a_step_that_was_prepared_beside_another_has_held_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    device = Device()
    thread = await started(device)
    monkeypatch.setattr("services.worker.executor.plan_queue.time.perf_counter", lambda: now[0])
    thread.submit(plan(0))
    await device.says("await 1.0")
    now[0] = 2.0
    thread.submit(plan(1))
    await device.says("begin 1.1")
    device.ends["1.2"] = 60.0
    now[0] = 4.0
    device.gate("1.0").set()
    first = await thread.result()
    now[0] = 5.0
    device.gate("1.1").set()
    second = await thread.result()
    assert first.output is not None
    assert second.output is not None
    assert (second.output.timing.wait, second.output.timing.prepare) == (0.0, 0.0)
    assert (first.ended, second.ended) == (4.0, 5.0)
    now[0] = 6.0
    thread.submit(plan(2))
    device.gate("1.2").set()
    third = await thread.result()
    assert third.output is not None
    assert third.ended == 60.0, "the device knows best"
    assert third.output.timing.wait == 1.0, "nothing lay ready when the second had ended"
    device.begins["1.3"] = 62.5
    thread.submit(plan(3))  # has come long ago, as the device's clock goes
    device.gate("1.3").set()
    fourth = await thread.result()
    assert fourth.output is not None
    assert fourth.output.timing.prepare == 2.5, "from the end of the third until the device began"
    await thread.stop()


class Processor(Scripted):
    """Computes while it is called, and puts the result into words later."""

    def __init__(self) -> None:
        super().__init__()
        self.worded_on: list[str] = []

    mode: ExecutionMode = "sequential"

    def prepare(self, plan: StepPlan) -> Words:
        return Words(self, plan)


class Words:
    def __init__(self, processor: Processor, plan: StepPlan) -> None:
        self._processor, self._plan = processor, plan

    def launch(self) -> None:
        self._processor.note(f"compute {self._plan.step}")

    def result(self) -> StepOutput:
        self._processor.worded_on.append(threading.current_thread().name)
        return StepOutput((), StepTiming(wait=0, prepare=2, forward=1, sample=0))


async def test_what_a_processor_computed_is_put_into_words_beside_the_next_step() -> None:
    processor = Processor()
    thread = await started(processor)
    for number in range(3):
        thread.submit(plan(number))
    await processor.says("compute 2")
    assert processor.worded_on == [], "nobody has asked yet, and the next step did not wait for that"
    results = [await thread.result() for _ in range(3)]
    assert [result.plan.step for result in results] == [0, 1, 2]
    assert set(processor.worded_on) == {threading.current_thread().name}
    outputs = [result.output for result in results if result.output is not None]
    assert [(int(output.timing.prepare), output.timing.forward) for output in outputs] == [(2, 1)] * 3
    assert all(output.timing.prepare > 2 for output in outputs), "preparing before it was launched counts, too"
    assert [output.timing.wait for output in outputs[1:]] == [0.0, 0.0], "their plans lay ready"
    await thread.stop()
