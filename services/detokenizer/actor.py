"""The detokenizer's shell: receives token batches, asks the core, sends what it answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, assert_never

from services.detokenizer import metrics
from services.detokenizer.core.actions import (
    MAX_STREAMS,
    Action,
    EngineLost,
    GatewayLost,
    StreamOrphaned,
    ToEngine,
    ToGateway,
)
from services.detokenizer.core.detokenizer import Detokenizer
from services.detokenizer.core.stream_probes import NoReply, StreamProbe, StreamProbes
from services.detokenizer.core.text import TextVocabulary
from shared import topics
from shared.actor import Actor, Tick, TopicSubscription
from shared.bus import Bus, BusError, NoResponders, PayloadTooLarge, Undelivered
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, ModelName, RequestId, new_incarnation
from shared.messages.detokenizer import OpenStream, TokenBatch
from shared.messages.gateway import Deltas, GatewayMessage, RequestFailed
from shared.messages.generation import FinishReason
from shared.messages.lifecycle import DetokenizerReport, Lifecycle
from shared.messages.scheduler import Cancel, Probe, ProbeReply, StopMatched, TokenBatchLost
from shared.registry import InstanceGone, Registry
from shared.telemetry.logs import record_trace
from shared.telemetry.metrics import PublishedTotals
from shared.telemetry.tracing import TRACING, OpenSpan, trace_id_of

log = logging.getLogger(__name__)


SILENCE = 10.0
"""Seconds until a silent engine or gateway counts as gone here. Longer than elsewhere: dropping what they left is
housekeeping, while the gateways notice a dead engine sooner, and a dead gateway takes no deltas."""

PROBE_INTERVAL = 1.0
"""Seconds between two looks at streams that are silent."""
PROBE_REPLY_TIMEOUT = 1.0


class DetokenizerActor(Actor):
    """Owns a core that owns the streams, and a registry that says whose streams can be dropped."""

    service = "detokenizer"
    tick_every = 0.5

    def __init__(
        self,
        bus: Bus,
        instance: InstanceId,
        model: ModelName,
        vocabulary: TextVocabulary,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        super().__init__(bus, instance)
        self._id = DetokenizerId(instance)
        self._model = model
        self.core = Detokenizer(self._id, new_incarnation(), model, vocabulary, max_streams)
        self._registry = Registry(SILENCE)
        self._probes = StreamProbes()
        self._totals = PublishedTotals()
        self._traced: dict[RequestId, tuple[str | None, float]] = {}
        """The context of each open stream that is traced, and when it was opened, in Unix seconds."""
        self._most_traced = 1024
        """Above so many, those that have ended unnoticed are dropped."""

    def subscriptions(self) -> Sequence[TopicSubscription[Any]]:
        """Token batches, and the heartbeats of engines and gateways.

        Nothing is an intake: a coordinator gives a draining detokenizer no more requests, and those that it has need
        their batches.
        """
        peers = [TopicSubscription(topics.lifecycles("scheduler")), TopicSubscription(topics.lifecycles("gateway"))]
        return [TopicSubscription(topics.detokenizer_tokens(self._id)), *peers]

    def open_spans(self, trace_id: str) -> list[OpenSpan]:
        """The streams of a trace that have not ended."""
        return [
            OpenSpan("detokenize", began)
            for request, (context, began) in self._traced.items()
            if context and trace_id_of(context) == trace_id and request in self.core.streams
        ]

    async def handle(self, message: Any) -> None:
        """One message to the core, and what the core answers to the bus. Raises TypeError for a message that no topic
        of a detokenizer carries."""
        match message:
            case TokenBatch():
                started = time.perf_counter()
                for opened in message.opened:
                    record_trace(opened.request, opened.trace)
                    extra = {"request": opened.request, "attempt": opened.attempt, "engine": message.engine}
                    log.info("opened", extra=extra)
                    if opened.trace is not None:
                        self._follow(opened)
                await self._send(self.core.handle(message))
                metrics.SECONDS.observe(time.perf_counter() - started)
            case Lifecycle():
                gone = self._registry.record_lifecycle(message, self.bus.liveness_now())
                if gone is not None:
                    await self._drop(gone)
            case Tick():
                for gone in self._registry.expire(message.alive_now):
                    await self._drop(gone)
                metrics.publish(self.core.counters, self._totals)
            case Undelivered():
                await self._undelivered(message)
            case _:
                raise TypeError(f"a detokenizer takes no {type(message).__name__}")
        metrics.STREAMS.set(len(self.core.streams))

    async def background(self) -> None:
        """Asks engines after streams for which nothing comes, one after the other."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL)
            for probe in self._probes.due(self.core.streams.values(), self.bus.liveness_now()):
                reply = await self._ask(probe)
                if self._probes.replied(probe, reply, self.bus.liveness_now()):
                    log.warning("unclaimed", extra={"request": probe.request, "engine": probe.engine})
                    await self._send(self.core.end_streams(StreamOrphaned(*probe[1:])))

    async def _ask(self, probe: StreamProbe) -> ProbeReply | NoReply:
        topic = topics.engine_probes(probe.engine)
        try:
            question = Probe(probe.request, probe.attempt)
            reply: ProbeReply = await self.bus.request(topic, question, ProbeReply, PROBE_REPLY_TIMEOUT)
        except NoResponders:
            return "nobody there"
        except BusError:
            return "no reply in time"
        return reply

    async def tear_down(self) -> None:
        """Publishes what was counted since the last tick."""
        metrics.publish(self.core.counters, self._totals)

    def is_idle(self) -> bool:
        """Whether no stream is open here."""
        return not self.core.streams

    def load(self) -> int:
        """Streams that are open here."""
        return len(self.core.streams)

    def detokenizer_report(self) -> DetokenizerReport:
        """The model whose text this detokenizer makes."""
        return DetokenizerReport(model=self._model)

    async def _drop(self, gone: InstanceGone) -> None:
        last, reason = gone
        if last.service == "scheduler":
            await self._send(self.core.end_streams(EngineLost(EngineId(last.instance), reason, gone.death_of)))
        elif last.service == "gateway":
            await self._send(self.core.end_streams(GatewayLost(GatewayId(last.instance), reason)))

    async def _undelivered(self, undelivered: Undelivered) -> None:
        """A gateway's deltas had no subscriber: it is gone, and its requests are of no use."""
        gateways = {stream.opened.gateway for stream in self.core.streams.values()}
        for gateway in gateways:
            if topics.gateway_inbox(gateway) == undelivered.topic:
                log.warning("gateway gone", extra={"gateway": gateway})
                await self._send(self.core.end_streams(GatewayLost(gateway, "took no deltas")))

    async def _send(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ToGateway(gateway, message):
                    try:
                        confirm = isinstance(message, Deltas)
                        await self.bus.publish(topics.gateway_inbox(gateway), message, confirm=confirm)
                    except PayloadTooLarge as error:
                        await self._give_up(gateway, message, error)
                        continue
                    if isinstance(message, Deltas):
                        for delta in message.deltas:
                            if delta.finish is not None:
                                log.info("finished", extra={"request": delta.request, "finish": delta.finish})
                                self._record_span(delta.request, delta.finish)
                    elif isinstance(message, RequestFailed):
                        log.warning("failed", extra={"request": message.request, "why": message.reason})
                case ToEngine(engine, message):
                    _log_control(message)
                    await self.bus.publish(topics.engine_control(engine), message)
                case _:
                    assert_never(action)

    def _follow(self, opened: OpenStream) -> None:
        if len(self._traced) >= self._most_traced:
            self._traced = {request: traced for request, traced in self._traced.items() if request in self.core.streams}
            self._most_traced = max(1024, 2 * len(self._traced))
        self._traced[opened.request] = opened.trace, time.time()

    def _record_span(self, request: RequestId, finish: FinishReason) -> None:
        trace, began = self._traced.pop(request, (None, 0.0))
        TRACING.record("detokenize", trace, began, time.time(), finish=finish)

    async def _give_up(self, gateway: GatewayId, message: GatewayMessage, error: PayloadTooLarge) -> None:
        """Only log-probabilities of very many requests at once come to this. The gateway will see a gap in the
        numbers, so all of its requests fail."""
        log.error("deltas too large", extra={"gateway": gateway, "error": str(error)})
        if isinstance(message, Deltas):
            reason = "the deltas were too large to send"
            actions = self.core.end_streams(GatewayLost(gateway, reason))
            ended = [delta for delta in message.deltas if delta.finish is not None]
            failed = [RequestFailed(delta.request, delta.attempt, reason) for delta in ended]
            await self._send([*actions, *(ToGateway(gateway, failure) for failure in failed)])


def _log_control(message: Cancel | StopMatched | TokenBatchLost) -> None:
    match message:
        case StopMatched():
            log.info("stop string", extra={"request": message.request})
        case Cancel():
            log.info("cancelled", extra={"request": message.request})
        case TokenBatchLost():
            log.warning("tokens missed")
        case _:
            assert_never(message)
