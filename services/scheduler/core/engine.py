"""The engine's state machine: one event in, messages out. Every request ends in exactly one final word.

Final words: a `NewTokens` entry with `finish` (to the detokenizer), `Rejected` or `Failed` (to the gateway). A request
that the gateway or the detokenizer called off, or that a newer attempt replaces, ends in silence: who asked knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from services.scheduler.core import results
from services.scheduler.core.events import (
    DetokenizerGone,
    Event,
    GatewayGone,
    GiveUp,
    Output,
    RankProgress,
    SendPlan,
    TellGateway,
    TimePassed,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.core.fence import Fence
from services.scheduler.core.limits import Limits
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.serving import Serving
from shared.blocks import BLOCK_SIZE
from shared.ids import Attempt, EngineId, Incarnation, RequestId
from shared.messages.gateway import Failed, Rejected
from shared.messages.lifecycle import EngineReport
from shared.messages.scheduler import (
    Cancel,
    DetokenizerLost,
    Generate,
    ProbeReply,
    Sampled,
    StepFinished,
    StepMissed,
    StopMatched,
    Transferred,
)
from shared.messages.worker import StepPlan

OVERLOADED_RETRY = 1.0
"""Seconds after which a client may try again when the waiting line is full."""


class Stuck(AssertionError):
    """Nothing is on its way and nothing can be planned: a bug that would leave requests waiting for ever."""


class Engine:
    """Owns every request of one engine, from acceptance to its final word. Serves nothing until `WorkersReady`."""

    def __init__(self, engine: EngineId, epoch: Incarnation, limits: Limits) -> None:
        self.limits = limits
        self.serving: Serving | None = None
        self.requests: dict[RequestId, Sequence] = {}
        self.tokens = 0
        """Output tokens since the start."""
        self.plan_due: float | None = None
        """When `TimePassed` is wanted at the latest, so that the device finds its next plan ready."""
        self._engine = engine
        self._epoch = epoch
        self._fence = Fence()
        self._tickets = 0
        self._out: list[Output] = []

    def handle(self, event: Event, now: float) -> list[Output]:
        """Takes one event in; the outputs are to be sent in order. `now` are seconds on the liveness clock."""
        match event:
            case StepFinished():
                self._step_finished(event, now)
            case Generate():
                self._generate(event)
            case Cancel():
                self._call_off(event.request, event.attempt, tell_detokenizer=True)
            case StopMatched():
                self._call_off(event.request, event.attempt, tell_detokenizer=False)
            case DetokenizerLost() | DetokenizerGone():
                reached = isinstance(event, DetokenizerLost)
                if self.serving is not None and not reached:
                    self.serving.streams.forget(event.detokenizer)
                self._fail_where(lambda s: s.detokenizer == event.detokenizer, "its detokenizer was lost", reached)
            case GatewayGone():
                for sequence in [s for s in self.requests.values() if s.generation.gateway == event.gateway]:
                    self._end(sequence, tell_detokenizer=True)
            case RankProgress():
                self._rank_progress(event, now)
            case Transferred():
                pass  # no plan holds transfers yet
            case StepMissed():
                if self.serving is not None and event.epoch == self.serving.steps.epoch:
                    self._start_anew(f"{event.worker} never received step {event.expected}")
            case WorkersReady():
                self._workers_ready(event)
            case WorkersLost():
                self._stop_serving(event.reason)
            case TimePassed():
                self._look_for_overdue_step(now)
            case _:
                assert_never(event)
        self._plan(now)
        self._flush()
        out, self._out = self._out, []
        return out

    # ---- questions

    def probe(self, request: RequestId, attempt: Attempt) -> ProbeReply:
        sequence = self.requests.get(request)
        if sequence is None or sequence.generation.attempt != attempt:
            return ProbeReply("unknown", 0)
        running = sequence.phase in ("prefilling", "decoding")
        return ProbeReply("running" if running else "waiting", sequence.produced)

    def report(self) -> EngineReport | None:
        """The load, or None while there are no workers."""
        if self.serving is None:
            return None
        planner = self.serving.planner
        return EngineReport(
            model=self.serving.card,
            waiting=len(self.requests) - planner.running,
            running=planner.running,
            max_waiting=self.limits.max_waiting,
            max_running=self.serving.limits.max_running,
            blocks_total=planner.memory.pool.total,
            blocks_free=planner.memory.pool.free,
            steps=self.serving.steps.finished,
            tokens=self.tokens,
        )

    # ---- requests come and are called off

    def _generate(self, generate: Generate) -> None:
        generation = generate.generation
        request, attempt = generation.request, generation.attempt
        held = self.requests.get(request)
        if self._fence.bars(request, attempt) or (held is not None and held.generation.attempt >= attempt):
            return
        if held is not None:
            self._end(held, tell_detokenizer=True)
        if self.serving is None:
            self._refuse(generate, Failed(request, attempt, "the engine has no workers"))
            return
        self._tickets += 1
        admitted = self.serving.admission.admit(generate, self._tickets)
        if isinstance(admitted, Rejected):
            self._refuse(generate, admitted)
        elif len(self.serving.planner.waiting) >= self.limits.max_waiting:
            self._refuse(generate, self._overloaded(request, attempt))
        else:
            self._accept(self.serving, admitted)

    def _accept(self, serving: Serving, sequence: Sequence) -> None:
        self.requests[sequence.generation.request] = sequence
        serving.planner.accept(sequence)
        if len(sequence.tokens) >= sequence.limit:  # earlier attempts gave all that was asked for
            serving.streams.open(sequence, 0)
            serving.streams.add(sequence, results.entry(sequence, (), "length"))
            self._end(sequence, tell_detokenizer=False)

    def _overloaded(self, request: RequestId, attempt: Attempt) -> Rejected:
        return Rejected(
            request=request,
            attempt=attempt,
            kind="overloaded",
            message=f"{self.limits.max_waiting} requests are waiting already, and no more may",
            retry_after=OVERLOADED_RETRY,
        )

    def _refuse(self, generate: Generate, answer: Rejected | Failed) -> None:
        self._fence.close(answer.request, answer.attempt)
        self._out.append(TellGateway(generate.generation.gateway, answer))

    def _call_off(self, request: RequestId, attempt: Attempt, *, tell_detokenizer: bool) -> None:
        """Fences even what is unknown: a cancel can overtake the request that it cancels."""
        self._fence.close(request, attempt)
        sequence = self.requests.get(request)
        if sequence is not None and sequence.generation.attempt <= attempt:
            self._end(sequence, tell_detokenizer=tell_detokenizer)

    def _end(self, sequence: Sequence, *, tell_detokenizer: bool) -> None:
        assert self.serving is not None, "without workers no request is held"
        generation = sequence.generation
        self._fence.close(generation.request, generation.attempt)
        del self.requests[generation.request]
        self.serving.planner.end(sequence)
        if tell_detokenizer:
            self.serving.streams.abandon(sequence)

    # ---- steps

    def _plan(self, now: float) -> None:
        serving = self.serving
        self.plan_due = None
        while serving is not None and serving.steps.in_flight <= self.limits.run_ahead:
            if self._may_wait(serving, now):
                return
            planned = serving.planner.plan()
            if planned is None:
                if self.requests and serving.steps.in_flight == 0:
                    raise Stuck(f"{len(self.requests)} requests are held, and none can be computed")
                return
            for sequence, cached in planned.started:
                serving.streams.open(sequence, cached)
            step = serving.steps.issue(samples=planned.samples, tokens=planned.tokens, now=now)
            plan = StepPlan(
                epoch=serving.steps.epoch,
                step=step,
                released=planned.released,
                new=planned.new,
                work=planned.work,
            )
            self._out.append(SendPlan(plan))

    def _may_wait(self, serving: Serving, now: float) -> bool:
        """Whether the plan is the last one ahead, and not due yet; then sets `plan_due`."""
        last_ahead = 0 < serving.steps.in_flight == self.limits.run_ahead
        if self.limits.plan_late and last_ahead and now < serving.steps.next_due():
            self.plan_due = serving.steps.next_due()
            return True
        return False

    def _step_finished(self, result: StepFinished, now: float) -> None:
        serving = self.serving
        if serving is None or result.epoch != serving.steps.epoch or result.step < serving.steps.finished:
            return
        if result.step > serving.steps.finished:
            self._start_anew(f"the result of step {serving.steps.finished} never came")
            return
        serving.steps.finish(len(result.sampled), now)
        by_id = serving.planner.by_id
        for sampled in result.sampled:
            sequence = by_id.get(sampled.sequence)
            if sequence is not None:  # else it ended meanwhile, and this was computed ahead for nothing
                self._take_token(serving, sequence, sampled)

    def _take_token(self, serving: Serving, sequence: Sequence, sampled: Sampled) -> None:
        entry = results.take(sequence, sampled)
        self.tokens += 1
        serving.streams.add(sequence, entry)
        if not len(sequence.tokens) % BLOCK_SIZE:
            serving.planner.memory.index_full_blocks(sequence)
        if entry.finish is not None:
            self._end(sequence, tell_detokenizer=False)
        elif sequence.phase == "returning" and not sequence.awaits_token:
            serving.planner.wait(sequence)

    def _rank_progress(self, report: RankProgress, now: float) -> None:
        if self.serving is not None and (reason := self.serving.steps.lost(report, now)) is not None:
            self._start_anew(reason)

    def _look_for_overdue_step(self, now: float) -> None:
        if self.serving is not None and self.serving.steps.overdue(now, self.limits.step_timeout):
            reason = f"step {self.serving.steps.finished} took longer than {self.limits.step_timeout:g} s"
            self._stop_serving(reason)
            self._out.append(GiveUp(reason))

    # ---- epochs

    def _workers_ready(self, workers: WorkersReady) -> None:
        if self.serving is not None:
            self._stop_serving("the engine's workers were exchanged")
        self.serving = Serving(self._engine, self._epoch, self.limits, workers)

    def _start_anew(self, reason: str) -> None:
        """A message to or from the workers was lost, so they and we may disagree on everything: a new epoch."""
        assert self.serving is not None
        workers = self.serving.workers
        self._stop_serving(reason)
        self._workers_ready(workers)

    def _stop_serving(self, reason: str) -> None:
        self._fail_where(lambda _: True, reason, tell_detokenizer=True)
        self._flush()
        self.serving = None
        self._epoch = Incarnation(self._epoch + 1)

    def _fail_where(self, concerned: Callable[[Sequence], bool], reason: str, tell_detokenizer: bool) -> None:
        for sequence in [s for s in self.requests.values() if concerned(s)]:
            generation = sequence.generation
            self._end(sequence, tell_detokenizer=tell_detokenizer)
            failed = Failed(generation.request, generation.attempt, reason)
            self._out.append(TellGateway(generation.gateway, failed))

    def _flush(self) -> None:
        if self.serving is not None:
            self._out += self.serving.streams.flush()
