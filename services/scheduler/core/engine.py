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
    NotTaken,
    Output,
    PassOn,
    PeerChanged,
    RankProgress,
    SendPlan,
    StoreAnswered,
    StoreGone,
    StoreHere,
    TellGateway,
    TimePassed,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.core.fence import Fence
from services.scheduler.core.grammars import Waited
from services.scheduler.core.hand_overs import PassedOn, Peers, Settled, handed
from services.scheduler.core.limits import Limits
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.serving import Serving
from services.scheduler.core.site import Site
from services.scheduler.core.store import Store
from services.scheduler.core.streams import Streams
from services.scheduler.core.tally import Tally
from shared.ids import Attempt, EngineId, Incarnation, RequestId
from shared.messages.gateway import Failed, Placed, Rejected
from shared.messages.generation import Generation
from shared.messages.kvstore import Attach, Find, Reserve
from shared.messages.lifecycle import EngineReport
from shared.messages.scheduler import (
    Cancel,
    DetokenizerLost,
    Generate,
    GrammarCompiled,
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

    def __init__(self, engine: EngineId, epoch: Incarnation, limits: Limits, site: Site | None = None) -> None:
        self.limits = limits
        self.site = site or Site()
        self.tally = Tally()
        self.store = Store(self.site, self.tally)
        self.serving: Serving | None = None
        self.requests: dict[RequestId, Sequence] = {}
        self.tokens = 0
        """Output tokens since the start."""
        self.plan_due: float | None = None
        """When `TimePassed` is wanted at the latest, so that the device finds its next plan ready."""
        self._engine = engine
        self._epoch = epoch
        self._streams = Streams(engine, epoch)
        """This epoch's, workers or not: what is handed over to us has a stream already, which we may have to end."""
        self._fence = Fence()
        self._passed_on = PassedOn()
        self.peers = Peers()
        self._tickets = 0
        self._out: list[Output] = []

    def handle(self, event: Event, now: float) -> list[Output]:
        """Takes one event in; the outputs are to be sent in order. `now` are seconds on the liveness clock."""
        match event:
            case StepFinished():
                self._step_finished(event, now)
            case Generate():
                self._generate(event)
            case Cancel() | StopMatched():
                self._call_off(event)
            case DetokenizerLost() | DetokenizerGone():
                reached = isinstance(event, DetokenizerLost)
                if not reached:
                    self._streams.forget(event.detokenizer)
                self._fail_where(lambda s: s.detokenizer == event.detokenizer, "its detokenizer was lost", reached)
            case GatewayGone():
                for sequence in [s for s in self.requests.values() if s.generation.gateway == event.gateway]:
                    self._end(sequence, tell_detokenizer=True)
            case PeerChanged():
                self.peers.changed(event.engine, takes=event.takes)
            case RankProgress():
                self._rank_progress(event, now)
            case Transferred():
                self._transferred(event, now)
            case StoreAnswered():
                self._store_answered(event, now)
            case StoreHere() | StoreGone():
                self._store_changed(event)
            case NotTaken():
                self._not_taken(event)
            case StepMissed():
                if self.serving is not None and event.epoch == self.serving.steps.epoch:
                    self._start_anew(f"{event.worker} never received step {event.expected}")
            case GrammarCompiled():
                if self.serving is not None and event.epoch == self.serving.steps.epoch:
                    self._waited(self.serving, self.serving.grammars.answered(event.grammar, event.error, now))
            case WorkersReady():
                self._workers_ready(event)
            case WorkersLost():
                self._stop_serving(event.reason)
            case TimePassed():
                self._look_for_overdue_step(now)
                if self.serving is not None:
                    self._waited(self.serving, self.serving.grammars.look_at_clock(now))
                self.store.look_at_clock(now)
            case _:
                assert_never(event)
        self._plan(now)
        if self.site.node is not None:
            self._mind_store(now)
        self._flush()
        out, self._out = self._out, []
        return out

    # ---- questions

    def probe(self, request: RequestId, attempt: Attempt) -> ProbeReply:
        sequence = self.requests.get(request)
        if sequence is None or sequence.generation.attempt != attempt:
            return ProbeReply("unknown", 0)
        running = sequence.phase in ("loading", "prefilling", "decoding", "handing")
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
            role=self.site.role,
            node=self.site.node,
            prefill_tokens=sum(max(0, len(s.tokens) - s.planned) for s in self.requests.values()),
            prompt_tokens=self.tally.prompt_tokens,
            cached_tokens=self.tally.cached_tokens,
            drafted_tokens=self.tally.drafted,
            accepted_tokens=sum(self.tally.accepted),
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is in hand, neither requests nor blocks on their way to the store."""
        return not self.requests and (self.serving is None or not self.serving.saving)

    # ---- requests come and are called off

    def _generate(self, generate: Generate) -> None:
        generation = generate.generation
        request, attempt = generation.request, generation.attempt
        held = self.requests.get(request)
        if self._fence.bars(request, attempt) or (held is not None and held.generation.attempt >= attempt):
            if generate.handed is not None:  # a cancel has overtaken it: the stream that moved here is nobody's
                self._streams.disown(generate.detokenizer, request, attempt)
            return
        if held is not None:
            self._end(held, tell_detokenizer=True)
        if self.serving is None:
            self._refuse(generate, Failed(request, attempt, "the engine has no workers"))
            return
        self._tickets += 1
        admitted = self.serving.admission.admit(generate, self._tickets)
        planner = self.serving.planner
        if isinstance(admitted, Rejected):
            self._refuse(generate, admitted)
        elif (error := self.serving.grammars.error(generation.grammar)) is not None:
            self._refuse(generate, _uncompilable(generation, error))
        elif planner.lined_up >= self.limits.max_waiting:
            self._refuse(generate, self._overloaded(request, attempt))
        else:
            self._accept(self.serving, admitted)

    def _accept(self, serving: Serving, sequence: Sequence) -> None:
        self.requests[sequence.generation.request] = sequence
        other = sequence.decode_on
        if other is not None and not (self.store.attached and other != self._engine and self.peers.take_over(other)):
            sequence.decode_on = None  # there is no way to hand anything over
        serving.planner.accept(sequence)
        if len(sequence.tokens) >= sequence.limit:  # earlier attempts gave all that was asked for
            self._streams.open(sequence, 0)
            self._streams.add(sequence, results.entry(sequence, (), "length"))
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
        if generate.handed is not None:
            answer = self._returned(generate, answer)
        self._out.append(TellGateway(generate.generation.gateway, answer))

    def _returned(self, generate: Generate, answer: Rejected | Failed) -> Failed:
        """What was accepted elsewhere, and has been seen by its client, is tried again; its stream here is not."""
        self._streams.disown(generate.detokenizer, answer.request, answer.attempt)
        if isinstance(answer, Failed):
            return answer
        return Failed(answer.request, answer.attempt, f"{self._engine} cannot take it over: {answer.message}")

    def _call_off(self, message: Cancel | StopMatched) -> None:
        """Fences even what is unknown: a cancel can overtake the request that it cancels."""
        request, attempt = message.request, message.attempt
        self._fence.close(request, attempt)
        sequence = self.requests.get(request)
        if sequence is not None and sequence.generation.attempt <= attempt:
            self._end(sequence, tell_detokenizer=isinstance(message, Cancel))
        elif isinstance(message, Cancel) and message.detokenizer is not None:
            self._streams.disown(message.detokenizer, request, attempt)
        if (relay := self._passed_on.called_off(message)) is not None:
            self._out.append(relay)

    def _waited(self, serving: Serving, waited: list[Waited]) -> None:
        """What became of grammars that sequences have waited for."""
        for sequence, error in waited:
            if error is None:
                serving.planner.compiled(sequence)
                continue
            generation = sequence.generation
            self._end(sequence, tell_detokenizer=True)
            self._out.append(TellGateway(generation.gateway, _uncompilable(generation, error)))

    def _end(self, sequence: Sequence, *, tell_detokenizer: bool) -> None:
        assert self.serving is not None, "without workers no request is held"
        generation = sequence.generation
        self._fence.close(generation.request, generation.attempt)
        del self.requests[generation.request]
        self.serving.hand_overs.forget(sequence)
        self.serving.planner.end(sequence)
        if tell_detokenizer:
            self._streams.abandon(sequence)

    # ---- steps

    def _plan(self, now: float) -> None:
        serving = self.serving
        self.plan_due = None
        while serving is not None and serving.steps.in_flight <= serving.limits.plans_ahead:
            if self._may_wait(serving, now):
                return
            planned = serving.planner.plan(now)
            if planned is None:
                if self.requests and serving.steps.in_flight == 0 and not serving.planner.waits_elsewhere:
                    raise Stuck(f"{len(self.requests)} requests are held, and none can be computed")
                return
            for sequence, cached in planned.started:
                self._streams.open(sequence, cached)
                self.tally.began(sequence.generation.prompt_length, cached)
            for sequence in planned.handing:
                serving.hand_overs.begin(sequence)
            step = serving.steps.issue(planned.expected, now)
            serving.transfers.issued(step)
            plan = StepPlan(
                epoch=serving.steps.epoch,
                step=step,
                released=planned.released,
                new=planned.new,
                work=planned.work,
                transfers=planned.transfers,
                compile=planned.compile,
            )
            self._out.append(SendPlan(plan))

    def _may_wait(self, serving: Serving, now: float) -> bool:
        """Whether the workers have enough to do, and the plan is not due yet; then sets `plan_due`."""
        if not self.limits.plan_late or self.limits.run_ahead == 0:
            return False
        due = serving.steps.next_due(serving.limits.stages)
        if now < due:
            self.plan_due = due
            return True
        return False

    def _step_finished(self, result: StepFinished, now: float) -> None:
        serving = self.serving
        if serving is None or result.epoch != serving.steps.epoch or result.step < serving.steps.finished:
            return
        if result.step > serving.steps.finished:
            self._start_anew(f"the result of step {serving.steps.finished} never came")
            return
        expected = serving.steps.finish(len(result.sampled), now)
        serving.transfers.step_finished(result.step, now)
        serving.drafts.take(result, expected)
        by_id = serving.planner.by_id
        for scored in result.scored:
            if (sequence := by_id.get(scored.sequence)) is not None:
                self._streams.scored(sequence, scored)
        for sampled in result.sampled:
            sequence = by_id.get(sampled.sequence)
            if sequence is not None:  # else it ended meanwhile, and this was computed ahead for nothing
                self._take_tokens(serving, sequence, sampled)

    def _take_tokens(self, serving: Serving, sequence: Sequence, sampled: Sampled) -> None:
        entry = results.take(sequence, sampled)
        self.tokens += len(entry.tokens)
        self._streams.add(sequence, entry)
        if len(sequence.hashes) > sequence.indexed:
            serving.planner.memory.index_full_blocks(sequence)
        if entry.finish is not None:
            self._end(sequence, tell_detokenizer=False)
        elif sequence.phase == "returning" and not sequence.awaits_token:
            serving.planner.wait(sequence)

    def _transferred(self, report: Transferred, now: float) -> None:
        serving = self.serving
        if serving is None or report.epoch != serving.steps.epoch:
            return
        for kind, lease, done in serving.transfers.reported(report, now):
            if kind == "save":
                serving.saves.over(lease, done)
            else:
                sequence, tokens, others = serving.loads.over(lease, done)
                if sequence is not None:
                    serving.planner.loaded(sequence, tokens)
                for other in others:
                    serving.planner.resume(other)

    def _rank_progress(self, report: RankProgress, now: float) -> None:
        if report.transfers is not None:
            self._transferred(report.transfers, now)
        if self.serving is not None and (reason := self.serving.steps.lost(report, now)) is not None:
            self._start_anew(reason)

    def _look_for_overdue_step(self, now: float) -> None:
        serving, timeout = self.serving, self.limits.step_timeout
        if serving is None:
            return
        late = f"step {serving.steps.finished}" if serving.steps.overdue(now, timeout) else None
        if late is None and serving.transfers.overdue(now, timeout):
            late = "copying blocks from or to the KV store"
        if late is not None:
            reason = f"{late} took longer than {timeout:g} s"
            self._stop_serving(reason)
            self._out.append(GiveUp(reason))

    # ---- the KV store

    def _store_changed(self, event: StoreHere | StoreGone) -> None:
        if isinstance(event, StoreGone):
            self.store.gone()
        elif not self.store.here(event.incarnation):
            return
        if self.serving is not None:
            self.serving.saves.forget()

    def _store_answered(self, event: StoreAnswered, now: float) -> None:
        question, answer = event.question, event.answer
        self.store.take_note(question, answer, now)
        if isinstance(question, Attach):
            self.store.attach_answered(question, answer, now)
        elif self.serving is None:
            self.store.release(question.lease)
        elif isinstance(question, Find):
            sequence = self.serving.loads.answered(question.lease, answer, now)
            if sequence is not None:
                self.serving.planner.resume(sequence)
        elif isinstance(question, Reserve):
            self.serving.saves.answered(question.lease, answer, now)
        else:
            self.serving.saves.committed(question.lease, answer)

    def _mind_store(self, now: float) -> None:
        """Offers what the last plan computes, and hands over what is saved; then somebody may be planned again."""
        while (serving := self.serving) is not None:
            fresh, serving.planner.memory.fresh = serving.planner.memory.fresh, []
            serving.saves.offer(fresh, now)
            serving.saves.reserve(now, idle=serving.steps.in_flight == 0)
            for save in serving.saves.take_over():
                serving.hand_overs.over(save)
            settled = serving.hand_overs.settled() if serving.hand_overs else []
            if not settled:
                break
            for one in settled:
                self._hand_over(serving, one)
            self._plan(now)
        self._out += self.store.take_outputs()

    # ---- hand-overs

    def _hand_over(self, serving: Serving, settled: Settled) -> None:
        """To the engine that goes on; or back into our own line, where it would have to compute what is not saved."""
        sequence = settled.sequence
        engine = sequence.decode_on
        if not settled.good or engine is None or not self.peers.take_over(engine):
            self.tally.kept += 1
            serving.planner.keep(sequence)
            return
        self.tally.handed_over += 1
        self._streams.move(sequence, engine)
        self._flush()  # the first token must be there before the second is drawn
        generation = sequence.generation
        placed = Placed(generation.request, generation.attempt, engine, sequence.detokenizer, self._engine)
        self._out.append(TellGateway(generation.gateway, placed))
        self._out.append(PassOn(engine, handed(settled, self._engine, self.site.node)))
        self._passed_on.add(generation, engine, sequence.detokenizer)
        self._end(sequence, tell_detokenizer=False)

    def _not_taken(self, event: NotTaken) -> None:
        """Whom we passed a request on to is gone."""
        generation = event.generate.generation
        self._streams.disown(event.generate.detokenizer, generation.request, generation.attempt)
        if not self._passed_on.came_back(generation):
            return  # nobody wants it any more
        failed = Failed(generation.request, generation.attempt, f"{event.engine} does not take it over")
        self._out.append(TellGateway(generation.gateway, failed))

    # ---- epochs

    def _workers_ready(self, workers: WorkersReady) -> None:
        if self.serving is not None:
            self._stop_serving("the engine's workers were exchanged")
        self.serving = Serving(self._epoch, self.limits, workers, self.store)
        self.store.share(workers.layout if self.site.node is not None else None, workers.card.name)

    def _start_anew(self, reason: str) -> None:
        """A message to or from the workers was lost, so they and we may disagree on everything: a new epoch."""
        assert self.serving is not None
        workers = self.serving.workers
        self._stop_serving(reason)
        self._workers_ready(workers)

    def _stop_serving(self, reason: str) -> None:
        self._fail_where(lambda _: True, reason, tell_detokenizer=True)
        self._flush()
        if self.serving is not None:
            self.serving.close()
        self.serving = None
        self._epoch = Incarnation(self._epoch + 1)
        self._streams = Streams(self._engine, self._epoch)

    def _fail_where(self, concerned: Callable[[Sequence], bool], reason: str, tell_detokenizer: bool) -> None:
        for sequence in [s for s in self.requests.values() if concerned(s)]:
            generation = sequence.generation
            self._end(sequence, tell_detokenizer=tell_detokenizer)
            failed = Failed(generation.request, generation.attempt, reason)
            self._out.append(TellGateway(generation.gateway, failed))

    def _flush(self) -> None:
        self._out += self._streams.flush()


def _uncompilable(generation: Generation, error: str) -> Rejected:
    """Which of the client's fields the grammar came from, the gateway knows."""
    request, attempt = generation.request, generation.attempt
    return Rejected(request=request, attempt=attempt, kind="invalid_request", message=error, field="grammar")
