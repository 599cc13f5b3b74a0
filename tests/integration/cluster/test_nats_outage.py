"""The bus goes away and comes back: nobody is told, nobody is declared dead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared import topics
from shared.bus import BusError
from shared.bus.nats_bus import NatsOptions, connect
from shared.ids import Attempt, EngineId, RequestId
from shared.messages.scheduler import Cancel
from tests.support.cluster.nats_server import NatsServer, nats_server
from tests.support.cluster.ports import free_port

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


async def test_a_bus_that_is_not_there_is_named() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(BusError, match=f"{url}: .*Connect call failed"):
        await connect(NatsOptions(servers=(url,), connect_timeout=0.5))


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
