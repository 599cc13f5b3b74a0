"""Streams that clients resume: at the gateway that has them, at another one, and after the first one's death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from deploy.cli.keys import new_key
from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect
from shared.messages.scheduler import Cancel
from shared.messages.tokenizer import Tokenize
from shared.packing import unpack
from tests.support.gateway.event_streams import Event, events, last_id
from tests.support.gateway.fake_services import MODEL, FakeRing, eventually, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack
from tests.support.paths import REPOSITORY

TOKENS = 40
RESUMABLE = {"include_usage": True, "resumable": True}


def body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": MODEL,
        "messages": messages,
        "stream": True,
        "stream_options": RESUMABLE,
        "max_tokens": TOKENS,
    } | fields


async def begun(stack: GatewayStack, request: dict[str, Any], chunks: int = 8, **headers: str) -> list[Event]:
    """The first events of a stream; then the client is gone."""
    seen: list[Event] = []
    stream = events(stack.http, request, **headers)
    async for event in stream:
        seen.append(event)
        if len(seen) == chunks:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return seen


async def rest(stack: GatewayStack, last: str, **headers: str) -> list[Event]:
    return [event async for event in events(stack.http, None, last, **headers)]


async def read_out(stream: AsyncIterator[Event], seen: list[Event] | None = None) -> None:
    async for event in stream:
        if seen is not None:
            seen.append(event)


def text(seen: list[Event], index: int = 0) -> str:
    choices = [choice for _, data in seen if data != "[DONE]" for choice in data["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)


def assert_complete(seen: list[Event]) -> None:
    """One role, all of the text once, one end, one usage."""
    assert text(seen) == said(TOKENS)
    assert sum("role" in c["delta"] for _, data in seen if data != "[DONE]" for c in data["choices"]) == 1
    assert [c["finish_reason"] for _, data in seen[:-1] for c in data["choices"] if c["finish_reason"]] == ["length"]
    assert seen[-2][1]["usage"]["completion_tokens"] == TOKENS
    assert seen[-1][1] == "[DONE]"
    assert len({data["id"] for _, data in seen[:-1]}) == 1


def tokenizes(ring: FakeRing) -> list[Tokenize]:
    return [message for message in ring.seen if isinstance(message, Tokenize)]


@asynccontextmanager
async def two_gateways(bus: MemoryBus, **settings: Any) -> AsyncIterator[tuple[GatewayStack, GatewayStack]]:
    """Each on a port of its own, so that a test can say which one it means."""
    ring = FakeRing(bus, step=0.01)
    async with (
        gateway_stack(bus, ring=ring, **settings) as one,
        gateway_stack(bus, ring=ring, wait=False, instance="gateway-2", **settings) as two,
    ):
        await ring.announce()
        await eventually(lambda: two.runtime.phase == "ready")
        await eventually(lambda: all(stack.gateway.peers.ready() for stack in (one, two)))
        yield one, two


@pytest.fixture
async def pair(memory_bus: MemoryBus) -> AsyncIterator[tuple[GatewayStack, GatewayStack]]:
    async with two_gateways(memory_bus) as pair:
        yield pair


Pair = tuple[GatewayStack, GatewayStack]


async def test_a_client_that_was_cut_off_gets_the_rest_where_it_was(pair: Pair) -> None:
    one, _ = pair
    seen = await begun(one, body())
    assert all(name for name, _ in seen), "every event has an id"
    seen += await rest(one, last_id(seen))
    assert_complete(seen)
    assert len(tokenizes(one.ring)) == 1, "it was generated on, and not again"


async def test_another_gateway_takes_a_stream_over_from_one_that_lives(pair: Pair) -> None:
    one, two = pair
    seen = await begun(one, body())
    seen += await rest(two, last_id(seen))
    assert_complete(seen)
    first, second = tokenizes(one.ring)
    assert (first.gateway, second.gateway) == ("gateway-1", "gateway-2")
    assert (first.sampling, first.arrival) == (second.sampling, second.arrival)
    assert second.attempt > 1000
    resumed = unpack(second.resume)
    assert (resumed, len(resumed) >= 7) == (list(range(len(resumed))), True), "behind all tokens that were said"
    assert any(isinstance(m, Cancel) and m.attempt == 1 for m in one.ring.seen)
    assert len(one.gateway.requests) == 0


async def test_the_former_connection_ends_without_a_complete_response(pair: Pair) -> None:
    for second in pair:
        seen: list[Event] = []
        stream = events(pair[0].http, body())
        async for event in stream:
            seen.append(event)
            if len(seen) == 5:
                again = asyncio.create_task(rest(second, last_id(seen)))
                break
        with pytest.raises(httpx2.RemoteProtocolError):
            await read_out(stream)
        assert_complete(seen[:5] + await again)


async def test_a_gateway_that_stops_leaves_its_streams_to_the_other_one(pair: Pair) -> None:
    one, two = pair
    one.ring.step = 0.1  # longer than it drains
    seen, stream = list[Event](), events(one.http, body())
    async for event in stream:
        seen.append(event)
        if len(seen) == 3:
            one.runtime.stop()
            break
    with pytest.raises(httpx2.RemoteProtocolError):
        await read_out(stream, seen)
    assert [data for _, data in seen if "error" in data] == []
    await asyncio.wait([one.task])
    one.ring.step = 0.01
    # The client is cut off at the second gateway, too.
    stream = events(two.http, None, last_id(seen))
    again: list[Event] = []
    async for event in stream:
        again.append(event)
        if len(again) == 4:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    assert_complete(seen + again + await rest(two, last_id(again)))
    assert tokenizes(two.ring)[-1].gateway == "gateway-2"
    assert_complete(seen + await rest(two, last_id(seen)))  # and once more from where it was


async def test_the_example_of_the_docs_reads_on_where_it_was_cut_off(pair: Pair) -> None:
    one, _ = pair
    page = (REPOSITORY / "docs" / "api.md").read_text()
    [example] = [block for block in page.split("```")[1::2] if "def chunks(" in block]
    names: dict[str, Any] = {}
    exec(example.removeprefix("python\n").partition("\nbody = ")[0], names)

    loop = asyncio.get_running_loop()

    def read() -> str:
        seen = ""
        for number, chunk in enumerate(names["chunks"](f"{one.url}/v1/chat/completions", body())):
            seen += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
            if number % 7 == 6:  # the client's connections break
                loop.call_soon_threadsafe(cut)
        return seen

    def cut() -> None:
        for connection in list(one.gateway.server._server.server_state.connections):
            connection.transport.abort()

    assert await asyncio.to_thread(read) == said(TOKENS)


async def test_a_finished_stream_can_be_read_again_for_a_while(memory_bus: MemoryBus) -> None:
    async with two_gateways(memory_bus, resume_s=60.0) as (one, _):
        whole = [event async for event in events(one.http, body())]
        assert_complete(whole)
        for position in (0, 5, len(whole) - 3, len(whole) - 2):
            name = whole[position][0]
            assert name is not None
            assert_complete(whole[: position + 1] + await rest(one, name))


async def test_a_finished_stream_is_forgotten_after_a_while(memory_bus: MemoryBus) -> None:
    async with two_gateways(memory_bus, resume_s=0.3) as (one, two):
        whole = [event async for event in events(one.http, body())]
        await eventually(lambda: len(one.gateway.requests.records) + len(two.gateway.requests.records) == 0)
        assert one.gateway.requests.records.bytes == two.gateway.requests.records.bytes == 0
        with pytest.raises(httpx2.HTTPStatusError) as gone:
            await rest(two, last_id(whole))
        assert gone.value.response.status_code == 404
        assert gone.value.response.json()["error"]["code"] == "stream_not_found"


async def test_a_stream_that_nobody_comes_back_for_is_cancelled(memory_bus: MemoryBus) -> None:
    async with two_gateways(memory_bus, resume_s=2.0) as (one, two):
        await begun(one, body(max_tokens=2000), chunks=3)
        assert len(one.gateway.requests) == 1
        await eventually(lambda: len(one.gateway.requests) == 0)
        await eventually(lambda: any(isinstance(m, Cancel) for m in one.ring.seen))
        await eventually(lambda: len(two.gateway.requests.records) == 0)


async def test_several_choices_each_go_on_where_they_were(pair: Pair) -> None:
    one, two = pair
    seen = await begun(one, body(n=3), chunks=12)
    seen += await rest(two, last_id(seen))
    assert [text(seen, index) for index in range(3)] == [said(TOKENS)] * 3
    assert seen[-2][1]["usage"]["completion_tokens"] == 3 * TOKENS


async def test_tool_calls_keep_their_ids(memory_bus: MemoryBus) -> None:
    ring = FakeRing(memory_bus, step=0.01)
    ring.dialect = Dialect("hermes")
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 3}}</tool_call>'
    ring.script = list(f"Well. {call}")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    request = body("weather?", tools=tools, max_tokens=1000)
    async with (
        gateway_stack(memory_bus, ring=ring) as one,
        gateway_stack(memory_bus, ring=ring, wait=False, instance="gateway-2") as two,
    ):
        await eventually(lambda: two.runtime.phase == "ready" and bool(one.gateway.peers.ready()))
        undisturbed = text([event async for event in events(one.http, request)])
        for cut in (2, 4, 6, 12):
            seen = await begun(one, request, chunks=cut)
            seen += await rest(two, last_id(seen))
            deltas = [choice["delta"] for _, data in seen[:-1] for choice in data["choices"]]
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
            assert text(seen) == undisturbed
            assert len([call["id"] for call in calls if "id" in call]) == 1
            arguments = "".join(call["function"]["arguments"] for call in calls)
            assert json.loads(arguments) == {"city": "Paris", "days": 3}


async def test_only_the_same_key_may_resume(memory_bus: MemoryBus, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secrets = {name: new_key(path, name, {}) for name in ("alice", "bob")}
    headers = {name: {"Authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
    async with two_gateways(memory_bus, keys_file=path) as (one, two):
        seen = await begun(one, body(), **headers["alice"])
        for stack in (one, two):
            with pytest.raises(httpx2.HTTPStatusError) as refused:
                await rest(stack, last_id(seen), **headers["bob"])
            assert refused.value.response.status_code == 404
        with pytest.raises(httpx2.HTTPStatusError) as unknown:
            await rest(two, last_id(seen))
        assert unknown.value.response.status_code == 401
        assert_complete(seen + await rest(two, last_id(seen), **headers["alice"]))


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"stream": False}, 400, "stream_options"),
        ({"n": 17}, 400, "stream_options.resumable"),
        ({"user": "x" * 2**20}, 413, "stream_options.resumable"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(pair: Pair, fields: dict[str, Any], status: int, param: str) -> None:
    answer = await pair[0].http.post("/v1/chat/completions", json=body(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    echoed = {"model": MODEL, "prompt": "a b", "stream": True, "stream_options": RESUMABLE, "echo": True, "logprobs": 1}
    answer = await pair[0].http.post("/v1/completions", json=echoed)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options.resumable")


async def test_ids_of_other_streams_are_refused(pair: Pair) -> None:
    seen = await begun(pair[0], body())
    for last, status in (
        ("17", 400),
        (last_id(seen).replace("chatcmpl", "cmpl"), 400),
        (last_id(seen) + ",1.1", 400),
        ("chatcmpl-" + "0" * 24 + ":1.1", 404),
    ):
        answer = await pair[0].http.post("/v1/chat/completions", json=body(), headers={"Last-Event-ID": last})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "Last-Event-ID")


async def test_memory_is_bounded(memory_bus: MemoryBus) -> None:
    async with two_gateways(memory_bus, resumable_memory=16 * 1024) as (one, two):
        statuses = []
        for _ in range(12):
            answer = await one.http.post("/v1/chat/completions", json=body("y" * 4000, max_tokens=2))
            statuses.append(answer.status_code)
        assert set(statuses) == {200}, "finished streams make room"
        assert one.gateway.requests.records.bytes <= 16 * 1024
        assert two.gateway.requests.records.bytes <= 16 * 1024
        open_ones = [asyncio.create_task(begun(one, body("y" * 4000, max_tokens=2000), chunks=2)) for _ in range(2)]
        await asyncio.gather(*open_ones)
        answer = await one.http.post("/v1/chat/completions", json=body("y" * 4000))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
