"""What an engine does for its health: asks canaries of itself, suspects itself, and says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.events import Output, WorkersReady
from services.scheduler.core.health.canary import Canary, CanaryOutcome
from services.scheduler.core.health.suspicion import Suspicion
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.sequence import Sequence as EngineSequence
from shared.ids import RequestId
from shared.messages.model_card import ModelCard
from shared.messages.scheduler import Cancel, GenerateRequest, SequenceFailed


class HealthMonitor:
    """Owns the canary and the suspicion. It outlives epochs: workers that were replaced because they said something
    wrong are measured by what was right before."""

    def __init__(self, limits: EngineLimits, counters: EngineCounters) -> None:
        self.canary = Canary(limits.canary_interval)
        self.suspicion = Suspicion(limits.ejection_time, probed=limits.canary_interval > 0)
        self._counters = counters
        self._workers: WorkersReady | None = None

    @property
    def knows_answer(self) -> bool:
        """Whether canaries can be compared, or never will be; a suspect need not wait for that."""
        return self.canary.recorded or self.suspicion.reason is not None

    def requests(self, held: Mapping[RequestId, EngineSequence]) -> int:
        """How many of the requests held are clients'."""
        run = self.canary.run
        return len(held) - (run is not None and run.cancel.request in held)

    def running(self, held: Mapping[RequestId, EngineSequence]) -> bool:
        """Whether a canary is among the running sequences."""
        run = self.canary.run
        sequence = None if run is None else held.get(run.cancel.request)
        return sequence is not None and sequence.phase in ("prefilling", "decoding")

    # ---- what happens to the engine

    def start_epoch(self, workers: WorkersReady) -> None:
        """Workers are ready: the same ones, or new ones. A suspect's new ones must say what was said before; others,
        which may have been started with other settings, say anew what is right."""
        before, self._workers = self._workers, workers
        if before == workers:
            return
        self.suspicion.record_restart()
        if before is not None and (self.suspicion.reason is None or _model(before) != _model(workers)):
            self.canary.forget_answer()

    def end_epoch(self) -> None:
        """The workers are gone, and a canary under way with them: that is not its outcome."""
        self.canary.abandon()

    def accuse(self, reason: str, now: float) -> None:
        """Others say why requests should not go to this engine: it looks for itself at once."""
        self.suspicion.accuse(reason, now)
        self.canary.hurry(now)

    def record_failed(self, failed: Sequence[SequenceFailed], now: float) -> None:
        """A step has failed for some sequences. Where the model computed NaN, a canary says whether it was their
        prompts."""
        undefined = sum(each.fault == "nan" for each in failed)
        self._counters.undefined += undefined
        if undefined:
            self.canary.hurry(now)

    def next_request(self, workers: WorkersReady, now: float, *, idle: bool) -> GenerateRequest | None:
        """The canary to be computed now; None for none. A suspect, and one that may become it, is probed although it is
        busy."""
        probing = self.suspicion.doubtful or self.suspicion.reason is not None
        return self.canary.next_request(workers, now, idle=idle or probing)

    def tick(self, now: float) -> Cancel | None:
        """Time has passed. Returns the cancel of a canary that is late; the outcome is recorded."""
        if self.suspicion.ejections:  # else it was no suspect for long: nothing ends, and nothing is forgotten
            self.suspicion.tick(now)
        if self.canary.run is None:
            return None
        cancel = self.canary.overdue(now)
        if cancel is not None:
            self._record(self.canary.give_up(now), now)
        return cancel

    def separate(self, outputs: list[Output], now: float) -> list[Output]:
        """The engine's outputs without what is the canary's; needed only where some are `mixed_in`."""
        rest, outcome = self.canary.separate(outputs, now)
        if outcome is not None:
            self._record(outcome, now)
        return rest

    def _record(self, outcome: CanaryOutcome, now: float) -> None:
        counters, suspicion = self._counters, self.suspicion
        counters.canaries += 1
        counters.canary_faults += outcome.fault is not None
        counters.canary_seconds += outcome.seconds
        suspicion.record_canary(outcome.fault, now)
        if suspicion.doubtful or not self.knows_answer:
            self.canary.pause(0.0, now)
        elif suspicion.reason is not None:
            self.canary.pause(max(suspicion.probe_interval, outcome.seconds), now)
        else:
            self.canary.pause(self.canary.pause_seconds(), now)


def _model(workers: WorkersReady) -> ModelCard:
    """What they serve, whenever they loaded it."""
    return replace(workers.card, created=0)
