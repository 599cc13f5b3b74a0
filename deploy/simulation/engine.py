"""One engine on virtual time: the scheduler's real core, and the simulated device that it plans for."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import floor, inf
from typing import Literal, NamedTuple

from deploy.simulation.kit import EngineKit, SimulationError
from deploy.simulation.prompts import RequestRecord
from deploy.simulation.steps.decode_leap import TIMER_SECONDS, ResultDue, StepTimeline
from deploy.simulation.steps.decode_run import DecodeRun
from deploy.simulation.steps.device import VirtualDevice
from deploy.simulation.store import INCARNATION, NODE, VirtualCopies
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import (
    Event,
    Output,
    PeerChanged,
    ReleaseLease,
    SendHandOver,
    SendPlan,
    SendStoreRequest,
    SendToGateway,
    SendTokens,
    StoreReady,
    StoreReplied,
    TimePassed,
    WorkersReady,
)
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineRole
from services.scheduler.core.transfer.prefill_pulls import PrefillPulls
from shared.ids import EngineId, Incarnation, InstanceId, RequestId
from shared.kv_events.stream import KvEventStream
from shared.messages.coordinator import PullPrefills
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import RequestPlaced, RequestRejected
from shared.messages.kv_events import KvEvents, KvSource
from shared.messages.kvstore import LeaseOwner
from shared.messages.lifecycle import Lifecycle, Phase, Role
from shared.messages.scheduler import GenerateRequest, StepFinished, TransferProgress
from shared.messages.worker import StepPlan

ROOM_REPORT_SECONDS = 0.1
"""Between two reports that nothing waits any more, as in `services.scheduler.actor`."""
PHASE_STEP = 0.6180339887
"""Heartbeats of engines are spread over the half second by the golden ratio."""
LAST_HEARTBEATS = 2
"""An engine to which nothing happens goes on reporting so often: the last report counts what the one before, sent right
behind a placement, might not have counted."""


class EngineTotals(NamedTuple):
    """What an engine has done in all."""

    engine: EngineId
    steps: int
    busy: float
    """Seconds in which its device computed."""


class AnswerComplete(NamedTuple):
    """The client has the last token of a request, or its error."""

    request: RequestId


class EngineStopped(NamedTuple):
    """A drained engine has stopped."""

    engine: EngineId


class HandedRequest(NamedTuple):
    """A request that another engine goes on with, and what became of it so far."""

    generate: GenerateRequest
    record: RequestRecord


class NodeCall(NamedTuple):
    """What an engine sends to the store of its node, or to another engine on it."""

    at: float
    message: SendStoreRequest | ReleaseLease | SendHandOver
    record: RequestRecord | None = None
    """Of the request that is handed over."""


class EngineEvent(NamedTuple):
    """Something that others hear of an engine, when they hear it. Sorts alike however engines are grouped."""

    at: float
    engine: int
    number: int
    """Counts the news of the engine."""
    message: Lifecycle | KvEvents | PullPrefills | AnswerComplete | EngineStopped


def engine_id(number: int) -> EngineId:
    """The name of the engine with that number, from 0."""
    return EngineId(f"engine-{number + 1}")


def number_of(engine: EngineId) -> int:
    """The number of an engine that `engine_id` has named."""
    return int(engine.removeprefix("engine-")) - 1


_Timer = Literal["plan", "heartbeat", "kv events", "ready", "drain"]
_CoreEvent = StepFinished | StoreReplied | TransferProgress | PeerChanged


class VirtualEngine:
    """Owns one engine's core and device, and what has yet to happen to them. Engines without a store know nothing of
    each other, so each may be simulated up to the moment at which the next message may come to it.

    It does what `services.scheduler.actor` and a worker do around them: timers, reports, block events, and one step
    after the other on the device.
    """

    def __init__(self, number: int, kit: EngineKit, *, ready: float, role: Role = "mixed") -> None:
        """`ready`: when its workers are."""
        self.id = engine_id(number)
        self.records: list[RequestRecord] = []
        """Of the requests that have ended."""
        self.news: list[EngineEvent] = []
        """To be taken by whoever simulates it."""
        self._number = number
        self._hops = kit.hops
        self._checked = kit.checked
        self._run: DecodeRun | None = None
        self._device = VirtualDevice(kit.device.another(), kit.slow.speed_of(number), ready)
        self.calls: list[NodeCall] = []
        """To be taken by whoever simulates the node, if there is one."""
        owner = LeaseOwner(InstanceId(self.id), Incarnation(1))
        self._core = EngineCore(
            self.id, Incarnation(1), kit.limits, EngineRole(role, NODE, owner) if kit.store_memory else EngineRole(role)
        )
        self._pulls = PrefillPulls(kit.limits) if kit.pulls and role == "prefill" else None
        self._copies = VirtualCopies(kit.copier.seconds_per_block) if kit.store_memory else None
        self._kv: KvEventStream | None = None
        self._kv_due = False
        self._held: dict[RequestId, RequestRecord] = {}
        self._timeline: list[tuple[float, int, _CoreEvent | GenerateRequest | HandedRequest | _Timer]] = []
        self._scheduled = 0
        self._sent = 0
        self._phase: Phase = "ready"
        self._drained_at = inf
        self._plan_at: float | None = None
        self._report_seconds = kit.report_seconds
        self._kv_event_seconds = kit.kv_event_seconds
        self._first_heartbeat = ready + (number * PHASE_STEP % 1.0) * kit.report_seconds
        self._heartbeat = -1
        """The number of the last one that was sent or is to be sent."""
        self._heartbeats_left = 0
        self._heartbeat_at = inf
        self._had_waiting = False
        self._room_reported_at = -inf
        self._at(ready, "ready")

    # ---- from outside

    @property
    def next_at(self) -> float:
        """When the next thing happens to it by itself; infinity for never."""
        return self._timeline[0][0] if self._timeline else inf

    @property
    def core(self) -> EngineCore:
        """For questions only."""
        return self._core

    @property
    def totals(self) -> EngineTotals:
        """So far."""
        epoch = self._core.snapshot().epoch
        return EngineTotals(self.id, 0 if epoch is None else epoch.steps, self._device.busy)

    def place(self, request: GenerateRequest, at: float) -> None:
        """A coordinator's request comes at that time, which must not have passed."""
        self._at(at, request)

    def drain(self, at: float) -> None:
        """From that time on it takes no requests; it stops when the last has ended."""
        self._at(at, "drain")

    def run(self, until: float) -> None:
        """Simulates it up to that time, exclusively. Raises SimulationError."""
        timeline = self._timeline
        while timeline and timeline[0][0] < until:
            if self._run is None or not self._leap(self._run, until):
                self.run_next()

    def run_next(self) -> None:
        """Lets the next thing happen to it. Raises SimulationError."""
        now, _, what = heappop(self._timeline)
        match what:
            case StepFinished():
                if not self._decode(what, now):
                    self._handle(what, now)
                if self._had_waiting or self._run is None:
                    self._report_room(now)
            case StoreReplied() | TransferProgress() | PeerChanged():
                self._handle(what, now)
            case GenerateRequest():
                generation = what.generation
                prompt = generation.prompt_length
                self._receive(what, RequestRecord(generation.request, self.id, generation.arrival, prompt), now)
            case HandedRequest(generate, record):
                self._receive(generate, record, now)
            case "plan":
                if self._plan_at == now:
                    self._plan_at = None
                    if not self._decode(None, now):
                        self._handle(TimePassed(), now)
            case _:
                self._timer(what, now)

    def take_over(self, handed: HandedRequest, at: float) -> None:
        """Another engine's request comes at that time."""
        self._at(at, handed)

    def hear_store(self, reply: StoreReplied, at: float) -> None:
        """The store's reply comes at that time."""
        self._at(at, reply)

    def hear_peer(self, change: PeerChanged, at: float) -> None:
        """It hears at that time that another engine begins or ceases to take requests over."""
        if self._phase != "stopped":
            self._at(at, change)

    # ---- what happens to it

    def _timer(self, what: _Timer, now: float) -> None:
        match what:
            case "heartbeat":
                self._send_heartbeat(now)
            case "kv events":
                self._publish_blocks(now)
            case "ready":
                self._start(now)
            case "drain":
                self._phase, self._drained_at = "draining", now
                self._publish_lifecycle(now)
                self._keep_reporting(now)
            case _:
                raise AssertionError(what)

    def _start(self, now: float) -> None:
        device = self._device.backend
        layout = device.kv.layout if self._copies is not None and device.kv is not None else None
        ready = WorkersReady(device.card, device.num_blocks, layout=layout, max_speculate=device.max_speculate)
        self._handle(ready, now)
        if self._copies is not None:
            self._handle(StoreReady(INCARNATION), now)
        state = self._core.epoch_state
        assert state is not None, "workers are ready"
        source = KvSource(instance=InstanceId(self.id), model=device.card.name, node=self._core.role.node)
        self._kv = KvEventStream(source, state.steps.epoch, state.memory.index.changes)
        self._publish_lifecycle(now)
        self._publish_blocks(now)

    def _receive(self, request: GenerateRequest, record: RequestRecord, now: float) -> None:
        if self._phase == "stopped":
            raise SimulationError(f"{self.id}: a request came after it had stopped")
        self._held[record.request] = record
        self._handle(request, now)

    def _decode(self, result: StepFinished | None, now: float) -> bool:
        """Whether it only decodes, so that a step's result (None: the time for a plan has come) was taken in by the
        shorter way."""
        run = self._run
        if run is None and not self._checked and result is not None:
            run = self._run = DecodeRun.begin(self._core)
        if run is None or not run.goes_on or (result is None and run.is_overdue(now)):
            return False
        learnt = () if result is None else run.finish(result, now)
        plans, due = run.plan(now)
        for plan in plans:
            self._compute(plan, now)
        heard = now + self._hops.tokens
        for request in learnt:
            record = self._held[request]
            record.token_times.append(heard)
            record.output_tokens += 1
        self._go_on(due, now)
        return True

    def _leap(self, run: DecodeRun, until: float) -> bool:
        """Whether it only decodes until then, or until something else happens to it, so that more than one event was
        taken in."""
        room = None if self._had_waiting else run.room()
        if room is None:
            return False
        results: list[ResultDue] = []
        others, plan_number = [], 0
        for event in sorted(self._timeline):
            at, number, what = event
            if isinstance(what, StepFinished):
                results.append(ResultDue(at, number, what.timing.wait, what.timing.forward, what))
            elif what == "plan" and at == self._plan_at and not plan_number:
                plan_number = number
            else:
                others.append(event)
        timeline = StepTimeline(deque(results), self._plan_at, plan_number, self._scheduled)
        leap = run.leap(self._device, self._hops, timeline, min(until, others[0][0]) if others else until, room)
        if not leap.times and not leap.planned:
            return False
        for request in run.requests:
            record = self._held[request]
            record.token_times.extend([at + self._hops.tokens for at in leap.times])
            record.output_tokens += len(leap.times)
        self._plan_at, self._scheduled = timeline.plan_at, timeline.events
        planning = list(timeline.overtaken)
        if timeline.plan_at is not None:
            planning.append((timeline.plan_at, timeline.plan_number))
        self._timeline[:] = others
        self._timeline += [(at, number, "plan") for at, number in planning]
        self._timeline += [(due.at, due.number, due.made) for due in timeline.results]
        heapify(self._timeline)
        self._heartbeats_left = LAST_HEARTBEATS
        return True

    def _handle(self, event: Event, now: float) -> None:
        core, self._run = self._core, None
        for output in core.handle(event, now):
            self._act(output, now)
        if self._checked:
            check(core)
        if self._pulls is not None and (wanted := self._pulls.due(core.requests.values(), now)) is not None:
            self._tell(now + self._hops.report, PullPrefills(self.id, wanted))
        self._go_on(core.plan_due, now)

    def _go_on(self, due: float | None, now: float) -> None:
        """What follows from an event by itself; `due`: when the next plan is."""
        if due is not None and self._plan_at != due:
            self._plan_at = max(due, now + TIMER_SECONDS)
            self._at(self._plan_at, "plan")
        kv = self._kv
        if kv is not None and not self._kv_due and kv.changes.changed:
            self._kv_due = True
            self._at(now + self._kv_event_seconds, "kv events")
        self._keep_reporting(now)

    def _act(self, output: Output, now: float) -> None:
        match output:
            case SendPlan(plan):
                self._compute(plan, now)
            case SendTokens(_, batch):
                self._record_tokens(batch, now + self._hops.tokens)
            case SendToGateway(_, message) if isinstance(message, RequestRejected):
                self._end(
                    self._held.pop(message.request), now + self._hops.tokens, f"{message.kind}: {message.message}"
                )
            case SendToGateway(_, RequestPlaced()):
                pass  # as the hand-over that follows says
            case SendStoreRequest() | ReleaseLease():
                self.calls.append(NodeCall(now, output))
            case SendHandOver():
                record = self._held.pop(output.generate.generation.request)
                self.calls.append(NodeCall(now, output, record))
            case _:
                raise SimulationError(f"{self.id}: {output}")

    def _compute(self, plan: StepPlan, now: float) -> None:
        begins, ends, result = self._device.compute(plan, now + self._hops.plan)
        self._at(ends + self._hops.result, result)
        if plan.transfers and self._copies is not None:
            for number, ended in self._copies.add(plan, begins, ends):
                self._at(ended + self._hops.result, TransferProgress(rank=0, epoch=plan.epoch, done=number + 1))

    def _record_tokens(self, batch: TokenBatch, heard: float) -> None:
        held = self._held
        for opened in batch.opened:
            held[opened.request].cached_tokens = opened.cached_tokens
        for entry in batch.entries:
            record = held[entry.request]
            record.token_times.append(heard)
            record.output_tokens += len(entry.tokens)
            if entry.finish is not None:
                self._end(held.pop(entry.request), heard)

    def _end(self, record: RequestRecord, heard: float, error: str | None = None) -> None:
        record.error = error
        self.records.append(record)
        self._tell(heard, AnswerComplete(record.request))

    # ---- what others hear of it

    @property
    def _unheard_drain(self) -> float:
        """For so long behind its drain something may come from those who had not heard of that."""
        return self._hops.report + self._hops.place

    def _report_room(self, now: float) -> None:
        if self._core.waiting:
            self._had_waiting = True
        elif self._had_waiting and now - self._room_reported_at >= ROOM_REPORT_SECONDS:
            self._had_waiting, self._room_reported_at = False, now
            self._publish_lifecycle(now)

    def _keep_reporting(self, now: float) -> None:
        """Something has happened: its next heartbeats say something new. Others are left out, for they change no
        decision, and there would be millions."""
        self._heartbeats_left = LAST_HEARTBEATS
        if self._heartbeat_at == inf and self._phase != "stopped":
            passed = floor((now - self._first_heartbeat) / self._report_seconds)
            self._heartbeat = max(self._heartbeat + 1, passed + 1)  # not the same once more, however it was rounded
            self._heartbeat_at = self._first_heartbeat + self._heartbeat * self._report_seconds
            self._at(self._heartbeat_at, "heartbeat")

    def _send_heartbeat(self, now: float) -> None:
        self._heartbeat_at = inf
        if self._phase == "draining" and self._core.idle and now > self._drained_at + self._unheard_drain:
            self._phase = "stopped"
            self._tell(now + self._hops.report, EngineStopped(self.id))
        self._publish_lifecycle(now)
        left = self._heartbeats_left - 1
        if left > 0 or self._core.load or self._phase == "draining":
            self._keep_reporting(now)
            self._heartbeats_left = left

    def _publish_lifecycle(self, now: float) -> None:
        core = self._core
        life = Lifecycle(
            service="scheduler",
            instance=InstanceId(self.id),
            incarnation=Incarnation(1),
            phase=self._phase,
            pid=0,
            host="simulated",
            started=0.0,
            load=core.load,
            progress=self._scheduled,
            engine=core.report(),
        )
        self._tell(now + self._hops.report, life)

    def _publish_blocks(self, now: float) -> None:
        assert self._kv is not None, "it has started"
        self._kv_due = False
        for event in self._kv.flush():
            self._tell(now + self._hops.report, event)

    def _tell(self, at: float, message: Lifecycle | KvEvents | PullPrefills | AnswerComplete | EngineStopped) -> None:
        self._sent += 1
        self.news.append(EngineEvent(at, self._number, self._sent, message))

    def _at(self, when: float, what: _CoreEvent | GenerateRequest | HandedRequest | _Timer) -> None:
        self._scheduled += 1
        heappush(self._timeline, (when, self._scheduled, what))
