"""A real gateway on a real port with a fake ring behind it, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx2
from openai import AsyncOpenAI

from services.gateway.actor import Gateway
from services.gateway.config import GatewayConfig
from shared.actor import ActorRuntime
from shared.bus import Bus
from shared.bus.nats_connection import NatsOptions, connect
from tests.support.gateway.fake_services import FakeRing, eventually


class GatewayStack(NamedTuple):
    gateway: Gateway
    runtime: ActorRuntime
    ring: FakeRing
    http: httpx2.AsyncClient
    openai: AsyncOpenAI
    task: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.server.port}"


@asynccontextmanager
async def gateway_stack(
    bus: Bus,
    *,
    ring: FakeRing | None = None,
    wait: bool = True,
    clock: Callable[[], float] = time.monotonic,
    connect: Callable[[NatsOptions], Awaitable[Bus]] = connect,
    **settings: Any,
) -> AsyncIterator[GatewayStack]:
    """Starts it, and at the end stops it as the real process would: drained."""
    ring = ring or FakeRing(bus)
    defaults: dict[str, Any] = {"instance": "gateway-1", "port": 0, "silence_s": 0.3}
    gateway = Gateway(bus, GatewayConfig(**(defaults | settings)), clock=clock, connect=connect)
    runtime = ActorRuntime(gateway, drain_timeout=2.0)
    task = asyncio.create_task(runtime.run())
    try:
        await eventually(lambda: gateway.server.listening or task.done())
        if wait:
            await ring.start()
            await eventually(lambda: runtime.phase == "ready")
        url = f"http://127.0.0.1:{gateway.server.port}"
        # No TLS is spoken; loading certificates would be the slowest part of every test.
        async with (
            httpx2.AsyncClient(base_url=url, timeout=60, verify=False) as http,
            AsyncOpenAI(base_url=f"{url}/v1", api_key="key-1", max_retries=0, timeout=60, http_client=http) as openai,
        ):
            yield GatewayStack(gateway, runtime, ring, http, openai, task)
    finally:
        await ring.stop()
        runtime.stop()
        async with asyncio.timeout(60):
            await task
