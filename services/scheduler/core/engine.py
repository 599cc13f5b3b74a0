"""The engine's state machine: one event in, messages out. Every request ends in one last word (see `answers.py`)."""

from __future__ import annotations

from typing import assert_never

from services.scheduler.core.answers import Answers
from services.scheduler.core.events import (
    DetokenizerGone,
    Event,
    GatewayGone,
    GiveUp,
    NotTaken,
    Output,
    PeerChanged,
    RankProgress,
    StoreAnswered,
    StoreGone,
    StoreHere,
    TimePassed,
    WorkersLost,
    WorkersReady,
)
from services.scheduler.core.hand_overs import Peers
from services.scheduler.core.intake import Intake
from services.scheduler.core.limits import Limits
from services.scheduler.core.passing_on import PassingOn
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.serving import Serving
from services.scheduler.core.site import Site
from services.scheduler.core.store import Store
from services.scheduler.core.tally import Tally
from shared.ids import Attempt, EngineId, Incarnation, RequestId
from shared.messages.kvstore import Attach
from shared.messages.lifecycle import EngineReport
from shared.messages.scheduler import (
    Cancel,
    DetokenizerLost,
    Generate,
    GrammarCompiled,
    ProbeReply,
    StepFinished,
    StepMissed,
    StopMatched,
    Transferred,
)


class Engine:
    """Owns the epochs of one engine: what it has while it has workers. Serves nothing until `WorkersReady`."""

    def __init__(self, engine: EngineId, epoch: Incarnation, limits: Limits, site: Site | None = None) -> None:
        self.limits = limits
        self.site = site or Site()
        self.tally = Tally()
        self.store = Store(self.site, self.tally)
        self.serving: Serving | None = None
        self._epoch = epoch
        self._answers = Answers(engine, epoch)
        self._passing_on = PassingOn(engine, self._answers, self.store, self.tally)
        self._intake = Intake(limits.max_waiting, self._answers, self._passing_on)

    def handle(self, event: Event, now: float) -> list[Output]:
        """Takes one event in; the outputs are to be sent in order. `now` are seconds on the liveness clock."""
        match event:
            case Generate():
                self._intake.generate(event, self.serving)
            case Cancel() | StopMatched():
                self._intake.call_off(event, self.serving)
            case NotTaken():
                self._passing_on.not_taken(event)
            case PeerChanged():
                self.peers.changed(event.engine, takes=event.takes)
            case DetokenizerLost() | DetokenizerGone() | GatewayGone():
                self._listener_gone(event)
            case StepFinished() | StepMissed() | GrammarCompiled() | Transferred() | RankProgress():
                if self.serving is not None:
                    self._rank_said(self.serving, event, now)
            case StoreAnswered():
                self._store_answered(event, now)
            case StoreHere() | StoreGone():
                self._store_changed(event)
            case WorkersReady():
                self._workers_ready(event)
            case WorkersLost():
                self._stop_serving(event.reason)
            case TimePassed():
                self._look_at_clock(now)
            case _:
                assert_never(event)
        self._plan(now)
        if self.site.node is not None:
            self._mind_store(now)
        return self._answers.take()

    # ---- questions

    @property
    def requests(self) -> dict[RequestId, Sequence]:
        """Those taken in that have not ended; without workers, none is."""
        return {} if self.serving is None else self.serving.requests.held

    @property
    def tokens(self) -> int:
        """Output tokens since the start."""
        return self.tally.output_tokens

    @property
    def plan_due(self) -> float | None:
        """When `TimePassed` is wanted at the latest, so that the device finds its next plan ready."""
        return None if self.serving is None else self.serving.stepping.plan_due

    @property
    def peers(self) -> Peers:
        """Who takes over what is handed over."""
        return self._passing_on.peers

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
        places, pool = self.serving.planner.places, self.serving.planner.memory.pool
        return EngineReport(
            model=self.serving.card,
            waiting=len(self.requests) - places.running,
            running=places.running,
            max_waiting=self.limits.max_waiting,
            max_running=self.serving.limits.max_running,
            blocks_total=pool.total,
            blocks_free=pool.free,
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

    # ---- who listens, who computes

    def _listener_gone(self, event: DetokenizerLost | DetokenizerGone | GatewayGone) -> None:
        if isinstance(event, DetokenizerGone):
            self._answers.streams.forget(event.detokenizer)
        if self.serving is None:
            return
        requests = self.serving.requests
        if isinstance(event, GatewayGone):
            requests.end_where(lambda s: s.generation.gateway == event.gateway)
        else:
            reached = isinstance(event, DetokenizerLost)
            requests.fail_where(
                lambda s: s.detokenizer == event.detokenizer, "its detokenizer was lost", tell_detokenizer=reached
            )

    def _rank_said(
        self,
        serving: Serving,
        event: StepFinished | StepMissed | GrammarCompiled | Transferred | RankProgress,
        now: float,
    ) -> None:
        current = event.epoch == serving.steps.epoch
        lost: str | None = None
        match event:
            case StepFinished():
                lost = serving.stepping.finished(event, now)
            case StepMissed():
                lost = f"{event.worker} never received step {event.expected}" if current else None
            case GrammarCompiled():
                if current:
                    serving.requests.waited(serving.grammars.answered(event.grammar, event.error, now))
            case Transferred():
                if current:
                    serving.kv_traffic.transferred(event, now)
            case RankProgress():
                lost = self._rank_progress(serving, event, now)
            case _:
                assert_never(event)
        if lost is not None:
            self._start_anew(serving, lost)

    def _rank_progress(self, serving: Serving, report: RankProgress, now: float) -> str | None:
        transfers = report.transfers
        if transfers is not None and transfers.epoch == serving.steps.epoch:
            serving.kv_traffic.transferred(transfers, now)
        return serving.steps.lost(report, now)

    # ---- steps

    def _plan(self, now: float) -> None:
        if self.serving is not None:
            self.serving.stepping.plan(now)

    def _look_at_clock(self, now: float) -> None:
        if self.serving is not None and (reason := self.serving.stepping.overdue(now)) is not None:
            self._stop_serving(reason)
            self._answers.add(GiveUp(reason))
        if self.serving is not None:
            self.serving.requests.waited(self.serving.grammars.look_at_clock(now))
        self.store.look_at_clock(now)

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
        else:
            self.serving.kv_traffic.answered(question, answer, now)

    def _mind_store(self, now: float) -> None:
        """Offers what the last plan computes, and hands over what is saved; then somebody may be planned again."""
        while (serving := self.serving) is not None:
            settled = serving.kv_traffic.offer(now, idle=serving.steps.in_flight == 0)
            if not settled:
                break
            for one in settled:
                self._passing_on.hand_over(serving, one)
            self._plan(now)
        for output in self.store.take_outputs():
            self._answers.add(output)

    # ---- epochs

    def _workers_ready(self, workers: WorkersReady) -> None:
        if self.serving is not None:
            self._stop_serving("the engine's workers were exchanged")
        self.serving = Serving(self._epoch, self.limits, workers, self.store, self._answers)
        self.store.share(workers.layout if self.site.node is not None else None, workers.card.name)

    def _start_anew(self, serving: Serving, reason: str) -> None:
        """A message to or from the workers was lost, so they and we may disagree on everything: a new epoch."""
        self._stop_serving(reason)
        self._workers_ready(serving.workers)

    def _stop_serving(self, reason: str) -> None:
        if self.serving is not None:
            self.serving.requests.fail_where(lambda _: True, reason, tell_detokenizer=True)
            self.serving.close()
        self.serving = None
        self._epoch = Incarnation(self._epoch + 1)
        self._answers.begin(self._epoch)
