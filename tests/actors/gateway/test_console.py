"""The console's page and stream as a browser gets them: what is served, to whom, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import services.gateway.http.console_page as page_files
from deploy.cli.keys import new_key
from services.gateway.console.feed import MAX_VIEWERS
from services.gateway.http.pages.console import ASSETS
from services.gateway.metrics import MAX_KEYS, Meters
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.messages.supervisor import PlannerDecision, PoolDecision
from shared.telemetry.tracing import Tracing
from tests.support.gateway.fake_services import MODEL, FakeRing, eventually
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.unit.gateway.console.test_merge_patch import applied


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, ring=FakeRing(memory_bus, step=0.02)) as stack:
        stack.gateway.console.interval = 0.05
        yield stack


class Viewer:
    """Follows the stream as the page does."""

    def __init__(self, response: httpx2.Response) -> None:
        self.document: dict[str, Any] = {}
        self.names: list[str] = []
        self._task = asyncio.create_task(self._read(response))

    async def _read(self, response: httpx2.Response) -> None:
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                self.names.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                self.document = data if self.names[-1] == "snapshot" else applied(self.document, data)

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def viewer(stack: GatewayStack, **headers: str) -> AsyncIterator[Viewer]:
    async with stack.http.stream("GET", "/console/events", headers=headers) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        viewer = Viewer(response)
        try:
            yield viewer
        finally:
            await viewer.leave()


async def test_the_page_and_all_that_it_loads_come_from_here(stack: GatewayStack) -> None:
    page = await stack.http.get("/console")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    folder = Path(page_files.__file__).parent
    assert {file.name for file in folder.iterdir() if file.suffix in (".js", ".css", ".svg")} == set(ASSETS)
    wanted = set(re.findall(r'(?:src|href)="console/([^"]+)"', page.text))
    for name in ASSETS:
        asset = await stack.http.get(f"/console/{name}")
        assert asset.status_code == 200
        assert asset.content == (folder / name).read_bytes()
        if name.endswith(".js"):
            wanted |= set(re.findall(r'from "\./([^"]+)"', asset.text))
            assert "://" not in asset.text.replace("http://www.w3.org", ""), "nothing comes from elsewhere"
    assert wanted == set(ASSETS)
    assert (await stack.http.get("/console/nothing.js")).status_code == 404


async def test_the_stream_shows_a_death_and_what_is_open(stack: GatewayStack) -> None:
    async with viewer(stack) as seen:
        await eventually(lambda: seen.document.get("instances", {}).keys() >= {"engine-1", "tokenizer-1", "gateway-1"})
        assert seen.document["engines"]["engine-1"]["max_running"] == 9
        assert seen.document["models"]["demo/model"]["max_model_len"] == 2048
        asked = asyncio.create_task(
            stack.http.post("/v1/completions", json={"model": "demo/model", "prompt": "HOLD", "max_tokens": 2})
        )
        await eventually(lambda: bool(seen.document["requests"]))
        ((request, shown),) = seen.document["requests"].items()
        assert (shown["state"], shown["engines"], shown["model"]) == ("running", ["engine-1"], "demo/model")
        stack.ring.hold.set()
        assert (await asked).json()["id"] == request
        await eventually(lambda: not seen.document["requests"])
        await stack.ring.die("tokenizer")
        await eventually(lambda: seen.document["instances"]["tokenizer-1"]["deaths"] == 1)
    assert seen.names == ["snapshot"] + ["patch"] * (len(seen.names) - 1)
    await eventually(lambda: not stack.gateway.console.watched)


async def test_it_shows_what_every_gateway_has(stack: GatewayStack, memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, ring=FakeRing(memory_bus), wait=False, instance="gateway-2") as other:
        await eventually(lambda: len(stack.gateway.peers.alive()) == 1 and other.runtime.phase == "ready")
        async with viewer(stack) as seen:
            body = {"model": MODEL, "prompt": "HOLD", "max_tokens": 2}
            asked = asyncio.create_task(other.http.post("/v1/completions", json=body))
            await eventually(lambda: bool(seen.document.get("requests")))
            ((request, shown),) = seen.document["requests"].items()
            assert (shown["gateway"], seen.document["open_responses"]) == ("gateway-2", 1)
            aborted = await stack.http.post("/abort_requests", json={"request_ids": [request]})
            assert aborted.json() == {"status": "aborted", "aborted": 1, "request_ids": [request]}
            assert (await asked).json()["choices"][0]["finish_reason"] == "abort"
            await stack.http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 3})
            await eventually(lambda: MODEL in seen.document["latency"])
            latencies = seen.document["latency"][MODEL]
            assert latencies.keys() == {"ttft", "itl", "tpot", "e2e"}
            for histogram in latencies.values():
                assert len(histogram["counts"]) == len(histogram["bounds"]) + 1
            # What each gateway has answered is counted once.
            await eventually(lambda: sum(seen.document["latency"][MODEL]["e2e"]["counts"]) == 2)


async def test_pages_of_elsewhere_are_refused_on_this_machine_too(stack: GatewayStack) -> None:
    foreign = await stack.http.get("/console/events", headers={"origin": "http://evil.example"})
    assert (foreign.status_code, "evil.example" in foreign.text) == (403, True)
    for host in ("evil.example:8000", "evil.localhost.example", ""):
        rebound = await stack.http.get("/console/events", headers={"host": host})
        assert rebound.status_code == 403, host
    async with viewer(stack, host=f"localhost:{stack.gateway.server.port}"):
        pass
    rebound = await stack.http.post(
        "/abort_requests", headers={"host": "evil.example", "origin": "http://evil.example"}
    )
    assert rebound.status_code == 403


async def test_with_keys_it_needs_an_operators(memory_bus: MemoryBus, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    user = new_key(keys, "user", {"scopes": ["inference"]})
    async with gateway_stack(memory_bus, api_keys=("boss",), keys_file=keys) as stack:
        stack.http.headers.pop("authorization", None)
        assert (await stack.http.get("/console")).status_code == 200
        assert (await stack.http.get("/console/events")).status_code == 401
        limited = await stack.http.get("/console/events", headers={"authorization": f"Bearer {user}"})
        assert limited.status_code == 403
        async with viewer(stack, authorization="Bearer boss", host="gpu.example") as seen:
            await eventually(lambda: "instances" in seen.document)


async def test_an_open_port_without_keys_shows_nothing(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, host="0.0.0.0", insecure=True) as stack:
        answer = await stack.http.get("/console/events")
        assert (answer.status_code, "--api-key" in answer.text) == (403, True)


async def test_viewers_are_bounded(stack: GatewayStack) -> None:
    class Silent:
        def write_chunk(self, data: bytes) -> None:
            pass

        def unread(self) -> int:
            return 0

        def abort(self) -> None:
            pass

    for _ in range(MAX_VIEWERS):
        stack.gateway.console.add(Silent())
    answer = await stack.http.get("/console/events")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_it_can_be_switched_off(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, console=False) as stack:
        for path in ("/console", "/console/main.js", "/console/events"):
            assert (await stack.http.get(path)).status_code == 404


@asynccontextmanager
async def engine_viewer(stack: GatewayStack) -> AsyncIterator[list[tuple[str, Any]]]:
    """What a page sees of `engine-1`, as it comes."""
    seen: list[tuple[str, Any]] = []

    async def read(response: httpx2.Response) -> None:
        async for line in response.aiter_lines():
            name, _, data = line.partition(": ")
            if name == "event":
                seen.append((data, None))
            elif name == "data":
                seen[-1] = seen[-1][0], json.loads(data)

    async with stack.http.stream("GET", "/console/engines/engine-1") as response:
        assert response.status_code == 200
        reading = asyncio.create_task(read(response))
        try:
            yield seen
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def test_an_engine_is_asked_once_for_all_and_only_while_somebody_looks(stack: GatewayStack) -> None:
    feed = stack.gateway.console.engines
    feed.interval = 0.2
    assert feed.asked == 0
    async with engine_viewer(stack) as one, engine_viewer(stack) as other:
        await eventually(lambda: len(one) >= 4 and len(other) >= 4)
        name, picture = one[0]
        assert (name, picture["engine"], picture["blocks"]["cells"]) == ("engine", "engine-1", "01234")
        assert picture["steps"][0]["timing"]["forward"] == 0.25
        assert feed.asked <= max(len(one), len(other)) + 1
        await stack.ring.probes.stop()
        await eventually(lambda: one[-1][0] == "trouble")
    await eventually(lambda: not feed.watched)
    asked = feed.asked
    await asyncio.sleep(3 * feed.interval)
    assert feed.asked == asked


async def test_an_unknown_engine_is_named(stack: GatewayStack) -> None:
    answer = await stack.http.get("/console/engines/engine-9")
    assert (answer.status_code, "engine-9" in answer.text) == (404, True)


async def test_a_request_is_followed_though_no_collector_wants_it(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembering = Tracing()
    remembering.remember(100)
    for module in ("services.gateway.http.endpoints", "services.gateway.console.overview", "shared.actor.runtime"):
        monkeypatch.setattr(f"{module}.TRACING", remembering)
    headers = {"x-request-id": "mine"}
    answer = await stack.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}, headers=headers)
    response = answer.json()["id"]
    for name in (response, "mine"):
        found = (await stack.http.get(f"/console/requests/{name}")).json()
        ((hop,), trace) = found["hops"], found["trace"]
        assert (hop["name"], hop["instance"], len(trace)) == ("POST /v1/completions", "gateway-1", 32)
        assert hop["attributes"]["gen_ai.response.id"] == response
    async with viewer(stack) as seen:
        await eventually(lambda: response in seen.document.get("ended", {}))
        assert seen.document["ended"][response]["outcome"] == "finished"
    unknown = await stack.http.get("/console/requests/cmpl-9")
    assert (unknown.status_code, "cmpl-9" in unknown.text) == (404, True)


async def test_keys_and_pools_have_latencies_of_their_own(memory_bus: MemoryBus, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    alice = new_key(keys, "alice", {"scopes": ["inference"]})
    async with gateway_stack(memory_bus, ring=FakeRing(memory_bus), api_keys=("boss",), keys_file=keys) as stack:
        stack.http.headers.pop("authorization", None)
        body, headers = {"model": MODEL, "prompt": "a", "max_tokens": 3}, {"authorization": f"Bearer {alice}"}
        assert (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        async with viewer(stack, authorization="Bearer boss") as seen:
            await eventually(lambda: "alice" in seen.document.get("latency_by_key", {}))
            found = seen.document["latency_by_key"]["alice"]
            assert found.keys() == {"ttft", "tpot", "e2e"}
            assert {name: sum(each["counts"]) for name, each in found.items()} == dict.fromkeys(found, 1)
            assert "alice" not in seen.document["latency"]
            pool = seen.document["pools"][f"{MODEL} mixed"]
            assert (pool["role"], pool["engines"], pool["first_tokens"]) == ("mixed", 1, 0)


def test_keys_that_have_figures_of_their_own_are_bounded() -> None:
    meters = Meters()
    for number in range(MAX_KEYS + 10):
        meters.of_key(f"key-{number}").e2e.observe(1.0)
    found = {each.model: sum(each.counts) for each in meters.latencies() if each.name == "e2e"}
    assert len(found) == MAX_KEYS + 1
    assert (found["key-0"], found["others"]) == (1, 10)


async def test_what_a_planner_decides_is_heard_while_somebody_looks(stack: GatewayStack, memory_bus: MemoryBus) -> None:
    async with viewer(stack) as seen:
        await eventually(lambda: "decisions" in seen.document)
        await memory_bus.publish(topics.planner_decisions(), DECISION)
        await eventually(lambda: bool(seen.document["decisions"]))
        (shown,) = seen.document["decisions"]
    assert shown["pools"] == [{"role": "decode", "present": 1, "wanted": 3, "target": 2, "reason": "cool-down"}]
    assert (shown["suffices"], shown["predicted_rate"], "observed_ttft" in shown) == (False, 2.5, False)
    assert shown["heard"] == pytest.approx(time.time(), abs=60)


DECISION = PlannerDecision(
    at=1.5,
    observed_rate=2.0,
    predicted_rate=2.5,
    backlog=4,
    prompt_tokens=5.5,
    cached_tokens=6.5,
    output_tokens=7.5,
    observed_ttft=None,
    observed_itl=0.5,
    ttft_correction=1.25,
    itl_correction=0.75,
    forecast_ttft=0.25,
    forecast_itl=0.125,
    suffices=False,
    pools=(PoolDecision(role="decode", present=1, wanted=3, target=2, reason="cool-down"),),
)
