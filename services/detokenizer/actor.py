"""The detokenizer's shell: token batches in, the core asked, messages out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, assert_never

from services.detokenizer import metrics
from services.detokenizer.core.actions import Action, EngineGone, GatewayGone, StreamUnclaimed, ToEngine, ToGateway
from services.detokenizer.core.detokenizer import MAX_STREAMS, Detokenizer
from services.detokenizer.core.text import TextVocabulary
from services.detokenizer.core.unclaimed import Ask, NoAnswer, Unclaimed
from shared import topics
from shared.actor import Actor, Hears, Tick
from shared.bus import Bus, BusError, NoResponders, PayloadTooLarge, Undelivered
from shared.ids import DetokenizerId, EngineId, GatewayId, InstanceId, ModelName, new_incarnation
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import Deltas, Failed, GatewayMessage
from shared.messages.lifecycle import Lifecycle
from shared.messages.scheduler import Cancel, DetokenizerLost, ProbeReply, SchedulerControl, StopMatched
from shared.registry import Gone, Registry

log = logging.getLogger(__name__)


SILENCE = 10.0
"""Seconds until a silent engine or gateway counts as gone here. Longer than elsewhere: dropping what they left is
housekeeping, while the gateways notice a dead engine sooner, and a dead gateway takes no deltas."""

ASK_EVERY = 1.0
"""Seconds between two looks at streams that have moved and are silent."""
ANSWER_SECONDS = 1.0


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
        self.core = Detokenizer(self._id, new_incarnation(), model, vocabulary, max_streams)
        self._registry = Registry(SILENCE)
        self._unclaimed = Unclaimed()
        self._published = metrics.Published()

    def hears(self) -> Sequence[Hears[Any]]:
        # No intake: a coordinator gives a draining detokenizer no more requests, and those that it has need it.
        peers = [Hears(topics.lifecycles("scheduler")), Hears(topics.lifecycles("gateway"))]
        return [Hears(topics.detokenizer_tokens(self._id)), *peers]

    async def handle(self, message: Any) -> None:
        match message:
            case TokenBatch():
                await self._batch(message)
            case Lifecycle():
                gone = self._registry.heard(message, self.bus.liveness_now())
                await self._mourn([gone] if gone is not None else [])
            case Tick():
                await self._mourn(self._registry.expire(message.alive_now))
            case Undelivered():
                await self._returned(message)
            case _:
                raise TypeError(f"a detokenizer hears no {type(message).__name__}")
        metrics.STREAMS.set(len(self.core.streams))
        self._published.update(self.core.tally)

    async def background(self) -> None:
        """Asks after streams that moved to an engine from which nothing comes, one after the other."""
        while True:
            await asyncio.sleep(ASK_EVERY)
            for ask in self._unclaimed.due(self.core.streams.values(), self.bus.liveness_now()):
                answer = await self._answer(ask)
                if self._unclaimed.answered(ask, answer, self.bus.liveness_now()):
                    log.warning("unclaimed", extra={"request": ask.probe.request, "engine": ask.engine})
                    await self._send(self.core.handle(StreamUnclaimed(ask.probe.request, ask.probe.attempt)))

    async def _answer(self, ask: Ask) -> ProbeReply | NoAnswer:
        topic = topics.engine_probes(ask.engine)
        try:
            reply: ProbeReply = await self.bus.ask(topic, ask.probe, ProbeReply, ANSWER_SECONDS)
        except NoResponders:
            return "nobody there"
        except BusError:
            return "no answer in time"
        return reply

    def is_idle(self) -> bool:
        return not self.core.streams

    def load(self) -> int:
        return len(self.core.streams)

    async def _batch(self, batch: TokenBatch) -> None:
        started = time.perf_counter()
        for opened in batch.opened:
            log.info("opened", extra={"request": opened.request, "attempt": opened.attempt, "engine": batch.engine})
        await self._send(self.core.handle(batch))
        metrics.SECONDS.observe(time.perf_counter() - started)

    async def _mourn(self, gone: Sequence[Gone]) -> None:
        for last, reason in gone:
            if last.service == "scheduler":
                await self._send(self.core.handle(EngineGone(EngineId(last.instance), reason)))
            elif last.service == "gateway":
                await self._send(self.core.handle(GatewayGone(GatewayId(last.instance), reason)))

    async def _returned(self, undelivered: Undelivered) -> None:
        """Nobody took a gateway's deltas: it is gone, and so is what it asked for."""
        gateways = {stream.opened.gateway for stream in self.core.streams.values()}
        for gateway in gateways:
            if topics.gateway_inbox(gateway) == undelivered.topic:
                log.warning("gateway gone", extra={"gateway": gateway})
                await self._send(self.core.handle(GatewayGone(gateway, "took no deltas")))

    async def _send(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ToGateway(gateway, message):
                    await self._tell_gateway(gateway, message)
                case ToEngine(engine, message):
                    _note(message)
                    await self.bus.publish(topics.engine_control(engine), message)
                case _:
                    assert_never(action)

    async def _tell_gateway(self, gateway: GatewayId, message: GatewayMessage) -> None:
        try:
            await self.bus.publish(topics.gateway_inbox(gateway), message, confirm=isinstance(message, Deltas))
        except PayloadTooLarge as error:
            await self._give_up(gateway, message, error)
            return
        if isinstance(message, Deltas):
            for delta in message.deltas:
                if delta.finish is not None:
                    log.info("finished", extra={"request": delta.request, "finish": delta.finish})
        elif isinstance(message, Failed):
            log.warning("failed", extra={"request": message.request, "why": message.reason})

    async def _give_up(self, gateway: GatewayId, message: GatewayMessage, error: PayloadTooLarge) -> None:
        """Only log-probabilities of very many requests at once come to this. The gateway will see a gap in the
        numbers, so every request of its fails."""
        log.error("deltas too large", extra={"gateway": gateway, "error": str(error)})
        if isinstance(message, Deltas):
            reason = "the deltas were too large to send"
            await self._send(self.core.handle(GatewayGone(gateway, reason)))
            for delta in message.deltas:
                if delta.finish is not None:
                    await self._tell_gateway(gateway, Failed(delta.request, delta.attempt, reason))


def _note(message: SchedulerControl) -> None:
    match message:
        case StopMatched():
            log.info("stop string", extra={"request": message.request})
        case Cancel():
            log.info("cancelled", extra={"request": message.request})
        case DetokenizerLost():
            log.warning("tokens missed")
        case _:
            assert_never(message)
