"""The gateway as a process on a real nats-server: started by flags, through an outage of the bus, to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.support.cluster.nats_server import NatsServer
from tests.support.gateway.fake_services import MODEL, eventually, said
from tests.support.gateway.gateway_process import gateway_process
from tests.support.paths import REPOSITORY


async def stream(http: httpx2.AsyncClient, tokens: int) -> str:
    client = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="x", http_client=http, max_retries=0)
    pieces = []
    chunks = await client.completions.create(model=MODEL, prompt="x", max_tokens=tokens, stream=True)
    async for chunk in chunks:
        pieces.append(chunk.choices[0].text)
    return "".join(pieces)


async def test_streams_survive_an_outage_of_the_bus(own_nats: NatsServer) -> None:
    async with gateway_process(own_nats) as (http, _, ring):
        streams = [asyncio.create_task(stream(http, 60)) for _ in range(4)]
        ring.step = 0.5  # none ends before all have begun
        await eventually(lambda: len(ring.running) == 4)
        ring.step = 0.02
        await eventually(lambda: min(ring.running.values()) >= 5)
        own_nats.kill()
        await eventually(lambda: not ring.bus.connected)
        own_nats.start()
        assert await asyncio.gather(*streams) == [said(60)] * 4


async def test_a_terminated_gateway_finishes_its_streams_and_ends_in_order(shared_nats: NatsServer) -> None:
    async with gateway_process(shared_nats) as (http, process, ring):
        reading = asyncio.create_task(stream(http, 40))
        while not ring.running:
            await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        assert await reading == said(40)
        assert await asyncio.to_thread(process.wait, 60) == 0


async def test_a_taken_port_is_said_in_the_log(shared_nats: NatsServer) -> None:
    async with gateway_process(shared_nats) as (http, _, _ring):
        command = [sys.executable, "-m", "services.gateway", "--nats-url", shared_nats.url, "--instance", "gateway-2"]
        second = await asyncio.create_subprocess_exec(
            *command, "--port", str(http.base_url.port), cwd=REPOSITORY, stderr=subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(second.communicate(), 60)
        assert second.returncode == 1
        assert b"cannot listen" in errors


@pytest.mark.parametrize("flag", ["--port=99999", "--queue-s=-1", "--frobnicate=1"])
def test_a_bad_flag_stops_the_start(flag: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.gateway", flag], cwd=REPOSITORY, capture_output=True, timeout=60
    )
    assert ended.returncode == 2
    assert flag.split("=")[0].lstrip("-").replace("-", "_") in ended.stderr.decode().replace("-", "_")
