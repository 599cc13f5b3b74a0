"""The gateway over real HTTP, with a ring that misbehaves on request."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.routing import Route

from services.gateway.http.connection import Connection
from shared import topics
from shared.bus.memory_bus import MemoryBus
from shared.ids import Attempt, GatewayId, InstanceId, ModelName
from shared.messages.encoder import EncodeInput, EncoderRefusal
from shared.messages.gateway import PromptsHeld
from shared.messages.lifecycle import Drain, Phase, SleepReport, Undrain
from shared.messages.scheduler import Probe
from shared.messages.tokenizer import Tokenize
from shared.packing import unpack
from tests.support.gateway.fake_services import CARD, MODEL, FakeRing, eventually, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


async def content(stack: GatewayStack, text: str, **fields: Any) -> str:
    """The answer's text, streamed."""
    pieces = []
    stream = await stack.openai.chat.completions.create(**chat(text, stream=True, **fields))
    async for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
    return "".join(pieces)


def tokenizes(stack: GatewayStack) -> list[Tokenize]:
    return [message for message in stack.ring.seen if isinstance(message, Tokenize)]


# A stream survives what happens behind it.


@pytest.mark.parametrize("text", ["FAIL", "LOSE", "VANISH"])
async def test_a_stream_that_loses_its_engine_goes_on_where_it_was(stack: GatewayStack, text: str) -> None:
    assert await content(stack, text, max_tokens=8) == said(8)
    first, second = tokenizes(stack)
    assert (first.attempt, second.attempt) == (1, 2)
    assert second.sent_chars == len(said(len(unpack(second.resume))))
    assert (first.sampling, first.arrival) == (second.sampling, second.arrival)
    if text == "FAIL":
        assert second.avoid == ("engine-1",)


async def test_a_request_lost_without_a_word_is_asked_about_before_it_is_tried_again(stack: GatewayStack) -> None:
    assert await content(stack, "VANISH") == said(8)
    first, second = (stack.ring.seen.index(message) for message in tokenizes(stack))
    between = stack.ring.seen[first + 1 : second]
    assert [message.attempt for message in between if isinstance(message, Probe)] == [1, 1]


@pytest.mark.parametrize("service", ["scheduler", "detokenizer"])
async def test_the_death_of_a_service_is_survived(stack: GatewayStack, service: Any) -> None:
    stack.ring.step = 0.02
    reading = asyncio.create_task(content(stack, "hello", max_tokens=20))
    await eventually(lambda: any(position > 3 for position in stack.ring.running.values()))
    await stack.ring.die(service)
    assert await reading == said(20)
    assert [message.attempt for message in tokenizes(stack)] == [1, 2]


async def test_answers_that_are_one_body_survive_too(stack: GatewayStack) -> None:
    answer = await stack.openai.chat.completions.create(**chat("FAIL", max_tokens=8))
    assert answer.choices[0].message.content == said(8)


async def test_a_client_that_left_just_as_its_request_came_is_given_no_answer(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The transport closes a moment before the server hears of it."""

    complete = Connection.on_message_complete

    def closing(connection: Connection) -> None:
        complete(connection)
        monkeypatch.setattr(connection.transport, "is_closing", lambda: True)

    monkeypatch.setattr(Connection, "on_message_complete", closing)
    caplog.set_level(logging.INFO)
    async with gateway_stack(memory_bus) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + b"%b" % body)
        try:
            await eventually(lambda: "audit" in caplog.messages)
            writer.write_eof()
            assert await reader.read() == b""
        finally:
            writer.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_that_leaves_while_its_next_requests_wait_is_given_no_answer(
    memory_bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    came: list[Connection] = []
    complete = Connection.on_message_complete

    def counted(connection: Connection) -> None:
        complete(connection)
        came.append(connection)

    monkeypatch.setattr(Connection, "on_message_complete", counted)
    caplog.set_level(logging.INFO)
    async with gateway_stack(memory_bus) as stack:
        await stack.ring.intake.stop()
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write((head + body) * 3)
        try:
            await eventually(lambda: len(came) >= 2 and "request" in caplog.messages)
            came[0].transport.abort()
            assert await reader.read() == b""
            await eventually(lambda: "audit" in caplog.messages)
        finally:
            writer.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_without_a_tokenizer_a_request_waits_for_one(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack:
        await stack.ring.intake.stop()
        asking = asyncio.create_task(content(stack, "hello"))
        await eventually(lambda: len(stack.gateway.requests) == 1)
        await memory_bus.subscribe(topics.tokenize(MODEL), stack.ring._tokenize)
        assert await asking == said(8)


async def test_a_tokenizer_says_that_it_has_a_prompt(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack:
        await stack.ring.intake.stop()
        sent: asyncio.Queue[Tokenize] = asyncio.Queue()
        await memory_bus.subscribe(topics.tokenize(MODEL), sent.put)
        asking = asyncio.create_task(content(stack, "hello"))
        async with asyncio.timeout(60):
            message = await sent.get()
        (request,) = stack.gateway.requests.open_requests()
        held = PromptsHeld(InstanceId("tokenizer-1"), ((message.request, message.attempt),))
        await memory_bus.publish(topics.gateway_inbox(message.gateway), held)
        await eventually(lambda: request.tokenizer == "tokenizer-1")
        await stack.ring._tokenize(message)
        assert await asking == said(8)


async def test_large_prompts_wait_for_each_other_and_all_are_answered(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack:
        await stack.ring.intake.stop()
        sent: asyncio.Queue[Tokenize] = asyncio.Queue()
        await memory_bus.subscribe(topics.tokenize(MODEL), sent.put)
        body = {"model": MODEL, "prompt": "x" * (6 * 2**20), "n": 5, "max_tokens": 2}
        asking = asyncio.create_task(stack.http.post("/v1/completions", json=body))
        for answered in range(5):
            async with asyncio.timeout(60):
                message = await sent.get()
            open_requests = list(stack.gateway.requests.open_requests())
            assert sum(request.state == "dispatched" for request in open_requests) <= 2
            assert (message.attempt, len(open_requests)) == (1, 5 - answered)
            await stack.ring._serve(message)
            await eventually(lambda number=answered: len(stack.gateway.requests) == 4 - number)  # type: ignore[misc]
        assert (await asking).json()["usage"]["completion_tokens"] == 10


async def test_a_request_that_nobody_serves_in_time_is_told_so(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, queue_s=0.3) as stack:
        answer = await stack.http.post("/v1/chat/completions", json=chat("QUEUE"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["type"] == "service_unavailable"
        await eventually(lambda: bool(stack.ring.withdrawn))


# Clients that leave, and clients that do not read.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_request(stack: GatewayStack, stream: bool) -> None:
    stack.ring.step = 0.02
    reader, writer = await raw_post(stack, chat("hello", max_tokens=10_000, stream=stream))
    await eventually(lambda: bool(stack.ring.running))
    writer.close()
    await eventually(lambda: bool(stack.ring.cancelled))
    await eventually(lambda: len(stack.gateway.requests) == 0 and stack.gateway.requests.idle)
    assert reader is not None


async def test_a_client_that_leaves_the_queue_is_withdrawn(stack: GatewayStack) -> None:
    _, writer = await raw_post(stack, chat("QUEUE"))
    await eventually(lambda: bool(stack.ring.seen))
    assert stack.ring.seen[0].hears_held, "else its tokenizer does not say that it has it"
    writer.close()
    await eventually(lambda: bool(stack.ring.withdrawn))


async def test_a_client_that_does_not_read_is_cut_off(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, unread_limit=20_000) as stack:
        _, writer = await raw_post(stack, chat("hello", max_tokens=200_000, stream=True))
        await eventually(lambda: bool(stack.ring.cancelled))
        await eventually(lambda: stack.gateway.requests.idle)
        writer.close()


async def raw_post(stack: GatewayStack, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port, limit=2**12)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def test_a_silent_stream_is_kept_alive(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, keep_alive_s=0.2) as stack:
        lines = []
        async with stack.http.stream("POST", "/v1/chat/completions", json=chat("HOLD", stream=True)) as response:
            async for line in response.aiter_lines():
                if line == ": keep-alive" and line not in lines:
                    stack.ring.hold.set()
                lines.append(line)
        assert ": keep-alive" in lines
        assert lines[-2:] == ["data: [DONE]", ""]


# What is refused at the door.


async def test_bodies_and_numbers_of_requests_are_bounded(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, max_body=1000, max_open_requests=2) as stack:
        long = await stack.http.post("/v1/chat/completions", json=chat("x" * 1000))
        assert (long.status_code, long.json()["error"]["param"]) == (413, "body")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100

        assert (await stack.http.post("/v1/chat/completions", content=chunks())).status_code == 413
        many = await stack.http.post("/v1/chat/completions", json=chat(n=3))
        assert (many.status_code, many.headers["retry-after"]) == (429, "1")
        assert (await stack.http.post("/v1/chat/completions", json=chat(n=2))).status_code == 200


async def test_images_make_bodies_of_chats_larger_and_nothing_else_does(memory_bus: MemoryBus) -> None:
    ring = FakeRing(memory_bus)
    ring.images = 8

    async def encoder(question: EncodeInput) -> EncoderRefusal:
        return EncoderRefusal(f"{len(question.content)} bytes")

    await memory_bus.serve(topics.image_requests(MODEL), encoder)
    async with gateway_stack(memory_bus, ring=ring, max_body=1000, max_media_body=4000) as stack:

        async def refusal(path: str, **fields: Any) -> tuple[int, str]:
            answer = await stack.http.post(path, json={"model": MODEL, **fields})
            return answer.status_code, answer.json()["error"]["message"]

        def seen(size: int, **fields: Any) -> dict[str, Any]:
            url = f"data:image/png;base64,{base64.b64encode(bytes(size)).decode()}"
            part = {"type": "image_url", "image_url": {"url": url}}
            return {"messages": [{"role": "user", "content": [part]}], **fields}

        for path in ("/v1/chat/completions", "/invocations"):
            assert await refusal(path, **seen(2000)) == (400, "messages[0].content[0].image_url.url: 2000 bytes")
            assert await refusal(path, **seen(4000)) == (413, "body: larger than the 4000 bytes that are allowed")
            status, why = await refusal(path, **seen(1000, metadata={"a": "x" * 1000}))
            assert (status, why.partition(" bytes ")[2]) == (
                413,
                "without its images, videos and sounds; 1000 are allowed",
            )
        assert (await refusal("/v1/chat/completions", **chat("x" * 1000)))[0] == 413
        assert (await refusal("/v1/completions", prompt="x" * 1000))[0] == 413
        assert stack.gateway._bodies.budget.used == 0


async def test_a_prompt_larger_than_the_bus_takes_is_413() -> None:
    bus = MemoryBus(max_payload=10_000)
    async with gateway_stack(bus) as stack:
        for stream in (False, True):
            answer = await stack.http.post("/v1/chat/completions", json=chat("x" * 10_000, stream=stream))
            assert answer.status_code == 413
        assert (await stack.http.post("/tokenize", json={"prompt": "x" * 10_000})).status_code == 413
        long_text = await stack.http.post("/detokenize", json={"tokens": [0] * 2300})
        assert (long_text.status_code, long_text.json()["error"]["code"]) == (413, "too_large")
    await bus.close()


async def test_while_the_stack_starts_nothing_is_promised(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, wait=False) as stack:
        answer = await stack.http.post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        for page in ("/health", "/ready"):
            verdict = await stack.http.get(page)
            assert verdict.status_code == 503
            assert "no scheduler" in verdict.json()["reason"]
        assert (await stack.http.get("/live")).status_code == 200


async def test_engines_that_sleep_are_healthy_and_not_ready(stack: GatewayStack) -> None:
    stack.ring.sleep = SleepReport(1)
    await eventually(lambda: stack.runtime.phase == "starting")
    for page in ("/health", "/ping"):
        assert (await stack.http.get(page)).status_code == 200
    verdict = await stack.http.get("/ready")
    assert (verdict.status_code, "engines are asleep" in verdict.json()["reason"]) == (503, True)
    stack.ring.absent.add("tokenizer")
    await stack.ring.die("tokenizer")
    await eventually(lambda: "tokenizer" in str(stack.gateway.requests.not_serving()))
    assert (await stack.http.get("/health")).status_code == 503


async def test_ready_says_how_many_models_are_not_served_and_answers_for_each(stack: GatewayStack) -> None:
    lost = replace(CARD, name=ModelName("lost"), aliases=(ModelName("gone"),))
    phases: tuple[Phase, ...] = ("ready", "failed")
    for phase in phases:
        life = stack.ring.life_of("scheduler", "engine-9", phase)
        assert life.engine is not None
        life = replace(life, engine=replace(life.engine, model=lost))
        await stack.ring.bus.publish(topics.lifecycle_of("scheduler", InstanceId("engine-9")), life)
    await eventually(lambda: stack.gateway.requests.models_not_serving() == 1)
    verdicts = [await stack.http.get(f"/ready{query}") for query in ("", f"?model={MODEL}", "?model=gone", "?model=x")]
    assert [verdict.status_code for verdict in verdicts] == [200, 200, 503, 404]
    assert verdicts[0].json() == {"status": "ok", "models_not_served": 1}
    assert verdicts[1].json() == {"status": "ok"}
    assert "no scheduler" in verdicts[2].json()["reason"]


async def test_health_follows_the_engine(stack: GatewayStack) -> None:
    assert (await stack.http.get("/health")).json() == {"status": "ok"}
    assert [(await stack.http.request(how, "/ping")).status_code for how in ("GET", "POST")] == [200, 200]
    stack.ring.absent.add("scheduler")
    await stack.ring.die("scheduler")
    await eventually(lambda: stack.runtime.phase == "starting")
    assert (await stack.http.get("/health")).json()["reason"] == "no scheduler is ready"
    assert (await stack.http.get("/ping")).status_code == 503
    waiting = await stack.http.get("/v1/models")
    assert [model["id"] for model in waiting.json()["data"]] == [MODEL], "known, though away for the moment"


# A drain.


async def test_a_drain_lets_open_streams_finish_and_an_undrain_opens_the_door_again(stack: GatewayStack) -> None:
    stack.ring.step = 0.02
    reading = asyncio.create_task(content(stack, "hello", max_tokens=30))
    await eventually(lambda: bool(stack.ring.running))
    control = topics.instance_control(InstanceId("gateway-1"))
    await stack.gateway.bus.publish(control, Drain())
    await eventually(lambda: stack.runtime.phase == "draining")
    with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel likes
        await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
    assert await reading == said(30)
    await stack.gateway.bus.publish(control, Undrain())
    await eventually(lambda: stack.runtime.phase == "ready")
    assert await content(stack, "hello") == said(8)


async def test_a_stop_that_cannot_wait_says_so_to_its_streams(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus) as stack:
        stack.runtime._drain_timeout = 0.1
        _, writer = reader_writer = await raw_post(stack, chat("HOLD", stream=True))
        await eventually(lambda: bool(stack.ring.running))
        stack.runtime.stop()
        answer = await reader_writer[0].read(65536)
        assert b"503 Service Unavailable" in answer
        assert b"this gateway is stopping" in answer
        writer.close()
        await stack.task


async def test_two_gateways_share_a_port(memory_bus: MemoryBus) -> None:
    ring = FakeRing(memory_bus)
    async with gateway_stack(memory_bus, ring=ring, reuse_port=True) as one:
        port = one.gateway.server.port
        async with gateway_stack(
            memory_bus, ring=ring, wait=False, reuse_port=True, port=port, instance="gateway-2"
        ) as two:
            assert two.gateway.server.port == port
            await ring.announce()
            await eventually(lambda: two.runtime.phase == "ready")
            served: set[GatewayId] = set()
            for _ in range(40):
                assert await content(one, "hello", max_tokens=1) == said(1)
                await two.openai.chat.completions.create(**chat(max_tokens=1), extra_headers={"connection": "close"})
                served |= {message.gateway for message in tokenizes(one)}
                if len(served) == 2:
                    break
            assert served == {"gateway-1", "gateway-2"}
            await eventually(lambda: all(len(stack.gateway.peers.alive()) == 1 for stack in (one, two)))
            for stack in (one, two):  # whoever is asked answers for both
                page = (await stack.http.get("/metrics")).text
                assert page.count("# TYPE baton_gateway_retries_total counter") == 1
                shown = [line for line in page.splitlines() if line.startswith("baton_gateway_retries_total{")]
                assert len(shown) == 2, page
                assert 'gateway="gateway-1"' in shown[0] + shown[1]
                assert 'gateway="gateway-2"' in shown[0] + shown[1]


# Pages and headers.


@pytest.mark.parametrize("string_slices", [True, False], ids=["", "an older tokenizer"])
async def test_tokens_of_a_prompt_and_back(stack: GatewayStack, string_slices: bool) -> None:
    stack.ring.string_slices = string_slices
    answer = await stack.http.post("/tokenize", json={"model": MODEL, "prompt": "a b c", "return_token_strs": True})
    assert answer.json() == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": [0, 1, 2],
        "token_strs": ["a", "b", "c"],
    }
    chat_answer = await stack.http.post("/tokenize", json={"messages": [{"role": "user", "content": "a b"}]})
    assert (chat_answer.json()["count"], chat_answer.json()["token_strs"]) == (2, None)
    assert (await stack.http.post("/detokenize", json={"tokens": [0, 1]})).json() == {"prompt": "Paris is"}
    busy = await stack.http.post("/tokenize", json={"prompt": "OVERLOAD"})
    assert (busy.status_code, busy.headers["retry-after"], busy.json()["error"]["message"]) == (
        429,
        "1",
        "too many wait",
    )
    refused = await stack.http.post("/tokenize", json={"prompt": "REFUSE"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


async def test_request_ids_are_passed_on(stack: GatewayStack) -> None:
    answer = await stack.http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    other = await stack.http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "a b"})
    assert other.headers["x-request-id"] != "a b"


async def test_what_is_not_there_is_said_as_json(stack: GatewayStack) -> None:
    missing = await stack.http.get("/v2/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    images = await stack.http.post("/v1/images/generations", json={"prompt": "x"})
    assert images.status_code == 404
    served = (
        "/v1/chat/completions, /v1/chat/completions/batch, /v1/chat/completions/render, /v1/completions, "
        "/v1/completions/render, /v1/decisions, /v1/audio/transcriptions, /v1/audio/translations, /generate, "
        "/inference/v1/generate, /generative_scoring, /invocations, /tokenize, /detokenize, /v1/models, /v1/responses, "
        "/v1/responses/input_tokens, /v1/conversations, /v1/messages, /v1/messages/render, "
        "/v1/messages/count_tokens, /api/chat, /api/generate, /api/embed, /api/embeddings, /api/tags, /api/ps, "
        "/api/show, /api/version, /v2/chat, /cohere/v2/chat, "
        "/v1/embeddings, /pooling, /classify, /score, /v1/score, /rerank, /v1/rerank, /v2/rerank, /v2/embed, "
        "/v1/files, /v1/batches, /v1/messages/batches, /tokenizer_info, /v1/load_lora_adapter, /v1/unload_lora_adapter"
    )
    assert images.json()["error"]["message"] == f"POST /v1/images/generations: Not Found; served are {served}"
    theirs = {"anthropic-version": "2023-06-01"}
    for path, headers in (("/v1/messages/none", {}), ("/v1/none", theirs)):  # errors have each vendor's shape
        error = (await stack.http.get(path, headers=headers)).json()
        assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    assert (await stack.http.get("/api/none")).json()["error"].startswith("GET /api/none: Not Found")
    for path in ("/v2/none", "/v2/rerank"):
        error = (await stack.http.post(path, json={"model": "none"})).json()
        assert error["message"] == error["error"]["message"]
    wrong = await stack.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert "allow" in wrong.headers
    assert (await stack.http.get("/version")).json()["version"]


async def test_metrics_show_what_users_feel(stack: GatewayStack) -> None:
    await content(stack, "FAIL", max_tokens=8)
    page = (await stack.http.get("/metrics")).text
    for name in (
        f'baton_gateway_time_to_first_token_seconds_count{{gateway="gateway-1",model="{MODEL}"}}',
        f'baton_gateway_inter_token_latency_seconds_bucket{{gateway="gateway-1",le="+Inf",model="{MODEL}"}}',
        f'baton_gateway_time_per_output_token_seconds_sum{{gateway="gateway-1",model="{MODEL}"}}',
        f'baton_gateway_e2e_request_latency_seconds_count{{gateway="gateway-1",model="{MODEL}"}}',
        f'baton_gateway_generation_tokens_total{{gateway="gateway-1",model="{MODEL}"}}',
        f'baton_gateway_requests_total{{endpoint="chat",gateway="gateway-1",model="{MODEL}",outcome="finished"}}',
        f'baton_gateway_choices_finished_total{{gateway="gateway-1",model="{MODEL}",reason="length"}}',
        f'vllm:request_success_total{{finished_reason="length",gateway="gateway-1",model_name="{MODEL}"}}',
        f'vllm:time_to_first_token_seconds_bucket{{gateway="gateway-1",le="+Inf",model_name="{MODEL}"}}',
        f'vllm:request_generation_tokens_sum{{gateway="gateway-1",model_name="{MODEL}"}}',
        f'vllm:generation_tokens_total{{gateway="gateway-1",model_name="{MODEL}"}}',
        f'vllm:num_requests_running{{engine="engine-1",model_name="{MODEL}"}} 0.0',
        f'vllm:kv_cache_usage_perc{{engine="engine-1",model_name="{MODEL}"}} 0.0',
        f'vllm:prefix_cache_queries_total{{engine="engine-1",model_name="{MODEL}"}} 0.0',
        'baton_gateway_open_requests{gateway="gateway-1",state="running"}',
        "baton_gateway_retries_total",
        "process_cpu_seconds_total",
    ):
        assert name in page


async def test_browsers_may_call_where_an_origin_is_allowed(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, cors_origins=("https://app.example",)) as stack:
        origin = {"origin": "https://app.example"}
        answer = await stack.http.post("/v1/chat/completions", json=chat(stream=True), headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.text.endswith("data: [DONE]\n\n")
        preflight = await stack.http.options(
            "/v1/chat/completions", headers=origin | {"access-control-request-method": "POST"}
        )
        assert preflight.status_code == 200


async def test_a_request_head_is_bounded(stack: GatewayStack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
    writer.write(b"GET /live HTTP/1.1\r\n" + b"x-filler: " + b"y" * 200_000)
    assert b"431" in await reader.read(1000)
    writer.close()


async def test_pipelined_and_reused_connections_are_served_in_order(stack: GatewayStack) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.server.port)
    body = json.dumps(chat(stream=True, max_tokens=2)).encode()
    post = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    writer.write(post + b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" + post)
    seen = b""
    while seen.count(b"[DONE]") < 2:
        seen += await reader.read(65536)
    assert seen.index(b"[DONE]") < seen.index(b"alive") < seen.rindex(b"[DONE]")
    writer.close()


async def test_garbage_on_the_inbox_harms_nobody(stack: GatewayStack, memory_bus: MemoryBus) -> None:
    inbox = topics.gateway_inbox(GatewayId("gateway-1")).subject
    for payload in (b"", b"\xc1", b"garbage", b"\x93\xa6Placed\x01\x02"):
        await memory_bus.publish_raw(inbox, payload)
    assert await content(stack, "hello") == said(8)
    assert tokenizes(stack)[0].attempt == Attempt(1)


async def test_the_openapi_page_lists_the_routes_that_there_are(stack: GatewayStack) -> None:
    page = await stack.http.get("/openapi.json")
    assert (page.status_code, page.headers["content-type"]) == (200, "application/json")
    described = {(path, method.upper()) for path, methods in page.json()["paths"].items() for method in methods}
    assets = ("/docs/", "/console/")  # what the pages for people are made of
    routes = [each for each in stack.gateway.app.routes if isinstance(each, Route) and not each.path.startswith(assets)]
    served = {(route.path, method) for route in routes for method in route.methods or () if method != "HEAD"}
    assert described == {(path.replace("{name:path}", "{name}"), method) for path, method in served}
