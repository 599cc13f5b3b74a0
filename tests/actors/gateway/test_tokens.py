"""vLLM's `/inference/v1/generate` and `/generative_scoring`, through a real gateway to a scripted model."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.api.generation import RequestLimits
from services.gateway.api.tokens.request import read_tokens
from shared.bus.memory_bus import MemoryBus
from shared.messages.tokenizer import Tokenize
from tests.support.gateway.fake_services import CARD, MODEL, FakeRing, said
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack

PATH = "/inference/v1/generate"


@pytest.fixture
async def stack(memory_bus: MemoryBus) -> AsyncIterator[GatewayStack]:
    async with gateway_stack(memory_bus) as stack:
        yield stack


async def generate(stack: GatewayStack, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, **(sampling or {})}, **fields}
    return (await stack.http.post(PATH, json=body)).raise_for_status().json()


async def events(stack: GatewayStack, sampling: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, **(sampling or {})}, **fields, "stream": True}
    answer = await stack.http.post(PATH, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_an_answer_has_the_fields_of_vllms(stack: GatewayStack) -> None:
    answer = await generate(stack, {"logprobs": 2}, request_id="mine", return_token_ids=True)
    [choice] = answer.pop("choices")
    assert answer.pop("created") > 0
    assert answer.pop("usage").items() >= {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}.items()
    assert answer == {
        "request_id": "generate-tokens-mine",
        "model": MODEL,
        "output_mode": "tokens",
        "prompt_token_ids": [5, 6],
        **dict.fromkeys(("prompt_logprobs", "prompt_token_id_logprobs", "mm_placeholders", "metrics")),
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params")),
    }
    positions = choice.pop("logprobs")["content"]
    assert choice == {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [0, 1, 2],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": 3}],
    }
    first = {"token_id": 0, "logprob": -0.5, "rank": 1}
    assert positions[0] == {**first, "top_logprobs": [first, {"token_id": 1, "logprob": -1.5, "rank": 2}]}
    assert [len(position["top_logprobs"]) for position in (await logprobs(stack, 0))["content"]] == [1, 1, 1]
    [choice] = (await generate(stack, {"logprobs": 1, "logprob_token_ids": [8, 7]}))["choices"]
    shown = choice["logprobs"]["content"][0]["top_logprobs"]
    assert [(each["token_id"], each["rank"]) for each in shown] == [(0, None), (8, None), (7, None)]


async def test_all_tokens_of_a_small_vocabulary_are_shown() -> None:
    card = replace(CARD, vocab_size=12)
    body = b'{"token_ids": [1], "sampling_params": {"logprobs": -1}}'
    assert read_tokens(body, [card], RequestLimits(), None).options.logprobs == 12


async def logprobs(stack: GatewayStack, top: int, **fields: Any) -> Any:
    return (await generate(stack, {"logprobs": top}, **fields))["choices"][0]["logprobs"]


async def test_texts_are_there_where_they_are_wanted(stack: GatewayStack) -> None:
    [choice] = (await generate(stack, {"logprobs": 1}, output_mode="text"))["choices"]
    assert (choice["text"], choice["token_ids"]) == (said(3), [0, 1, 2])
    assert [each["token"] for each in choice["logprobs"]["content"]] == [said(1), " is", " the"]
    assert [each["token"] for each in choice["logprobs"]["content"][0]["top_logprobs"]] == [said(1)]


async def test_a_stream_has_the_tokens_as_they_come(stack: GatewayStack) -> None:
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = await events(stack, {"n": 2}, return_token_ids=True, request_id="x", **usage)
    assert [token for index in (0, 1) for token in tokens_of(chunks, index)] == [0, 1, 2, 0, 1, 2]
    assert ["prompt_token_ids" in chunk for chunk in chunks].count(True) == 1
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]["total_tokens"], last["request_id"]) == ([], 8, "generate-tokens-x")
    ends = [chunk["choices"][0]["weight_versions"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert ends == [[{"version": "default", "start": 0, "end": 3}]] * 2
    counted = await events(stack, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in counted] == [1, 2, 3, 3]


def tokens_of(chunks: list[Any], index: int) -> list[int]:
    choices = [chunk["choices"][0] for chunk in chunks]
    return [token for choice in choices if choice["index"] == index for token in choice["token_ids"]]


async def test_tokens_without_a_text_are_sent_at_once(stack: GatewayStack) -> None:
    stack.ring.script = ["", "", "a"]
    assert [chunk["choices"][0]["token_ids"] for chunk in await events(stack)] == [[0], [1], [2]]


async def test_parameters_arrive_and_no_bound_is_the_context(stack: GatewayStack) -> None:
    params = {"temperature": 0.5, "seed": 9, "stop": ["x"], "max_tokens": 4, "extra_args": None, "unknown": 1}
    await generate(stack, params, priority=2, model=MODEL, cache_salt="s")
    [sent] = [each for each in stack.ring.seen if isinstance(each, Tokenize)]
    assert (sent.sampling.temperature, sent.sampling.seed, sent.priority) == (0.5, 9, 2)
    assert (sent.stopping.max_tokens, sent.stopping.stop) == (4, ("x",))
    stack.ring.script = ["a"]
    stack.ring.seen.clear()
    await generate(stack, {"max_tokens": None})
    [sent] = [each for each in stack.ring.seen if isinstance(each, Tokenize)]
    assert sent.stopping.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": [1]}, "sampling_params"),
        ({"token_ids": [], "sampling_params": {}}, "token_ids"),
        ({"token_ids": [-1], "sampling_params": {}}, "token_ids"),
        ({"token_ids": "a", "sampling_params": {}}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"token_ids": [1], "sampling_params": {"logprobs": 99}}, "sampling_params.logprobs"),
        ({"token_ids": [1], "sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        (
            {"token_ids": [1], "sampling_params": {"detokenize": False}, "output_mode": "text"},
            "sampling_params.detokenize",
        ),
        (
            {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "a"}}, "reasoning_ended": False},
            "reasoning_ended",
        ),
        (
            {"token_ids": [1], "sampling_params": {}, "stream": True, "stream_options": {"resumable": True}},
            "stream_options.resumable",
        ),
    ],
)
async def test_what_is_refused_is_named(stack: GatewayStack, fields: dict[str, Any], param: str) -> None:
    answer = await stack.http.post(PATH, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.ring.seen == []


async def test_it_is_aborted_by_the_id_that_its_client_gave(memory_bus: MemoryBus) -> None:
    async with gateway_stack(memory_bus, ring=FakeRing(memory_bus, step=0.05)) as stack:
        asked = asyncio.create_task(generate(stack, {"max_tokens": 500}, request_id="long"))
        async with asyncio.timeout(60):
            while not list(stack.gateway.requests.open_responses()):
                await asyncio.sleep(0.01)
            nothing = await stack.http.post("/inference/v1/abort_requests", json={})
            assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, "request_ids")
            named = {"request_ids": ["generate-tokens-long"]}
            assert (await stack.http.post("/inference/v1/abort_requests", json=named)).json()["aborted"] == 1
            assert (await asked)["choices"][0]["finish_reason"] == "abort"


async def test_items_are_scored_behind_their_query(stack: GatewayStack) -> None:
    body: Any = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [1, 2], "request_id": "q"}
    answer = (await stack.http.post("/generative_scoring", json=body)).raise_for_status().json()
    assert (answer["id"], answer["object"], answer["model"]) == ("generative-scoring-q", "list", MODEL)
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 2
    sent = [each for each in stack.ring.seen if isinstance(each, Tokenize)]
    assert {each.sampling.logprob_token_ids for each in sent} == {(1, 2)}
    first, other = math.exp(-0.5), math.exp(-1.5)  # of the labels, as the model says
    assert [each["score"] for each in answer["data"]] == pytest.approx([first / (first + other)] * 2)
    whole = (await stack.http.post("/generative_scoring", json={**body, "apply_softmax": False})).json()
    assert [each["score"] for each in whole["data"]] == pytest.approx([first, first])
    mixed = await stack.http.post("/generative_scoring", json={**body, "items": ["a", [1]]})
    assert (mixed.status_code, mixed.json()["error"]["param"]) == (400, "items")
