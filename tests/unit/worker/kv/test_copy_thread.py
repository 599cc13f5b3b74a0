"""When copies happen: beside steps and never before their turn, and never once a new epoch computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from services.worker.backend import StepOutput
from services.worker.executor.compute_thread import ComputeThread
from services.worker.executor.plan_queue import PlanQueue
from services.worker.kv import copy_thread
from services.worker.kv.copier import Copied, RankKvCache, TransferChunk
from services.worker.kv.copy_thread import CopyingStuck, CopyThread, TransferEnded, around
from services.worker.kv.rank_heads import RankHeads
from shared.ids import Incarnation, ModelName
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import StepTiming
from shared.messages.worker import StepPlan, Transfer
from tests.support.kv.ranks import BLOCKS, make_arena, make_layout, transfer
from tests.support.worker.step_by_step import StepByStep

LAYOUT = make_layout("float32")
SECONDS = 60.0
"""A test that waits this long has failed."""


class Scripted(StepByStep):
    """A device and its memory in one: writes down what is done to it, and waits where a test tells it to."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.card = ModelCard(
            name=ModelName("m"), max_model_len=8, vocab_size=8, eos_token_ids=(), dtype="x", created=0
        )
        self.num_blocks, self.device = BLOCKS, "scripted"
        self.max_speculate = self.max_jump_ahead = self.max_loras = 0
        self.rows_per_draft = 1
        self.adapters = self.expert_load = self.group = None
        self.grammars = None
        self.kv = RankKvCache(LAYOUT, 0, LAYOUT.kv_heads, True, BLOCKS, self, 0, LAYOUT.layers)
        self.runs = ()
        self.held: dict[str, threading.Event] = {}
        self.reached: dict[str, threading.Event] = {}

    def hold(self, what: str) -> None:
        """`what` will wait when it has begun, until `let_go`."""
        self.held[what], self.reached[what] = threading.Event(), threading.Event()

    async def reaches(self, what: str) -> None:
        assert await asyncio.to_thread(self.reached[what].wait, SECONDS), f"{what} never began"

    def let_go(self, what: str) -> None:
        self.held[what].set()

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.held:
            self.reached[what].set()
            assert self.held[what].wait(SECONDS)
            self.done.append(f"{what} ends")

    def step(self, plan: StepPlan) -> StepOutput:
        self._do(f"step {plan.epoch}.{plan.step}")
        return StepOutput((), StepTiming(wait=0, prepare=0, forward=0, sample=0))

    def reset(self) -> None:
        self.done.append("reset")

    def bind(self, heads: RankHeads) -> Scripted:
        return self

    def save(self, chunk: TransferChunk) -> Copied:
        self._do(f"save {chunk.blocks[0]}")
        return "all"

    def load(self, chunk: TransferChunk) -> Copied:
        self._do(f"load {chunk.blocks[0]}")
        return "all"

    def close(self) -> None:
        pass


class Running:
    """Both threads over one scripted device."""

    def __init__(self, device: Scripted, directory: Path, *, skip_void: bool) -> None:
        self.device = device
        self.copies = CopyThread(directory)
        self.plans = PlanQueue(skip_void=skip_void)
        self.compute = ComputeThread(lambda: device, self.plans, self.copies)

    def plan(self, epoch: int, step: int, *transfers: Transfer) -> None:
        self.plans.submit(StepPlan(epoch=Incarnation(epoch), step=step, transfers=transfers))

    async def computed(self, plans: int) -> None:
        async with asyncio.timeout(SECONDS):
            for _ in range(plans):
                await self.plans.results.get()

    async def over(self, count: int) -> list[TransferEnded]:
        async with asyncio.timeout(SECONDS):
            return [await self.copies.next_ended() for _ in range(count)]


@asynccontextmanager
async def running(device: Scripted, directory: Path, *, skip_void: bool = True) -> AsyncIterator[Running]:
    make_arena(directory, LAYOUT)
    both = Running(device, directory, skip_void=skip_void)
    await both.compute.start()
    try:
        yield both
    finally:
        for held in device.held.values():
            held.set()
        await both.compute.stop()
        await both.copies.stop()


def copy(kind: Literal["load", "save"], number: int) -> Transfer:
    """Of block `number` alone, so that the log tells which it was."""
    return transfer(kind, [number], [number], number=number)


def test_a_load_waits_for_the_saves_before_it_and_for_nothing_else() -> None:
    load, save, late = copy("load", 0), copy("save", 1), copy("load", 2)
    assert around((load,)) == ((load,), ())
    assert around((load, save, late)) == ((load,), (save, late))
    assert around(()) == ((), ())


async def test_a_load_begins_when_the_plans_before_its_own_are_computed(tmp_path: Path) -> None:
    device = Scripted()
    device.hold("step 1.0")
    device.hold("step 1.1")
    async with running(device, tmp_path) as both:
        both.plan(1, 0)
        both.plan(1, 1, copy("load", 0))
        await device.reaches("step 1.0")
        assert device.done == ["reset", "step 1.0"]
        device.let_go("step 1.0")
        assert await both.over(1) == [TransferEnded(Incarnation(1), 0, False)]
        assert device.done.index("load 0") > device.done.index("step 1.0 ends")
        assert "step 1.1 ends" not in device.done, "it need not wait for its own plan"
        device.let_go("step 1.1")
        await both.computed(2)


async def test_a_save_begins_when_its_own_plan_is_computed(tmp_path: Path) -> None:
    device = Scripted()
    device.hold("step 1.0")
    async with running(device, tmp_path) as both:
        both.plan(1, 0, copy("save", 0), copy("load", 1))
        await device.reaches("step 1.0")
        device.let_go("step 1.0")
        await both.over(2)
        assert device.done == ["reset", "step 1.0", "step 1.0 ends", "save 0", "load 1"]


async def test_steps_never_wait_for_copies(tmp_path: Path) -> None:
    device = Scripted()
    device.hold("save 0")
    async with running(device, tmp_path) as both:
        both.plan(1, 0, copy("save", 0), copy("save", 1))
        await device.reaches("save 0")
        for step in range(1, 9):
            both.plan(1, step, *([copy("load", 2)] if step == 1 else []))
        await both.computed(9)
        assert "save 1" not in device.done
        device.let_go("save 0")
        assert [over.number for over in await both.over(3)] == [0, 1, 2], "in order"


async def test_a_new_epoch_begins_when_the_copy_in_hand_has_stopped_and_drops_the_others(tmp_path: Path) -> None:
    device = Scripted()
    device.hold("load 0")
    async with running(device, tmp_path) as both:
        both.plan(1, 0, copy("load", 0), copy("load", 1), copy("save", 2))
        await device.reaches("load 0")
        both.plan(2, 0, copy("save", 3))
        await asyncio.sleep(0.05)
        assert device.done.count("reset") == 1, "the old epoch's copy still goes into these blocks"
        assert "step 2.0" not in device.done
        device.let_go("load 0")
        assert (await both.over(2))[-1] == TransferEnded(Incarnation(2), 3, False)
        await both.computed(2)
        begun = device.done.index("step 2.0")
        assert device.done[begun:] == ["step 2.0", "save 3"]
        assert device.done.index("load 0 ends") < len(device.done) - 1 - device.done[::-1].index("reset")
        assert {"load 1", "save 2"}.isdisjoint(device.done)


async def test_what_void_plans_want_copied_is_left_out(tmp_path: Path) -> None:
    """Ranks that compute together execute void plans; their copies would be of an epoch that nobody awaits."""
    device = Scripted()
    device.hold("step 1.0")
    async with running(device, tmp_path, skip_void=False) as both:
        both.plan(1, 0, copy("save", 0))
        both.plan(1, 1, copy("load", 1))
        await device.reaches("step 1.0")
        both.plan(2, 0, copy("load", 2))
        device.let_go("step 1.0")
        await both.computed(3)
        assert await both.over(1) == [TransferEnded(Incarnation(2), 2, False)]
        assert [done for done in device.done if "step" not in done] == ["reset", "reset", "load 2"]


async def test_a_copy_that_does_not_stop_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_thread, "REST_TIMEOUT", 0.05)
    device = Scripted()
    device.hold("load 0")
    async with running(device, tmp_path) as both:
        both.plan(1, 0, copy("load", 0))
        await device.reaches("load 0")
        await both.computed(1)
        both.plan(2, 0)
        with pytest.raises(CopyingStuck):
            await both.computed(1)


async def test_a_bug_in_copying_ends_the_process(tmp_path: Path) -> None:
    device = Scripted()
    async with running(device, tmp_path) as both:
        both.plan(1, 0, replace(copy("load", 0), blocks=b""))
        with pytest.raises(Exception, match="0 blocks, 1 slots"):
            await both.over(1)


async def test_without_a_directory_every_transfer_fails_in_its_turn(tmp_path: Path) -> None:
    copies = CopyThread(None)
    copies.start(Scripted().kv)
    copies.add(Incarnation(1), [copy("load", 0), copy("save", 1)])
    async with asyncio.timeout(SECONDS):
        assert [await copies.next_ended() for _ in range(2)] == [
            TransferEnded(Incarnation(1), 0, True),
            TransferEnded(Incarnation(1), 1, True),
        ]
    await copies.stop()


async def test_too_many_transfers_are_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_thread, "MAX_WAITING_TRANSFERS", 2)
    copies = CopyThread(None)
    with pytest.raises(OverflowError):
        copies.add(Incarnation(1), [copy("load", number) for number in range(3)])
