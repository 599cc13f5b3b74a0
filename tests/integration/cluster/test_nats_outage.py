"""The bus goes away and comes back: nobody is declared dead, and clients are told where it takes long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import openai
import pytest

from shared import topics
from shared.bus import Bus, BusError, ReplyTimeout
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import Attempt, EngineId, RequestId
from shared.messages.scheduler import Cancel
from tests.support.cluster.nats_server import NatsServer, nats_server
from tests.support.cluster.ports import free_port
from tests.support.gateway.fake_services import MODEL, FakeRing, eventually, said
from tests.support.gateway.gateway_server import gateway_stack

TOPIC = topics.engine_control(EngineId("engine-1"))


async def test_messages_published_while_the_bus_is_away_arrive_when_it_is_back(own_nats: NatsServer) -> None:
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    heard: asyncio.Queue[object] = asyncio.Queue()
    await bus.subscribe(TOPIC, heard.put)
    await bus.flush()
    own_nats.kill()
    async with asyncio.timeout(60):
        while bus.connected:
            await asyncio.sleep(0.01)
    stood_at = bus.liveness_now()
    message = Cancel(RequestId("r"), Attempt(1))
    await bus.publish(TOPIC, message)
    await asyncio.sleep(0.2)
    assert bus.liveness_now() == stood_at
    own_nats.start()
    async with asyncio.timeout(60):
        assert await heard.get() == message
    assert bus.connected
    await bus.close()


async def flush_until_refused(bus: Bus) -> None:
    """A server that was told to stand still does so within moments."""
    while True:
        await bus.flush()


async def test_a_bus_that_stood_still_is_heard_when_it_goes_on_whoever_asked_it_meanwhile(own_nats: NatsServer) -> None:
    """The answer to a flush that was given up comes at last; the library's reader ended of it."""
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    heard: asyncio.Queue[object] = asyncio.Queue()
    await bus.subscribe(TOPIC, heard.put)
    await bus.flush()
    own_nats.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ReplyTimeout):
            await flush_until_refused(bus)
    finally:
        own_nats.send_signal(signal.SIGCONT)
    await bus.flush()
    message = Cancel(RequestId("r"), Attempt(1))
    await bus.publish(TOPIC, message)
    async with asyncio.timeout(60):
        assert await heard.get() == message
    assert bus.outage() == 0.0
    await bus.close()


@pytest.mark.parametrize("what", ["flush", "request"])
async def test_a_cancellation_that_comes_with_the_bus_s_answer_is_heeded(shared_nats: NatsServer, what: str) -> None:
    """It got lost in the library: the supervisor asks the bus every second, and one that was to end did not."""
    bus = await connect(NatsOptions(servers=(shared_nats.url,)))
    await bus.serve(TOPIC, lambda _: asyncio.sleep(0, "heard"))
    await bus.flush()

    async def ask() -> None:
        await (bus.flush() if what == "flush" else bus.request(TOPIC, Cancel(RequestId("r"), Attempt(1)), str, 60.0))

    asking = asyncio.create_task(ask())
    waiting: dict[str, Callable[[], Collection[asyncio.Future[Any]]]] = {
        "flush": lambda: bus._client._pongs,
        "request": lambda: bus._client._resp_map.values(),
    }
    async with asyncio.timeout(60):
        while not waiting[what]():
            await asyncio.sleep(0)
    for answer in waiting[what]():
        answer.add_done_callback(lambda _: asking.cancel())
    with pytest.raises(asyncio.CancelledError):
        await asking
    await bus.close()


async def test_requests_end_in_an_outage_that_lasts_and_are_cancelled_when_it_is_over(own_nats: NatsServer) -> None:
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    services = await connect(NatsOptions(servers=(own_nats.url,)))
    ring = FakeRing(services)
    ring.step = 0.02
    async with gateway_stack(bus, ring=ring, bus_outage_s=2.0, wait_for_engines_s=1.0) as stack:
        stream = await stack.openai.chat.completions.create(**chat("hello"), max_tokens=100_000, stream=True)
        await anext(stream)
        queued = asyncio.create_task(stack.http.post("/v1/chat/completions", json=chat("QUEUE")))
        await eventually(lambda: len(stack.gateway.requests) == 2)
        own_nats.kill()
        await eventually(lambda: not bus.connected)
        new = await stack.http.post("/v1/chat/completions", json=chat("hello"))
        assert (new.status_code, new.headers["retry-after"]) == (503, "1")
        assert "the bus is away" in new.json()["error"]["message"]
        ready = await stack.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the bus is away")
        answer = await queued
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "the bus is away for 2 s" in answer.json()["error"]["message"]
        with pytest.raises(openai.APIError, match="the bus is away for 2 s"):
            async for _ in stream:
                pass
        assert len(stack.gateway.requests) == 0
        assert stack.gateway.requests.idle
        own_nats.start()
        await eventually(lambda: bool(ring.cancelled))
        await eventually(lambda: stack.gateway.requests.not_serving() is None)
        again = await stack.openai.chat.completions.create(**chat("hello"), max_tokens=8)
        assert again.choices[0].message.content == said(8)
    await bus.close()
    await services.close()


async def test_an_outage_shorter_than_the_bound_ends_nothing(own_nats: NatsServer) -> None:
    bus = await connect(NatsOptions(servers=(own_nats.url,)))
    services = await connect(NatsOptions(servers=(own_nats.url,)))
    async with gateway_stack(bus, ring=FakeRing(services), wait_for_engines_s=60) as stack:
        own_nats.kill()
        await eventually(lambda: not bus.connected)
        asking = asyncio.create_task(stack.http.post("/v1/chat/completions", json=chat("hello") | {"max_tokens": 8}))
        await eventually(lambda: len(stack.gateway.requests) == 1)
        assert (await stack.http.get("/ready")).status_code == 200
        own_nats.start()
        answer = await asking
        assert answer.json()["choices"][0]["message"]["content"] == said(8)
    await bus.close()
    await services.close()


def chat(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


async def test_a_bus_that_is_not_there_is_named() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusError, match=f"{url}: .*Connect call failed"):
        await connect(NatsOptions(servers=(url,), connect_timeout=0.5))


async def test_a_bus_that_is_slow_gets_more_time_than_one_that_is_not_there(own_nats: NatsServer) -> None:
    """As on a machine that is too busy: it listens, and says nothing for a while."""
    asked, answers, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await answers.wait()
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", own_nats.port)
        await asyncio.gather(pipe(reader, server_writer), pipe(server_reader, writer), return_exceptions=True)
        ended.set()

    slow = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
    absent = f"nats://127.0.0.1:{free_port()}"
    async with asyncio.timeout(60):
        connecting = asyncio.create_task(
            connect(NatsOptions(servers=(url,), connect_timeout=60.0, refused_timeout=0.05))
        )
        await asked.wait()
        with pytest.raises(BusError, match=f"{absent}: .*Connect call failed"):
            await connect(NatsOptions(servers=(absent,), connect_timeout=3600.0, refused_timeout=0.05))
        assert not connecting.done()
        answers.set()
        bus = await connecting
        await bus.close()
        await ended.wait()
    slow.close()


async def test_a_bus_is_reached_by_web_socket_too(tmp_path: Path) -> None:
    port = free_port()
    websocket = f'websocket {{ host: "127.0.0.1", port: {port}, no_tls: true }}'
    with nats_server(tmp_path, more=websocket) as server:
        async with asyncio.timeout(60):
            bus, other = (
                await connect(NatsOptions(servers=(f"ws://127.0.0.1:{port}",))),
                await connect(NatsOptions(servers=(server.url,))),
            )
            heard: asyncio.Queue[object] = asyncio.Queue()
            await bus.subscribe(TOPIC, heard.put)
            await bus.flush()
            message = Cancel(RequestId("r"), Attempt(1))
            await other.publish(TOPIC, message)
            assert await heard.get() == message
            await bus.close()
            await other.close()
