"""The worker's shell: plans from the bus to the compute thread, results back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from services.worker import metrics
from services.worker.backend import Backend, StepOutput
from services.worker.compute_thread import ComputeThread
from services.worker.copy_thread import CopyThread
from services.worker.guided.compile_desk import CompileDesk
from services.worker.kv.transfer_ledger import TransferLedger
from services.worker.step_order import Gap, StepOrder
from services.worker.step_sums import added
from shared import topics
from shared.actor import Actor, Hears
from shared.bus import Bus
from shared.ids import EngineId, InstanceId
from shared.messages.lifecycle import StepSums, WorkerReport
from shared.messages.scheduler import StepFinished, StepMissed
from shared.messages.worker import StepPlan

log = logging.getLogger(__name__)


class OutOfStep(Exception):
    """A rank of several missed a plan. The others wait for it inside that step, so the engine's ranks start anew."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which engine this process is, and what its scheduler may ask of it."""

    engine: EngineId
    rank: int = 0
    world_size: int = 1
    stages: int = 1
    """Of the pipeline that the ranks form."""
    max_num_seqs: int | None = None
    max_batch_tokens: int | None = None
    kvstore_dir: Path | None = None
    """None: what it asks to be copied to or from a KV store fails."""

    @property
    def publishes(self) -> bool:
        """One rank speaks for all: the first of the last stage, which draws the tokens."""
        return self.rank == self.world_size - self.world_size // self.stages


class WorkerActor(Actor):
    """Owns one rank's compute thread and copy thread. Decides nothing: it executes plans in order, says how far their
    transfers are, and when a plan is missing."""

    service = "worker"

    def __init__(self, bus: Bus, instance: InstanceId, place: Place, make_backend: Callable[[], Backend]) -> None:
        super().__init__(bus, instance)
        self._place = place
        self._copies = CopyThread(place.kvstore_dir)
        self._thread = ComputeThread(make_backend, self._copies, skip_void=place.world_size == 1)
        self._backend: Backend | None = None
        self._order = StepOrder()
        self._ledger = TransferLedger(place.rank)
        self._grammars = CompileDesk()
        self._in_hand = 0
        self._published = 0
        self._sums = StepSums()

    def hears(self) -> Sequence[Hears[Any]]:
        return [Hears(topics.engine_steps(self._place.engine))]

    async def set_up(self) -> None:
        self._backend = await self._thread.start()
        extra = {"device": self._backend.device, "blocks": self._backend.num_blocks}
        log.info("backend ready", extra=extra)

    async def handle(self, message: StepPlan) -> None:
        verdict = self._order.take(message)
        match verdict:
            case "first" | "next":
                if verdict == "first":
                    self._published = 0
                self._in_hand += 1
                self._ledger.took(message)
                if message.compile and self._place.publishes:
                    self._grammars.ask(self._ready.grammars, message.epoch, message.compile)
                self._thread.submit(message, first=verdict == "first")
            case "repeated":
                log.warning("plan came twice", extra={"step": message.step})
            case Gap(expected):
                await self._missed(message, expected)

    async def background(self) -> None:
        async with asyncio.TaskGroup() as all_three:
            all_three.create_task(self._tell_steps())
            all_three.create_task(self._tell_transfers())
            all_three.create_task(self._tell_grammars())

    async def _tell_grammars(self) -> None:
        while True:
            await self.bus.publish(topics.engine_results(self._place.engine), await self._grammars.told())

    @property
    def _ready(self) -> Backend:
        assert self._backend is not None, "messages come behind set_up"
        return self._backend

    async def _tell_transfers(self) -> None:
        while True:
            over = await self._copies.over()
            told = self._ledger.over(over.epoch, over.number, failed=over.failed)
            if told is not None:
                await self.bus.publish(topics.engine_results(self._place.engine), told)

    async def _tell_steps(self) -> None:
        while True:
            plan, output, ended = await self._thread.result()
            self._in_hand -= 1
            if output is None:
                continue
            output = replace(output, timing=replace(output.timing, answer=max(0.0, time.perf_counter() - ended)))
            if self._place.publishes:
                await self._publish(plan, output)
            metrics.note_step(plan, output)
            self._sums = added(self._sums, plan, output)

    async def _publish(self, plan: StepPlan, output: StepOutput) -> None:
        if plan.epoch == self._order.epoch:
            self._published += 1
        finished = StepFinished(
            epoch=plan.epoch,
            step=plan.step,
            sampled=output.sampled,
            timing=output.timing,
            drafted=output.drafted,
            accepted=output.accepted,
            scored=output.scored,
        )
        await self.bus.publish(topics.engine_results(self._place.engine), finished)

    async def tear_down(self) -> None:
        await self._thread.stop()
        await self._copies.stop()

    def is_idle(self) -> bool:
        return self._in_hand == 0 and self._ledger.outstanding == 0

    def load(self) -> int:
        return self._in_hand

    def worker_report(self) -> WorkerReport | None:
        if self._backend is None:
            return None
        return WorkerReport(
            engine=self._place.engine,
            rank=self._place.rank,
            world_size=self._place.world_size,
            stages=self._place.stages,
            model=self._backend.card,
            num_blocks=self._backend.num_blocks,
            device=self._backend.device,
            epoch=self._order.epoch,
            received=self._order.expected,
            published=self._published,
            max_num_seqs=self._place.max_num_seqs,
            max_batch_tokens=self._place.max_batch_tokens,
            layout=None if self._backend.kv is None else self._backend.kv.layout,
            transfers=self._ledger.report(),
            max_speculate=self._backend.max_speculate,
            max_jump_ahead=self._backend.max_jump_ahead,
            sums=self._sums,
        )

    async def _missed(self, plan: StepPlan, expected: int) -> None:
        metrics.MISSED.inc()
        log.error("plan missed", extra={"epoch": plan.epoch, "expected": expected, "came": plan.step})
        missed = StepMissed(worker=self.instance, epoch=plan.epoch, expected=expected)
        await self.bus.publish(topics.engine_results(self._place.engine), missed)
        if self._place.world_size > 1:
            raise OutOfStep(f"expected step {expected}, came {plan.step}")
