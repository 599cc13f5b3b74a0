"""What a scheduler says of each request's life, to be followed by its id: log lines, counts, and spans of its trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from services.scheduler import metrics
from services.scheduler.core.events import SendHandOver, SendPlan
from services.scheduler.core.sequence import Sequence
from shared.ids import RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import RequestFailed, RequestPlaced, RequestRejected
from shared.messages.scheduler import GenerateRequest
from shared.telemetry.tracing import TRACING, Attribute

log = logging.getLogger(__name__)

MAX_TRACED = 4096
"""Requests that are followed at a time; above it later ones have no spans of this engine."""
COMPUTED = ("prefilling", "decoding", "handing")
"""Phases of a sequence whose turn has come."""


class RequestStage:
    """The stage that a traced request is in: one follows the other without a gap."""

    def __init__(self, generate: GenerateRequest) -> None:
        self.context = generate.generation.trace
        self.stage = "queue" if generate.handed is None else "kv_load"
        self.began = time.time()
        self.decodes = generate.handed is not None
        """Whether its prompt has been computed elsewhere."""
        self.prompt: dict[str, int] = {}
        """Its lengths, once they are known."""

    def enter(self, stage: str, engine: str, **attributes: Attribute) -> None:
        """Records the stage that ends, and begins the next one."""
        now = time.time()
        TRACING.record(self.stage, self.context, self.began, now, engine=engine, **attributes)
        self.stage, self.began = stage, now


class RequestLog:
    """Owns where the traced requests of an engine stand."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._traced: dict[RequestId, RequestStage] = {}

    def arrived(self, generate: GenerateRequest, held: Mapping[RequestId, Sequence]) -> None:
        """A request was taken. `held`: those that have not ended; others are followed no longer."""
        metrics.PREDICTED_CACHED.inc(generate.predicted_cached)
        if generate.generation.trace is None:
            return
        if len(self._traced) >= MAX_TRACED:
            self._traced = {request: traced for request, traced in self._traced.items() if request in held}
        if len(self._traced) < MAX_TRACED:
            self._traced[generate.generation.request] = RequestStage(generate)

    def planned(self, output: SendPlan, held: Mapping[RequestId, Sequence]) -> None:
        """A plan is sent. `held`: as in `arrived`."""
        if output.plan.work:
            metrics.BATCH_TOKENS.observe(sum(work.count for work in output.plan.work))
        if not output.plan.new:
            return
        for request, traced in self._traced.items():
            sequence = held.get(request)
            if traced.stage in ("queue", "kv_load") and sequence is not None and sequence.phase in COMPUTED:
                traced.enter("decode" if traced.decodes else "prefill", self._engine)

    def sent(self, batch: TokenBatch) -> None:
        """Tokens are sent to a detokenizer."""
        if batch.entries:
            metrics.OUTPUT_TOKENS.inc(sum([len(entry.tokens) for entry in batch.entries]))
        for opened in batch.opened:
            metrics.PROMPT_TOKENS.labels("cached").inc(opened.cached_tokens)
            metrics.PROMPT_TOKENS.labels("computed").inc(opened.prompt_tokens - opened.cached_tokens)
            extra = {"prompt_tokens": opened.prompt_tokens, "cached_tokens": opened.cached_tokens}
            log.info("started", extra={"request": opened.request, "attempt": opened.attempt, **extra})
            if (traced := self._traced.get(opened.request)) is not None:
                traced.prompt = extra
        for entry in batch.entries:
            if self._traced and (traced := self._traced.get(entry.request)) is not None and traced.stage == "prefill":
                traced.enter("decode", self._engine, **traced.prompt)
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
        if (traced := self._traced.get(request)) is not None:
            traced.stage = "hand_over" if traced.stage == "decode" else traced.stage
            self._ended(request, to=output.engine)

    def answered(self, message: RequestRejected | RequestFailed | RequestPlaced) -> None:
        """A gateway hears of a request beside its tokens."""
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
        if (traced := self._traced.pop(request, None)) is not None:
            traced.enter("ended", self._engine, **attributes)
