"""What operators do over HTTP: prefix caches are reset, responses aborted, engines scaled; who may, and from where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.gateway.http.admin import loras
from shared import topics
from shared.bus import EndpointError
from shared.bus.memory_bus import MemoryBus
from shared.ids import ModelName
from shared.messages.scheduler import Cancel
from shared.models.lora_registry import LoraRegistry
from tests.support.gateway.fake_services import MODEL, FakeRing, eventually
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


class FakeCoordinator:
    """Notes what it is asked, and answers or refuses."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.refusal: EndpointError | None = None
        self.paused: str | None = None
        self.asleep: int | None = None
        self.busy = 0
        """How often its engine is still at work when it is asked."""

    async def start(self, bus: MemoryBus) -> None:
        endpoints = {f"{topics.ADMIN}.{name}": self._answering(name) for name in topics.ADMIN_OF_GATEWAYS}
        await bus.serve_micro("baton-admin", "1.0.0", "", endpoints)

    def _answering(self, name: str) -> Any:
        async def answer(body: bytes) -> bytes:
            self.asked.append((name, json.loads(body)))
            if self.refusal is not None:
                raise self.refusal
            if name in ("pause", "resume", "paused"):
                return self._pause_state(name)
            if name in ("sleep", "wake_up", "sleeping"):
                return self._sleep_state(name)
            if self.asked[-1][1].get("one_group"):
                return b'{"service": "engines", "started": [], "stopping": [], "superseded": []}'
            return b'{"instances": {"engine-1": 5}}'

        return answer

    def _pause_state(self, name: str) -> bytes:
        if name != "paused":
            self.paused = self.asked[-1][1].get("mode")
        self.busy -= self.busy > 0
        return json.dumps({"instances": {"engine-1": {"paused": self.paused, "busy": self.busy}}}).encode()

    def _sleep_state(self, name: str) -> bytes:
        if name != "sleeping":
            self.asleep = self.asked[-1][1].get("level")
            self.busy = 2
        self.busy -= self.busy > 0
        return json.dumps({"instances": {"engine-1": {"asleep": self.asleep, "busy": self.busy}}}).encode()


@pytest.fixture
async def coordinator(memory_bus: MemoryBus) -> FakeCoordinator:
    coordinator = FakeCoordinator()
    await coordinator.start(memory_bus)
    return coordinator


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus, ring=FakeRing(memory_bus, step=0.02)) as stack:
        yield stack


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_prefix_caches_are_reset(stack: GatewayStack, coordinator: FakeCoordinator, path: str) -> None:
    answer = await stack.http.post(path)
    assert (answer.status_code, answer.json()) == (200, {"success": True, "instances": {"engine-1": 5}})
    assert coordinator.asked == [("reset_prefix_cache", {})]


@pytest.mark.parametrize(
    ("query", "param", "text"),
    [
        ("reset_external=true", "reset_external", "not supported"),
        ("reset_running_requests=1", "reset_running_requests", "not supported"),
        ("reset_external=maybe", "reset_external", "true or false"),
        ("everything=1", "everything", "reset_external"),
    ],
)
async def test_what_a_reset_cannot_do_is_refused(
    stack: GatewayStack, coordinator: FakeCoordinator, query: str, param: str, text: str
) -> None:
    answer = await stack.http.post(f"/reset_prefix_cache?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert text in answer.json()["error"]["message"]
    assert coordinator.asked == []
    assert (await stack.http.post("/reset_prefix_cache?reset_external=false")).status_code == 200


async def test_a_coordinators_refusal_and_its_absence_are_passed_on(stack: GatewayStack, memory_bus: MemoryBus) -> None:
    assert (await stack.http.post("/reset_prefix_cache")).status_code == 503
    coordinator = FakeCoordinator()
    await coordinator.start(memory_bus)
    coordinator.refusal = EndpointError(409, "not now")
    answer = await stack.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert (answer.status_code, answer.json()["error"]["message"]) == (409, "not now")


async def test_engines_are_scaled_until_they_are_ready(stack: GatewayStack, coordinator: FakeCoordinator) -> None:
    answer = await stack.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 1})
    assert answer.json() == {"message": "Scaled to 1 data parallel engines"}
    assert coordinator.asked == [("scale", {"service": "engines", "count": 1, "one_group": True})]
    late = asyncio.create_task(
        stack.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2, "drain_timeout": 0.5})
    )
    await eventually(lambda: len(coordinator.asked) == 2)
    assert (await stack.http.post("/is_scaling_elastic_ep")).json() == {"is_scaling_elastic_ep": True}
    second = await stack.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 3})
    assert second.status_code == 409
    assert (await late).status_code == 408
    assert (await stack.http.post("/is_scaling_elastic_ep")).json() == {"is_scaling_elastic_ep": False}


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("drain", {"instance": "engine-1"}, {"instance": "engine-1", "force": False}),
        ("undrain", {"instance": "decode"}, {"instance": "decode"}),
        (
            "scale",
            {"service": "engines", "count": 0, "model": "m"},
            {"service": "engines", "count": 0, "host": None, "model": "m", "data_parallel_size": None},
        ),
    ],
)
async def test_coordinators_are_asked_as_the_commands_ask_them(
    stack: GatewayStack, coordinator: FakeCoordinator, path: str, body: dict[str, Any], asked: dict[str, Any]
) -> None:
    answer = await stack.http.post(f"/admin/{path}", json=body)
    assert answer.json() == {"instances": {"engine-1": 5}}
    assert coordinator.asked == [(path, asked)]
    coordinator.refusal = EndpointError(409, "the last one")
    refused = await stack.http.post(f"/admin/{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, "the last one")
    foreign = await stack.http.post(f"/admin/{path}", json=body, headers={"origin": "http://evil.example"})
    assert (foreign.status_code, len(coordinator.asked)) == (403, 2)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("drain", {"instance": ""}, "instance"),
        ("drain", {"instance": "engine-1", "force": "yes"}, "force"),
        ("undrain", {"instance": "engine-1", "force": True}, "force"),
        ("scale", {"service": "worker", "count": 1}, "service"),
        ("scale", {"service": "engines", "count": 257}, "count"),
    ],
)
async def test_operations_that_cannot_be_meant_are_refused_by_field(
    stack: GatewayStack, coordinator: FakeCoordinator, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await stack.http.post(f"/admin/{path}", json=body)
    assert (answer.status_code, param in answer.json()["error"]["message"]) == (400, True)
    assert coordinator.asked == []


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1000, **fields}


async def test_an_aborted_stream_ends_with_what_it_has(stack: GatewayStack) -> None:
    stream = await stack.openai.chat.completions.create(**chat(stream=True, n=2))
    long = {"model": MODEL, "prompt": "a", "max_tokens": 1000}
    other = asyncio.create_task(stack.http.post("/v1/completions", json=long))
    first = await anext(stream)
    answer = await stack.http.post("/abort_requests", json={"request_ids": [first.id, "chatcmpl-none"]})
    assert answer.json() == {"status": "aborted", "aborted": 1, "request_ids": [first.id]}
    finishes = {choice.index: choice.finish_reason async for chunk in stream for choice in chunk.choices}
    assert finishes == {0: "abort", 1: "abort"}
    await eventually(lambda: len([each for each in stack.ring.seen if isinstance(each, Cancel)]) == 2)
    assert not other.done()
    assert (await stack.http.post("/abort_requests")).json()["aborted"] == 1
    assert (await other).json()["choices"][0]["finish_reason"] == "abort"
    assert len(stack.gateway.requests) == 0


@pytest.mark.parametrize("asked", [["chatcmpl-mine"], []])
async def test_what_is_aborted_has_the_name_that_its_client_sees(stack: GatewayStack, asked: list[str]) -> None:
    stream = await stack.openai.chat.completions.create(**chat(stream=True, extra_body={"request_id": "mine"}))
    assert (await anext(stream)).id == "chatcmpl-mine"
    answer = await stack.http.post("/abort_requests", json={"request_ids": asked})
    assert answer.json() == {"status": "aborted", "aborted": 1, "request_ids": ["chatcmpl-mine"]}
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"


async def test_each_of_several_responses_with_an_id_that_a_client_gave_them_is_counted(stack: GatewayStack) -> None:
    streams = [
        await stack.openai.chat.completions.create(**chat(stream=True, extra_body={"request_id": "same"}))
        for _ in range(2)
    ]
    for stream in streams:
        await anext(stream)
    answer = await stack.http.post("/abort_requests", json={"request_ids": ["chatcmpl-same"]})
    assert answer.json() == {"status": "aborted", "aborted": 2, "request_ids": ["chatcmpl-same"] * 2}
    for stream in streams:
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"


async def test_a_search_that_is_aborted_has_nothing_to_show(stack: GatewayStack) -> None:
    body = chat(n=2, use_beam_search=True, temperature=0)
    search = asyncio.create_task(stack.http.post("/v1/chat/completions", json=body))
    await eventually(lambda: len(stack.gateway.requests) > 0)
    await stack.http.post("/abort_requests", json={})
    answer = await search
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "aborted")


async def test_responses_of_another_gateway_are_aborted_too(memory_bus: MemoryBus, stack: GatewayStack) -> None:
    ring = FakeRing(memory_bus)
    async with gateway_stack(memory_bus, ring=ring, wait=False, instance="gateway-2") as other:
        await eventually(lambda: bool(other.gateway.peers.alive()) and bool(other.gateway.requests.cluster.models()))
        stream = await stack.openai.chat.completions.create(**chat(stream=True))
        first = await anext(stream)
        answer = await other.http.post("/abort_requests", json={"request_ids": [first.id]})
        assert answer.json()["request_ids"] == [first.id]
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"


async def test_a_pause_ends_what_is_open_and_answers_when_engines_rest(
    stack: GatewayStack, coordinator: FakeCoordinator
) -> None:
    stream = await stack.openai.chat.completions.create(**chat(stream=True))
    await anext(stream)
    coordinator.busy = 3
    answer = await stack.http.post("/pause")
    assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
    asked = [("pause", {"mode": "new"}), *[("paused", {})] * 2, ("reset_prefix_cache", {})]
    assert coordinator.asked == asked
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"
    assert (await stack.http.get("/is_paused")).json() == {"is_paused": True, "instances": {"engine-1": True}}
    assert (await stack.http.post("/resume")).json() == {"status": "resumed"}
    assert (await stack.http.get("/is_paused")).json() == {"is_paused": False, "instances": {"engine-1": False}}


@pytest.mark.parametrize(
    ("path", "body", "mode", "reset"),
    [
        ("/pause?mode=wait", None, "new", True),
        ("/pause?wait_for_inflight_requests=true", None, "new", True),
        ("/pause?mode=wait&clear_cache=false", None, "new", False),
        ("/pause?mode=keep&clear_cache=true", None, "all", False),
        ("/pause_generation", {"mode": "in_place"}, "all", False),
    ],
)
async def test_a_pause_may_leave_what_runs(
    stack: GatewayStack, coordinator: FakeCoordinator, path: str, body: Any, mode: str, reset: bool
) -> None:
    request = asyncio.create_task(stack.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
    await eventually(lambda: len(stack.gateway.requests) > 0)
    assert (await stack.http.post(path, json=body)).status_code == 200
    assert coordinator.asked == [("pause", {"mode": mode}), *[("reset_prefix_cache", {})] * reset]
    assert (await request).json()["choices"][0]["finish_reason"] != "abort"
    assert (await stack.http.post("/continue_generation", json={})).json()["status"] == "ok"
    assert coordinator.paused is None


async def test_engines_rest_and_forget_before_they_sleep(stack: GatewayStack, coordinator: FakeCoordinator) -> None:
    stream = await stack.openai.chat.completions.create(**chat(stream=True))
    await anext(stream)
    assert (await stack.http.post("/sleep?level=2")).json() == {"status": "sleeping", "level": 2, "is_sleeping": True}
    asked = [("pause", {"mode": "new"}), ("reset_prefix_cache", {}), ("sleep", {"level": 2}), ("sleeping", {})]
    assert coordinator.asked == asked
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"
    assert (await stack.http.get("/is_sleeping")).json() == {"is_sleeping": True, "instances": {"engine-1": True}}
    coordinator.asked.clear()
    assert (await stack.http.post("/release_memory_occupation", json={})).status_code == 200
    assert [name for name, _ in coordinator.asked] == ["pause", "reset_prefix_cache", "sleep", "sleeping"]
    coordinator.asked.clear()
    assert (await stack.http.post("/resume_memory_occupation", json={"tags": ["weights", "kv_cache"]})).json() is None
    awake = (await stack.http.post("/wake_up?tags=weights&tags=kv_cache")).json()
    assert awake == {"status": "awake", "tags": ["weights", "kv_cache"], "is_sleeping": False}
    assert coordinator.asked == [("wake_up", {}), ("sleeping", {})] * 2
    assert (await stack.http.get("/is_sleeping")).json()["is_sleeping"] is False


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/pause?mode=stop", None, "mode", "abort, wait, keep"),
        ("/pause?clear_cache=maybe", None, "clear_cache", "true or false"),
        ("/pause?all=1", None, "all", "mode, wait_for_inflight_requests, clear_cache"),
        ("/resume?tags=all", None, "tags", "no fields"),
        ("/sleep?level=0", None, "level", "1, 2"),
        ("/sleep?mode=now", None, "mode", "abort, wait, keep"),
        ("/wake_up?tags=weights", None, "tags", "weights, kv_cache"),
        ("/wake_up?level=1", None, "level", "tags"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, "tags", "weights, kv_cache"),
        ("/resume_memory_occupation", {"tags": ["weights", "experts"]}, "tags", "weights, kv_cache"),
        ("/pause_generation", {"mode": "retract"}, "mode", "abort"),
        ("/continue_generation", {"mode": "abort"}, "mode", "mode"),
    ],
)
async def test_what_a_pause_cannot_do_is_refused(
    stack: GatewayStack, coordinator: FakeCoordinator, path: str, body: Any, param: str, text: str
) -> None:
    answer = await stack.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert text in answer.json()["error"]["message"]
    assert coordinator.asked == []


async def test_operators_may_not_be_web_pages_of_others(memory_bus: MemoryBus, coordinator: FakeCoordinator) -> None:
    async with gateway_stack(memory_bus, cors_origins=("http://friend",)) as stack:
        own = f"http://127.0.0.1:{stack.gateway.server.port}"
        for origin, status in (("http://evil", 403), ("null", 403), ("http://friend", 200), (own, 200)):
            answer = await stack.http.post("/reset_prefix_cache", headers={"origin": origin})
            assert answer.status_code == status, origin


async def test_without_keys_operators_are_on_this_machine(memory_bus: MemoryBus, coordinator: FakeCoordinator) -> None:
    async with gateway_stack(memory_bus, host="0.0.0.0", insecure=True) as stack:
        answer = await stack.http.post("/reset_prefix_cache")
        assert answer.status_code == 403
        assert "--api-key" in answer.json()["error"]["message"]
        assert (await stack.http.get("/v1/models")).status_code == 200
    assert coordinator.asked == []


async def test_the_server_says_what_it_serves_with(stack: GatewayStack) -> None:
    info = (await stack.http.get("/server_info")).json()
    assert info["version"] == (await stack.http.get("/version")).json()["version"]
    assert [model["name"] for model in info["models"]] == [MODEL]
    assert info["engines"]["engine-1"]["phase"] == "ready"
    assert info["engines"]["engine-1"]["max_running"] > 0


async def test_people_find_a_page_of_the_api(stack: GatewayStack) -> None:
    page = await stack.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for name in ("docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/start.js"):
        assert name in page.text
        packed = await stack.http.get(f"/{name}")
        plain = await stack.http.get(f"/{name}", headers={"accept-encoding": "identity"})
        assert packed.content == plain.content != b""
        assert ("content-encoding" in packed.headers) == (name != "docs/start.js")
        assert "content-encoding" not in plain.headers
    assert (await stack.http.get("/docs/nothing.js")).status_code == 404


async def test_adapters_that_are_loaded_at_once_are_few_and_none_waits_for_what_is_gone(
    memory_bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "MAX_CHANGES", 2)
    monkeypatch.setattr(loras, "REREAD_SECONDS", 0.05)
    registry = LoraRegistry(tmp_path / "loras.json")
    async with gateway_stack(memory_bus, lora_registry=registry.path) as stack:

        async def load(name: str, path: str) -> tuple[int, str]:
            answer = await stack.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
            return answer.status_code, answer.text

        first = asyncio.create_task(load("poet", "/a"))
        await eventually(lambda: registry.read() == {"poet": "/a"})
        second = asyncio.create_task(load("poet", "/b"))
        await asyncio.sleep(0)
        status, said = 0, ""
        while status != 429:  # once the second one waits, too; nobody can load a model's own name
            status, said = await load(MODEL, "/c")
        assert "2 adapters are being loaded or unloaded" in said
        assert registry.remove(ModelName("poet"))  # as another gateway does
        status, said = await first
        assert (status, "was unloaded while it was being loaded" in said) == (400, True)
        await eventually(lambda: registry.read() == {"poet": "/b"})
        registry.remove(ModelName("poet"))
        assert (await second)[0] == 400
