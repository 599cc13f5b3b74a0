"""A detokenizer on the bus: batches in, deltas and words to engines out, peers that vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.detokenizer import actor as detokenizer
from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.core import stream_probes
from services.detokenizer.core.vocabularies import text_vocabulary
from shared import topics
from shared.actor import ActorRuntime
from shared.bus import Subscription
from shared.bus.memory_bus import MemoryBus
from shared.ids import (
    Attempt,
    DetokenizerId,
    EngineId,
    GatewayId,
    Incarnation,
    InstanceId,
    ModelName,
    RequestId,
)
from shared.messages.detokenizer import NewTokens, OpenStream, StreamMoved, TokenBatch
from shared.messages.gateway import Delta, Deltas, RequestFailed
from shared.messages.generation import TokenLogprobs
from shared.messages.lifecycle import Lifecycle, Phase, Service
from shared.messages.scheduler import Cancel, Probe, ProbeReply, StopMatched, TokenBatchLost
from shared.models.tokenizer_files import special_ids
from shared.packing import pack
from tests.support.models import tiny_tokenizers

R, ONE = RequestId("r"), Attempt(1)
ENGINE, GATEWAY, HERE = EngineId("engine-1"), GatewayId("gateway-1"), DetokenizerId("detokenizer-1")
TOKENIZER = tiny_tokenizers.byte_level()


class Ring:
    """A detokenizer between an engine and a gateway that only listen."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        vocabulary = text_vocabulary(TOKENIZER, special_ids(TOKENIZER))
        self.actor = DetokenizerActor(bus, InstanceId(HERE), ModelName("demo"), vocabulary)
        self.runtime = ActorRuntime(self.actor, drain_timeout=5)
        self.at_gateway: asyncio.Queue[Any] = asyncio.Queue()
        self.at_engine: asyncio.Queue[Any] = asyncio.Queue()
        self.numbers = iter(range(100))

    async def start(self) -> None:
        self.gateway: Subscription = await self.bus.subscribe(topics.gateway_inbox(GATEWAY), self.at_gateway.put)
        await self.bus.subscribe(topics.engine_control(ENGINE), self.at_engine.put)
        self.task = asyncio.create_task(self.runtime.run())
        async with asyncio.timeout(60):
            while self.runtime.phase != "ready":
                await asyncio.sleep(0.001)

    async def batch(self, **parts: Any) -> None:
        batch = TokenBatch(engine=ENGINE, epoch=Incarnation(1), number=next(self.numbers), **parts)
        await self.bus.publish(topics.detokenizer_tokens(HERE), batch)

    async def lifecycle(self, service: Service, instance: str, phase: Phase, incarnation: int = 1) -> None:
        message = Lifecycle(
            service=service,
            instance=InstanceId(instance),
            incarnation=Incarnation(incarnation),
            phase=phase,
            pid=1,
            host="h",
            started=0.0,
        )
        await self.bus.publish(topics.lifecycle_of(service, InstanceId(instance)), message)

    async def stop(self) -> None:
        self.runtime.stop()
        async with asyncio.timeout(60):
            await self.task


async def heard(queue: asyncio.Queue[Any]) -> Any:
    async with asyncio.timeout(60):
        return await queue.get()


def opened(request: RequestId = R, **more: Any) -> OpenStream:
    return OpenStream(
        request=request,
        attempt=ONE,
        gateway=GATEWAY,
        model=ModelName("demo"),
        context=pack([1]),
        resumed=0,
        sent_chars=0,
        prompt_tokens=1,
        cached_tokens=0,
        **more,
    )


def entry(position: int, text: str, **more: Any) -> NewTokens:
    return NewTokens(R, ONE, position, tuple(TOKENIZER.encode(text, add_special_tokens=False).ids), **more)


@pytest.fixture
async def ring(memory_bus: MemoryBus) -> AsyncIterator[Ring]:
    ring = Ring(memory_bus)
    await ring.start()
    yield ring
    if not ring.task.done():
        ring.actor.core.streams.clear()
        await ring.stop()


async def test_text_reaches_the_gateway_and_a_stop_string_the_engine(ring: Ring) -> None:
    await ring.batch(opened=(opened(stop=("jumps",)),), entries=(entry(0, "The quick"),))
    first = await heard(ring.at_gateway)
    await ring.batch(entries=(entry(first.deltas[0].position + len(first.deltas[0].tokens), " fox jumps over"),))
    second = await heard(ring.at_gateway)
    assert [d.text for d in (*first.deltas, *second.deltas)] == ["The quick", " fox "]
    assert (first.number, second.number, first.epoch) == (0, 1, second.epoch)
    assert second.deltas[0].finish == "stop"
    assert second.deltas[0].stop_reason == "jumps"
    assert await heard(ring.at_engine) == StopMatched(R, ONE)


async def test_a_missed_batch_is_told_to_gateway_and_engine(ring: Ring) -> None:
    await ring.batch(opened=(opened(),))
    await heard(ring.at_gateway)
    next(ring.numbers)
    await ring.batch(entries=(entry(0, "a"),))
    assert isinstance(await heard(ring.at_gateway), RequestFailed)
    assert await heard(ring.at_engine) == TokenBatchLost(HERE)


async def test_a_stream_whose_request_never_reached_the_engine_that_it_moved_to_fails(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenizer, "PROBE_INTERVAL", 0.001)
    monkeypatch.setattr(stream_probes, "PROBE_AFTER", 0.0)
    monkeypatch.setattr(stream_probes, "DENIAL_INTERVAL", 0.0)
    ring = Ring(memory_bus)
    await ring.start()
    asked: list[Probe] = []

    async def answer(probe: Probe) -> ProbeReply:
        asked.append(probe)
        return ProbeReply("waiting" if len(asked) < 3 else "unknown", 0)

    other = EngineId("engine-2")
    await memory_bus.serve(topics.engine_probes(other), answer)
    await ring.batch(opened=(opened(),), moved=(StreamMoved(R, ONE, other),))
    assert isinstance(await heard(ring.at_gateway), Deltas)
    assert await heard(ring.at_gateway) == RequestFailed(R, ONE, "engine engine-2 does not have the request")
    assert set(asked) == {Probe(R, ONE)}
    assert len(asked) >= 4, "twice it was waiting, twice it was not there"
    assert not ring.actor.core.streams
    await ring.stop()


async def test_a_stream_whose_end_was_lost_keeps_no_detokenizer_from_draining(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an outage of the bus, when the engine has nothing else to send."""
    monkeypatch.setattr(detokenizer, "PROBE_INTERVAL", 0.001)
    monkeypatch.setattr(stream_probes, "PROBE_AFTER", 0.01)
    monkeypatch.setattr(stream_probes, "DENIAL_INTERVAL", 0.0)
    ring = Ring(memory_bus)
    await ring.start()

    async def answer(_: Probe) -> ProbeReply:
        return ProbeReply("unknown", 0)

    await memory_bus.serve(topics.engine_probes(ENGINE), answer)
    await ring.batch(opened=(opened(),), entries=(entry(0, "a"),))
    assert isinstance(await heard(ring.at_gateway), Deltas)
    assert await heard(ring.at_gateway) == RequestFailed(R, ONE, "engine engine-1 does not have the request")
    await ring.stop()
    assert ring.runtime.phase == "stopped"


async def test_requests_of_a_gateway_that_takes_nothing_are_cancelled(ring: Ring) -> None:
    await ring.batch(opened=(opened(),))
    await heard(ring.at_gateway)
    await ring.gateway.stop()
    await ring.batch(entries=(entry(0, "a"),))
    assert await heard(ring.at_engine) == Cancel(R, ONE)
    assert ring.actor.load() == 0


async def test_requests_of_a_gateway_that_started_anew_are_cancelled(ring: Ring) -> None:
    await ring.lifecycle("gateway", GATEWAY, "ready", incarnation=1)
    await ring.batch(opened=(opened(),))
    await heard(ring.at_gateway)
    await ring.lifecycle("gateway", GATEWAY, "starting", incarnation=2)
    assert await heard(ring.at_engine) == Cancel(R, ONE)


async def test_requests_of_an_engine_that_stopped_fail(ring: Ring) -> None:
    await ring.lifecycle("scheduler", ENGINE, "ready")
    await ring.batch(opened=(opened(),))
    await heard(ring.at_gateway)
    await ring.lifecycle("scheduler", ENGINE, "failed")
    assert await heard(ring.at_gateway) == RequestFailed(R, ONE, "engine engine-1: failed", death="beside others")


async def test_a_drain_waits_for_the_last_text(ring: Ring) -> None:
    await ring.batch(opened=(opened(),))
    await heard(ring.at_gateway)
    ring.runtime.stop()
    await ring.batch(entries=(entry(0, "a", finish="length"),))
    end = await heard(ring.at_gateway)
    assert end.deltas == (Delta(R, ONE, 0, entry(0, "a").tokens, "a", "length"),)
    async with asyncio.timeout(60):
        await ring.task
    assert ring.runtime.phase == "stopped"


async def test_deltas_too_large_for_the_bus_fail_their_requests_and_no_other() -> None:
    bus = MemoryBus(max_payload=11_000)
    ring = Ring(bus)
    await ring.start()
    await ring.batch(opened=(opened(),))
    await heard(ring.at_gateway)
    tokens = (TOKENIZER.token_to_id("a"),) * 40
    logprobs = tuple(TokenLogprobs(token, -1.0, tuple((n, -1.0) for n in range(20))) for token in tokens)
    await ring.batch(entries=(NewTokens(R, ONE, 0, tokens, None, None, logprobs),))
    assert await heard(ring.at_gateway) == RequestFailed(R, ONE, "gateway gateway-1: the deltas were too large to send")
    assert await heard(ring.at_engine) == Cancel(R, ONE)
    await ring.batch(opened=(opened(RequestId("s")),))
    assert isinstance(await heard(ring.at_gateway), Deltas)
    ring.actor.core.streams.clear()
    await ring.stop()
    await bus.close()
