"""What a scheduler says of each request's life, to be followed by its id: log lines, counts, and spans of its trace."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Mapping

from prometheus_client import Histogram

from services.scheduler import metrics
from services.scheduler.core.events import SendHandOver
from services.scheduler.core.sequence import Sequence
from shared.ids import RequestId, SequenceId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import PromptKept, RequestFailed, RequestPlaced, RequestRejected
from shared.messages.lifecycle import LATENCY_BOUNDS, STEP_TOKEN_BOUNDS, BucketCounts, EngineHealth, RequestFigures
from shared.messages.scheduler import GenerateRequest
from shared.messages.worker import StepPlan
from shared.telemetry.logs import record_trace
from shared.telemetry.tracing import TRACING, Attribute, OpenSpan, trace_id_of

log = logging.getLogger(__name__)

_SECONDS = {
    "queue": metrics.QUEUE_SECONDS,
    "prefill": metrics.PREFILL_SECONDS,
    "decode": metrics.DECODE_SECONDS,
    "inference": metrics.INFERENCE_SECONDS,
}
"""Of the stages that are measured; inference: prefill and decode as one."""


class EngineHistogram:
    """Owns one histogram of one engine: what the process's page shows may be of several."""

    def __init__(self, published: Histogram, bounds: tuple[float, ...]) -> None:
        self._published, self._bounds = published, bounds
        self._counts, self._total = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Counts one observation here and on the page."""
        self._published.observe(value)
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def counts(self) -> BucketCounts:
        """Returns what was counted."""
        return BucketCounts(tuple(self._counts), self._total)


class RequestStage:
    """The stage that a request is in: one follows the other without a gap."""

    __slots__ = ("began", "computes_from", "context", "decodes", "name", "prompt", "request", "sequence")

    def __init__(self, generate: GenerateRequest, sequence: SequenceId) -> None:
        self.request, self.sequence = generate.generation.request, sequence
        self.context = generate.generation.trace
        record_trace(self.request, self.context)
        self.name = "queue" if generate.handed is None else "kv_load"
        self.began = time.time()
        self.decodes = generate.handed is not None
        """Whether its prompt has been computed elsewhere."""
        self.computes_from: float | None = None
        """When the first step computed something of it, as far as it goes on here."""
        self.prompt: dict[str, int] = {}
        """Its lengths, once they are known."""

    def enter(self, name: str, engine: str, times: Mapping[str, EngineHistogram], **attributes: Attribute) -> None:
        """Records the stage that ends, and begins the next one."""
        now = time.time()
        if (seconds := times.get(self.name)) is not None:
            seconds.observe(max(0.0, now - self.began))
        if self.name == "decode" and self.computes_from is not None:
            times["inference"].observe(max(0.0, now - self.computes_from))
        elif self.computes_from is None and name in ("prefill", "decode"):
            self.computes_from = now
        TRACING.record(self.name, self.context, self.began, now, engine=engine, **attributes)
        self.name, self.began = name, now


class RequestLog:
    """Owns where the requests of an engine stand."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._open: dict[RequestId, RequestStage] = {}
        self._waiting: dict[SequenceId, RequestStage] = {}
        """Those that no step has computed anything of."""
        self._prefilling: dict[RequestId, RequestStage] = {}
        """Those that wait for their first token."""
        self._most = 1024
        """Above so many, those that have ended unnoticed are dropped."""
        self._times = {name: EngineHistogram(published, LATENCY_BOUNDS) for name, published in _SECONDS.items()}
        self._step_tokens = EngineHistogram(metrics.BATCH_TOKENS, STEP_TOKEN_BOUNDS)

    def figures(self) -> RequestFigures:
        """Returns what requests and steps took until now."""
        times = {name: each.counts() for name, each in self._times.items()}
        return RequestFigures(**times, step_tokens=self._step_tokens.counts())

    def open_stages(self, trace_id: str) -> list[OpenSpan]:
        """Returns in which stages the requests of a trace are."""
        stages = (stage for stage in self._open.values() if stage.context and trace_id_of(stage.context) == trace_id)
        return [OpenSpan(stage.name, stage.began) for stage in stages]

    def arrived(self, generate: GenerateRequest, held: Mapping[RequestId, Sequence]) -> None:
        """The core has decided on a request. `held`: those that have not ended."""
        metrics.PREDICTED_CACHED.inc(generate.predicted_cached)
        request = generate.generation.request
        if (sequence := held.get(request)) is None:
            return
        if len(self._open) >= self._most:
            self._open = {request: stage for request, stage in self._open.items() if request in held}
            here = {sequence.id for sequence in held.values()}
            self._waiting = {sequence: stage for sequence, stage in self._waiting.items() if sequence in here}
            self._prefilling = {request: stage for request, stage in self._prefilling.items() if request in held}
            self._most = max(1024, 2 * len(self._open))
        self._open[request] = self._waiting[sequence.id] = RequestStage(generate, sequence.id)

    def planned(self, plan: StepPlan) -> None:
        """A plan is sent."""
        if plan.work:
            self._step_tokens.observe(sum(work.count for work in plan.work))
        for new in plan.new:
            if (stage := self._waiting.pop(new.sequence, None)) is None:
                continue
            stage.enter("decode" if stage.decodes else "prefill", self._engine, self._times)
            if not stage.decodes:
                self._prefilling[stage.request] = stage

    def sent(self, batch: TokenBatch) -> None:
        """Tokens are sent to a detokenizer."""
        if batch.entries:
            metrics.OUTPUT_TOKENS.inc(sum([len(entry.tokens) for entry in batch.entries]))
        for opened in batch.opened:
            metrics.PROMPT_TOKENS.labels("cached").inc(opened.cached_tokens)
            metrics.PROMPT_TOKENS.labels("computed").inc(opened.prompt_tokens - opened.cached_tokens)
            extra = {"prompt_tokens": opened.prompt_tokens, "cached_tokens": opened.cached_tokens}
            log.info("started", extra={"request": opened.request, "attempt": opened.attempt, **extra})
            if (stage := self._open.get(opened.request)) is not None:
                stage.prompt = extra
        if self._prefilling:
            for entry in batch.entries:
                if (stage := self._prefilling.pop(entry.request, None)) is not None:
                    stage.enter("decode", self._engine, self._times, **stage.prompt)
        for entry in batch.entries:
            if entry.finish is not None:
                life = {"request": entry.request, "attempt": entry.attempt, "finish": entry.finish}
                output_tokens = entry.position + len(entry.tokens)
                log.info("finished", extra={**life, "output_tokens": output_tokens})
                self._ended(entry.request, finish=entry.finish, output_tokens=output_tokens)
        for abandoned in batch.abandoned:
            log.info("request abandoned", extra={"request": abandoned.request, "attempt": abandoned.attempt})
            self._ended(abandoned.request, finish="abandoned")

    def handed_over(self, output: SendHandOver) -> None:
        """Another engine goes on with a request, with the blocks of its prompt or before these are computed."""
        request = output.generate.generation.request
        if (stage := self._open.get(request)) is not None:
            stage.name = "hand_over" if stage.name == "decode" else stage.name
            self._ended(request, to=output.engine)

    def answered(self, message: RequestRejected | RequestFailed | RequestPlaced | PromptKept) -> None:
        """A gateway hears of a request beside its tokens."""
        if isinstance(message, PromptKept):
            log.info("prompt kept", extra={"request": message.request, "blocks": message.blocks})
            return
        if isinstance(message, RequestPlaced):
            extra = {"request": message.request, "attempt": message.attempt, "engine": message.engine}
            log.info("handed over", extra=extra)
            return
        kind, reason = (
            (message.kind, message.message) if isinstance(message, RequestRejected) else ("failed", message.reason)
        )
        metrics.REFUSED.labels(kind).inc()
        extra = {"request": message.request, "attempt": message.attempt, "kind": kind, "reason": reason}
        log.info("request refused", extra=extra)
        self._ended(message.request, error=reason)

    def _ended(self, request: RequestId, **attributes: Attribute) -> None:
        if (stage := self._open.pop(request, None)) is None:
            return
        self._prefilling.pop(request, None)
        if self._waiting.get(stage.sequence) is stage:
            del self._waiting[stage.sequence]
        stage.enter("ended", self._engine, self._times, **attributes)


def log_health(before: EngineHealth, now: EngineHealth) -> None:
    """Says, and counts, that the engine is taken to fail, or is so no longer."""
    if now.suspect is not None and before.suspect is None:
        metrics.EJECTIONS.inc()
        log.error("engine suspect", extra={"reason": now.suspect, "ejections": now.ejections})
    elif now.suspect is None and before.suspect is not None:
        log.info("engine no longer suspect", extra={"reason": before.suspect, "ejections": now.ejections})
