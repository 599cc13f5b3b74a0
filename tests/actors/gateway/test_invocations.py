"""`/invocations` is whichever endpoint a body is for; and a chat that goes on with its last message, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.bus.memory_bus import MemoryBus
from shared.messages.dialects import Dialect
from tests.support.gateway.fake_services import MODEL, FakeRing, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

BEGUN = [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": "Once upon a time "}]
CONTINUED = {"messages": BEGUN, "max_tokens": 3, "continue_final_message": True, "echo": True}


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "logprobs": 1}),
    ],
)
async def test_an_invocation_is_answered_as_the_endpoint_it_is_for(stack: GatewayStack, path: str, body: Any) -> None:
    own, invoked = [await stack.http.post(where, json=body) for where in (path, "/invocations")]
    assert (own.status_code, invoked.status_code) == (200, 200)
    assert own.json().keys() == invoked.json().keys()
    assert own.json()["choices"] == invoked.json()["choices"]
    streamed = await stack.http.post("/invocations", json=body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({}, "messages", "this field is required; one of messages, prompt, prompt_embeds, input"),
        ({"prompt": "a", "messages": []}, "messages", "messages and prompt are not allowed together"),
        ({"prompt": "a", "top_p": 7}, "top_p", "7.0 is not allowed"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds", "--enable-prompt-embeds"),
        ({"input": "a"}, "model", "not served for embeddings"),
        ({"text_1": "a", "text_2": "b"}, "model", "not served for embeddings"),
        ({"query": "a", "documents": ["b"]}, "model", "not served for embeddings"),
    ],
)
async def test_what_is_for_no_endpoint_is_refused_by_name(
    stack: GatewayStack, body: Any, param: str, text: str
) -> None:
    answer = await stack.http.post("/invocations", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert text in error["message"]


async def test_an_echo_stands_before_what_goes_on_with_it(stack: GatewayStack) -> None:
    answer = (await stack.http.post("/v1/chat/completions", json=CONTINUED)).json()
    assert answer["choices"][0]["message"]["content"] == BEGUN[1]["content"] + said(3)
    silent = (await stack.http.post("/v1/chat/completions", json=CONTINUED | {"echo": False})).json()
    assert silent["choices"][0]["message"]["content"] == said(3)


@pytest.mark.parametrize("parsed", [False, True])
async def test_an_echo_is_streamed_once_whatever_parses_the_output(memory_bus: MemoryBus, parsed: bool) -> None:
    ring = FakeRing(memory_bus)
    ring.dialect = Dialect("hermes", "qwen3") if parsed else Dialect()
    ring.script = ["<think>", "hm", "</think>", "there ", "was"]
    async with gateway_stack(memory_bus, ring=ring) as stack:
        await check_streamed_echo(stack)


async def check_streamed_echo(stack: GatewayStack) -> None:
    body = CONTINUED | {"stream": True, "max_tokens": 5, "n": 2}
    response = await stack.http.post("/v1/chat/completions", json=body)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    whole = (await stack.http.post("/v1/chat/completions", json=CONTINUED | {"max_tokens": 5})).json()
    begun = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["delta"].get("role")]
    assert begun == [{"role": "assistant", "content": BEGUN[1]["content"]}] * 2
    for index in (0, 1):
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]


async def test_usage_counts_from_nothing_on(stack: GatewayStack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "messages": BEGUN,
        "max_tokens": 4,
        "stream": True,
        "stream_options": options,
        "add_generation_prompt": False,
    }
    response = await stack.http.post("/v1/chat/completions", json=body)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 4, 4]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(c["delta"]["content"] for chunk in chunks[1:] for c in chunk["choices"]), "no delta is empty"


async def test_usage_may_be_in_every_chunk_unasked(memory_bus: MemoryBus) -> None:
    """vLLM's --enable-force-include-usage."""
    async with gateway_stack(memory_bus, enable_force_include_usage=True) as stack:
        for more in ({}, {"stream_options": {"include_usage": False}}):
            body = {"prompt": "a", "max_tokens": 3, "stream": True, **more}
            response = await stack.http.post("/v1/completions", json=body)
            chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
            assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_a_client_names_its_request_and_is_told_its_times(stack: GatewayStack) -> None:
    body = {"model": MODEL, "prompt": "a b", "max_tokens": 4, "request_id": "mine", "return_metrics": True}
    answer = (await stack.http.post("/v1/completions", json=body)).json()
    assert answer["id"] == "cmpl-mine"
    metrics = answer["metrics"]
    assert 0 < metrics["time_to_first_token_ms"] < 60_000
    assert metrics["generation_time_ms"] == pytest.approx(3 * metrics["mean_itl_ms"])
    assert metrics["tokens_per_second"] > 0
    assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await stack.http.post("/v1/completions", json=body | options)
    *_, last = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert last["id"] == "cmpl-mine"
    assert last["metrics"].keys() == metrics.keys()
