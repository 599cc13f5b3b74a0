"""A gateway as a process on a real port and a real bus, with a fake ring behind it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from shared.bus.nats_connection import NatsOptions, connect
from tests.support.cluster.nats_server import NatsServer
from tests.support.cluster.ports import free_port
from tests.support.gateway.fake_services import FakeRing
from tests.support.paths import REPOSITORY


@asynccontextmanager
async def gateway_process(
    nats: NatsServer, *flags: str
) -> AsyncIterator[tuple[httpx2.AsyncClient, subprocess.Popen[bytes], FakeRing]]:
    port = free_port()
    common = ["--nats-url", nats.url, "--port", str(port), "--instance", "gateway-1", "--silence-s", "0.5"]
    process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
        [sys.executable, "-m", "services.gateway", *common, *flags], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    bus = await connect(NatsOptions(servers=(nats.url,)))
    ring = FakeRing(bus, step=0.02)
    await ring.start()
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as http:
            await until_ready(http)
            yield http, process, ring
    finally:
        await ring.stop()
        await bus.close()
        process.kill()
        process.wait()


async def until_ready(http: httpx2.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.02)
