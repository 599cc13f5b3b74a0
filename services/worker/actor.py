"""The worker's shell: plans from the bus to the compute thread, results back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, assert_never

from msgspec.structs import replace

from services.worker import metrics
from services.worker.backend import Backend, BackendError
from services.worker.executor.compute_thread import ComputeThread
from services.worker.executor.plan_queue import PlanGap, PlanQueue
from services.worker.expert_reporter import ExpertReporter
from services.worker.flops import FlopsMeter
from services.worker.guided.outbox import CompileOutbox
from services.worker.kv.connector_thread import ConnectorThread, ConnectorUnusable
from services.worker.kv.copy_thread import CopyThread, TransferLedger
from services.worker.lora_watcher import LoraWatcher
from services.worker.rank_identity import RankIdentity
from services.worker.rank_rows import RankRows, names_rows
from services.worker.rank_sleep import RankSleep
from services.worker.watchdog import CHECK_EVERY, StepWatchdog
from shared import topics
from shared.actor import Actor, TopicSubscription
from shared.bus import Bus, Subscription
from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle, SleepReport, StepSums, WorkerReport
from shared.messages.scheduler import StepFinished, StepMissed
from shared.messages.worker import PingRank, RankOrder, SleepRank, StepPlan, WakeRank
from shared.topics import Topic

log = logging.getLogger(__name__)


class RankOutOfSync(Exception):
    """A rank of several missed a plan. The others wait for it inside that step, so the engine's ranks start anew."""


class WorkerActor(Actor):
    """Owns one rank's compute thread and copy thread. Decides nothing: it executes plans in order, reports the progress
    of their transfers, and reports a missing plan."""

    service = "worker"

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        identity: RankIdentity,
        make_backend: Callable[[], Backend],
        make_meter: Callable[[Backend], FlopsMeter | None] = lambda _: None,
        connector: ConnectorThread | None = None,
        loras: LoraWatcher | None = None,
        sleep: RankSleep | None = None,
    ) -> None:
        """`connector`: what works for a KV connector; None: there is none. `loras`: what follows the file of adapters
        that come at run time; None: none come. `make_meter`: what estimates the operations
        of its steps; None where the model's shape is not known. `sleep`: of a rank that starts asleep."""
        super().__init__(bus, instance)
        self._identity = identity
        self._publishes = identity.publishes
        self._results = topics.engine_results(identity.engine)
        self._rows = RankRows(bus, identity.engine)
        self._copies = CopyThread(identity.kvstore_dir)
        self._plans = PlanQueue(skip_void=identity.world_size == 1)
        self._connector = connector
        self._thread = ComputeThread(make_backend, self._plans, self._copies, connector, identity.world_size)
        self._backend: Backend | None = None
        self._make_meter = make_meter
        self._meter: FlopsMeter | None = None
        self._loras = loras
        self._sleep = sleep or RankSleep()
        self._experts: ExpertReporter | None = None
        self._ledger = TransferLedger(identity.rank)
        self._grammars = CompileOutbox()
        self._watchdog = StepWatchdog(identity.min_step_timeout, identity.first_step_timeout)
        self._gap: StepMissed | None = None
        """The plan that is missing and was reported."""
        self._published = 0
        self._sums = StepSums()
        self._pings: Subscription | None = None

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """The plans of this rank's engine, and when it is to sleep."""
        engine = self._identity.engine
        return [TopicSubscription(topics.engine_steps(engine)), TopicSubscription(topics.rank_orders(engine))]

    def lifecycle_topic(self) -> Topic[Lifecycle]:
        """Its engine's: the scheduler hears of no other ranks."""
        return topics.rank_lifecycles(self._identity.engine)

    abandons_set_up = True
    """Ranks wait for each other, and one that is told to stop may wait for one that never comes."""

    async def set_up(self) -> None:
        """Makes the backend, which takes from a second to minutes, once the rank is awake. Raises BackendError."""
        if self._sleep.level is not None:
            await self._sleep.until_woken(self.bus, self._identity.engine)
            await self.publish_lifecycle()
        try:
            self._backend = await self._thread.start()
        except ConnectorUnusable as error:
            raise BackendError(str(error)) from None
        except asyncio.CancelledError:
            self._plans.end()  # the thread has nothing to compute once it has made the backend
            raise
        if self._loras is not None and self._backend.adapters is not None:
            await self._loras.follow(self._backend.adapters)  # before it is ready: requests for them wait for it
        if self._backend.expert_load is not None:
            self._experts = ExpertReporter(self._backend.expert_load)
        self._watchdog.compiles_kernels = self._backend.mode == "launched"
        if (group := self._backend.group) is not None:
            self._watchdog.latest = lambda: group.latest
            metrics.STEPS_OF_OTHERS.set_function(lambda: group.dummy_steps)
        self._meter = self._make_meter(self._backend)
        metrics.PEAK_FLOPS.set((self._meter and self._meter.peak) or 0.0)
        self._pings = await self.bus.subscribe(topics.rank_orders(self._identity.engine), self._answer_ping)
        extra = {"device": self._backend.device, "blocks": self._backend.num_blocks}
        log.info("backend ready", extra=extra)

    async def _answer_ping(self, order: RankOrder) -> None:
        """Beside the inbox, in which a plan may wait for the rows that it names."""
        if isinstance(order, PingRank):
            await self.publish_lifecycle()

    async def handle(self, message: StepPlan | RankOrder) -> None:
        """Has a plan computed. If the rank is to sleep, ends the process: a sleeping one takes its place."""
        match message:
            case StepPlan():
                await self._take_plan(message)
            case SleepRank(level):
                log.info("falling asleep", extra={"level": level})
                self._sleep.next_level = level
                self.stop()
            case WakeRank() | PingRank():  # it is awake; pings are answered beside the inbox
                pass
            case _:
                assert_never(message)

    async def _take_plan(self, message: StepPlan) -> None:
        """Has a plan computed after those before it. A duplicate is dropped. For a missing plan the scheduler is sent
        `StepMissed`, and sends the plan again; if it begins a new epoch instead, a rank of several raises
        RankOutOfSync."""
        if names_rows(message):
            message = await self._rows.found(message)
        arrival = self._plans.submit(message)
        match arrival:
            case "first" | "next":
                if self._gap is not None:
                    self._close_gap(self._gap, message)
                if arrival == "first":
                    self._published = 0
                self._watchdog.start(message, time.perf_counter())
                if message.transfers or message.connector is not None or arrival == "first":
                    self._ledger.record(message)
                if (message.compile or message.forget) and self._publishes:
                    assert self._backend is not None, "messages come behind set_up"
                    self._grammars.request(self._backend.grammars, message)
            case "repeated":
                log.info("plan received twice", extra={"step": message.step})
            case PlanGap(expected):
                await self._report_missed(StepMissed(worker=self.instance, epoch=message.epoch, expected=expected))
            case _:
                assert_never(arrival)

    async def background(self) -> None:
        """Publishes what comes of plans, transfers and grammars. Raises what computing or copying raised, and StepHung
        where a step does not end."""
        async with asyncio.TaskGroup() as reports:
            reports.create_task(self._report_steps())
            reports.create_task(self._report_transfers(self._copies))
            if self._connector is not None:
                reports.create_task(self._report_transfers(self._connector))
            reports.create_task(self._report_grammars())
            reports.create_task(self._watch_steps())
            if self._experts is not None:
                reports.create_task(self._experts.run())
            if self._loras is not None and self._backend is not None and self._backend.adapters is not None:
                reports.create_task(self._loras.run(self._backend.adapters, self.publish_lifecycle))

    async def _watch_steps(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY)
            metrics.STEP_DEADLINE.set(self._watchdog.seconds_allowed())
            grammars = None if self._backend is None else self._backend.grammars
            excused = grammars is not None and grammars.awaited
            self._watchdog.check(time.perf_counter(), excused=excused)

    async def _report_grammars(self) -> None:
        while True:
            await self.bus.publish(self._results, await self._grammars.next_result())

    async def _report_transfers(self, copies: CopyThread | ConnectorThread) -> None:
        while True:
            ended = await copies.next_ended()
            report = self._ledger.finish(ended.epoch, ended.number, failed=ended.failed)
            if report is not None:
                await self.bus.publish(self._results, report)

    async def _report_steps(self) -> None:
        while True:
            plan, output, ended = await self._plans.results.get()
            shared = None if output is None else output.shared
            self._watchdog.finish(time.perf_counter(), computed=output is not None, shared=shared)
            if output is None:
                if self._meter is not None:
                    self._meter.record(plan, None)
                continue
            output = replace(output, timing=replace(output.timing, answer=max(0.0, time.perf_counter() - ended)))
            if self._publishes:
                if plan.epoch == self._plans.epoch:
                    self._published += 1
                finished = StepFinished(
                    epoch=plan.epoch,
                    step=plan.step,
                    sampled=output.sampled,
                    timing=output.timing,
                    drafted=output.drafted,
                    accepted=output.accepted,
                    scored=output.scored,
                    failed=output.failed,
                    pooled=output.pooled,
                )
                await self.bus.publish(self._results, finished)  # it has left before what follows
            self._sums = metrics.record_step(plan, output, self._sums)
            if self._meter is not None:
                metrics.record_flops(self._meter.record(plan, output), output.timing, self._meter.peak)

    async def tear_down(self) -> None:
        """Ends both threads, or leaves one behind that does not end within its STOP_TIMEOUT."""
        if self._pings is not None:
            await self._pings.stop()
        await self._thread.stop()
        await self._copies.stop()
        if self._connector is not None:
            await self._connector.stop()
        if self._experts is not None:
            await self._experts.report()
        if self._backend is not None and self._backend.grammars is not None:
            await asyncio.to_thread(self._backend.grammars.close)

    def is_idle(self) -> bool:
        """Whether no plan is in hand and all transfers are over."""
        return not self._watchdog and self._ledger.pending == 0

    def load(self) -> int:
        """Number of plans that have been received and not finished."""
        return len(self._watchdog)

    def sleep_report(self) -> SleepReport | None:
        """Whether it sleeps."""
        return None if self._sleep.level is None else SleepReport(self._sleep.level)

    def worker_report(self) -> WorkerReport | None:
        """What the lifecycle message says of this rank; None before its backend is made."""
        if self._backend is None:
            return None
        adapters = self._backend.adapters
        card = replace(self._backend.card, aliases=self._identity.aliases)
        return WorkerReport(
            engine=self._identity.engine,
            rank=self._identity.rank,
            world_size=self._identity.world_size,
            stages=self._identity.stages,
            model=card if adapters is None else replace(card, loras=adapters.cards),
            num_blocks=self._backend.num_blocks,
            device=self._backend.device,
            epoch=self._plans.epoch,
            received=self._plans.expected,
            published=self._published,
            max_num_seqs=self._identity.max_num_seqs,
            max_batch_tokens=self._identity.max_batch_tokens,
            layout=None if self._backend.kv is None else self._backend.kv.layout,
            transfers=self._ledger.report(),
            max_speculate=self._backend.max_speculate,
            rows_per_draft=self._backend.rows_per_draft,
            max_jump_ahead=self._backend.max_jump_ahead,
            sums=self._sums,
            cache_format="" if self._connector is None else self._connector.layout.name,
            layerwise_loads=self._connector is not None and self._connector.layerwise,
            max_loras=self._backend.max_loras,
            kv_groups=self._backend.kv_groups,
            state_checkpoints=self._backend.state_checkpoints,
            state_records=self._backend.state_records,
            lora_refusals=() if self._loras is None else self._loras.refusals,
            data_parallel_size=self._identity.data_parallel_size,
            experts=None if self._experts is None else self._experts.latest,
        )

    async def _report_missed(self, missed: StepMissed) -> None:
        if missed == self._gap:
            return  # reported; if that is lost, too, the lifecycle message shows how far this rank is
        self._gap = missed
        metrics.MISSED.inc()
        log.error("plan missing", extra={"epoch": missed.epoch, "expected": missed.expected})
        await self.bus.publish(self._results, missed)

    def _close_gap(self, gap: StepMissed, plan: StepPlan) -> None:
        """A plan that can be computed has come after a gap. Raises RankOutOfSync if it is of a new epoch, as other
        ranks may be waiting for this one in the step that it missed."""
        self._gap = None
        if gap.epoch != plan.epoch and self._identity.world_size > 1:
            raise RankOutOfSync(f"step {gap.expected} of epoch {gap.epoch} never came")
