"""One engine on virtual time: the scheduler's real core, and the simulated device that it plans for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import floor, inf
from typing import Literal, NamedTuple

from deploy.simulation.hops import HopDelays
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.events import Event, Output, SendPlan, SendToGateway, SendTokens, TimePassed, WorkersReady
from services.scheduler.core.invariants import check
from services.scheduler.core.limits import EngineLimits
from services.worker.sim.backend import SimBackend
from shared.ids import EngineId, Incarnation, InstanceId, RequestId
from shared.kv_event_stream import KvEventStream
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import RequestRejected
from shared.messages.kv_events import KvEvents, KvSource
from shared.messages.lifecycle import HEARTBEAT_SECONDS, Lifecycle, Phase
from shared.messages.scheduler import GenerateRequest, StepFinished, StepTiming
from shared.messages.worker import StepPlan

KV_EVENTS_PAUSE = 0.025
"""Seconds for which an engine gathers changes of its blocks, as `services.scheduler.kv_publisher` does."""
ROOM_REPORT_SECONDS = 0.1
"""Between two reports that nothing waits any more, as in `services.scheduler.actor`."""
TIMER_SECONDS = 0.001
"""No timer is finer."""
PHASE_STEP = 0.6180339887
"""Heartbeats of engines are spread over the half second by the golden ratio."""
LAST_HEARTBEATS = 2
"""An engine to which nothing happens goes on reporting so often: the last report counts what the one before, sent right
behind a placement, might not have counted."""


class EngineKit(NamedTuple):
    """What every engine of a simulation is made from."""

    limits: EngineLimits
    device: SimBackend
    """Each engine has another one of its kind."""
    hops: HopDelays
    checked: bool = False
    """Check the core's invariants after every event: slow, for tests."""


class SimulationError(Exception):
    """The cores did what no simulation without faults expects: a bug."""


@dataclass(slots=True)
class RequestRecord:
    """What became of one request on its engine. Times are those at which its client has the tokens."""

    request: RequestId
    engine: EngineId
    sent: float
    prompt_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    """Of each frame with tokens."""
    error: str | None = None


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


class EngineNews(NamedTuple):
    """Something that others hear of an engine, when they hear it. Sorts alike however engines are grouped."""

    at: float
    engine: int
    number: int
    """Counts the news of the engine."""
    message: Lifecycle | KvEvents | AnswerComplete | EngineStopped


def engine_id(number: int) -> EngineId:
    """The name of the engine with that number, from 0."""
    return EngineId(f"engine-{number + 1}")


def number_of(engine: EngineId) -> int:
    """The number of an engine that `engine_id` has named."""
    return int(engine.removeprefix("engine-")) - 1


_Timer = Literal["plan", "heartbeat", "kv events", "ready", "drain"]


class VirtualEngine:
    """Owns one engine's core and device, and what has yet to happen to them. Engines know nothing of each other, so
    each may be simulated up to the moment at which the next message may come to it.

    It does what `services.scheduler.actor` and a worker do around them: timers, reports, block events, and one step
    after the other on the device.
    """

    def __init__(self, number: int, kit: EngineKit, *, ready: float) -> None:
        """`ready`: when its workers are."""
        self.id = engine_id(number)
        self.records: list[RequestRecord] = []
        """Of the requests that have ended."""
        self.news: list[EngineNews] = []
        """To be taken by whoever simulates it."""
        self._number = number
        self._hops = kit.hops
        self._checked = kit.checked
        self._device = kit.device.another()
        self._core = EngineCore(self.id, Incarnation(1), kit.limits)
        self._kv: KvEventStream | None = None
        self._kv_due = False
        self._held: dict[RequestId, RequestRecord] = {}
        self._timeline: list[tuple[float, int, StepFinished | GenerateRequest | _Timer]] = []
        self._scheduled = 0
        self._sent = 0
        self._phase: Phase = "ready"
        self._busy_until = ready
        """When the device will have computed all that it was given."""
        self._busy = 0.0
        self._plan_at: float | None = None
        self._first_heartbeat = ready + (number * PHASE_STEP % 1.0) * HEARTBEAT_SECONDS
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
        return EngineTotals(self.id, 0 if epoch is None else epoch.steps, self._busy)

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
            now, _, what = heappop(timeline)
            if isinstance(what, StepFinished):
                self._handle(what, now)
                self._report_room(now)
            elif isinstance(what, GenerateRequest):
                self._receive(what, now)
            elif what == "plan":
                if self._plan_at == now:
                    self._plan_at = None
                    self._handle(TimePassed(), now)
            else:
                self._timer(what, now)

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
                self._phase = "draining"
                self._publish_lifecycle(now)
                self._keep_reporting(now)
            case _:
                raise AssertionError(what)

    def _start(self, now: float) -> None:
        device = self._device
        self._handle(WorkersReady(device.card, device.num_blocks, max_speculate=device.max_speculate), now)
        state = self._core.epoch_state
        assert state is not None, "workers are ready"
        source = KvSource(instance=InstanceId(self.id), model=device.card.name, node=None)
        self._kv = KvEventStream(source, state.steps.epoch, state.memory.index.changes)
        self._publish_lifecycle(now)
        self._publish_blocks(now)

    def _receive(self, request: GenerateRequest, now: float) -> None:
        if self._phase == "stopped":
            raise SimulationError(f"{self.id}: a request came after it had stopped")
        generation = request.generation
        self._held[generation.request] = RequestRecord(
            generation.request, self.id, generation.arrival, generation.prompt_length
        )
        self._handle(request, now)

    def _handle(self, event: Event, now: float) -> None:
        core = self._core
        for output in core.handle(event, now):
            self._act(output, now)
        if self._checked:
            check(core)
        due = core.plan_due
        if due is not None and self._plan_at != due:
            self._plan_at = max(due, now + TIMER_SECONDS)
            self._at(self._plan_at, "plan")
        kv = self._kv
        if kv is not None and not self._kv_due and kv.changes.changed:
            self._kv_due = True
            self._at(now + KV_EVENTS_PAUSE, "kv events")
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
            case _:
                raise SimulationError(f"{self.id}: {output}")

    def _compute(self, plan: StepPlan, now: float) -> None:
        """The device begins with it when it has come and all steps before are over."""
        output = self._device.compute(plan)
        begins = max(now + self._hops.plan, self._busy_until)
        seconds, idle = output.timing.forward, begins - self._busy_until
        self._busy_until = ended = begins + seconds
        self._busy += seconds
        result = StepFinished(
            epoch=plan.epoch,
            step=plan.step,
            sampled=output.sampled,
            timing=StepTiming(wait=idle, prepare=0.0, forward=seconds, sample=0.0),
            drafted=output.drafted,
            accepted=output.accepted,
        )
        self._at(ended + self._hops.result, result)

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
            passed = floor((now - self._first_heartbeat) / HEARTBEAT_SECONDS)
            self._heartbeat = max(self._heartbeat + 1, passed + 1)  # not the same once more, however it was rounded
            self._heartbeat_at = self._first_heartbeat + self._heartbeat * HEARTBEAT_SECONDS
            self._at(self._heartbeat_at, "heartbeat")

    def _send_heartbeat(self, now: float) -> None:
        self._heartbeat_at = inf
        if self._phase == "draining" and self._core.idle:
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

    def _tell(self, at: float, message: Lifecycle | KvEvents | AnswerComplete | EngineStopped) -> None:
        self._sent += 1
        self.news.append(EngineNews(at, self._number, self._sent, message))

    def _at(self, when: float, what: StepFinished | GenerateRequest | _Timer) -> None:
        self._scheduled += 1
        heappush(self._timeline, (when, self._scheduled, what))
