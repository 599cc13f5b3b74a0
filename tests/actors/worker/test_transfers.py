"""What a rank tells of its transfers: after each, cumulative, and in its lifecycle; plans of nothing else work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from services.worker.actor import WorkerActor
from services.worker.backend import Backend, StepOutput
from services.worker.kv.copy_thread import MAX_FAILED_REPORTED, TransferLedger
from services.worker.rank_identity import RankIdentity
from shared import topics
from shared.actor import ActorRuntime
from shared.bus.memory_bus import MemoryBus
from shared.ids import ArenaId, Incarnation, InstanceId, ModelName
from shared.messages.lifecycle import Lifecycle, WorkerReport
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import StepFinished, StepTiming, TransferProgress, WorkerResult
from shared.messages.worker import StepPlan, Transfer
from tests.support.engines.engine_on_a_bus import ENGINE, make_model, sim_backend
from tests.support.kv.ranks import BLOCKS, Rank, make_arena, make_layout, transfer
from tests.support.worker.step_by_step import StepByStep

LAYOUT = make_layout("bfloat16")


class Memory(StepByStep):
    """A device that computes nothing and has KV memory."""

    def __init__(self, directory: Path) -> None:
        self.rank = Rank("torch", LAYOUT, directory)
        self.rank.compute()
        self.kv = self.rank.share
        self.card = ModelCard(
            name=ModelName("m"), max_model_len=8, vocab_size=8, eos_token_ids=(), dtype="x", created=0
        )
        self.num_blocks, self.device = BLOCKS, "memory"
        self.max_speculate = self.max_jump_ahead = self.max_loras = 0
        self.rows_per_draft = 1
        self.adapters = self.expert_load = self.group = None
        self.prefix_caching, self.state_checkpoints = True, 0
        self.grammars = None

    def step(self, plan: StepPlan) -> StepOutput:
        return StepOutput((), StepTiming(wait=0, prepare=0, forward=0, sample=0))

    def reset(self) -> None:
        pass


class Heard:
    """What the scheduler hears."""

    def __init__(self) -> None:
        self.results: list[WorkerResult] = []
        self.reports: list[WorkerReport] = []

    async def result(self, message: WorkerResult) -> None:
        self.results.append(message)

    async def life(self, life: Lifecycle) -> None:
        if life.worker is not None:
            self.reports.append(life.worker)

    @property
    def transferred(self) -> list[TransferProgress]:
        return [result for result in self.results if isinstance(result, TransferProgress)]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def worker(
    bus: MemoryBus, make: Callable[[], Backend], directory: Path | None, rank: int = 0
) -> AsyncIterator[Heard]:
    heard = Heard()
    await bus.subscribe(topics.engine_results(ENGINE), heard.result)
    await bus.subscribe(topics.lifecycles(), heard.life)
    place = RankIdentity(ENGINE, rank, rank + 1, kvstore_dir=directory)
    runtime = ActorRuntime(WorkerActor(bus, InstanceId("w"), place, make), drain_timeout=1.0)
    task = asyncio.create_task(runtime.run())
    await heard.until(lambda: heard.reports)
    try:
        yield heard
    finally:
        runtime.stop()
        await task


async def plan(bus: MemoryBus, epoch: int, step: int, *transfers: Transfer) -> None:
    message = StepPlan(epoch=Incarnation(epoch), step=step, transfers=transfers)
    await bus.publish(topics.engine_steps(ENGINE), message)


async def test_each_transfer_that_is_over_is_told_with_all_before_it(memory_bus: MemoryBus, tmp_path: Path) -> None:
    make_arena(tmp_path, LAYOUT)
    async with worker(memory_bus, lambda: Memory(tmp_path), tmp_path) as heard:
        wrong = transfer("load", [4], [4], number=1, arena=ArenaId(5))
        await plan(memory_bus, 1, 0, transfer("save", [1], [1], number=0))
        await plan(memory_bus, 1, 1, wrong, transfer("load", [2], [1], number=2))
        await heard.until(lambda: len(heard.transferred) == 3)
        epoch = Incarnation(1)
        assert heard.transferred == [
            TransferProgress(rank=0, epoch=epoch, done=1),
            TransferProgress(rank=0, epoch=epoch, done=2, failed=(1,)),
            TransferProgress(rank=0, epoch=epoch, done=3, failed=(1,)),
        ]
        finished = [result for result in heard.results if isinstance(result, StepFinished)]
        assert [(f.step, f.sampled) for f in finished] == [(0, ()), (1, ())], "plans of nothing but transfers"
        await heard.until(lambda: heard.reports[-1].transfers == heard.transferred[-1])
        assert heard.reports[-1].layout == LAYOUT


async def test_every_rank_tells_of_its_own(memory_bus: MemoryBus, tmp_path: Path) -> None:
    make_arena(tmp_path, LAYOUT)
    async with worker(memory_bus, lambda: Memory(tmp_path), tmp_path, rank=1) as heard:
        await plan(memory_bus, 1, 0, transfer("save", [1], [1], number=0))
        await heard.until(lambda: heard.transferred)
        assert heard.results == [TransferProgress(rank=1, epoch=Incarnation(1), done=1)], "and nothing of steps"


async def test_a_new_epoch_counts_anew(memory_bus: MemoryBus, tmp_path: Path) -> None:
    make_arena(tmp_path, LAYOUT)
    async with worker(memory_bus, lambda: Memory(tmp_path), tmp_path) as heard:
        await plan(memory_bus, 1, 0, transfer("load", [1], [1], number=0))
        await heard.until(lambda: heard.transferred)
        await plan(memory_bus, 2, 0, transfer("save", [1], [1], number=0))
        await heard.until(lambda: len(heard.transferred) == 2)
        assert heard.transferred == [
            TransferProgress(rank=0, epoch=Incarnation(1), done=1, failed=(0,)),
            TransferProgress(rank=0, epoch=Incarnation(2), done=1),
        ]


async def test_without_a_stores_directory_every_transfer_fails_at_once(memory_bus: MemoryBus, tmp_path: Path) -> None:
    async with worker(memory_bus, lambda: Memory(tmp_path), None) as heard:
        await plan(memory_bus, 1, 0, transfer("save", [1], [1], number=0))
        await heard.until(lambda: heard.transferred)
        assert heard.transferred == [TransferProgress(rank=0, epoch=Incarnation(1), done=1, failed=(0,))]


async def test_a_simulated_rank_shares_thin_blocks(memory_bus: MemoryBus, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    async with worker(memory_bus, lambda: sim_backend(model), tmp_path) as heard:
        await plan(memory_bus, 1, 0, transfer("load", [1], [1], number=0))
        await heard.until(lambda: heard.transferred)
        assert heard.transferred == [TransferProgress(rank=0, epoch=Incarnation(1), done=1, failed=(0,))]
        layout = heard.reports[-1].layout
        assert layout is not None
        assert (layout.layers, layout.kv_heads, layout.head_dim) == (1, 1, 1)


def taken(epoch: int, *transfers: Transfer) -> StepPlan:
    return StepPlan(epoch=Incarnation(epoch), step=0, transfers=transfers)


def test_a_ledger_counts_one_epoch_and_remembers_the_newest_failures() -> None:
    ledger = TransferLedger(rank=3)
    assert ledger.report() is None
    ledger.record(taken(1, *[transfer("save", [0], [0])] * 300))
    for number in range(300):
        ledger.finish(Incarnation(1), number, failed=True)
    report = ledger.report()
    assert report is not None
    assert (report.rank, report.done, report.failed) == (3, 300, tuple(range(300 - MAX_FAILED_REPORTED, 300)))
    assert ledger.pending == 0
    ledger.record(taken(2, transfer("save", [0], [0])))
    assert ledger.finish(Incarnation(1), 300, failed=False) is None, "nobody wants to know any more"
    assert ledger.pending == 1
    assert ledger.report() == TransferProgress(rank=3, epoch=Incarnation(2), done=0)
