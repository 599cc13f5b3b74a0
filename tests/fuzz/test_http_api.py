"""The HTTP API under requests made from its own OpenAPI page: no 5xx, no silence, no dead process, nothing left."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Literal

import httpx2
import msgspec
import pytest

from services.gateway.api.openapi import openapi_page
from shared.bus.memory_bus import MemoryBus
from tests.fuzz.http_requests import FuzzRequest, RequestGenerator, faults, send, status_of
from tests.support.cluster.conversations import DEADLINE, blocks_in_use, client_of, stream_chat
from tests.support.cluster.stack import running_stack
from tests.support.gateway.fake_services import FakeRing
from tests.support.gateway.gateway_server import gateway_stack

SHARE = 600
FULL = {"sim": 18_000, "cpu": 2000}
"""By device: the simulated one takes any request as fast as the services do, the real one computes the demo model."""
AT_A_TIME = 16
PROGRESS = 1000


async def ask_all(port: int, requests: list[FuzzRequest]) -> Counter[int | None]:
    """Sends requests, some at a time. Returns how many got which status. Raises AssertionError where there are
    faults."""
    waiting = iter(requests)
    statuses: Counter[int | None] = Counter()
    found: list[tuple[str, bytes, bytes]] = []

    async def client() -> None:
        for request in waiting:
            answer = await send(port, request)
            statuses[status_of(answer)] += 1
            if statuses.total() % PROGRESS == 0:
                print(f"{statuses.total()} requests: {dict(statuses)}, {len(found)} faults", flush=True)
            fault = faults(request, answer)
            if fault is not None:
                found.append((fault, request.data[:3000], (answer or b"")[-1000:]))

    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_A_TIME):
            clients.create_task(client())
    assert found == [], f"{len(found)} faults, such as {found[:5]}"
    return statuses


async def test_a_gateway_answers_whatever_it_is_sent(memory_bus: MemoryBus, tmp_path: Path) -> None:
    generator = RequestGenerator(msgspec.json.decode(openapi_page("1")), seed=1)
    requests = [generator.request() for _ in range(SHARE)]
    kept = tmp_path / "database.sqlite"
    async with gateway_stack(memory_bus, ring=FakeRing(memory_bus, longest=4), database_file=kept) as stack:
        statuses = await ask_all(stack.gateway.server.port, requests)
        assert statuses[200] > SHARE / 20 < statuses[400]
        assert len(stack.gateway.requests) == 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("device", ["sim", "cpu"])
async def test_a_stack_serves_on_after_thousands_of_requests(tmp_path: Path, device: Literal["sim", "cpu"]) -> None:
    settings = ["gateway.allow_request_template=true"]
    short = ["--max-model-len=512"]  # some ask for as many tokens as there may be
    with running_stack(tmp_path, device=device, kvstore="64MiB", settings=settings, more=short) as stack:
        async with client_of(stack.url) as client, httpx2.AsyncClient(timeout=DEADLINE) as http:
            before = await stream_chat(client, stack.model, "Who are you?", max_tokens=16, seed=1)
            pids = {member.instance: (member.pid, member.restarts) for member in stack.state.members}
            generator = RequestGenerator((await http.get(f"{stack.url}/openapi.json")).json(), seed=FULL[device])
            statuses = await ask_all(stack.state.port, [generator.request() for _ in range(FULL[device])])
            print(f"{device}: {sorted(statuses.items(), key=str)}")
            assert {m.instance: (m.pid, m.restarts) for m in stack.state.members} == pids
            assert (await stream_chat(client, stack.model, "Who are you?", max_tokens=16, seed=1)).text == before.text
            assert await blocks_in_use(stack) == 0
            await stack.until_heard(lambda said: all(life.load == 0 for life in said.values()))
