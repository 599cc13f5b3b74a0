"""The state of one epoch: the time in which an engine has one set of workers. The next epoch starts afresh.

It plans steps as far ahead as allowed, processes their results, and moves blocks between the ranks and the KV store.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from msgspec.structs import replace

from services.scheduler.core.encoded_memory import EncodedBlockAllocator
from services.scheduler.core.events import (
    ConnectorMatched,
    ForwardControl,
    LorasChanged,
    RankProgress,
    SendPlan,
    WorkersReady,
)
from services.scheduler.core.health.canary import CANARY_DETOKENIZER
from services.scheduler.core.hybrid_memory import HybridBlockAllocator
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.planning.planner import StepPlanner
from services.scheduler.core.planning.prefill_budget import PrefillBudget
from services.scheduler.core.planning.speculation import SpeculationBudget
from services.scheduler.core.planning.step_builder import StepBuilder, new_sequence
from services.scheduler.core.planning.step_regression import StepRegressions
from services.scheduler.core.planning.step_timing import (
    RECENT_STEPS,
    ExpectedResult,
    FinishedStep,
    MissedPlan,
    StepsInFlight,
)
from services.scheduler.core.queue.grammars import Grammars
from services.scheduler.core.results.outbox import EngineOutbox
from services.scheduler.core.results.requests import EngineRequests, RequestValidator
from services.scheduler.core.results.step_results import StepResults
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.state_memory import StateBlockAllocator
from services.scheduler.core.transfer.connector import ConnectorClient
from services.scheduler.core.transfer.epoch_transfers import EpochTransfers
from services.scheduler.core.transfer.hand_over import HandOverSender, SettledHandOver
from services.scheduler.core.transfer.loads import LoadOutcome
from services.scheduler.core.transfer.store_client import StoreClient
from shared.ids import Incarnation, SequenceId
from shared.messages.kvstore import Commit, Find, FindAny, KvStoreReply, Reserve
from shared.messages.model_card import LoraRefusal
from shared.messages.scheduler import PauseMode, ReleaseKept, StepFinished, TransferProgress
from shared.messages.worker import NewSequence, StepPlan

MAX_SENDINGS = 3
"""How often a plan is sent again to a rank that missed it, before everything starts again."""


class EngineStuck(AssertionError):
    """No step is in flight and none can be planned: a bug that would leave requests waiting for ever."""


class EpochState:
    """Owns everything that ends with the epoch. One is made for each epoch."""

    def __init__(
        self,
        epoch: Incarnation,
        limits: EngineLimits,
        workers: WorkersReady,
        tickets: Iterator[int],
        store: StoreClient,
        connector: ConnectorClient,
        sender: HandOverSender,
        outbox: EngineOutbox,
    ) -> None:
        self.workers = workers
        self.limits = limits.bounded(workers.max_running, workers.max_batch_tokens, workers.stages, workers.max_loras)
        saves = connector.use is not None and bool(connector.use.saves)
        self.memory = _allocator(workers, self.limits, for_store=store.enabled, for_connector=saves)
        self.transfers = EpochTransfers(outbox.engine, self.limits, workers, self.memory, store, connector)
        self.grammars = Grammars(limits.compile_timeout, limits.max_grammars, store.counters)
        speculation = SpeculationBudget(
            workers.max_speculate, workers.max_jump_ahead, limits.speculation, workers.rows_per_draft
        )
        self._prefill_budget = PrefillBudget(self.limits.itl_target, self.limits.prefill_target)
        self.planner = StepPlanner(
            self.limits, self._prefill_budget, self.memory, self.transfers, self.grammars, speculation, store.counters
        )
        self.queues = self.planner.queues
        self.isolation = self.planner.isolation
        self._validator = RequestValidator(
            *(workers.card, workers.num_blocks, self.memory.max_tokens, self.limits),
            prefix_caching=workers.state_checkpoints != 0,
        )
        self.lora_refusals: tuple[LoraRefusal, ...] = ()
        """See `EngineReport.lora_refusals`."""
        self.requests = EngineRequests(
            self._validator, self.limits, tickets, self.grammars, self.queues, self.transfers, sender, outbox
        )
        self.steps = StepsInFlight(epoch)
        self.step_times = StepRegressions()
        self._plans_ahead = self.limits.plans_ahead
        self._computes_prompts = False
        """Whether plans since the last offer to the store do."""
        self._sent: deque[StepPlan] = deque()
        """The plans in flight, oldest first."""
        self.recent_steps: deque[FinishedStep] = deque(maxlen=RECENT_STEPS)
        """The last finished ones, oldest first; only this class writes it."""
        self._last_missed: int | None = None
        self._sendings = 0
        """How often the plan of step `_last_missed` was sent again."""
        self._counters = store.counters
        self._sender = sender
        self._outbox = outbox
        self._results = StepResults(
            self.memory, self.queues, self.requests, speculation, self.transfers.keeper, outbox, store.counters
        )

    def close(self) -> None:
        """Gives the store back what is held there. Every sequence has ended."""
        self.transfers.close()
        self.send_reports()

    def send_reports(self) -> None:
        """Lets gateways know which prompts are kept."""
        for report in self.transfers.keeper.take_reports():
            self._outbox.add(report)

    # ---- steps

    def plan(self, now: float, paused: PauseMode | None = None) -> float | None:
        """Plans until enough are in flight, or nothing is left to do while `paused` so. Returns when the next plan is
        due, where the workers have enough to do until then. Raises EngineStuck."""
        if paused == "all":
            return None
        steps, limits, isolation = self.steps, self.limits, self.isolation
        while steps.issued - steps.finished <= self._plans_ahead:
            if limits.plan_late and limits.run_ahead:
                due = steps.next_due(limits.stages)
                if now < due:
                    return due
            suspected = isolation.current is not None or self.queues.suspects
            if suspected and isolation.pauses(steps.in_flight, begins=paused is None):
                return None if steps.in_flight else now
            step = self.planner.plan(now, admits=paused is None)
            for sequence in self.transfers.remote.take_leaving():
                self._pass_on(sequence)
            if step is None and suspected and isolation.goes_on(steps.in_flight):
                continue
            if step is None:
                held = len(self.requests.held)
                if held and paused is None and steps.in_flight == 0 and not self.planner.waits_elsewhere:
                    raise EngineStuck(f"{held} requests are held, and none can be computed")
                return None
            self._outbox.add(SendPlan(self.issue(step, now)))
        return None

    def issue(self, step: StepBuilder, now: float) -> StepPlan:
        """The step as the ranks are to be sent it, under the number that it has in flight from now on."""
        for sequence, cached in step.started:
            self._open(sequence, cached, now)
        for sequence in step.handing:
            self.transfers.hand_overs.start(sequence)
        tokens = self.limits.max_batch_tokens - step.budget - step.withheld
        prefills = len(step.work) > step.decodes
        self._computes_prompts |= prefills
        number = self.steps.issue(ExpectedResult(step.samples, tokens, step.extras, prefills, step.decodes), now)
        plan = StepPlan(
            epoch=self.steps.epoch,
            step=number,
            released=self.queues.take_released() if self.queues.released else (),
            new=self._new(step) if step.started or step.loading else (),
            work=tuple(step.work),
            transfers=self.transfers.copies.take_planned(number) if self.transfers.copies.planned else (),
            compile=step.grammars.compile,
            forget=step.grammars.forget,
            connector=None if (saves := self.transfers.connector_saves) is None else saves.plan(now),
            forget_loras=self.queues.adapters.take_unused(self.requests.held.values()),
            restored=self.memory.take_restored([start.sequence for start in step.started]),
            checkpoints=self.memory.take_checkpoints(),
        )
        self._sent.append(plan)
        return plan

    def _new(self, step: StepBuilder) -> tuple[NewSequence, ...]:
        memory = self.memory
        return tuple(
            [
                new_sequence(*start, memory.tables, memory.take_encoded(start.sequence))
                for start in (*step.started, *step.loading)
            ]
        )

    def record_loras(self, changed: LorasChanged) -> None:
        """Takes which adapters there are from now on. Sequences of one that is gone go on; no more are accepted."""
        before, card = {lora.id for lora in self.workers.card.loras}, replace(self.workers.card, loras=changed.loras)
        self.queues.adapters.retire(before - {lora.id for lora in card.loras}, card.loras)
        self.workers = dataclasses.replace(self.workers, card=card)
        self._validator.card = card
        self.lora_refusals = changed.refusals

    def _open(self, sequence: Sequence, cached: int, now: float) -> None:
        """Its prompt is being computed, but for the first `cached` tokens."""
        self._outbox.streams.open(sequence, cached, queued=now - sequence.last_token_at)
        if sequence.detokenizer == CANARY_DETOKENIZER:
            return
        if (kept := sequence.generation.kept) is not None:  # what was found is loaded by now
            self._outbox.add(ForwardControl(kept.engine, ReleaseKept(kept.request)))
        prompt = sequence.tokens.prompt_length
        self._counters.prompt_tokens += prompt
        self._counters.cached_tokens += min(prompt, cached)
        self._counters.loaded_tokens += min(prompt, cached, sequence.transfer.loaded_tokens)
        if sequence.transfer.decode_node is None:
            return
        if (ahead := self._sender.prefetch(sequence, self.memory)) is not None:
            self._outbox.add(ahead)

    def _pass_on(self, sequence: Sequence) -> None:
        self.requests.pass_on(sequence)
        self._outbox.pass_on(sequence, self._sender.pass_on(sequence))

    @property
    def plans_in_flight(self) -> tuple[StepPlan, ...]:
        """Those that have no result yet, oldest first."""
        return tuple(self._sent)

    def computing(self, before: int | None = None) -> set[SequenceId]:
        """The sequences that the steps in flight compute, of those `before` a step where one is given."""
        return {item.sequence for plan in self._sent if before is None or plan.step < before for item in plan.work}

    def send_again(self, missed: MissedPlan) -> str | None:
        """Sends a plan that a rank missed again, with those behind it, which that rank dropped. Returns why everything
        has to start again where the plan is not in flight or was sent too often.

        Ranks that have received the plans drop them.
        """
        self._sendings = self._sendings + 1 if missed.step == self._last_missed else 1
        self._last_missed = missed.step
        again = [plan for plan in self._sent if plan.step >= missed.step]
        if not again or again[0].step != missed.step or self._sendings > MAX_SENDINGS:
            return f"{missed.rank} never received step {missed.step}"
        for plan in again:
            self._outbox.add(SendPlan(plan))
        return None

    def finish_step(self, result: StepFinished, now: float) -> str | None:
        """Takes in a step's result, unless it is old. Returns why everything has to start again, where one before it
        was lost."""
        steps = self.steps
        if result.epoch != steps.epoch or result.step < steps.finished:
            return None
        if result.step > steps.finished:
            return f"the result of step {steps.finished} never came"
        expected = self.measure(result, now)
        if self.transfers.copies.in_flight:
            self.transfers.copies.finish_step(result.step, now)
        self._results.record(result, expected, now)
        return None

    def measure(self, result: StepFinished, now: float) -> ExpectedResult:
        """Takes the oldest step in flight, whose result this is, out of those, and records how long it took. Returns
        what it was to yield."""
        steps = self.steps
        expected = steps.finish(len(result.sampled), now)
        self._prefill_budget.record(expected.tokens, steps.last_seconds, prefills=expected.prefills)
        self.step_times.record(expected.tokens, self._used, steps.last_seconds, prefills=expected.prefills)
        if expected.prefills:
            self.transfers.costs.record_step(expected.tokens, steps.last_seconds)
        work = self._sent.popleft().work
        self.recent_steps.append(
            FinishedStep(
                *(result.step, work, expected.decodes, steps.last_seconds),
                *(result.timing, result.drafted, result.accepted),
            )
        )
        return expected

    @property
    def _used(self) -> int:
        return self.memory.blocks - self.memory.free_blocks

    def record_run(self, finished: list[FinishedStep], plans: list[StepPlan]) -> None:
        """Steps that decode a token of the same sequences each were numbered of which nobody made plans and results:
        `finished` are over, those that were in flight before among them, and `plans` are in flight behind what is left
        of those. Takes the first out of those in flight, and records how long they took."""
        for _ in range(min(len(finished), len(self._sent))):
            self._sent.popleft()
        self.recent_steps += finished
        self._sent += plans
        if self.limits.itl_target is not None:
            for step in finished:
                self._prefill_budget.record(step.decodes, step.seconds, prefills=False)
        if finished:
            self.step_times.record_decodes(finished[0].decodes, self._used, [step.seconds for step in finished])

    def record_progress(self, report: RankProgress, now: float) -> str | None:
        """Takes in how far a rank is. Returns what it shows to be lost, if anything."""
        if report.transfers is not None and report.transfers.epoch == self.steps.epoch:
            self.record_transfers(report.transfers, now)
        loss = self.steps.find_loss(report, now)
        return self.send_again(loss) if isinstance(loss, MissedPlan) else loss

    def overdue(self, now: float) -> str | None:
        """The step or transfer that takes so long that the workers count as wedged, if any."""
        timeout, copies = self.limits.step_timeout, self.transfers.copies
        if (allowed := self.steps.overdue(now, timeout)) is not None:
            return f"step {self.steps.finished} took longer than {allowed:g} s"
        if self.transfers.connector_saves is None and copies.in_flight and copies.overdue(now, timeout):
            return f"copying blocks from or to the KV store took longer than {timeout:g} s"
        return None

    # ---- blocks from and to the KV store

    def record_transfers(self, report: TransferProgress, now: float) -> None:
        """A rank has copied blocks, or failed to."""
        for outcome in self.transfers.record_report(report, now):
            self._finish_load(outcome, now)

    def expire_loads(self, now: float) -> None:
        """Sequences that a KV connector keeps waiting for too long are computed."""
        for outcome in self.transfers.connector_loads.expire(now):
            self._finish_load(outcome, now)

    def _finish_load(self, outcome: LoadOutcome, now: float) -> None:
        sequence, tokens, others, computed = outcome
        if sequence is not None:
            self.queues.finish_loading(sequence, tokens, computed)
            if tokens is not None and computed:  # the workers know it already
                self._open(sequence, tokens, now)
        for other in others:
            self.queues.resume(other)

    def record_match(self, reply: ConnectorMatched, now: float) -> None:
        """The KV connector has replied to a lookup."""
        self._resume(self.transfers.record_match(reply, now))

    def record_store_reply(
        self, request: Find | FindAny | Reserve | Commit, reply: KvStoreReply | None, now: float
    ) -> None:
        """The store has replied, or (None) has not in time."""
        self._resume(self.transfers.record_store_reply(request, reply, now))

    def _resume(self, sequence: Sequence | None) -> None:
        if sequence is not None:
            self.queues.resume(sequence)

    def offer_saves(self, now: float) -> list[SettledHandOver]:
        """Offers the store what the last plan computes. Returns the sequences that wait to be handed over and of which
        the store has all blocks, or cannot have them."""
        prompts, self._computes_prompts = self._computes_prompts, False
        named, idle = self.memory.take_newly_named(), self.steps.in_flight == 0
        return self.transfers.offer_saves(named, now, prompts=prompts, idle=idle)


def _allocator(workers: WorkersReady, limits: EngineLimits, *, for_store: bool, for_connector: bool) -> BlockAllocator:
    """For as many groups of layers as the workers have, for rows of an encoder's, or for their states."""
    if any(group.encoded is not None for group in workers.kv_groups):
        return EncodedBlockAllocator(
            workers.num_blocks, workers.card.block_size, workers.kv_groups, for_store=for_store
        )
    if workers.kv_groups:
        return HybridBlockAllocator(
            workers.num_blocks,
            workers.card.block_size,
            workers.kv_groups,
            limits.max_batch_tokens,
            for_store=for_store,
        )
    if workers.state_checkpoints is not None:
        return StateBlockAllocator(
            *(workers.num_blocks, workers.card.block_size, workers.state_checkpoints, workers.state_records),
            for_store=for_store,
        )
    return BlockAllocator(workers.num_blocks, workers.card.block_size, for_store=for_store, for_connector=for_connector)
