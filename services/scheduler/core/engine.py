"""The engine's state machine: one event in, messages out. Every request ends in one final answer (`results/`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import assert_never

from services.scheduler.core.counters import EngineCounters, EngineSnapshot, EpochSnapshot
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.events import (
    ConnectorKeeps,
    ConnectorMatched,
    DetokenizerGone,
    EndProcess,
    Event,
    GatewayGone,
    HandOverRefused,
    LorasChanged,
    Output,
    PeerChanged,
    RankProgress,
    StoreGone,
    StoreReady,
    StoreReplied,
    TimePassed,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.core.health.monitor import HealthMonitor
from services.scheduler.core.limits import EngineLimits, EngineRole
from services.scheduler.core.planning.step_timing import MissedPlan
from services.scheduler.core.results.outbox import EngineOutbox
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.connector import ConnectorClient
from services.scheduler.core.transfer.hand_over import HandOverSender, SettledHandOver
from services.scheduler.core.transfer.store_client import StoreClient
from shared.ids import Attempt, EngineId, Incarnation, RequestId
from shared.messages.gateway import Death, RequestFailed
from shared.messages.kv_events import ResetPrefixCache
from shared.messages.kvstore import Attach
from shared.messages.lifecycle import EngineReport, LatencySums
from shared.messages.scheduler import (
    Cancel,
    GenerateRequest,
    GrammarCompiled,
    OutlierReport,
    PauseGeneration,
    PauseMode,
    PauseState,
    ProbeReply,
    ReleaseKept,
    ResumeGeneration,
    StepFinished,
    StepMissed,
    StopMatched,
    TokenBatchLost,
    TransferProgress,
)


class EngineCore:
    """Owns the epochs of one engine: what it has while it has workers. Serves nothing until `WorkersReady`."""

    def __init__(
        self, engine: EngineId, epoch: Incarnation, limits: EngineLimits, role: EngineRole | None = None
    ) -> None:
        self.limits = limits
        self.role = role or EngineRole()
        self.counters = EngineCounters()
        self.store = StoreClient(self.role, self.counters)
        self._connector = ConnectorClient(self.role.connector, self.counters)
        self.epoch_state: EpochState | None = None
        """None while there are no workers."""
        self.plan_due: float | None = None
        """The latest time for the next `TimePassed`, so that the device finds its next plan ready."""
        self.paused: PauseMode | None = None
        """How operators have paused it, through all epochs; None: they have not."""
        self._epoch = epoch
        self._tickets = count(1)
        self._outbox = EngineOutbox(engine, epoch)
        self._sender = HandOverSender(engine, self.store)
        self.health = HealthMonitor(limits, self.counters)

    def handle(self, event: Event, now: float) -> list[Output]:
        """Handles one event; the outputs must be sent in order. `now`: seconds on the liveness clock."""
        match event:
            case StepFinished() | StepMissed() | GrammarCompiled() | TransferProgress() | RankProgress():
                self._handle_rank(event, now)
            case TimePassed():
                self._tick(now)
            case GenerateRequest():
                self._handle_request(event, now)
            case Cancel() | StopMatched():
                self._call_off(event)
            case ReleaseKept():
                if self.epoch_state is not None:
                    self.epoch_state.transfers.keeper.release(event.request)
            case OutlierReport():
                if self.epoch_state is not None:  # without workers it gets nothing anyway
                    self.health.accuse(event.reason, now)
            case HandOverRefused():
                self._take_back(event)
            case PeerChanged():
                self._sender.record_peer(event.engine, takes=event.takes)
            case TokenBatchLost() | DetokenizerGone() | GatewayGone():
                self._end_unheard(event)
            case StoreReplied():
                self._handle_store_reply(event, now)
            case StoreReady() | StoreGone():
                self._handle_store_change(event)
            case ConnectorMatched() | ConnectorKeeps():
                self._handle_connector_reply(event, now)
            case WorkersReady():
                self._start_epoch(event)
            case LorasChanged():
                if self.epoch_state is not None:
                    self.epoch_state.record_loras(event)
            case WorkersLost():
                self._end_epoch(event.reason, died=event.died, unheard=event.unheard)
            case ResetPrefixCache():
                if self.epoch_state is not None:
                    self.epoch_state.memory.pool.forget()
            case PauseGeneration():
                self._pause(event.mode)
            case ResumeGeneration():
                self.paused = None
            case _:
                assert_never(event)
        outputs = self._advance(now)
        if self.paused is None and self.health.canary.is_due(now) and self._ask_canary(now):
            outputs += self._advance(now)
        return outputs

    def _advance(self, now: float) -> list[Output]:
        """Plans as many steps as can be planned now. Returns the messages to send."""
        state = self.epoch_state
        if state is not None:
            self.plan_due = state.plan(now, self.paused)
        if self.role.node is not None:
            self._exchange_with_store(now)
        if state is not None:
            state.send_reports()
        if self.role.connector is not None:
            for output in self._connector.take_outputs():
                self._outbox.add(output)
        outputs = self._outbox.take()
        return self.health.separate(outputs, now) if self.health.canary.mixed_in else outputs

    def _ask_canary(self, now: float) -> bool:
        """Has the engine compute a canary request, if it has workers. Returns whether it does."""
        state = self.epoch_state
        if state is None:
            return False
        canary = self.health.next_request(state.workers, now, idle=self.idle)
        if canary is None:
            return False
        state.requests.receive(canary, now)
        if (sequence := state.requests.held.get(canary.generation.request)) is not None:
            self.health.canary.enter(sequence.id)
        return True

    # ---- questions

    @property
    def requests(self) -> Mapping[RequestId, Sequence]:
        """The accepted requests that have not ended, a canary included; empty without workers."""
        return {} if self.epoch_state is None else self.epoch_state.requests.held

    @property
    def load(self) -> int:
        """Requests of clients that have not ended."""
        return self.health.requests(self.requests)

    @property
    def waiting(self) -> int:
        """Requests of clients that are not computed yet."""
        state = self.epoch_state
        if state is None:
            return 0
        held, running = state.requests.held, state.queues.running
        if self.health.canary.run is None:
            return len(held) - running
        return self.health.requests(held) - running + self.health.running(held)

    @property
    def epoch(self) -> Incarnation | None:
        """The epoch whose plans are sent; None while there are no workers."""
        return None if self.epoch_state is None else self.epoch_state.steps.epoch

    @property
    def step_awaited_since(self) -> float | None:
        """Since when the workers have been computing the oldest step without a result; None: they are idle."""
        return None if self.epoch_state is None else self.epoch_state.steps.awaited_since

    @property
    def serves(self) -> bool:
        """Whether requests may come: there are workers, and the right answer of the canary is known."""
        return self.epoch_state is not None and self.health.knows_answer

    @property
    def isolated(self) -> RequestId | None:
        """The suspect that is computed alone; None while there is none, and sequences share steps."""
        suspect = None if self.epoch_state is None else self.epoch_state.isolation.current
        return None if suspect is None else suspect.generation.request

    def takes_over(self, engine: EngineId) -> bool:
        """Whether another engine takes requests over, as far as is known."""
        return self._sender.takes_over(engine)

    def probe(self, request: RequestId, attempt: Attempt) -> ProbeReply:
        """The state of the attempt, and how many output tokens of it were sent."""
        sequence = self.requests.get(request)
        if sequence is None or sequence.generation.attempt != attempt:
            return ProbeReply("unknown", 0)
        running = sequence.phase in ("loading", "prefilling", "decoding", "handing")
        return ProbeReply("running" if running else "waiting", sequence.sent)

    def pause_state(self) -> PauseState:
        """Whether the engine is paused, and what it still computes."""
        state = self.epoch_state
        if state is None:
            return PauseState(self.paused, 0)
        return PauseState(self.paused, state.steps.in_flight + (0 if self.paused == "all" else state.queues.running))

    @property
    def named_blocks(self) -> int:
        """Blocks in the prefix index, those in use included."""
        return 0 if self.epoch_state is None else len(self.epoch_state.memory.index.hash_of)

    def snapshot(self) -> EngineSnapshot:
        """A snapshot of the engine's state. It is slow if many requests wait, so do not take one for every event."""
        state = self.epoch_state
        if state is None:
            return EngineSnapshot(replace(self.counters), 0, None, self.health.suspicion.report)
        held, queues, memory = state.requests.held, state.queues, state.memory
        requests, running = self.load, queues.running - self.health.running(held)
        epoch = EpochSnapshot(
            epoch=state.steps.epoch,
            model=state.workers.card,
            max_running=state.limits.max_running,
            waiting=self.waiting,
            running=running,
            compiling=len(queues.compiling),
            prefill_tokens=sum(max(0, len(s.tokens.known) - s.tokens.planned) for s in held.values()),
            transfers=len(state.transfers.copies.in_flight),
            blocks_total=memory.blocks,
            blocks_free=memory.free_blocks,
            blocks_cached=len(memory.pool.cached) // memory.tables,
            steps=state.steps.finished,
            step_deadline=state.steps.seconds_allowed(state.limits.step_timeout),
            preemptions=state.planner.preemption.count,
        )
        return EngineSnapshot(replace(self.counters), requests, epoch, self.health.suspicion.report)

    def report(self) -> EngineReport | None:
        """The load as it is reported to coordinators, or None while there are no workers."""
        snapshot = self.snapshot()
        epoch, counters = snapshot.epoch, snapshot.counters
        if epoch is None:
            return None
        return EngineReport(
            model=epoch.model,
            waiting=epoch.waiting,
            running=epoch.running,
            max_waiting=self.limits.max_waiting,
            max_running=epoch.max_running,
            blocks_total=epoch.blocks_total,
            blocks_free=epoch.blocks_free,
            steps=epoch.steps,
            tokens=counters.output_tokens,
            role=self.role.kind,
            node=self.role.node,
            prefill_tokens=epoch.prefill_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            drafted_tokens=counters.drafted,
            accepted_tokens=sum(counters.accepted),
            step_deadline=epoch.step_deadline,
            health=snapshot.health,
            latency=LatencySums(
                counters.first_tokens,
                counters.first_token_seconds,
                counters.later_tokens,
                counters.later_token_seconds,
                tuple(counters.first_counts),
                tuple(counters.later_counts),
            ),
            recompute=None if self.epoch_state is None else self.epoch_state.transfers.costs.report(),
            step_times=None if self.epoch_state is None else self.epoch_state.step_times.report(),
            loras=() if self.epoch_state is None else self.epoch_state.queues.adapters.recent,
            lora_refusals=() if self.epoch_state is None else self.epoch_state.lora_refusals,
            paused=self.paused,
            preemptions=epoch.preemptions,
            speculated=counters.speculated,
            loaded_tokens=counters.loaded_tokens,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is in hand, neither requests of clients nor blocks on their way to the store."""
        return self.epoch_state is None or not (self.load or self.epoch_state.transfers.saving)

    def _pause(self, mode: PauseMode) -> None:
        """Pauses the engine. A canary under way is given up, as it could not answer in time; the next one comes after
        the pause."""
        self.paused = mode
        if (run := self.health.canary.run) is not None:
            self._call_off(run.cancel)
            self.health.canary.abandon()

    # ---- requests

    def _handle_request(self, request: GenerateRequest, now: float) -> None:
        generation = request.generation
        if self.epoch_state is not None:
            self.epoch_state.requests.receive(request, now)
        elif self._outbox.fence.is_closed(generation.request, generation.attempt):
            self._outbox.disown(request)  # a cancel has overtaken it
        else:
            failed = RequestFailed(generation.request, generation.attempt, "the engine has no workers")
            self._outbox.refuse(request, failed)

    def _call_off(self, message: Cancel | StopMatched) -> None:
        """Ends a request. One that is unknown is fenced off, too, because a cancel can overtake the request that it
        cancels."""
        self._outbox.fence.close(message.request, message.attempt)
        ended = self.epoch_state is not None and self.epoch_state.requests.call_off(message)
        if not ended and isinstance(message, Cancel) and message.detokenizer is not None:
            self._outbox.streams.disown(message.detokenizer, message.request, message.attempt)
        if (forward := self._sender.forward(message)) is not None:
            self._release_room(message.request)
            self._outbox.add(forward)

    def _take_back(self, event: HandOverRefused) -> None:
        """The engine that a request was handed over to is gone: the request fails, unless it is no longer wanted."""
        generation = event.generate.generation
        self._release_room(generation.request)
        self._outbox.streams.disown(event.generate.detokenizer, generation.request, generation.attempt)
        if self._sender.take_back(event):
            reason = f"{event.engine} does not take it over"
            self._outbox.send_to_gateway(generation, RequestFailed(generation.request, generation.attempt, reason))

    def _release_room(self, request: RequestId) -> None:
        """A request that was passed on will not come back."""
        if self.epoch_state is not None:
            self.epoch_state.transfers.remote.release(request)

    def _end_unheard(self, event: TokenBatchLost | DetokenizerGone | GatewayGone) -> None:
        """Ends the requests whose tokens no process would read."""
        if isinstance(event, DetokenizerGone):
            self._outbox.streams.forget(event.detokenizer)
        if self.epoch_state is None:
            return
        requests = self.epoch_state.requests
        if isinstance(event, GatewayGone):
            requests.end_where(lambda s: s.generation.gateway == event.gateway)
        else:
            reached = isinstance(event, TokenBatchLost)
            requests.fail_where(
                lambda s: s.detokenizer == event.detokenizer, "its detokenizer was lost", tell_detokenizer=reached
            )

    # ---- ranks and time

    def _handle_rank(
        self, event: StepFinished | StepMissed | GrammarCompiled | TransferProgress | RankProgress, now: float
    ) -> None:
        state = self.epoch_state
        if state is None:
            return
        lost: str | None = None
        match event:
            case StepFinished():
                lost = state.finish_step(event, now)
                if event.failed:
                    self.health.record_failed(event.failed, now)
            case RankProgress():
                lost = state.record_progress(event, now)
            case _ if event.epoch != state.steps.epoch:
                pass
            case StepMissed():
                lost = state.send_again(MissedPlan(event.worker, event.expected))
            case GrammarCompiled():
                state.requests.record_grammars(state.grammars.record_reply(event, now))
            case TransferProgress():
                state.record_transfers(event, now)
        if lost is not None:  # workers and engine may disagree on everything: a new epoch
            self._end_epoch(lost)
            self._start_epoch(state.workers)

    def _tick(self, now: float) -> None:
        if self.epoch_state is not None and (reason := self.epoch_state.overdue(now)) is not None:
            self._end_epoch(reason)
            self._outbox.add(EndProcess(reason))
        state = self.epoch_state
        if state is not None:
            state.transfers.remote.expire(now)
            state.transfers.keeper.expire(now)
            self._outbox.streams.release(now)
        if state is not None and state.grammars.compiling:
            state.requests.record_grammars(state.grammars.expire(now))
        if state is not None and self.role.connector is not None:
            state.expire_loads(now)
        if (late := self.health.tick(now)) is not None:
            self._call_off(late)
        if self.role.node is not None:
            self.store.tick(now)

    # ---- the KV store

    def _handle_store_change(self, event: StoreReady | StoreGone) -> None:
        if isinstance(event, StoreGone):
            self.store.record_gone()
        elif not self.store.record_ready(event.incarnation):
            return
        if self.epoch_state is not None:
            self.epoch_state.transfers.saves.forget_reservations()

    def _handle_store_reply(self, event: StoreReplied, now: float) -> None:
        request, reply = event.request, event.reply
        self.store.record_reply(request, reply, now)
        if isinstance(request, Attach):
            self.store.record_attach(request, reply, now)
        elif self.epoch_state is None:
            self.store.release(request.lease)
        else:
            self.epoch_state.record_store_reply(request, reply, now)

    def _handle_connector_reply(self, event: ConnectorMatched | ConnectorKeeps, now: float) -> None:
        """Leases of an epoch that is over are unknown to the present one."""
        state = self.epoch_state
        if state is None or state.transfers.connector_saves is None:
            return
        if isinstance(event, ConnectorMatched):
            state.record_match(event, now)
        else:
            state.transfers.connector_saves.record_keeps(event.lease, event.keeps, now)

    def _exchange_with_store(self, now: float) -> None:
        """Offers what the last plan computes, and hands over what is saved; then others may be planned again."""
        while (state := self.epoch_state) is not None:
            settled = state.offer_saves(now)
            if not settled:
                break
            for each in settled:
                self._hand_over(state, each)
            self.plan_due = state.plan(now, self.paused)
        for output in self.store.take_outputs():
            self._outbox.add(output)

    def _hand_over(self, state: EpochState, settled: SettledHandOver) -> None:
        """To the engine that goes on; or back to our own decodes, where it would have to compute what is not saved."""
        hand_over = self._sender.send(settled)
        if hand_over is None:
            state.queues.cancel_hand_over(settled.sequence)
        else:
            self._outbox.hand_over(settled.sequence, hand_over)
            state.requests.end(settled.sequence, tell_detokenizer=False)

    # ---- epochs

    def _start_epoch(self, workers: WorkersReady) -> None:
        if self.epoch_state is not None:
            self._end_epoch("the engine's workers were exchanged")
        self.epoch_state = EpochState(
            self._epoch, self.limits, workers, self._tickets, self.store, self._connector, self._sender, self._outbox
        )
        self.health.start_epoch(workers)
        self.store.share(workers.layout if self.role.node is not None else None, workers.card.name)

    def _end_epoch(self, reason: str, *, died: bool = False, unheard: int | None = None) -> None:
        """Fails every request for `reason`. `died`: a process died, perhaps because of one of the requests that were
        being computed; requests whose plans from step `unheard` on came to a dead process are not suspected. Requests
        that come now wait for the workers of the next epoch."""
        state = self.epoch_state
        self.health.end_epoch()
        if state is not None:
            how: Death = "beside others" if self.isolated is None else "alone"
            deaths = dict.fromkeys(state.computing(unheard), how) if died else {}
            state.requests.fail_where(lambda _: True, reason, tell_detokenizer=True, deaths=deaths)
            state.close()
        self.epoch_state = self.plan_due = None
        self._epoch = Incarnation(self._epoch + 1)
        self._outbox.start_epoch(self._epoch)
